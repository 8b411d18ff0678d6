"""Reads a .safetensors file once, from front to back, hashing the very bytes that are used.

The safetensors library maps the file into memory. A server must not: if a trainer truncates the file meanwhile, the
next access kills the process. Plain reads turn that into an error, and one pass gives digest and weights of one and
the same content.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from multilora_jax.errors import AdapterError, NotFoundError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_LFS_START = b"version https://git-lfs"


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


def open_regular(path: str) -> io.BufferedReader:
    """Opens a file for reading; refuses folders, pipes and devices, on which a read could wait for ever.

    Raises:
        NotFoundError: no such file, or no permission to read it.
        AdapterError: not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "bad path"
        raise NotFoundError(
            f"cannot open {os.path.basename(path)} in the adapter's folder: {why}",
            reason="adapter_file_not_found", param="lora_path",
        ) from None  # fmt: skip
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise AdapterError(
            f"{os.path.basename(path)} is not a regular file", reason="corrupt_weights", param="lora_path"
        )
    return open(descriptor, "rb")


def refuse_lfs_pointer(start: bytes, name: str) -> None:
    """Raises AdapterError if `start`, a file's first bytes, are those of a Git LFS pointer."""
    if start.startswith(_LFS_START):
        raise AdapterError(
            f"{name} is a Git LFS pointer, a small text file in place of the real one: run `git lfs pull` there",
            reason="lfs_pointer", param="lora_path",
        )  # fmt: skip


class SafetensorsFile:
    """An open file whose header has been checked: every byte belongs to exactly one tensor.

    Attributes:
        tensors: the header's entries by their place in the file.

    Raises:
        NotFoundError: no such file.
        AdapterError: `corrupt_weights` (truncated, damaged or no safetensors file), `lfs_pointer`, or
            `unsupported_dtype` for anything but float32, float16 and bfloat16.
    """

    def __init__(self, path: str):
        self._name = os.path.basename(path)
        self._file = open_regular(path)
        try:
            self._start = self._file.read(8)
            refuse_lfs_pointer(self._start + self._file.peek(32)[:32], self._name)
            size = os.fstat(self._file.fileno()).st_size
            length = int.from_bytes(self._start, "little")
            if len(self._start) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise self._corrupt(f"its {size} bytes do not begin with a whole safetensors header")
            self._header = self._read(length)
            self.tensors = self._parse(size - 8 - length)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _corrupt(self, what: str) -> AdapterError:
        return AdapterError(
            f"{self._name} is damaged: {what}; copy or save it again", reason="corrupt_weights", param="lora_path"
        )

    def _read(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise self._corrupt("it ends early")
        return data

    def _parse(self, data_bytes: int) -> list[TensorInfo]:
        try:
            header = json.loads(self._header)
        except (ValueError, RecursionError):
            raise self._corrupt("its header is not valid JSON") from None
        if not isinstance(header, dict):
            raise self._corrupt("its header is not a JSON object")
        header.pop("__metadata__", None)
        tensors = sorted((self._entry(name, entry) for name, entry in header.items()), key=lambda t: (t.begin, t.end))
        position = 0
        for info in tensors:
            if info.begin != position:
                raise self._corrupt(f"tensor {info.name[:200]!r} does not begin where the one before it ends")
            position = info.end
        if position != data_bytes:
            raise self._corrupt(f"the header describes {position} bytes of tensors and {data_bytes} are there")
        return tensors

    def _entry(self, name: str, entry: Any) -> TensorInfo:
        entry = entry if isinstance(entry, dict) else {}
        shape, span = entry.get("shape"), entry.get("data_offsets")
        if (
            not isinstance(shape, list)
            or not isinstance(span, list)
            or (len(span), len(shape) > 32) != (2, False)
            or not all(type(n) is int and 0 <= n < 2**63 for n in (*shape, *span))
        ):
            raise self._corrupt(f"the header entry of {name[:200]!r} is malformed")
        dtype = _DTYPES.get(str(entry.get("dtype")))
        if dtype is None:
            raise AdapterError(
                f"tensor {name[:200]!r} has dtype {str(entry.get('dtype'))[:20]}: only F32, F16 and BF16 are read",
                reason="unsupported_dtype", param="lora_path",
            )  # fmt: skip
        if span[1] - span[0] != math.prod(shape) * dtype.itemsize:
            raise self._corrupt(f"the shape of tensor {name[:200]!r} does not fit its bytes")
        return TensorInfo(name, dtype, tuple(shape), span[0], span[1])

    def read(self, hasher: Hasher) -> Iterator[tuple[TensorInfo, np.ndarray]]:
        """Yields every tensor once, as float32 of its shape, in file order; feeds the whole file to `hasher`."""
        hasher.update(self._start)
        hasher.update(self._header)
        for info in self.tensors:
            data = np.empty(info.end - info.begin, np.uint8)
            if self._file.readinto(data.data) != data.nbytes:
                raise self._corrupt("it shrank while it was read")
            hasher.update(data)
            yield info, data.view(info.dtype).reshape(info.shape).astype(np.float32, copy=False)
