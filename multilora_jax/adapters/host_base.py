"""The base model as far as adapters are checked against it, read on the host: no device is touched."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from multilora_jax.config import EngineConfig
from multilora_jax.errors import ConfigError
from multilora_jax.lora.deltas import BaseTensors
from multilora_jax.lora.layout import COMPUTE_DTYPES
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.models.checkpoint import Checkpoint, expected_shapes, open_checkpoint, read_config
from multilora_jax.models.checkpoint.dummy import dummy_model
from multilora_jax.models.config import ModelConfig
from multilora_jax.tokenizer import Tokenizer

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class HostBase:
    """A base model and the pool that adapters are packed for.

    Attributes:
        model_config: sizes of the model.
        geometry: of the pool; its dtype is float32 where the configuration says auto, which only a device can decide.
        num_pages: pages of the pool where the configuration alone says how many, else None.
        tensors: the weights as they would be served.
        tokenizer: None for a model without one.
        name: path or id of the base, to hold against what an adapter says it was trained on.
    """

    model_config: ModelConfig
    geometry: PoolGeometry
    num_pages: int | None
    tensors: BaseTensors = field(repr=False)
    tokenizer: Tokenizer | None = field(repr=False)
    name: str


def open_base(config: EngineConfig, *, progress: bool = True) -> HostBase:
    """Opens the configuration's model; no weights are read yet.

    Args:
        config: see EngineConfig. Under `load_format: dummy` weights are made up, which are not those that an engine
            would make up: sizes do not depend on them.
        progress: show progress bars while downloading.

    Raises:
        ConfigError, NotFoundError: the model cannot be served so.
    """
    dtype = "float32" if config.dtype == "auto" else config.dtype
    if config.load_format == "dummy":
        model_config, tokenizer = dummy_model(
            config.model, config.base_name, config.model_shape, config.tokenizer
        )  # fmt: skip
        tensors: BaseTensors = _DummyTensors(model_config)
    else:
        checkpoint = _open_checkpoint(config.model, progress=progress)
        model_config = checkpoint.config
        tensors = _CheckpointTensors(checkpoint, COMPUTE_DTYPES[dtype])
        tokenizer = checkpoint.load_tokenizer(config.tokenizer)
    extra_vocab = config.max_extra_vocab if config.enable_lora else 0
    geometry = model_config.geometry(2, config.page_tokens, config.tensor_parallel_size, dtype, extra_vocab)
    num_pages = config.pool_pages
    if config.pool_memory_gib is not None:
        num_pages = int(config.pool_memory_gib * 2**30) // geometry.page_bytes
    return HostBase(model_config, geometry, num_pages, tensors, tokenizer, config.model)


def _open_checkpoint(model: str, *, progress: bool) -> Checkpoint:
    try:
        return open_checkpoint(model, progress=progress)
    except ConfigError as error:
        if error.reason != "missing_weights":
            raise
        raise ConfigError(
            f"{error.message}. To check adapters against its config.json alone, add --load-format dummy",
            reason=error.reason, param=error.param,
        ) from None  # fmt: skip


def read_model_config(model: str) -> ModelConfig:
    """The sizes of a model given as in the configuration; of a folder nothing but its config.json is read.

    Raises:
        ConfigError, NotFoundError: see `open_checkpoint`.
    """
    folder = Path(model).expanduser()
    return read_config(folder) if folder.is_dir() else open_checkpoint(model).config


class _CheckpointTensors:
    """BaseTensors of a checkpoint, rounded to the type it would be served in."""

    def __init__(self, checkpoint: Checkpoint, dtype: np.dtype):
        self._checkpoint, self._dtype = checkpoint, dtype
        self._names = set(checkpoint.names())

    def tensor(self, name: str) -> np.ndarray | None:
        if name == HEAD and self._checkpoint.config.tie_word_embeddings:
            name = EMBED
        if name not in self._names:
            return None
        with np.errstate(over="ignore"):
            return self._checkpoint.tensor(name).astype(self._dtype, copy=False).astype(np.float32, copy=False)


class _DummyTensors:
    """BaseTensors of the right shapes: ones for norms, random values of each tensor's own for the rest."""

    def __init__(self, config: ModelConfig):
        self._tied = config.tie_word_embeddings
        self._shapes = expected_shapes(config)

    def tensor(self, name: str) -> np.ndarray | None:
        if name == HEAD and self._tied:
            name = EMBED
        if name not in self._shapes:
            return None
        shape = self._shapes[name]
        if len(shape) == 1 and name.endswith(".weight"):
            return np.ones(shape, np.float32)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
