"""One .safetensors file, read tensor by tensor.

Plain reads rather than a memory map: mapped pages count as resident beside the copies made of them, which would
double the memory that loading takes. bfloat16, which numpy lacks, comes from ml_dtypes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from multilora_jax.errors import ConfigError

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000


def bad_file(path: Path, what: str) -> ConfigError:
    """The error for a weights file that cannot be read."""
    return ConfigError(f"{path}: {what}", reason="bad_checkpoint", param="model")


def refuse_lfs_pointer(path: Path, head: bytes) -> None:
    """Raise if the file is the text stub that git leaves where a large file was not downloaded."""
    if head.startswith(_LFS_POINTER):
        raise bad_file(path, "this is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """Names, shapes and data of one file.

    Raises:
        ConfigError: a truncated or corrupt file, or an LFS pointer.
    """

    def __init__(self, path: Path):
        self.path = path
        self._entries: dict[str, _Entry] = {}
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(len(_LFS_POINTER))
            refuse_lfs_pointer(path, head)
            header_bytes = int.from_bytes(head[:8], "little")
            if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
                raise bad_file(path, f"not a safetensors file, or cut off: {size} bytes, header of {header_bytes}")
            file.seek(8)
            header = file.read(header_bytes)
        data_start = 8 + header_bytes
        try:
            for name, entry in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    shape = tuple(int(n) for n in entry["shape"])
                    self._entries[name] = _Entry(entry["dtype"], shape, data_start + begin, data_start + end)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise bad_file(path, f"the safetensors header is corrupt ({type(error).__name__}: {error})") from error
        needed = max((entry.end for entry in self._entries.values()), default=data_start)
        if needed > size:
            raise bad_file(path, f"the file is cut off: {size} bytes of {needed}; download it again")

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def tensor(self, name: str) -> np.ndarray:
        """Read one tensor.

        Raises:
            ConfigError: its type is none of DTYPES, or its bytes do not fill its shape.
        """
        entry = self._entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise bad_file(self.path, f"{name} is stored as {entry.dtype}; supported are {', '.join(DTYPES)}")
        count = math.prod(entry.shape)
        if entry.end - entry.begin != count * dtype.itemsize:
            shape = f"{entry.dtype}{list(entry.shape)}"
            raise bad_file(self.path, f"{name} has {entry.end - entry.begin} bytes, {shape} needs another number")
        data = np.fromfile(self.path, dtype=dtype, count=count, offset=entry.begin)
        if data.size != count:
            raise bad_file(self.path, f"the file ended inside {name}")
        return data.reshape(entry.shape)
