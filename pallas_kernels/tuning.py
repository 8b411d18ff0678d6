"""Block sizes of the kernels: measured ones from a file per device and operation, a heuristic where there is none.

`tuned/<device>/<op>.json` holds what `python -m pallas_kernels.tune` measured:

    {"device": "NVIDIA H200", "jax": "0.11.2",
     "entries": [{"key": {"op": "expand", "tokens": 64, ...}, "config": {"block_out": 128, ...}, "us": 4.2}, ...]}

A key names what the best blocks depend on. An entry counts only where its whole key is equal, so a file that was
written for other shapes changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pallas_kernels import dispatch

TUNED = Path(__file__).parent / "tuned"
"""Where the measured block sizes lie."""

_Config = TypeVar("_Config")


def bucket(size: int) -> int:
    """The next power of two: sizes that differ by less share their blocks."""
    return 1 << max(size - 1, 0).bit_length()


def device_folder(kind: str) -> str:
    """Name of a device's folder: "NVIDIA H200" is nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


def tuned_file(op: str, kind: str, root: Path = TUNED) -> Path:
    """The file of an operation on a device."""
    return root / device_folder(kind) / f"{op}.json"


@functools.cache
def _entries(path: Path) -> Mapping[frozenset[tuple[str, Any]], Mapping[str, Any]]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return {frozenset(entry["key"].items()): entry["config"] for entry in content["entries"]}


def lookup(op: str, key: Mapping[str, int | str], heuristic: _Config, root: Path = TUNED) -> _Config:
    """The configuration to run with on the current device.

    Args:
        op: name of the file.
        key: what the choice depends on.
        heuristic: a frozen dataclass; its fields that were measured for this key are replaced.

    Raises:
        ValueError: the file names a field that the configuration does not have.
    """
    path = tuned_file(op, dispatch.current_device().kind, root)
    config = _entries(path).get(frozenset(key.items()))
    if config is None:
        return heuristic
    try:
        return dataclasses.replace(heuristic, **config)  # type: ignore[type-var]
    except TypeError as error:
        raise ValueError(
            f"{path} has blocks that {op} does not know ({error}): run python -m pallas_kernels.tune"
        ) from error


def save(op: str, kind: str, jax_version: str, entries: list[dict[str, Any]], root: Path = TUNED) -> Path:
    """Writes what was measured; entries of other keys that the file has stay.

    Args:
        entries: {"key", "config", "us"} each, one for a key.
    """
    path = tuned_file(op, kind, root)
    old = json.loads(path.read_text(encoding="utf-8"))["entries"] if path.exists() else []
    new = {frozenset(entry["key"].items()) for entry in entries}
    kept = [entry for entry in old if frozenset(entry["key"].items()) not in new]
    content = {"device": kind, "jax": jax_version, "entries": kept + entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _entries.cache_clear()
    return path
