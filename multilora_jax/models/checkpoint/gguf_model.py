"""A GGUF file of Llama architecture, under Hugging Face names and layouts."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from multilora_jax.errors import ConfigError
from multilora_jax.models.checkpoint.base import ignored, validate
from multilora_jax.models.checkpoint.gguf_file import GGUFFile
from multilora_jax.models.checkpoint.gguf_tokenizer import build_tokenizer
from multilora_jax.models.checkpoint.hub import resolve_tokenizer
from multilora_jax.models.config import ModelConfig
from multilora_jax.tokenizer import Tokenizer

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

# Metadata keys (after "llama.") that change the computation, with the values that switch them off.
_MUST_BE_OFF: dict[str, tuple[Any, ...]] = {
    "expert_count": (0, 1),
    "attention.sliding_window": (0,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
}
_LLAMA3_BAND = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GGUFCheckpoint:
    """Weights and tokenizer of one GGUF file; see Checkpoint. Every tensor comes out as float32.

    Args:
        path: the file.
        source: the name to show, if not the path.

    Raises:
        ConfigError: another architecture, an unsupported option, or a damaged file.
    """

    def __init__(self, path: Path, source: str | None = None):
        self.source = source or str(path)
        self._file = GGUFFile(path)
        self._gguf_names: dict[str, str] = {}
        for gguf_name in self._file.tensors:
            if gguf_name != _ROPE_FACTORS:
                self._gguf_names[_hf_name(gguf_name)] = gguf_name
        self.config = self._read_config(path.stem if source is None else source)
        self._gguf_names = {name: value for name, value in self._gguf_names.items() if not ignored(name, self.config)}
        validate(self)

    def names(self) -> list[str]:
        return list(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._gguf_names[name]].shape

    def tensor(self, name: str) -> np.ndarray:
        data = self._file.tensor(self._gguf_names[name])
        if "q_proj" in name:
            return _undo_rope_permutation(data, self.config.num_heads)
        if "k_proj" in name:
            return _undo_rope_permutation(data, self.config.num_kv_heads)
        return data

    def load_tokenizer(self, tokenizer: str | None = None) -> Tokenizer | None:
        if tokenizer is not None:
            return resolve_tokenizer(tokenizer)
        return build_tokenizer(self._file.metadata, self.source)

    def _read_config(self, name: str) -> ModelConfig:
        metadata = self._file.metadata
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise _unsupported(self.source, "general.architecture", architecture, "only 'llama' is supported")

        def get(key: str, default: Any = None) -> Any:
            return metadata.get(f"llama.{key}", default)

        for key, allowed in _MUST_BE_OFF.items():
            if get(key) is not None and get(key) not in allowed:
                raise _unsupported(self.source, f"llama.{key}", get(key), "the model would be computed wrongly")
        heads, hidden = get("attention.head_count"), get("embedding_length")
        for key, value in (("attention.head_count", heads), ("embedding_length", hidden)):
            if not isinstance(value, int) or value < 1:
                raise _unsupported(self.source, f"llama.{key}", value, "it must be one positive number")
        head_dim = get("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if get(key, head_dim) != head_dim:
                raise _unsupported(self.source, f"llama.{key}", get(key), f"it must be the head width {head_dim}")
        embedding = self._file.tensors.get("token_embd.weight")
        first_layer = "model.layers.0"
        return ModelConfig.from_hf(
            {
                "model_type": "llama",
                "vocab_size": embedding.shape[0] if embedding else get("vocab_size"),
                "hidden_size": hidden,
                "num_hidden_layers": get("block_count"),
                "num_attention_heads": heads,
                "num_key_value_heads": get("attention.head_count_kv", heads),
                "head_dim": head_dim,
                "intermediate_size": get("feed_forward_length"),
                # Stored as float32: 1e-5 comes back as 9.999999747e-06, which is not the value trained with.
                "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon', 1e-5):.6g}"),
                "max_position_embeddings": get("context_length"),
                "tie_word_embeddings": "lm_head.weight" not in self._gguf_names,
                "attention_bias": f"{first_layer}.self_attn.o_proj.bias" in self._gguf_names,
                "mlp_bias": f"{first_layer}.mlp.down_proj.bias" in self._gguf_names,
                "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
                "eos_token_id": _end_tokens(metadata),
                "rope_theta": get("rope.freq_base", 10000.0),
                "rope_scaling": self._rope_scaling(get, head_dim),
            },
            name,
        )

    def _rope_scaling(self, get: Any, head_dim: int) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._file.tensors:
            theta = get("rope.freq_base", 10000.0)
            return _llama3_scaling(self._file.tensor(_ROPE_FACTORS), theta, head_dim, self.source)
        kind = get("rope.scaling.type", "none")
        factor = get("rope.scaling.factor") or get("rope.scale_linear")
        if kind == "none" and get("rope.scale_linear") in (None, 0.0, 1.0):
            return None
        if kind in ("none", "linear"):
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            scaling = {"rope_type": "yarn", "factor": factor}
            for key, gguf_key in (
                ("original_max_position_embeddings", "original_context_length"),
                ("beta_fast", "yarn_beta_fast"),
                ("beta_slow", "yarn_beta_slow"),
            ):
                scaling[key] = get(f"rope.scaling.{gguf_key}")
            return scaling
        raise _unsupported(self.source, "llama.rope.scaling.type", kind, "only none, linear and yarn are supported")


def _hf_name(gguf_name: str) -> str:
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{kind}"
    # Kept as it is: validate() then refuses it by the name that the file uses.
    return gguf_name


def _undo_rope_permutation(data: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from interleaved pairs, (H/2, 2), back to two halves, (2, H/2)."""
    half = data.shape[0] // num_heads // 2
    return np.ascontiguousarray(data.reshape(num_heads, half, 2, -1).swapaxes(1, 2)).reshape(data.shape)


def _end_tokens(metadata: dict[str, Any]) -> list[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]


def _llama3_scaling(factors_H2: np.ndarray, theta: float, head_dim: int, source: str) -> dict[str, Any]:
    """The llama3 parameters behind a file's table of per-frequency divisors.

    The file holds the table alone. Every Llama 3.1 and 3.2 uses one band, so only the factor (the largest divisor)
    is free; the table that these parameters give must be the table in the file.
    """
    factor = float(factors_H2.max())
    low, high, length = _LLAMA3_BAND.values()
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    expected_H2 = 1 / ((1 - blend) / factor + blend)
    if factors_H2.shape != expected_H2.shape or not np.allclose(factors_H2, expected_H2, rtol=1e-4):
        raise _unsupported(source, _ROPE_FACTORS, f"<table up to {factor:g}>", "only Llama 3.1's is supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_BAND}


def _unsupported(source: str, key: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{source}: {key}={value!r}: {why}", reason="unsupported_model_config", param=key)
