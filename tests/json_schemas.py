"""Random JSON schemas whose answers are short."""

from __future__ import annotations

from typing import Any

import numpy as np


def random_schema(rng: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """An object's schema of one to three properties, nested up to `depth` more times."""
    names = [
        f"{word}{i}" for i, word in enumerate(rng.permutation(["a", "é", 'q"', "long name"])[: rng.integers(1, 4)])
    ]
    required = [name for name in names if rng.random() < 0.6]
    properties = {name: _value(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    kind = rng.integers(0 if depth else 2, 9)
    if kind == 0:
        return random_schema(rng, depth - 1)
    if kind == 1:
        return {"type": "array", "items": _value(rng, depth - 1), "minItems": 1, "maxItems": 3}
    low = int(rng.integers(-50, 50))
    return [
        {"type": "string", "maxLength": int(rng.integers(1, 9))},
        {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]+x$", "maxLength": 12},
        {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 90))},
        {"type": ["boolean", "null"]},
        {"enum": ["red", "gr\"een", 3, None, {"x": [1]}]},
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"const": "none"}]},
        {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    ][kind - 2]  # fmt: skip
