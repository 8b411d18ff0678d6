"""An adapter's tensors out of a folder that `checkpoints.save_adapter` wrote."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from multilora_jax.safetensors_file import FileError, Hasher
from multilora_jax.stored_tensors import MANIFEST_FILE, WEIGHTS_FOLDER, StoredTensor, StoredTensors


class OrbaxAdapterFile:
    """The tensors of one folder, in the order of the original's files.

    Args:
        folder: holds the manifest.

    Attributes:
        tensors: by name.

    Raises:
        FileError: see StoredTensors; `corrupt` too where the manifest does not say how the original was hashed.
    """

    def __init__(self, folder: str):
        self._stored = StoredTensors(folder, "adapter")
        self._hashed = _parse(self._stored.about.get("hashed"))
        if sorted(name for _, name in self._hashed) != sorted(self._stored.tensors):
            raise FileError("corrupt", f"{MANIFEST_FILE} does not list each tensor once")
        self.tensors: dict[str, StoredTensor] = {name: self._stored.tensors[name] for _, name in self._hashed}

    def read_all(self, hasher: Hasher) -> Iterator[tuple[StoredTensor, np.ndarray]]:
        """Yields every tensor once, as float32 of its shape; feeds `hasher` the very bytes that the original's file
        fed it: what is read, and what stood around it.

        Raises:
            FileError: `corrupt` where something has changed since the folder was opened.
        """
        for before, name in self._hashed:
            array = self._stored.read(name)
            hasher.update(before)
            hasher.update(array.reshape(-1).view(np.uint8))
            yield self.tensors[name], array.astype(np.float32, copy=False)


def orbax_files(folder: str) -> list[str]:
    """Paths of all that reading the folder's weights may open, links to folders among them."""
    found = [os.path.join(folder, MANIFEST_FILE)]
    for place, folders, files in os.walk(os.path.join(folder, WEIGHTS_FOLDER)):
        found += [os.path.join(place, name) for name in (*folders, *files)]
    return found


def _parse(hashed: Any) -> list[tuple[bytes, str]]:
    try:
        return [(base64.b64decode(before, validate=True), str(name)) for before, name in hashed]
    except (TypeError, ValueError):
        raise FileError("corrupt", f"{MANIFEST_FILE} does not say what the original's digest is made of") from None
