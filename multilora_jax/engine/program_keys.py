"""Keys of compiled programs as JSON, for the other hosts of a model."""

from __future__ import annotations

from typing import Any

from multilora_jax.engine.batch import BatchShape
from multilora_jax.lora.layout import Reach


def encode_key(value: Any) -> Any:
    """A program's key as JSON; `decode_key` is the inverse."""
    if isinstance(value, BatchShape):
        return {"shape": [value.num_prompt_tokens, value.num_blocks, value.num_decodes]}
    if isinstance(value, Reach):
        return {"reach": int(value)}
    if isinstance(value, tuple):
        return {"tuple": [encode_key(part) for part in value]}
    return value


def decode_key(value: Any) -> Any:
    """See encode_key."""
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "shape":
        return BatchShape(*content)
    return Reach(content) if kind == "reach" else tuple(map(decode_key, content))
