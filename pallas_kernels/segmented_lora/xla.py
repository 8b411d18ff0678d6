"""Segmented LoRA for any XLA device: dense products over the active rank rows, masked by owner.

All adapters of a batch lie side by side as rank rows, `A` as `[M*R, I]` and `B` as `[O, R]`, each adapter with as
many rows as its own rank. One dense product shrinks every token by every row, a mask keeps the rows that the token's
own adapters own, and one dense product expands. Up to a few hundred rows that beats every gather on a CPU, where the
masked work costs less than moving weights.

`features_first` is the layout of activations: `[I, T]` (float32 on CPUs, where `W[O, I] @ x[I, T]` runs at memory
speed and the other order does not) or `[T, I]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.segmented_lora.xla_blocks import BLOCK_ROWS, is_blocked, rows_of_blocks

_F32 = jnp.float32

ROWS_OF_A_TURN = 96
"""Rank rows of one turn of lora_deltas_of_rows: five prompts of 50 tokens with an adapter of rank 16 each need 80."""


def lora_shrink(
    x: jax.Array,
    a_MRI: jax.Array,
    scale_MR: jax.Array,
    mix_RT: jax.Array,
    const_MR: jax.Array | None = None,
    *,
    features_first: bool,
    axis_name: str | None = None,
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
        axis_name: mesh axis over which I is sharded; the result is summed over it (one all-reduce of [M*R, T]).

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
    return _keep_own(s, x.dtype, scale_MR, mix_RT, const_MR, features_first, axis_name)


def _keep_own(
    s: jax.Array,
    dtype: Any,
    scale_MR: jax.Array,
    mix_RT: jax.Array,
    const_MR: jax.Array | None,
    features_first: bool,
    axis_name: str | None,
) -> jax.Array:
    """Of each token's projections on all rows, scaled, those on its own: lora_shrink after its product."""
    if not features_first:
        mix_RT = mix_RT.T
    if axis_name is not None:
        s = jax.lax.psum(s, axis_name)

    def per_row(table_MR: jax.Array) -> jax.Array:
        return table_MR[:, :, None] if features_first else table_MR[:, None, :]

    # `where` and not a product: a row nobody owns may hold anything, and 0 * inf is no zero.
    scale = per_row(scale_MR)
    s = jnp.where(scale != 0, s * scale, 0)
    if const_MR is not None:
        s = s + per_row(const_MR)
    return jnp.where(mix_RT != 0, s * mix_RT, 0).astype(dtype)


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


def lora_deltas_of_rows(
    x: jax.Array,
    a_MRI: jax.Array,
    b_MOR: Sequence[jax.Array],
    scale_MR: jax.Array,
    mix_RT: jax.Array,
    const_MR: jax.Array | None,
    row_C: jax.Array,
    num_rows: jax.Array,
    *,
    features_first: bool,
    axis_name: str | None = None,
) -> list[jax.Array]:
    """Shrink and expand by some of the rank rows: for tokens whose adapters own few of them, as those of prompts do.

    The rows are gathered, and multiplied ROWS_OF_A_TURN at a time: what a turn costs goes with them and not with R.

    Args:
        x, a_MRI, scale_MR, mix_RT, const_MR, features_first, axis_name: see lora_shrink.
            a_MRI may also lie in blocks, [N, I, M * BLOCK_ROWS].
        b_MOR: of each of the M modules its [O, R]; [N, BLOCK_ROWS, O] where A lies in blocks.
        row_C: int32[C], the first num_rows (int32 scalar) of which name every row that any of the tokens has a factor
            on, each once; C is a multiple of ROWS_OF_A_TURN. Of blocks, all rows of each.

    Returns:
        for each module float32 [O, T] if features_first else [T, O].
    """
    num_tokens = x.shape[1 if features_first else 0]

    def turn(index: jax.Array | int) -> list[jax.Array]:
        row_K = jax.lax.dynamic_slice_in_dim(row_C, index * ROWS_OF_A_TURN, ROWS_OF_A_TURN)
        used_K = index * ROWS_OF_A_TURN + jnp.arange(ROWS_OF_A_TURN) < num_rows

        def rows_of(table: jax.Array, axis: int) -> jax.Array:
            return jnp.take(table, row_K, axis, mode="clip")

        tables = (
            rows_of(scale_MR, 1),
            jnp.where(used_K[:, None], rows_of(mix_RT, 0), 0),
            None if const_MR is None else rows_of(const_MR, 1),
        )
        if is_blocked(b_MOR[0]):
            block_J = row_K[::BLOCK_ROWS] // BLOCK_ROWS
            x_TI = x.T if features_first else x
            s = jnp.matmul(x_TI, rows_of_blocks(a_MRI, block_J), preferred_element_type=_F32)
            s = s.reshape(num_tokens, len(block_J), len(b_MOR), BLOCK_ROWS).transpose(2, 0, 1, 3)
            s = s.reshape(len(b_MOR), num_tokens, ROWS_OF_A_TURN)
            s = _keep_own(s, x.dtype, *tables, False, axis_name)
            out = [lora_expand(s[m], jnp.take(b, block_J, 0, mode="clip"), features_first=False)
                   for m, b in enumerate(b_MOR)]  # fmt: skip
            return [y.T for y in out] if features_first else out
        s = lora_shrink(x, rows_of(a_MRI, 1), *tables, features_first=features_first, axis_name=axis_name)
        return [lora_expand(s[m], rows_of(b, 1), features_first=features_first) for m, b in enumerate(b_MOR)]

    def nothing() -> list[jax.Array]:
        widths = [b.shape[2] if is_blocked(b) else len(b) for b in b_MOR]
        return [jnp.zeros((width, num_tokens) if features_first else (num_tokens, width), _F32) for width in widths]

    # The first turn, mostly the only one, is no part of the loop: adding to a sum costs as much as a turn's products.
    sums = jax.lax.cond(num_rows > 0, lambda: turn(0), nothing)
    num_turns = -(-num_rows // ROWS_OF_A_TURN)
    return jax.lax.fori_loop(
        1, num_turns, lambda index, sums: [old + new for old, new in zip(sums, turn(index), strict=True)], sums
    )
