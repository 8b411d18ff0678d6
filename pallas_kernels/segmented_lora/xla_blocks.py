"""Segmented LoRA over many rank rows on CPUs: blocks of rows, each multiplied by the tokens that use it.

With some hundred rank rows in a step, nearly all of a dense product is masked away. Here rows lie in blocks of
BLOCK_ROWS, each of one adapter, A as `[N, I, M * BLOCK_ROWS]` (the M modules that share an input side by side) and B as
`[N, BLOCK_ROWS, O]`: the order in which batched products read them at memory speed. A round takes the next few users of
every block, so that a batch of distinct adapters is one round, which reads each row once and multiplies it by its own
token alone (Punica's gather of matrix-vector products, arXiv 2310.18547 section 4, without the gather).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_F32 = jnp.float32

BLOCK_ROWS = 8
"""Rank rows of a block."""

BLOCKS_FROM = 256
"""Rank rows from which on blocks beat dense products on CPUs. A decode step of SmolLM2, rank 16 on all projections:
2 times with 512 rows and 32 tokens, 1.2 to 1.4 times with 128 rows; with 64 rows dense products are faster."""


@jax.tree_util.register_dataclass
@dataclass
class BlockUsers:
    """Which tokens use which block.

    Attributes:
        user_NT: int32[N, T], the tokens with a factor on an adapter of block n first; T stands for nobody.
        factor_NT: float32[N, T], their factors; 0 for nobody.
        num_rounds: int32[], rounds of `users_of_a_round` users that it takes.
    """

    user_NT: Any
    factor_NT: Any
    num_rounds: Any

    @classmethod
    def of(cls, mix_RT: jax.Array) -> BlockUsers:
        """Those of float32[R, T], the factor of token t on the adapter that owns rank row r (and all of its block)."""
        mix_NT = mix_RT[::BLOCK_ROWS]
        N, T = mix_NT.shape
        order_NT = jnp.argsort(mix_NT == 0, axis=1, stable=True).astype(jnp.int32)
        count_N = jnp.sum(mix_NT != 0, axis=1, dtype=jnp.int32)
        is_user = jnp.arange(T) < count_N[:, None]
        factor_NT = jnp.where(is_user, jnp.take_along_axis(mix_NT, order_NT, axis=1), 0)
        return cls(jnp.where(is_user, order_NT, T), factor_NT, -(-jnp.max(count_N) // users_of_a_round(N, T)))


def users_of_a_round(num_blocks: int, num_tokens: int) -> int:
    """Users of each block that a round takes: twice as many in all as there are tokens, a divisor of the tokens."""
    most = max(1, 2 * num_tokens // num_blocks)
    return max(n for n in range(1, num_tokens + 1) if num_tokens % n == 0 and n <= most)


def is_blocked(b: jax.Array) -> bool:
    """Whether rows of B lie in blocks: [N, BLOCK_ROWS, O], not [O, R]."""
    return b.ndim == 3


def lora_deltas_of_blocks(
    x: jax.Array,
    a_NIC: jax.Array,
    b_MNKO: Sequence[jax.Array],
    scale_MR: jax.Array,
    const_MR: jax.Array,
    users: BlockUsers,
    *,
    features_first: bool,
    axis_name: str | None = None,
) -> list[jax.Array]:
    """Shrink and expand every token by the blocks that it uses.

    Args:
        x: [I, T] if features_first else [T, I], compute type.
        a_NIC: [N, I, M * BLOCK_ROWS]; b_MNKO: of each of the M modules its [N, BLOCK_ROWS, O].
        scale_MR, const_MR: see lora_shrink; rows of A with scale 0 may hold anything, rows of B must be finite.
        users: of these T tokens.
        axis_name: mesh axis over which I is sharded.

    Returns:
        for each module float32 [O, T] if features_first else [T, O].
    """
    N, _, C = a_NIC.shape
    x_TI = x.T if features_first else x
    T, U = len(x_TI), users_of_a_round(N, len(x_TI))
    scale_N1C, const_N1C = (_by_block(table, N, C)[:, None] for table in (scale_MR, const_MR))

    def turn(index: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        user_NU, factor_NU = (
            jax.lax.dynamic_slice_in_dim(table, index * U, U, 1) for table in (users.user_NT, users.factor_NT)
        )  # fmt: skip
        x_NUI = jnp.take(x_TI, user_NU, axis=0, mode="clip")
        s = jax.lax.dot_general(x_NUI, a_NIC, (((2,), (1,)), ((0,), (0,))), preferred_element_type=_F32)
        if axis_name is not None:
            s = jax.lax.psum(s, axis_name)
        # `where` and not a product, as in lora_shrink.
        s = jnp.where(scale_N1C != 0, s * scale_N1C, 0) + const_N1C
        s = jnp.where(factor_NU[..., None] != 0, s * factor_NU[..., None], 0).astype(x.dtype)
        user_V, result = user_NU.reshape(-1), []
        for m, (old_TO, b_NKO) in enumerate(zip(sums, b_MNKO, strict=True)):
            s_NUK = s[..., m * BLOCK_ROWS : (m + 1) * BLOCK_ROWS]
            y = jax.lax.dot_general(s_NUK, b_NKO, (((2,), (1,)), ((0,), (0,))), preferred_element_type=_F32)
            result.append(old_TO.at[user_V].add(y.reshape(N * U, -1), mode="drop"))
        return result

    start = [jnp.zeros((T, b.shape[2]), _F32) for b in b_MNKO]
    sums = jax.lax.fori_loop(0, users.num_rounds, turn, start)
    return [y_TO.T if features_first else y_TO for y_TO in sums]


def rows_of_blocks(a_NIC: jax.Array, block_J: jax.Array) -> jax.Array:
    """A of some blocks as a matrix: [I, J * C]."""
    return jnp.take(a_NIC, block_J, axis=0, mode="clip").swapaxes(0, 1).reshape(a_NIC.shape[1], -1)


def _by_block(table_MR: jax.Array, num_blocks: int, columns: int) -> jax.Array:
    """[M, R] as the columns of A lie in their blocks: [N, M * BLOCK_ROWS]."""
    return table_MR.reshape(len(table_MR), num_blocks, BLOCK_ROWS).swapaxes(0, 1).reshape(num_blocks, columns)
