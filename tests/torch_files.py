"""Writes files of torch's format by hand, instruction by instruction, for the tests of their reader."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from multilora_jax.safetensors_file import FileError
from multilora_jax.torch_file import TorchFile

STORAGES = {
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float64": "DoubleStorage",
}


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value) if value < 2**31 else b"\x8a\x09" + value.to_bytes(9, "little")


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


def storage(key: str, size: int, kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + integer(size) + b"tQ"


def tensor(key: str, size: int, shape=(), strides=(), offset: int = 0, kind: str = "FloatStorage", extra=b"") -> bytes:
    """The instructions that describe a tensor as torch.save writes it."""
    parts = storage(key, size, kind) + integer(offset) + numbers(*shape) + numbers(*strides)
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + parts + b"\x89ccollections\nOrderedDict\n)R" + extra + b"tR"


def described(**tensors: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(text(name) + value for name, value in tensors.items()) + b"u."


def write(path: Path, description: bytes, entries: dict[str, bytes], **extra: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("adapter_model/data.pkl", description)
        for name, data in (extra | {f"data/{key}": data for key, data in entries.items()}).items():
            archive.writestr(f"adapter_model/{name}", data)
    return path


def read(path: Path) -> tuple[dict[str, np.ndarray], str]:
    digest = hashlib.sha256()
    return {info.name: array for info, array in TorchFile(path).read_all(digest)}, digest.hexdigest()


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    tensors, entries = {}, {}
    for index, (name, array) in enumerate(arrays.items()):
        strides = [stride // array.itemsize for stride in array.strides]
        kind = STORAGES[array.dtype.name]
        tensors[name] = tensor(str(index), array.size, array.shape, strides, kind=kind)
        entries[str(index)] = array.tobytes()
    return write(path, described(**tensors), entries)


def refused(path: Path) -> FileError:
    with pytest.raises(FileError) as caught:
        read(path)
    return caught.value
