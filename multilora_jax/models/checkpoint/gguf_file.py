"""The GGUF container: metadata and tensor directory, read sequentially; tensors dequantised block by block.

The `gguf` package's own reader makes several numpy objects for each of the hundred thousand strings of a vocabulary
(seconds, and hundreds of megabytes, before the first weight); this one reads the same header into plain lists. The
package still supplies the table of types and the dequantisation.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from multilora_jax.models.checkpoint.base import bad_checkpoint, reading
from multilora_jax.safetensors_file import open_regular, refuse_lfs_pointer

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_BLOCK_BYTES = 1 << 22
"""Quantised bytes expanded at a time: keeps the temporaries of dequantisation small."""


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the directory; shape in numpy's order (rows first), offset from the file's start in bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """Metadata and tensors of a little-endian GGUF file of version 2 or 3.

    Attributes:
        metadata: key -> value; arrays are lists.
        tensors: name -> entry.

    Raises:
        ConfigError: not a GGUF file, another version, cut off, or corrupt.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        with reading(path), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(64)
            refuse_lfs_pointer(head)
            if not head.startswith(b"GGUF"):
                raise bad_checkpoint(path, "not a GGUF file")
            file.seek(4)
            try:
                self._read_header(_Reader(file), size)
            except (struct.error, EOFError, UnicodeDecodeError, MemoryError) as error:
                raise bad_checkpoint(path, f"the header is cut off or corrupt ({error})") from error
        needed = max((t.offset + t.num_bytes for t in self.tensors.values()), default=0)
        if needed > size:
            raise bad_checkpoint(path, f"the file is cut off: {size} bytes of {needed}; download it again")

    def _read_header(self, reader: _Reader, size: int) -> None:
        version = reader.scalar("I")
        if version not in (2, 3):
            raise bad_checkpoint(self.path, f"GGUF version {version} is not supported (2 and 3 are)")
        num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
        for _ in range(num_keys):
            key = reader.string()
            self.metadata[key] = reader.value(reader.scalar("I"), size)
        entries = []
        for _ in range(num_tensors):
            name, num_dims = reader.string(), reader.scalar("I")
            dims = [reader.scalar("Q") for _ in range(num_dims)]
            entries.append((name, tuple(reversed(dims)), reader.scalar("I"), reader.scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-reader.tell() // alignment) * alignment
        for name, shape, type_id, offset in entries:
            if name in self.tensors:
                raise bad_checkpoint(self.path, f"tensor {name} appears twice")
            try:
                kind = GGMLQuantizationType(type_id)
            except ValueError:
                raise bad_checkpoint(self.path, f"{name} has unknown type {type_id}") from None
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block_size:
                raise bad_checkpoint(self.path, f"{name}: shape {list(shape)} does not fit blocks of {block_size}")
            num_bytes = math.prod(shape) // block_size * block_bytes
            self.tensors[name] = GGUFTensor(name, shape, kind, start + offset, num_bytes)

    def tensor(self, name: str) -> np.ndarray:
        """Read and dequantise one tensor to float32 of its shape."""
        entry = self.tensors[name]
        rows = math.prod(entry.shape[:-1])
        row_bytes = entry.num_bytes // rows
        result = np.empty((rows, entry.shape[-1]), np.float32)
        step = max(1, _BLOCK_BYTES // row_bytes)
        with self.path.open("rb") as file:
            file.seek(entry.offset)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                raw = np.fromfile(file, np.uint8, count * row_bytes)
                if raw.size != count * row_bytes:
                    raise bad_checkpoint(self.path, f"the file ended inside {name}")
                try:
                    result[first : first + count] = dequantize(raw.reshape(count, row_bytes), entry.type)
                except NotImplementedError:
                    raise bad_checkpoint(
                        self.path, f"{name} has type {entry.type.name}, which is not supported"
                    ) from None
        return result.reshape(entry.shape)


class _Reader:
    """Little-endian values from a file, each checked against its end."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def tell(self) -> int:
        return self._file.tell()

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._file.read(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        if length > 1 << 30:
            raise EOFError(f"a string of {length} bytes")
        data = self._file.read(length)
        if len(data) != length:
            raise EOFError("end of file inside a string")
        return data.decode("utf-8")

    def value(self, kind: int, size: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if count > size:
                raise EOFError(f"an array of {count} values")
            if item in _SCALARS:
                width = struct.calcsize("<" + _SCALARS[item])
                return list(struct.unpack(f"<{count}{_SCALARS[item]}", self._file.read(count * width)))
            return [self.value(item, size) for _ in range(count)]
        if kind not in _SCALARS:
            raise EOFError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])
