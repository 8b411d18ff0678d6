"""Reads the tensors of a file that torch.save wrote, with no chance for the file to run code.

Such a file is a zip archive: a pickle that describes the tensors, and one entry of raw bytes for each storage. The
pickle is read by torch_pickle, which calls nothing. All sizes are checked before memory is taken for them.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from multilora_jax.safetensors_file import FileError, Hasher, open_regular, refuse_lfs_pointer
from multilora_jax.torch_pickle import UnsafePickleError, View, read_description, shown

MAX_PICKLE_BYTES = 4 * 2**20
"""Far above what an adapter needs: about 150 bytes describe a tensor."""

_ZIP_START = b"PK\x03\x04"
_ZIP_ERRORS = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, OverflowError, struct.error, EOFError, OSError,
    LookupError,
)  # fmt: skip


@dataclass(frozen=True)
class TorchTensor:
    """One tensor: its name, and where its numbers are."""

    name: str
    view: View

    @property
    def dtype(self) -> np.dtype:
        return self.view.storage.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape


class TorchFile:
    """A file whose description has been checked against the bytes that are there.

    The file is opened for each read, so there is nothing to close; one that has changed since it was checked is
    refused.

    Attributes:
        path: where it is.
        tensors: by name, in the order of the description.

    Raises:
        UnsafePickleError: the description asks for code, or uses instructions that no dictionary of tensors needs; or
            the file is of the format before torch 1.6, which is pickled throughout.
        FileError: `not_found`, `not_regular`, `lfs_pointer`, `corrupt`, or `unsupported_dtype` for anything but
            float32, float16 and bfloat16.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = path
        with open_regular(path) as file:
            self._version = _version(file)
            start = file.read(64)
            refuse_lfs_pointer(start)
            if not start.startswith(_ZIP_START):
                raise _no_archive(start)
            with _damage():
                archive = zipfile.ZipFile(file)
                entries = _entries(archive)
                self._folder, description = _description(entries)
                text = archive.read(description)
                order = entries.get(f"{self._folder}byteorder")
                if order is not None and archive.read(order).strip() != b"little":
                    raise _corrupt("its numbers are not stored in little-endian order")
        self.tensors = {name: TorchTensor(name, view) for name, view in read_description(text).items()}
        for tensor in self.tensors.values():
            entry = entries.get(self._entry(tensor))
            if entry is None or entry.file_size != _num_bytes(tensor):
                raise _corrupt(f"the numbers of tensor {shown(tensor.name)} are not there, or not as many as it says")

    def read_all(self, hasher: Hasher) -> Iterator[tuple[TorchTensor, np.ndarray]]:
        """Yields every tensor once, as contiguous float32 of its shape; feeds names, types, shapes and the very bytes
        used to `hasher`.

        Raises:
            FileError: `corrupt` if the file has changed or its bytes are not those that it was saved with; or what
                opening it raises.
        """
        with open_regular(self.path) as file:
            if _version(file) != self._version:
                raise _corrupt("it has changed since it was opened")
            with _damage():
                archive = zipfile.ZipFile(file)
            for tensor in self.tensors.values():
                with _damage():
                    data = archive.read(self._entry(tensor))
                if len(data) != _num_bytes(tensor):
                    raise _corrupt("it shrank while it was read")
                array = _elements(data, tensor.view)
                hasher.update(repr((tensor.name, tensor.dtype.name, tensor.shape)).encode("utf-8", "replace"))
                hasher.update(array.reshape(-1).view(np.uint8))
                yield tensor, array.astype(np.float32)

    def _entry(self, tensor: TorchTensor) -> str:
        return f"{self._folder}data/{tensor.view.storage.key}"


def _num_bytes(tensor: TorchTensor) -> int:
    """Of the whole storage that the tensor is a view of."""
    return tensor.view.storage.size * tensor.dtype.itemsize


def _elements(data: bytes, view: View) -> np.ndarray:
    """The view's own elements, contiguous; its bounds were checked when it was described."""
    dtype = view.storage.dtype
    if 0 in view.shape:
        return np.empty(view.shape, dtype)
    first, strides = np.frombuffer(data, dtype)[view.offset :], [stride * dtype.itemsize for stride in view.strides]
    elements = np.lib.stride_tricks.as_strided(first, view.shape, strides, writeable=False)
    return np.ascontiguousarray(elements).reshape(view.shape)


def _version(file: io.BufferedReader) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _corrupt(what: str) -> FileError:
    return FileError("corrupt", what)


def _no_archive(start: bytes) -> FileError:
    if start.startswith(b"\x80"):
        return UnsafePickleError(
            "it has the format that torch wrote before version 1.6, which is pickled throughout: load and save it "
            "with a newer torch, or save it as safetensors"
        )
    return _corrupt("no zip archive, which torch.save writes")


@contextmanager
def _damage() -> Iterator[None]:
    """Turns what zipfile raises for a damaged archive into FileError."""
    try:
        yield
    except _ZIP_ERRORS as error:
        raise _corrupt(f"the zip archive is cut off or damaged ({str(error)[:200]})") from None


def _entries(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's entries by name; torch compresses none, so that none can be larger than the file itself."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        if entry.filename in entries:
            raise _corrupt(f"the archive holds {shown(entry.filename)} twice")
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise _corrupt(f"{shown(entry.filename)} is compressed, which torch.save never does")
        entries[entry.filename] = entry
    return entries


def _description(entries: dict[str, zipfile.ZipInfo]) -> tuple[str, zipfile.ZipInfo]:
    """(the archive's one folder with its slash, the entry of the pickle)."""
    found = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(found) != 1:
        raise _corrupt("the archive is none that torch.save writes: it has no data.pkl of its own")
    folder = found[0].removesuffix("data.pkl")
    if f"{folder}constants.pkl" in entries:
        raise UnsafePickleError("it holds a TorchScript program, not tensors")
    if entries[found[0]].file_size > MAX_PICKLE_BYTES:
        raise _corrupt(f"the description of its tensors is larger than {MAX_PICKLE_BYTES} bytes")
    return folder, entries[found[0]]
