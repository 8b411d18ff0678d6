"""Reads .safetensors files, whole and with a hash or tensor by tensor, after checking that their header is sound.

The safetensors library maps a file into memory. A server must not: if somebody truncates the file meanwhile, the next
access kills the process, and mapped pages count as resident beside the copies made of them. Plain reads turn the
first into an error and hold one tensor at a time.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np

from multilora_jax.errors import MultiLoRAError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_LFS_START = b"version https://git-lfs"

FileFault = Literal["not_found", "not_regular", "lfs_pointer", "corrupt", "unsupported_dtype"]


class FileError(MultiLoRAError):
    """A file that cannot be read; who reads an adapter or a model raises its own error in place of this one.

    Args:
        kind: what is wrong, in a word.
        message: what is wrong, in a sentence that the file's name goes before.
    """

    def __init__(self, kind: FileFault, message: str):
        super().__init__(message)
        self.kind: FileFault = kind
        self.message = message


class Hasher(Protocol):
    """What hashlib's objects offer."""

    def update(self, data: Any, /) -> None: ...


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the header: bytes [begin, end) after it hold `shape` elements of `dtype`."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Opens a file for reading; refuses folders, pipes and devices, on which a read could wait for ever.

    Raises:
        FileError: `not_found` (no such file, or no permission to read it) or `not_regular`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise FileError("not_found", why or "not a path the file system can hold") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError("not_regular", "not a regular file")
    return open(descriptor, "rb")


def refuse_lfs_pointer(start: bytes) -> None:
    """Raises FileError (`lfs_pointer`) if `start`, a file's first bytes, are those of a Git LFS pointer."""
    if start.startswith(_LFS_START):
        raise FileError(
            "lfs_pointer",
            "this is a Git LFS pointer, a small text file in place of the real one: run `git lfs pull` in its folder",
        )


class SafetensorsFile:
    """A file whose header has been checked: every byte after it belongs to exactly one tensor.

    The file is opened for each read, so there is nothing to close and threads may read at once; one that has changed
    since it was checked is refused.

    Attributes:
        path: where it is.
        tensors: the header's entries by name, in the order of their bytes.

    Raises:
        FileError: `not_found`, `not_regular`, `lfs_pointer`, `corrupt` (truncated, damaged or no safetensors file), or
            `unsupported_dtype` for anything but float32, float16 and bfloat16.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = path
        with open_regular(path) as file:
            self._version = _version(file)
            start = file.read(len(_LFS_START))
            refuse_lfs_pointer(start)
            size, length = self._version[0], int.from_bytes(start[:8], "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise _corrupt(f"cut off, or no safetensors file: {size} bytes, header of {length}")
            file.seek(0)
            self._head = _read(file, 8 + length).tobytes()
        self.tensors = _parse(self._head[8:], size - 8 - length)

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the file's type and in memory of its own.

        Raises:
            FileError: `corrupt` if the file has changed; or what opening it raises.
        """
        info = self.tensors[name]
        with self._open() as file:
            file.seek(len(self._head) + info.begin)
            return _read(file, info.end - info.begin).view(info.dtype).reshape(info.shape)

    def read_all(self, hasher: Hasher) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        """Yields every tensor once, as float32 of its shape; feeds the whole file to `hasher`, from front to back.

        What is hashed are the very bytes that are used, so digest and weights are of one and the same content.

        Raises:
            FileError: `corrupt` if the file has changed, or shrinks meanwhile; or what opening it raises.
        """
        with self._open() as file:
            hasher.update(self._head)
            file.seek(len(self._head))
            for info in self.tensors.values():
                data = _read(file, info.end - info.begin)
                hasher.update(data)
                yield info, data.view(info.dtype).reshape(info.shape).astype(np.float32, copy=False)

    def _open(self) -> io.BufferedReader:
        file = open_regular(self.path)
        if _version(file) != self._version:
            file.close()
            raise _corrupt("it has changed since it was opened")
        return file


def _version(file: io.BufferedReader) -> tuple[int, int]:
    """Size and time of the last change. The inode tells no more: some network file systems make up a new one."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _corrupt(what: str) -> FileError:
    return FileError("corrupt", what)


def _bad_header(what: str) -> FileError:
    return _corrupt(f"the safetensors header is corrupt: {what}")


def _read(file: io.BufferedReader, count: int) -> np.ndarray:
    """uint8[count], the file's next bytes."""
    data = np.empty(count, np.uint8)
    if file.readinto(data.data) != count:
        raise _corrupt("it shrank while it was read")
    return data


def _shown(name: str) -> str:
    """A name as messages give it: a stranger chose it, so it is cut and its control characters are escaped."""
    return repr(name[:200])[1:-1]


def _parse(text: bytes, data_bytes: int) -> dict[str, TensorInfo]:
    """The entries of a header that `data_bytes` bytes of tensors follow."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise _bad_header("not valid JSON") from None
    if not isinstance(header, dict):
        raise _bad_header("not a JSON object")
    header.pop("__metadata__", None)
    tensors = sorted((_entry(name, value) for name, value in header.items()), key=lambda info: (info.begin, info.end))
    position = 0
    for info in tensors:
        if info.begin != position:
            raise _bad_header(f"tensor {_shown(info.name)} does not begin where the one before it ends")
        position = info.end
    if position > data_bytes:
        raise _corrupt(f"the file is cut off: {data_bytes} bytes of tensors are there, of {position}")
    if position < data_bytes:
        raise _corrupt(f"{data_bytes - position} bytes at the end of the file belong to no tensor")
    return {info.name: info for info in tensors}


def _entry(name: str, value: Any) -> TensorInfo:
    match value:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [begin, end]} if len(shape) <= 32 and all(
            type(n) is int and 0 <= n < 2**63 for n in (*shape, begin, end)
        ):
            pass
        case _:
            raise _bad_header(f"the entry of {_shown(name)} is malformed")
    dtype = _DTYPES.get(kind)
    if dtype is None:
        raise FileError(
            "unsupported_dtype",
            f"tensor {_shown(name)} is stored as {_shown(kind[:20])}; only {', '.join(_DTYPES)} are read",
        )
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise _corrupt(f"tensor {_shown(name)} has {end - begin} bytes, which are not those of {kind}{shape}")
    return TensorInfo(name, dtype, tuple(shape), begin, end)
