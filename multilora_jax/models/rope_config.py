"""What config.json says of rotary position embedding, checked key by key (host only, hashable)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from multilora_jax.errors import ConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

WHOLE_HEAD: tuple[Any, ...] = (None, 1, 1.0)
"""Values of partial_rotary_factor that turn whole heads."""


def refuse(field: str, value: Any, why: str) -> NoReturn:
    """Raises the ConfigError that refuses a model for a field of its config.json."""
    raise ConfigError(f"config.json: {field}={value!r} {why}", reason="unsupported_model_config", param=field)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; field names and meanings are transformers'.

    Attributes:
        rope_type: one of ROPE_TYPES.
        theta: base of the frequencies (`rope_theta`).
        factor: stretch of the context (linear, dynamic, llama3, yarn).
        original_max_position_embeddings: context length before stretching, in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's band of interpolation.
        attention_factor: yarn's factor on cos and sin; None derives it from factor and the mscales.
        beta_fast, beta_slow: rotations that bound yarn's ramp (YaRN paper, section 3.2).
        mscale, mscale_all_dim: yarn's weights of the derived attention factor; 0 means absent.
        truncate: whether yarn rounds the ends of its ramp to whole dimensions.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @classmethod
    def from_hf(cls, config: dict[str, Any], max_position_embeddings: int) -> RopeConfig:
        """Read `rope_scaling` + `rope_theta`, or the newer `rope_parameters`, of a config.json.

        Raises:
            ConfigError: an unknown rope type or key, or a value out of range.
        """
        where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = config.get(where) or {}
        if not isinstance(given, dict):
            refuse(where, given, "must be an object")
        known = {f.name for f in fields(cls)} - {"theta"}
        known |= {"type", "rope_theta", "partial_rotary_factor", "finetuned"}
        for key in given:
            if key not in known:
                refuse(f"{where}.{key}", given[key], "is not supported: no rotary embedding served here has this key")
        if given.get("partial_rotary_factor") not in WHOLE_HEAD:
            refuse(f"{where}.partial_rotary_factor", given["partial_rotary_factor"], "is not supported: only 1.0 is")
        rope_type = given.get("rope_type") or given.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            refuse(f"{where}.rope_type", rope_type, f"is not supported: known types are {', '.join(ROPE_TYPES)}")

        def number(key: str, default: float | None, low: float = 0.0) -> float:
            value = given.get(key)
            value = default if value is None else value
            if value is None:
                refuse(f"{where}.{key}", None, f"is missing: rope type {rope_type!r} needs it")
            if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < math.inf:
                refuse(f"{where}.{key}", value, f"must be a number above {low:g}")
            return float(value)

        theta = given.get("rope_theta")
        theta = config.get("rope_theta") if theta is None else theta
        theta = 10000.0 if theta is None else theta
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not 1.0 < theta < math.inf:
            refuse("rope_theta", theta, "must be a number above 1")
        chosen: dict[str, Any] = {"rope_type": rope_type, "theta": float(theta)}
        if rope_type in ("llama3", "yarn"):
            original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
            original = max_position_embeddings if original is None else original
            if isinstance(original, bool) or not isinstance(original, int) or original < 1:
                refuse(f"{where}.original_max_position_embeddings", original, "must be a positive integer")
            chosen["original_max_position_embeddings"] = original
        if rope_type != "default":
            implied = None
            if rope_type == "yarn":
                implied = max_position_embeddings / chosen["original_max_position_embeddings"]
            chosen["factor"] = number("factor", implied)
        if rope_type == "llama3":
            low, high = number("low_freq_factor", None), number("high_freq_factor", None)
            if high <= low:
                refuse(f"{where}.high_freq_factor", high, f"must be above low_freq_factor={low}")
            chosen |= {"low_freq_factor": low, "high_freq_factor": high}
        if rope_type == "yarn":
            if given.get("attention_factor") is not None:
                chosen["attention_factor"] = number("attention_factor", None)
            for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
                chosen[key] = number(key, default) if given.get(key) else default
            for key in ("mscale", "mscale_all_dim"):
                chosen[key] = number(key, 0.0, low=-math.inf)
            chosen["truncate"] = bool(given.get("truncate", True))
        return cls(**chosen)
