"""Reads the folders that `checkpoints.save` writes: tensors in Orbax's format beside a manifest (host only, no jax).

A folder holds `multilora_checkpoint.json`, the manifest; `weights/0000`, `weights/0001` and so on, each a whole Orbax
checkpoint of some of the tensors, with a folder for each tensor (see zarr_array); and whatever else belongs to the
model or the adapter. The manifest lists every file with its size, and every tensor with its shape and type, and all of
that is checked before anything is read: Orbax takes a missing chunk for zeros.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from multilora_jax.safetensors_file import FileError, open_regular, refuse_lfs_pointer
from multilora_jax.zarr_array import ABOUT_FILE, ZarrArray

MANIFEST_FILE = "multilora_checkpoint.json"
UNFINISHED_FILE = "multilora_unfinished"
"""Lies in a folder that is being written; the folder takes its final name when it is whole."""
WEIGHTS_FOLDER = "weights"
FORMAT = 1
"""Version of the manifest."""

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in (
        ("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("int8", np.int8),
    )
}  # fmt: skip
_ZARR_NAMES = {"<f4": "float32", "<f2": "float16", "bfloat16": "bfloat16", "|i1": "int8"}
_MAX_MANIFEST_BYTES = 64 * 2**20
_ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "_sharding")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_GROUP = re.compile(r"\d{4,8}")
_AGAIN = "convert the original again"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a manifest; group is its folder under WEIGHTS_FOLDER."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    group: str


def is_stored(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` was written by `checkpoints.save`, whole or not."""
    return any(os.path.lexists(os.path.join(folder, name)) for name in (MANIFEST_FILE, UNFINISHED_FILE))


