"""Tables of rotary position embedding, computed once on the host in transformers' own precision."""

from __future__ import annotations

import math

import numpy as np

from multilora_jax.models.config import ModelConfig, RopeConfig


def rope_tables(config: ModelConfig, max_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of every position.

    `dynamic` scaling depends on how long a text has become, and keys already cached with one table cannot be turned
    by another. So one table serves all positions: the one for length `max(max_len, max_position_embeddings)`. Up to
    max_position_embeddings it is plain RoPE, exactly; a server that allows longer texts uses the stretched table for
    short ones too. Keep max_len at or below max_position_embeddings unless longer texts are wanted.

    Args:
        config: the model.
        max_len: number of positions, the longest text to serve.

    Returns:
        (cos_SH2, sin_SH2): float32[max_len, H/2] each; the attention factor of `yarn` is multiplied in.
    """
    inv_freq_H2, scale = inverse_frequencies(config, max_len)
    # The angle is rounded to float32 before its cosine is taken, as in the models' own code.
    angles_SH2 = (np.arange(max_len, dtype=np.float32)[:, None] * inv_freq_H2[None, :]).astype(np.float64)
    scale32 = np.float32(scale)
    return np.cos(angles_SH2).astype(np.float32) * scale32, np.sin(angles_SH2).astype(np.float32) * scale32


def inverse_frequencies(config: ModelConfig, max_len: int) -> tuple[np.ndarray, float]:
    """Radians per position of each pair of dimensions, float32[H/2], and the factor on cos and sin."""
    rope, dim = config.rope, config.head_dim
    if rope.rope_type == "dynamic":
        trained = config.max_position_embeddings
        length = max(max_len, trained)
        stretch = np.float32(rope.factor * length) / np.float32(trained) - np.float32(rope.factor - 1)
        # A head of two dimensions has one frequency, 1, whatever the base.
        power = np.float32(float(stretch) ** (dim / (dim - 2))) if dim > 2 else np.float32(1)
        return _reciprocal(_powers(float(np.float32(rope.theta) * power), dim)), 1.0
    powers_H2 = _powers(rope.theta, dim)
    if rope.rope_type == "yarn":
        return _yarn(rope, powers_H2, dim)
    inv_freq_H2 = _reciprocal(powers_H2)
    if rope.rope_type == "linear":
        inv_freq_H2 = inv_freq_H2 / np.float32(rope.factor)
    elif rope.rope_type == "llama3":
        inv_freq_H2 = _llama3(rope, inv_freq_H2)
    return inv_freq_H2, 1.0


def _powers(base: float, dim: int) -> np.ndarray:
    """base ** (2i/dim), correctly rounded from the float32 exponent: float32[dim/2]."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)


def _reciprocal(x: np.ndarray) -> np.ndarray:
    return np.float32(1.0) / x


def _llama3(rope: RopeConfig, inv_freq_H2: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a linear blend between."""
    assert rope.original_max_position_embeddings is not None
    old_length = np.float32(rope.original_max_position_embeddings)
    low, high, factor = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor), np.float32(rope.factor)
    # A reciprocal and a product, two roundings, where a division would have one: torch divides a number by a tensor so.
    wavelengths = _reciprocal(inv_freq_H2) * np.float32(2 * math.pi)
    blend = (_reciprocal(wavelengths) * old_length - low) / (high - low)
    blended = (1 - blend) * inv_freq_H2 / factor + blend * inv_freq_H2
    result = np.where(wavelengths > old_length / low, inv_freq_H2 / factor, blended)
    return np.where(wavelengths < old_length / high, inv_freq_H2, result)


def _yarn(rope: RopeConfig, powers_H2: np.ndarray, dim: int) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071, section 3): a ramp over dimensions from unscaled to scaled frequencies."""
    assert rope.original_max_position_embeddings is not None
    factor, old_length = rope.factor, rope.original_max_position_embeddings

    def dimension_of(rotations: float) -> float:
        return dim * math.log(old_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    steps = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1)
    unscaled_share = np.float32(1.0) - ramp
    scaled, unscaled = _reciprocal(np.float32(factor) * powers_H2), _reciprocal(powers_H2)
    inv_freq_H2 = scaled * (1 - unscaled_share) + unscaled * unscaled_share

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = rope.attention_factor
    if scale is None:
        both = rope.mscale and rope.mscale_all_dim
        scale = mscale(rope.mscale) / mscale(rope.mscale_all_dim) if both else mscale(1.0)
    return inv_freq_H2, scale
