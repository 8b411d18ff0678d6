"""A Hugging Face model folder: config.json, safetensors files, tokenizer files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from multilora_jax.errors import ConfigError
from multilora_jax.models.checkpoint.base import bad_checkpoint, ignored, reading, validate
from multilora_jax.models.checkpoint.hub import resolve_tokenizer
from multilora_jax.models.config import ModelConfig
from multilora_jax.safetensors_file import SafetensorsFile, open_regular
from multilora_jax.tokenizer import Tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_JSON_BYTES = 64 << 20


class FolderCheckpoint:
    """Weights of a folder; see Checkpoint.

    Args:
        folder: has config.json and either model.safetensors or the index and its shards.
        source: the name to show, if not the folder.

    Raises:
        ConfigError: the model is not supported, or a file is missing or damaged.
    """

    def __init__(self, folder: Path, source: str | None = None):
        self.source = source or str(folder)
        self.folder = folder
        self.config = read_config(folder, source)
        located = self._locate_tensors()
        self._files = {name: file for name, file in located.items() if not ignored(name, self.config)}
        validate(self)

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].tensors[name].shape

    def tensor(self, name: str) -> np.ndarray:
        file = self._files[name]
        with reading(file.path):
            return file.read(name)

    def load_tokenizer(self, tokenizer: str | None = None) -> Tokenizer | None:
        return Tokenizer.from_folder(self.folder) if tokenizer is None else resolve_tokenizer(tokenizer)

    def _locate_tensors(self) -> dict[str, SafetensorsFile]:
        index_path, single_path = self.folder / _INDEX, self.folder / _SINGLE
        if single_path.is_file():
            single = _open(single_path)
            return dict.fromkeys(single.tensors, single)
        if not index_path.is_file():
            found = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
            hint = f"; it has {', '.join(found[:4])}" if found else ""
            raise ConfigError(
                f"{self.folder}: neither {_SINGLE} nor {_INDEX} is there{hint}. Only safetensors weights are read "
                "from a folder; for a GGUF file give the path of the file itself",
                reason="missing_weights", param="model",
            )  # fmt: skip
        weight_map = _read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise bad_checkpoint(index_path, "has no weight_map")
        if not all(isinstance(shard, str) and "\0" not in shard for shard in weight_map.values()):
            raise bad_checkpoint(index_path, "its weight_map names files by what is no name")
        shards: dict[str, SafetensorsFile] = {}
        for shard in sorted(set(weight_map.values())):
            path = self.folder / shard
            if not path.is_file():
                raise bad_checkpoint(path, f"this shard is missing, {_INDEX} names it")
            shards[shard] = _open(path)
        for name, shard in weight_map.items():
            if name not in shards[shard].tensors:
                raise bad_checkpoint(self.folder / shard, f"{name} is missing here, {_INDEX} says it is in this shard")
        return {name: shards[shard] for name, shard in weight_map.items()}


def _open(path: Path) -> SafetensorsFile:
    with reading(path):
        return SafetensorsFile(path)


def read_config(folder: Path, name: str | None = None) -> ModelConfig:
    """The model's configuration from config.json and generation_config.json; no weights are needed.

    Args:
        folder: holds the files.
        name: for display; the folder's own name by default.

    Raises:
        ConfigError: a file is missing or damaged, or the model is not supported.
    """
    generation = folder / "generation_config.json"
    return ModelConfig.from_hf(
        _read_json(folder / "config.json"),
        name or folder.resolve().name,
        _read_json(generation) if generation.is_file() else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not os.path.lexists(path):
        raise bad_checkpoint(path, "this file is missing: is the folder a Hugging Face model?")
    with reading(path), open_regular(path) as file:
        text = file.read(_MAX_JSON_BYTES + 1)
    if len(text) > _MAX_JSON_BYTES:
        raise bad_checkpoint(path, f"larger than {_MAX_JSON_BYTES >> 20} MiB")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_checkpoint(path, f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise bad_checkpoint(path, "must hold a JSON object")
    return value
