"""Entries of jax's compilation cache that were cut off are removed (host only, no jax).

jax writes an entry in place and never over one that exists, so that what a full disk or a killed process leaves half
written is read in vain, compiled again and not kept, at every start from then on. Which entries were found whole is
noted beside them, and only others are read.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import zlib
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

NOTE = "whole.json"
"""Name of an entry to its size in bytes and time of change in ns."""

ENTRY = "-cache"
"""How jax's entries end."""

_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_MODULES = ("compression.zstd", "zstandard")
"""What jax compresses with where it is installed, else zlib."""


def remove_cut_off(folder: Path) -> list[str]:
    """Removes the entries of a cache folder that end too early; their names. Where that is not possible they stay."""
    note, known, whole, removed = folder / NOTE, dict[str, Any](), dict[str, Any](), []
    with contextlib.suppress(OSError, ValueError):
        read = json.loads(note.read_text(encoding="utf-8"))
        known = read if isinstance(read, dict) else {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(ENTRY):
                continue
            with contextlib.suppress(OSError):  # another process may do the same
                stat = entry.stat()
                mark = [stat.st_size, stat.st_mtime_ns]
                if known.get(entry.name) == mark or _is_whole(Path(entry.path).read_bytes()):
                    whole[entry.name] = mark
                else:
                    os.unlink(entry.path)
                    removed.append(entry.name)
    if removed:
        log.warning("%d compiled programs were cut off when they were written: they are compiled anew", len(removed))
    if whole != known:
        _write(note, whole)
    return removed


def _write(note: Path, whole: dict[str, Any]) -> None:
    new = note.with_name(f"{NOTE}.{os.getpid()}")
    try:
        new.write_text(json.dumps(whole), encoding="utf-8")
        os.replace(new, note)
    except OSError as error:  # the next start reads them once more
        log.warning("which compiled programs are whole is not noted: %s", error)
        with contextlib.suppress(OSError):
            new.unlink()


def _is_whole(data: bytes) -> bool:
    if data.startswith(_ZSTD):
        for name in _ZSTD_MODULES:
            with contextlib.suppress(ImportError):
                module = importlib.import_module(name)
                decompressor = getattr(module, "ZstdDecompressor", None)
                if decompressor is not None:
                    return _ends(getattr(decompressor(), "decompressobj", decompressor)(), data, Exception)
        return True  # nothing here reads it, jax neither
    return _ends(zlib.decompressobj(), data, zlib.error)


def _ends(decompressor: Any, data: bytes, error: type[Exception]) -> bool:
    """Whether the data are one compressed stream with its end."""
    try:
        decompressor.decompress(data)
    except error:
        return False
    return decompressor.eof
