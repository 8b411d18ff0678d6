"""A model's configuration as a Hugging Face config.json (host only)."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from multilora_jax.models.config import ModelConfig, RopeConfig
from multilora_jax.models.families import FAMILIES


def write_hf_config(config: ModelConfig, folder: Path) -> None:
    """Writes a model's config.json."""
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=2) + "\n", encoding="utf-8")


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model: the inverse of ModelConfig.from_hf."""
    family = FAMILIES[config.model_type]
    special: dict[str, Any] = {}
    if "attention_bias" not in family.must_be_off:
        special["attention_bias"] = config.attention_bias
    if "mlp_bias" not in family.must_be_off:
        special["mlp_bias"] = config.mlp_bias
    if family.window != "never":
        special["sliding_window"] = config.sliding_window
    if family.window == "use_sliding_window":
        special |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        **special,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": "float32",
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """What differs from a field's default; transformers warns of keys that a type of scaling does not have."""
    if rope.rope_type == "default":
        return None
    given = {f.name: getattr(rope, f.name) for f in fields(rope) if f.name != "theta"}
    needed = ("rope_type", "factor", *(("low_freq_factor", "high_freq_factor") if rope.rope_type == "llama3" else ()))
    defaults = RopeConfig()
    return {key: value for key, value in given.items() if key in needed or value != getattr(defaults, key)}
