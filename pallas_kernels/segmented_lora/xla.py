"""Segmented LoRA for any XLA device: dense products over the active rank rows, masked by owner.

All adapters of a batch lie side by side as rank rows, `A` as `[M*R, I]` and `B` as `[O, R]`, each adapter with as
many rows as its own rank. One dense product shrinks every token by every row, a mask keeps the rows that the token's
own adapters own, and one dense product expands. Up to a few hundred rows that beats every gather on a CPU, where the
masked work costs less than moving weights.

`features_first` is the layout of activations: `[I, T]` (float32 on CPUs, where `W[O, I] @ x[I, T]` runs at memory
speed and the other order does not) or `[T, I]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.segmented_lora.own_rows import packed_size, sum_dense
from pallas_kernels.segmented_lora.xla_blocks import is_blocked

_F32 = jnp.float32


def lora_shrink(
    x: jax.Array,
    a_MRI: jax.Array,
    scale_MR: jax.Array,
    mix_RT: jax.Array,
    const_MR: jax.Array | None = None,
    *,
    features_first: bool,
    axis_name: str | None = None,
    own_rows: int = 0,
) -> jax.Array:
    """Project each token on all rank rows of M modules that share the input, and keep its own.

    Args:
        x: [I, T] if features_first else [T, I], compute type.
        a_MRI: [M, R, I], rank rows of A, compute type.
        scale_MR: float32[M, R], the module's scale (alpha / r) of the adapter that owns row r; 0 where the module has
            no such row, whatever a_MRI holds there.
        mix_RT: float32[R, T], the factor that token t puts on the adapter that owns row r: 1 for its own adapter,
            other numbers in a weighted mix, 0 for every other row.
        const_MR: float32[M, R], added to the scaled projection: 1 with scale 0 makes a row of B a bias.
        axis_name: mesh axis over which I is sharded; the result is summed over it, in one all-reduce.
        own_rows: see own_rows.packed_size; 0: that all-reduce is of [M*R, T].

    Returns:
        [M, R, T] if features_first else [M, T, R], in x's type.
    """
    M, R, width = a_MRI.shape
    a = a_MRI.reshape(M * R, width)
    if features_first:
        s = jax.lax.dot_general(a, x, (((1,), (0,)), ((), ())), preferred_element_type=_F32)
        s = s.reshape(M, R, -1)
    else:
        s = jax.lax.dot_general(x, a, (((1,), (1,)), ((), ())), preferred_element_type=_F32)
        s = s.reshape(-1, M, R).swapaxes(0, 1)
    if not features_first:
        mix_RT = mix_RT.T
    if axis_name is not None:
        s = sum_dense(s, mix_RT != 0, packed_size(mix_RT.size // R, R, own_rows), axis_name)

    def per_row(table_MR: jax.Array) -> jax.Array:
        return table_MR[:, :, None] if features_first else table_MR[:, None, :]

    # `where` and not a product: a row nobody owns may hold anything, and 0 * inf is no zero.
    scale = per_row(scale_MR)
    s = jnp.where(scale != 0, s * scale, 0)
    if const_MR is not None:
        s = s + per_row(const_MR)
    return jnp.where(mix_RT != 0, s * mix_RT, 0).astype(x.dtype)


def lora_expand(s: jax.Array, b_OR: jax.Array, *, features_first: bool) -> jax.Array:
    """Expand one module's shrunk activations to its output.

    Args:
        s: [R, T] if features_first else [T, R], from lora_shrink.
        b_OR: [O, R], or in blocks [N, BLOCK_ROWS, O], compute type. Finite in every row, those that nobody owns too:
            they are multiplied by 0.

    Returns:
        float32 [O, T] if features_first else [T, O].
    """
    if is_blocked(b_OR):
        b_RO = b_OR.reshape(-1, b_OR.shape[2])
        y_TO = jnp.matmul(s.T if features_first else s, b_RO, preferred_element_type=_F32)
        return y_TO.T if features_first else y_TO
    if features_first:
        return jax.lax.dot_general(b_OR, s, (((1,), (0,)), ((), ())), preferred_element_type=_F32)
    return jax.lax.dot_general(s, b_OR, (((1,), (1,)), ((), ())), preferred_element_type=_F32)
