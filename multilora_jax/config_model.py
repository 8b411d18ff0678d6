"""The configuration's key that gives a model's shape: what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from multilora_jax.errors import ConfigError

MODEL_SHAPE_DOC = (
    "The model's sizes, with the names of its config.json. `load_format: dummy` needs no files then: weights are "
    "random, and a tokenizer of bytes stands in. Weights that are read must be of this shape."
)


def shape_of(name: str, value: Any) -> dict[str, Any]:
    """Field to value, from a mapping or a list of "field=value", whose values are read as YAML.

    Raises:
        ConfigError: neither of these.
    """
    if isinstance(value, list | tuple) and all(isinstance(item, str) and "=" in item for item in value):
        pairs = [item.split("=", 1) for item in value]
        try:
            value = {field.strip(): yaml.safe_load(text) for field, text in pairs}
        except yaml.YAMLError:
            raise _bad(name, f"entries are field=value, got {value!r}") from None
    if not isinstance(value, Mapping) or not all(isinstance(field, str) for field in value):
        raise _bad(name, f"must be a mapping of config.json's fields to values, got {value!r}")
    return dict(value)


def _bad(name: str, what: str) -> ConfigError:
    return ConfigError(f"{name} {what}", reason="bad_type", param=name)