def is_foreign_orbax(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder`, or one in it, is an Orbax checkpoint that something else wrote."""
    if is_stored(folder):
        return False
    try:
        inner = [entry.path for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return False  # what is wrong with it is told by who reads it
    return any(os.path.exists(os.path.join(place, name)) for place in (folder, *inner) for name in _ORBAX_FILES)


class StoredTensors:
    """The tensors of one folder, whose manifest, files, shapes and types have been checked.

    Args:
        folder: see this module.
        kind: "model" or "adapter", whichever is wanted.

    Attributes:
        about: what the manifest says besides.
        tensors: by name, in the manifest's order.

    Raises:
        FileError: `not_found`, `not_regular`, `lfs_pointer`, or `corrupt` for a folder that is unfinished, lacks a
            file, has one of another size, or tensors that are not those of the manifest.
    """

    def __init__(self, folder: str | os.PathLike[str], kind: str):
        self.path = Path(folder)
        if os.path.lexists(self.path / UNFINISHED_FILE):
            raise _corrupt(f"an interrupted conversion, never finished: delete the folder and {_AGAIN}")
        with open_regular(self.path / MANIFEST_FILE) as file:
            text = file.read(_MAX_MANIFEST_BYTES + 1)
        refuse_lfs_pointer(text)
        self.about = _parse(text)
        if self.about.get("kind") != kind:
            raise _corrupt(f"holds {_a(str(self.about.get('kind')))}, not {_a(kind)}")
        if self.about["ocdbt"] is not False:
            raise _corrupt(
                f"its tensors lie together in OCDBT files, as earlier versions wrote them; this one reads them faster, "
                f"from files of their own: {_AGAIN}"
            )
        self.tensors = {name: _entry(name, value) for name, value in self.about.pop("tensors").items()}
        files = self.about.pop("files")
        self._check_files(files)
        self._arrays = {name: self._open(tensor, files) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, whole, in memory of its own and in the stored type.

        Raises:
            FileError: it cannot be read any more.
        """
        out = np.empty(self.tensors[name].shape, self.tensors[name].dtype)
        self.read_into(name, (), out)
        return out

    def read_into(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Reads a part of a tensor; any number of threads may at once.

        Args:
            index: a slice for each axis, or of the first axes.
            out: what it is written to, of the part's shape; converted where its type is another (bfloat16 and float16
                are rounded to nearest even).

        Raises:
            FileError: `corrupt` or `not_found`: a file was changed or cut off meanwhile, or the disk failed.
        """
        self._arrays[name].read_into(index, out, self.tensors[name].dtype)

    def _check_files(self, files: Any) -> None:
        if not isinstance(files, dict) or not files:
            raise _corrupt(f"{MANIFEST_FILE} lists no files")
        for name, size in files.items():
            parts = name.split("/")
            if parts[0] != WEIGHTS_FOLDER or any(part in ("", ".", "..") for part in parts) or type(size) is not int:
                raise _corrupt(f"{MANIFEST_FILE} lists {name[:200]!r}, which is no file of {WEIGHTS_FOLDER}")
            try:
                status = os.stat(f"{self.path}/{name}")
            except PermissionError as error:
                raise _corrupt(f"{name} cannot be opened ({error.strerror})") from None
            except (OSError, ValueError):
                raise _corrupt(f"{name} is missing: copy it again, or {_AGAIN}") from None
            if not stat.S_ISREG(status.st_mode):
                raise FileError("not_regular", f"{name} is not a regular file")
            if status.st_size != size:
                with open_regular(self.path / name) as file:
                    refuse_lfs_pointer(file.read(64))
                raise _corrupt(f"{name} has {status.st_size} bytes instead of {size}: copy it again, or {_AGAIN}")
        # What is not compressed cannot hold more than its bytes; a manifest that says so would exhaust the memory.
        wanted = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors.values())
        if wanted > sum(files.values()):
            raise _corrupt(f"{MANIFEST_FILE} lists tensors of {wanted} bytes, more than the files have")

    def _open(self, tensor: StoredTensor, files: dict[str, int]) -> ZarrArray:
        """Checks that a tensor is what the manifest says, and its files those that the manifest lists."""
        place = f"{WEIGHTS_FOLDER}/{tensor.group}/{tensor.name}"
        where = f"tensor {tensor.name} in {WEIGHTS_FOLDER}/{tensor.group}"
        if f"{place}/{ABOUT_FILE}" not in files:
            raise _corrupt(f"{where} cannot be opened ({MANIFEST_FILE} does not list its {ABOUT_FILE}): {_AGAIN}")
        try:
            array = ZarrArray(f"{self.path}/{place}")
        except FileError as error:
            raise FileError(error.kind, f"{where} cannot be opened ({error.message}): {_AGAIN}") from None
        dtype = _ZARR_NAMES.get(array.dtype, array.dtype)
        if array.shape != tensor.shape or dtype != tensor.dtype.name:
            raise _corrupt(
                f"{where} is {dtype}{list(array.shape)} and {MANIFEST_FILE} says "
                f"{tensor.dtype.name}{list(tensor.shape)}: the files are of two checkpoints, or were changed; {_AGAIN}"
            )
        size = math.prod(array.chunks) * tensor.dtype.itemsize
        if array.num_chunks > len(files):  # more than can be counted, if somebody made it up
            raise _corrupt(f"{where} has {array.num_chunks} parts, and {MANIFEST_FILE} does not list them: {_AGAIN}")
        for name in array.files():
            if files.get(f"{place}/{name}") != size:
                raise _corrupt(f"{where}: {MANIFEST_FILE} does not list its part {name} as it should be: {_AGAIN}")
        return array


def checked_name(name: str) -> str:
    """A tensor's name, if it can be one of a file too.

    Raises:
        ValueError: it cannot.
    """
    if not _NAME.fullmatch(name) or len(name) > 240:
        raise ValueError(f"tensor {name[:200]!r} cannot be stored under this name")
    return name


def _parse(text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text) if len(text) <= _MAX_MANIFEST_BYTES else None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("tensors"), dict):
        raise _corrupt(f"{MANIFEST_FILE} is damaged: {_AGAIN}")
    if content.get("format") != FORMAT:
        raise _corrupt(
            f"{MANIFEST_FILE} has format {content.get('format')!r}, and this version reads {FORMAT}: {_AGAIN} with it"
        )
    return {"ocdbt": True, "files": None, **content}


def _entry(name: str, value: Any) -> StoredTensor:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "group": str(group)} if (
            dtype in DTYPES
            and len(shape) <= 32
            and all(type(n) is int and 0 < n < 2**63 for n in shape)
            and _GROUP.fullmatch(group)
            and _NAME.fullmatch(name)
        ):
            return StoredTensor(name, DTYPES[dtype], tuple(shape), group)
        case _:
            raise _corrupt(f"{MANIFEST_FILE}: the entry of tensor {name[:200]!r} is malformed")


def _a(kind: str) -> str:
    return f"{'an' if kind == 'adapter' else 'a'} {kind}"


def _corrupt(what: str) -> FileError:
    return FileError("corrupt", what)
