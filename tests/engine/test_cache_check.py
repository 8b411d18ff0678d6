"""Entries of the compilation cache that were cut off are removed, all others stay and are read once."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from multilora_jax.engine import cache_check
from multilora_jax.engine.cache_check import NOTE, remove_cut_off

DATA = zlib.compress(os.urandom(5000))


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("a-cache", "b-cache", "c-cache"):
        (tmp_path / name).write_bytes(DATA)
    (tmp_path / "notes").write_bytes(b"of somebody else")
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("data", [b"", DATA[:1], DATA[:1024], DATA[:-1], b"x" * 1024])
def test_what_is_cut_off_goes(folder, data, caplog):
    (folder / "b-cache").write_bytes(data)
    assert remove_cut_off(folder) == ["b-cache"]
    assert names(folder) == {"a-cache", "c-cache", "notes", NOTE}
    assert "1 compiled programs were cut off" in caplog.text


def test_what_was_whole_is_not_read_again(folder, monkeypatch):
    assert remove_cut_off(folder) == []
    read = []
    monkeypatch.setattr(cache_check, "_is_whole", lambda data: read.append(data) or True)
    assert remove_cut_off(folder) == []
    (folder / "b-cache").write_bytes(DATA[:7])  # another file of the name
    remove_cut_off(folder)
    assert read == [DATA[:7]]


@pytest.mark.parametrize("note", ["", "[]", '{"a-cache": 3}', "{"])
def test_a_note_that_says_nothing_is_written_anew(folder, note):
    (folder / NOTE).write_text(note)
    (folder / "a-cache").write_bytes(DATA[:9])
    assert remove_cut_off(folder) == ["a-cache"]
    assert (folder / NOTE).stat().st_size > 10


def test_a_folder_that_may_not_be_written_is_left(folder, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    (folder / "a-cache").write_bytes(b"")
    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    assert remove_cut_off(folder) == []
    assert {"a-cache"} <= names(folder)
    assert "read-only" in caplog.text
    assert remove_cut_off(folder / "none") == []


def test_both_ways_of_compression(folder):
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    data = zstandard.ZstdCompressor().compress(os.urandom(5000))
    (folder / "a-cache").write_bytes(data)
    (folder / "b-cache").write_bytes(data[:-1])
    assert remove_cut_off(folder) == ["b-cache"]
