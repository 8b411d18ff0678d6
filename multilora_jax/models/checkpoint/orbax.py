"""A model folder that `checkpoints.save` wrote: sharded Orbax checkpoints, config.json, tokenizer files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from multilora_jax.models.checkpoint.base import bad_checkpoint, reading, validate
from multilora_jax.models.checkpoint.folder import read_config
from multilora_jax.models.checkpoint.hub import resolve_tokenizer
from multilora_jax.safetensors_file import FileError
from multilora_jax.stored_tensors import DTYPES, StoredTensors
from multilora_jax.tokenizer import Tokenizer

SCALE = "_scale"
"""What the name of a tensor of 8 bits goes on with in the name of its scales."""


class OrbaxCheckpoint:
    """Weights of a converted folder; see Checkpoint. Parts of them are read by `read_into`.

    Args:
        folder: written by `checkpoints.save`.

    Attributes:
        stored: the tensors; in 8 bits NAME is int8[out, in] and NAME_scale float32[out].
        quantization: "int8" or None.

    Raises:
        ConfigError: the folder is unfinished, damaged, mixed up, or of a model that is not supported.
    """

    def __init__(self, folder: Path):
        self.source = str(folder)
        self.folder = folder
        with reading(folder):
            self.stored = StoredTensors(folder, "model")
        self.quantization: str | None = self.stored.about.get("quantization")
        if self.quantization not in (None, "int8"):
            raise bad_checkpoint(folder, f"its weights are in {self.quantization!r}, which this version does not read")
        self.config = read_config(folder)
        self._names = [name for name in self.stored.tensors if not self._is_scale(name)]
        validate(self)
        self._check_types()

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored.tensors[name].shape

    def tensor(self, name: str) -> np.ndarray:
        try:
            tensor = self.stored.read(name)
            if tensor.dtype != np.int8:
                return tensor
            return tensor.astype(np.float32) * self.stored.read(name + SCALE)[:, None]
        except FileError as error:
            raise bad_checkpoint(self.source, f"tensor {name}: {error.message}") from None

    def load_tokenizer(self, tokenizer: str | None = None) -> Tokenizer | None:
        return Tokenizer.from_folder(self.folder) if tokenizer is None else resolve_tokenizer(tokenizer)

    def read_into(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        """StoredTensors.read_into; raises ConfigError."""
        try:
            self.stored.read_into(name, index, out)
        except FileError as error:
            raise bad_checkpoint(self.source, f"tensor {name}: {error.message}") from None

    def _is_scale(self, name: str) -> bool:
        return self.quantization is not None and name.endswith(".weight" + SCALE)

    def _check_types(self) -> None:
        """Each tensor in a type that it can have here: matrices in 8 bits with their scales, or all in floats."""
        for name in self._names:
            tensor = self.stored.tensors[name]
            rounded = self.quantization is not None and len(tensor.shape) == 2
            if (tensor.dtype == DTYPES["int8"]) != rounded:
                wanted = "int8" if rounded else "a float type"
                raise bad_checkpoint(self.source, f"tensor {name} is {tensor.dtype} and should be of {wanted}")
            scale = self.stored.tensors.get(name + SCALE)
            if rounded and (scale is None or (scale.dtype.name, scale.shape) != ("float32", tensor.shape[:1])):
                found = "missing" if scale is None else f"{scale.dtype}{list(scale.shape)}"
                raise bad_checkpoint(self.source, f"tensor {name}{SCALE} is {found}, not float32[{tensor.shape[0]}]")
