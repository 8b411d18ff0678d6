"""What every kind of checkpoint offers, and the check that its tensors are the model's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from multilora_jax.errors import ConfigError
from multilora_jax.memory.geometry import MODULES
from multilora_jax.models.config import ModelConfig
from multilora_jax.safetensors_file import FileError
from multilora_jax.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """Weights under their Hugging Face names, read one at a time."""

    @property
    def config(self) -> ModelConfig:
        """The model's sizes and options."""
        ...

    @property
    def source(self) -> str:
        """Path or id, for display."""
        ...

    def names(self) -> list[str]:
        """Names of the tensors, for example `model.layers.0.self_attn.q_proj.weight`."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it; a matrix is [out, in]."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """Read one tensor into memory of its own, in the file's type; quantised ones become float32."""
        ...

    def load_tokenizer(self, tokenizer: str | None = None) -> Tokenizer | None:
        """The checkpoint's tokenizer (None if it has none), or the one of another folder or hub id."""
        ...


def bad_checkpoint(source: str | os.PathLike[str], what: str) -> ConfigError:
    """The error for a model's file or folder `source` that cannot be read."""
    return ConfigError(f"{source}: {what}", reason="bad_checkpoint", param="model")


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns what is wrong with the model's file `path` into a ConfigError."""
    try:
        yield
    except FileError as error:
        raise bad_checkpoint(path, error.message) from None


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model needs and its shape; a tied head is not among them."""
    D = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, D),
        "model.norm.weight": (D,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (D,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (D,)
        if config.qk_norm:
            shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
        for block, modules in (("self_attn", MODULES[:4]), ("mlp", MODULES[4:])):
            for module in modules:
                in_dim, out_dim = config.module_dims(module)
                shapes[f"{prefix}.{block}.{module}.weight"] = (out_dim, in_dim)
                if module in config.biased_modules:
                    shapes[f"{prefix}.{block}.{module}.bias"] = (out_dim,)
    return shapes


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor in a file is a known extra: frequencies that old files store, or a tied head's copy."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def validate(checkpoint: Checkpoint) -> None:
    """Check names and shapes of all tensors against the configuration; reads no weights.

    Raises:
        ConfigError: a tensor that is missing, unexpected or of the wrong shape.
    """
    expected, present = expected_shapes(checkpoint.config), set(checkpoint.names())
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in present]
    problems += [f"unexpected {name} {list(checkpoint.shape(name))}" for name in sorted(present - expected.keys())]
    for name in present & expected.keys():
        if checkpoint.shape(name) != expected[name]:
            shapes = f"{list(checkpoint.shape(name))}, the configuration asks for {list(expected[name])}"
            problems.append(f"{name} has shape {shapes}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise bad_checkpoint(
            checkpoint.source, f"the tensors do not fit the model's configuration: {'; '.join(problems[:5])}{more}"
        )
