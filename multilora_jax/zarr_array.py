"""Parts of an array as Orbax stores it, read straight into memory that the caller owns (host only, no jax).

The array is a folder in zarr's second format: `.zarray` says its shape, its type and how it is cut, and each chunk is a
file of nothing but its numbers, row by row, as nothing is compressed. So what lies in one piece on both sides goes from
the file into its place, and only what does not, or is of another type, by way of a small buffer.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from multilora_jax.safetensors_file import FileError, open_regular

ABOUT_FILE = ".zarray"
_MAX_ABOUT_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 20
"""Of a buffer on the way: small enough to stay in a core's cache."""


class ZarrArray:
    """One array, whose description has been checked; the chunks are opened for each read, by any number of threads.

    Args:
        folder: of the array.

    Attributes:
        dtype: zarr's name of its type.
        shape: of the array.
        chunks: shape of each chunk; the array is made of whole ones.

    Raises:
        FileError: there is no description (`not_found`), or it is none of what a conversion writes (`corrupt`).
    """

    def __init__(self, folder: str):
        self._folder = folder
        with open_regular(f"{folder}/{ABOUT_FILE}") as file:
            text = file.read(_MAX_ABOUT_BYTES + 1)
        try:
            about = json.loads(text)
            plain = (about["zarr_format"], about["order"], about["compressor"], about["filters"]) == (
                2,
                "C",
                None,
                None,
            )
            plain = plain and about.get("dimension_separator", ".") == "."
            self.dtype = str(about["dtype"])
            self.shape, self.chunks = (_sizes(about[name]) for name in ("shape", "chunks"))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise FileError("corrupt", f"its {ABOUT_FILE} is damaged") from None
        if not plain:
            raise FileError("corrupt", "it is compressed, or laid out in a way that no conversion does")
        fits = len(self.chunks) == len(self.shape)
        if not fits or any(size % part for size, part in zip(self.shape, self.chunks, strict=True)):
            raise FileError("corrupt", f"chunks of {list(self.chunks)} do not divide {list(self.shape)}")

    @property
    def num_chunks(self) -> int:
        """Files that the array is made of."""
        return math.prod(self.shape) // math.prod(self.chunks)

    def files(self) -> Iterator[str]:
        """Names of the chunks' files, each of which holds `prod(chunks)` numbers."""
        counts = (size // part for size, part in zip(self.shape, self.chunks, strict=True))
        return map(_name, itertools.product(*map(range, counts)))

    def read_into(self, index: tuple[slice, ...], out: np.ndarray, dtype: np.dtype) -> None:
        """Reads a part.

        Args:
            index: a slice of step 1 for each axis, or of the first axes.
            out: what it is written to, of the part's shape; converted where its type is another, as numpy does.
            dtype: of the stored numbers.

        Raises:
            FileError: `corrupt` or `not_found`: a chunk was changed or cut off, or the disk failed.
        """
        if not self.shape:
            return self._read_chunk((), [], out.reshape(1), dtype, (1,))
        whole = (*index, *(slice(None),) * (len(self.shape) - len(index)))
        bounds = [part.indices(size)[:2] for part, size in zip(whole, self.shape, strict=True)]
        touched = [range(a // c, -(-b // c)) for (a, b), c in zip(bounds, self.chunks, strict=True)]
        for place in itertools.product(*touched):
            firsts = [n * c for n, c in zip(place, self.chunks, strict=True)]
            inside = [  # of the array's axes, what is wanted of this chunk
                (max(a, first), min(b, first + c)) for (a, b), first, c in zip(bounds, firsts, self.chunks, strict=True)
            ]
            target = out[tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inside, bounds, strict=True))]
            own = [slice(a - first, b - first) for (a, b), first in zip(inside, firsts, strict=True)]
            self._read_chunk(place, own, target, dtype, self.chunks)

    def _read_chunk(
        self, place: tuple[int, ...], own: list[slice], target: np.ndarray, dtype: np.dtype, chunk: tuple[int, ...]
    ) -> None:
        """Reads a chunk's rows, and of them what `own` (slices of the chunk's axes) says, into `target`."""
        row_shape = chunk[1:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        first, num_rows = (own[0].start if own else 0), len(target)
        with open_regular(f"{self._folder}/{_name(place)}") as file:
            descriptor = file.fileno()
            if os.fstat(descriptor).st_size != chunk[0] * row_bytes:
                raise FileError("corrupt", f"{_name(place)} has changed since it was opened")
            if target.dtype == dtype and target.shape[1:] == row_shape and target.flags.c_contiguous:
                _read(descriptor, target, first * row_bytes)
                return
            block = np.empty((max(1, min(num_rows, _BUFFER_BYTES // row_bytes)), *row_shape), dtype)
            for start in range(0, num_rows, len(block)):
                rows = block[: num_rows - start]
                _read(descriptor, rows, (first + start) * row_bytes)
                with np.errstate(over="ignore"):  # as everywhere that weights become float16
                    target[start : start + len(rows)] = rows[(slice(None), *own[1:])]


def _read(descriptor: int, target: np.ndarray, position: int) -> None:
    """Fills a contiguous array with the bytes from `position` on."""
    view = target.reshape(-1).view(np.uint8).data
    while view:
        try:
            count = os.preadv(descriptor, [view], position)
        except OSError as error:
            raise FileError("corrupt", f"it cannot be read ({error.strerror})") from None
        if not count:
            raise FileError("corrupt", "it shrank while it was read")
        view, position = view[count:], position + count


def _name(place: tuple[int, ...]) -> str:
    return ".".join(map(str, place)) or "0"


def _sizes(value: Any) -> tuple[int, ...]:
    if not all(type(size) is int and 0 < size < 2**63 for size in value):
        raise ValueError
    return tuple(value)
