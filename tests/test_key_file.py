"""The file of hashed keys, and the command that makes entries for it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from multilora_jax.errors import ConfigError, NotFoundError
from multilora_jax.key_file import KEY_PREFIX, KeyEntry, hash_key, new_key, read_keys

ROOT = Path(__file__).parent.parent
DIGEST = hash_key("some key")


def write(folder: Path, text: str) -> str:
    path = folder / "keys.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_keys(write(folder, text))
    assert (caught.value.reason, caught.value.param) == ("bad_keys_file", "keys_file")
    return caught.value.message


def test_an_entry_says_who_and_what(tmp_path):
    text = yaml.safe_dump(
        {"keys": [
            {"tenant": "team-a", "sha256": DIGEST, "adapters": ["a-*"], "best_priority": -2,
             "requests_per_minute": 60, "tokens_per_minute": 1000, "max_concurrent": 4},
            {"tenant": "ops", "sha256": hash_key("other"), "admin": True},
        ]}
    )  # fmt: skip
    first, second = read_keys(write(tmp_path, text))
    assert first == KeyEntry("team-a", DIGEST, ("a-*",), -2, 60, 1000, 4)
    assert (second.admin, second.adapters, second.best_priority, second.metrics) == (True, (), 0, False)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("tenant: a", "has no sha256"),
        (f"sha256: '{DIGEST}'", "has no tenant"),
        ("tenant: a, key: mlj-secret", "has 'key': this file holds hashes only"),
        ("tenant: a, sha256: mlj-secret", "64 lower-case hexadecimal digits"),
        (f"tenant: a, sha256: '{DIGEST.upper()}'", "64 lower-case hexadecimal digits"),
        (f"tenant: a, sha256: '{DIGEST}', adapter: [x]", "did you mean 'adapters'?"),
        (f"tenant: a, sha256: '{DIGEST}', adapters: x", "must be a list of names or patterns"),
        (f"tenant: 'a b', sha256: '{DIGEST}'", "1 to 64 letters, digits"),
        (f"tenant: admin, sha256: '{DIGEST}'", "this server's own word"),
        (f"tenant: a, sha256: '{DIGEST}', max_concurrent: 0", "max_concurrent must be an integer of at least 1"),
        (f"tenant: a, sha256: '{DIGEST}', tokens_per_minute: '9'", "tokens_per_minute must be an integer"),
        (f"tenant: a, sha256: '{DIGEST}', best_priority: null", "best_priority must be an integer"),
        (f"tenant: a, sha256: '{DIGEST}', admin: 1", "admin must be true or false"),
    ],
)
def test_a_bad_entry_is_refused_by_place_and_without_its_secret(tmp_path, entry, words):
    message = refusal(tmp_path, f"keys:\n- {{tenant: ok, sha256: '{hash_key('x')}'}}\n- {{{entry}}}\n")
    assert "keys[1]: " in message
    assert words in message
    assert "mlj-secret" not in message


@pytest.mark.parametrize("text", ["", "keys:", "keys: []", "keys: {a: 1}", "other: 1", "keys: [1]"])
def test_a_file_without_entries_is_refused(tmp_path, text):
    refusal(tmp_path, text)


def test_a_key_has_one_entry(tmp_path):
    message = refusal(tmp_path, f"keys:\n- {{tenant: a, sha256: '{DIGEST}'}}\n- {{tenant: b, sha256: '{DIGEST}'}}\n")
    assert "keys[1] has the sha256 of keys[0]" in message
    with pytest.raises(NotFoundError):
        read_keys(str(tmp_path / "none.yaml"))


def test_keys_are_long_random_and_told_by_their_beginning():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(KEY_PREFIX) and len(key) == len(KEY_PREFIX) + 43 for key in keys)
    assert hash_key("é") == hashlib.sha256("é".encode()).hexdigest()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "multilora_jax.keys", "new", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_prints_a_key_and_its_entry(tmp_path):
    done = run("--tenant", "team-a", "--adapters", "a-*", "shared", "--tokens_per_minute", "5000", "--metrics")
    assert done.returncode == 0, done.stderr
    [key] = [word for word in done.stdout.split() if word.startswith(KEY_PREFIX)]
    entry = done.stdout[done.stdout.index("  - tenant") :]
    [read] = read_keys(write(tmp_path, "keys:\n" + entry))
    assert read == KeyEntry("team-a", hash_key(key), ("a-*", "shared"), tokens_per_minute=5000, metrics=True)
    for arguments, words in ((["--tenant", "a b"], "tenant must be"), ([], "tenant")):
        done = run(*arguments)
        assert done.returncode == 1
        assert words in done.stderr
        assert KEY_PREFIX not in done.stdout + done.stderr
