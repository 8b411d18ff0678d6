"""Sizes of models to plan; no weights."""

from __future__ import annotations

from multilora_jax.models.config import ModelConfig, RopeConfig


def llama(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        name=name, vocab_size=vocab, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=hidden // heads, ffn_size=ffn, rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=4096,
    )  # fmt: skip


LLAMA_8B = llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256)
LLAMA_13B = llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000)
LLAMA_70B = llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000)
SMALL = llama("small", 4, 1024, 16, 8, 2816, 32000)
