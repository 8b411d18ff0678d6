"""docs/CONFIG.md says what the dataclass says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

from multilora_jax import config_reference
from multilora_jax.config import EngineConfig, describe_keys
from multilora_jax.errors import UserError


def test_the_committed_reference_is_current():
    assert config_reference.PATH.read_text(encoding="utf-8") == config_reference.config_reference(), (
        f"docs/CONFIG.md is not current: run {config_reference.COMMAND}"
    )


def test_every_key_is_there_once_with_its_meaning_and_default():
    text = config_reference.config_reference()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [f.name for f in fields(EngineConfig)]
    for row, (name, doc) in zip(rows, describe_keys().items(), strict=True):
        assert doc.replace("|", "\\|") in row, name
        assert row.count(" | ") == 3
    assert "| `port` | integer | `8000` |" in text
    assert "| `fair_weights` | mapping of text to number | none |" in text
    assert "| `page` | true or false | `true` |" in text


def test_keys_of_a_class_above_are_grouped_too():
    @dataclass(frozen=True)
    class Above:
        """Keys of another kind. And more."""

        first: int = field(default=1)

    @dataclass(frozen=True)
    class Whole(Above):
        """All keys."""

        # A heading
        second: int = 2
        third: int = 3

    found = config_reference.sections(Whole)
    assert found == {"first": "Keys of another kind. And more", "second": "A heading", "third": "A heading"}


def test_a_key_that_changed_is_noticed(tmp_path: Path, monkeypatch, capsys):
    path = tmp_path / "CONFIG.md"
    monkeypatch.setattr(config_reference, "PATH", path)
    assert config_reference.main(["--check"]) == 1
    path.write_text(config_reference.config_reference(), encoding="utf-8")
    assert config_reference.main(["--check"]) == 0
    path.write_text(path.read_text(encoding="utf-8").replace("`8000`", "`80`"), encoding="utf-8")
    assert config_reference.main(["--check"]) == 1
    assert "run python -m multilora_jax.config_reference" in capsys.readouterr().err
    assert config_reference.main(["--stdout"]) == 0
    assert capsys.readouterr().out == config_reference.config_reference()
    with pytest.raises(UserError, match="unknown argument '--chekc'"):
        config_reference.main(["--chekc"])


def test_the_command_runs():
    command = [sys.executable, "-m", "multilora_jax.config_reference"]
    root = config_reference.PATH.parent.parent
    assert subprocess.run([*command, "--check"], cwd=root, capture_output=True).returncode == 0
    wrong = subprocess.run([*command, "--x"], cwd=root, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr) == (1, "error: unknown argument '--x': there are --check and --stdout\n")
