"""Weights rounded to 8 bits with one scale for each output channel, and products with them.

A product is exact in the rounded weights: values of at most 127 are converted to the compute type without loss and
the scale multiplies the finished sum. On a CPU, XLA writes a converted weight to memory before it multiplies, which
takes longer than reading the float32 weight would. Steps of few tokens therefore multiply integers there: each
token's activations are written as 16-bit fixed-point numbers in two digits of 8 bits, which one integer product over
twice the tokens sums exactly. Longer steps convert a tile of the weight at a time, which stays in the cache.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_F32 = jnp.float32

DIGIT_TOKENS = 32
"""Most tokens of a step whose activations are written in digits on a CPU; above it tiles are faster."""

_DIGIT_RANGE = 127 * 256
"""Largest fixed-point activation, so that both digits fit 8 bits with a sign."""

_TILE_BYTES = 2 << 20
"""Bytes of a converted tile of a weight: fits the second-level cache of current CPUs with the activations."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantWeight:
    """A weight of O outputs and I inputs: values_OI * scale_O[:, None].

    The leaves are arrays of jax or numpy, or whatever describes them (shapes, PartitionSpecs).

    Attributes:
        values_OI: int8[O, I], from -127 to 127.
        scale_O: float32[O].
    """

    values_OI: Any
    scale_O: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.values_OI.shape


def quantise(w_OI: np.ndarray) -> QuantWeight:
    """Rounds a weight to the nearest of 255 steps between minus and plus its row's largest magnitude.

    Args:
        w_OI: any float type; a row of zeros gives zeros.
    """
    w_OI = w_OI.astype(np.float32, copy=False)
    scale_O = np.maximum(w_OI.max(1, initial=0), -w_OI.min(1, initial=0)) / np.float32(127)
    divisor_O = np.where(scale_O > 0, scale_O, np.float32(1))
    values_OI = np.divide(w_OI, divisor_O[:, None])
    # A scale so small that it has few bits left of its own may give more than 127.
    np.clip(np.rint(values_OI, out=values_OI), -127, 127, out=values_OI)
    return QuantWeight(values_OI.astype(np.int8), scale_O)


def dequantise(weight: QuantWeight) -> np.ndarray:
    """float32[O, I] on the host: the weight that is served."""
    return np.asarray(weight.values_OI).astype(np.float32) * np.asarray(weight.scale_O)[:, None]


def take_rows(weight: jax.Array | QuantWeight, index_T: jax.Array) -> jax.Array:
    """[T, I]: rows of a weight, in the weight's type, float32 where it is quantised."""
    if not isinstance(weight, QuantWeight):
        return jnp.take(weight, index_T, axis=0, mode="clip")
    values_TI = jnp.take(weight.values_OI, index_T, axis=0, mode="clip").astype(_F32)
    return values_TI * jnp.take(weight.scale_O, index_T, mode="clip")[:, None]


def quant_product(weight: QuantWeight, x: jax.Array, features_first: bool) -> jax.Array:
    """The product of a weight with activations.

    Args:
        weight: int8[O, I] with scales.
        x: float[I, T] if features_first, else [T, I].
        features_first: layout of x and of the result.

    Returns:
        float32[O, T] or [T, O].
    """

    return jax.lax.platform_dependent(
        weight,
        x,
        cpu=functools.partial(_on_cpu, features_first=features_first),
        default=functools.partial(_converted, features_first=features_first),
    )


def _on_cpu(weight: QuantWeight, x: jax.Array, features_first: bool) -> jax.Array:
    """quant_product without a whole converted weight in memory."""
    x_IT = x if features_first else x.T
    y_OT = (_by_digits if x_IT.shape[1] <= DIGIT_TOKENS else _by_tiles)(weight, x_IT)
    return y_OT if features_first else y_OT.T


def _converted(weight: QuantWeight, x: jax.Array, features_first: bool) -> jax.Array:
    """quant_product where the conversion becomes a part of the product's kernel."""
    values_OI = weight.values_OI.astype(x.dtype)
    if features_first:
        y = jax.lax.dot_general(values_OI, x, (((1,), (0,)), ((), ())), preferred_element_type=_F32)
        return y * weight.scale_O[:, None]
    y = jax.lax.dot_general(x, values_OI, (((1,), (1,)), ((), ())), preferred_element_type=_F32)
    return y * weight.scale_O[None, :]


def _by_digits(weight: QuantWeight, x_IT: jax.Array) -> jax.Array:
    """float32[O, T]: every token's activations as step_T * (256 * high + low), the digits being int8.

    A token's activations are off by at most half of its step, which is its largest magnitude over 32512. What is not
    finite makes its own token's results not finite, and no other's.
    """
    x_IT = x_IT.astype(_F32)
    largest_T = jnp.max(jnp.abs(x_IT), 0)
    step_T = jnp.where(largest_T == 0, 1.0, largest_T / _DIGIT_RANGE)  # stays NaN or infinite
    fixed_IT = jnp.round(x_IT / step_T).astype(jnp.int32)
    high_IT = (fixed_IT + 128) >> 8
    digits_I2T = jnp.concatenate([high_IT, fixed_IT - 256 * high_IT], 1).astype(jnp.int8)
    sums_O2T = jax.lax.dot_general(
        weight.values_OI, digits_I2T, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
    )
    high_OT, low_OT = jnp.split(sums_O2T.astype(_F32), 2, 1)
    return (256 * high_OT + low_OT) * (weight.scale_O[:, None] * step_T)


def _by_tiles(weight: QuantWeight, x_IT: jax.Array) -> jax.Array:
    """float32[O, T]: the weight converted to x's type a tile of outputs at a time."""
    rows = max(1, _TILE_BYTES // (weight.values_OI.shape[1] * 4))

    def one_output(values_I: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            values_I.astype(x_IT.dtype), x_IT, (((0,), (0,)), ((), ())), preferred_element_type=_F32
        )

    return jax.lax.map(one_output, weight.values_OI, batch_size=rows) * weight.scale_O[:, None]
