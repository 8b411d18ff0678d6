"""Segmented LoRA over many rank rows on CPUs: blocks of rows, each multiplied by the tokens that use it.

With some hundred rank rows in a step, nearly all of a dense product is masked away. Here rows lie in blocks of
BLOCK_ROWS, each of one adapter, A as `[N, I, M * BLOCK_ROWS]` (the M modules that share an input side by side) and B as
`[N, BLOCK_ROWS, O]`: the order in which batched products read them at memory speed. A round takes the first few users
of every block; for distinct adapters it is all there is to do: it reads each row once and multiplies it by its own
token alone (Punica's gather of matrix-vector products, arXiv 2310.18547 section 4, without the gather). Blocks that
have more users are gathered for these.
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


TURN_BLOCKS, TURN_USERS = 4, 16
"""Blocks that a turn gathers, and users of each."""

TURN_COST = 4
"""What a block takes in a turn, in blocks of a round. A round takes all, whether they have users or not."""


@jax.tree_util.register_dataclass
@dataclass
class BlockUsers:
    """Which tokens use which block.

    A round multiplies all blocks, each by its first few users. Turns gather those that have more, and multiply them by
    the rest: so a block that many tokens share does not cost further rounds of all the others. Where few of the blocks
    have users at all, turns take all of these and there is no round.

    Attributes:
        user_NU: int32[N, U], the first tokens with a factor on the adapter of block n; T stands for nobody.
        factor_NU: float32[N, U], their factors; 0 for nobody.
        num_rounds: int32[], 0 or 1.
        block_E: int32[E], the blocks of the turns, TURN_BLOCKS each.
        user_EV, factor_EV: of those, [E, TURN_USERS].
        num_turns: int32[], turns that it takes.
    """

    user_NU: Any
    factor_NU: Any
    num_rounds: Any
    block_E: Any
    user_EV: Any
    factor_EV: Any
    num_turns: Any

    @classmethod
    def of(cls, mix_RT: jax.Array) -> BlockUsers:
        """Those of float32[R, T], the factor of token t on the adapter that owns rank row r (and all of its block)."""
        mix_NT = mix_RT[::BLOCK_ROWS]
        N, T = mix_NT.shape
        U, V = users_of_a_round(N, T), TURN_USERS
        order_NT = jnp.argsort(mix_NT == 0, axis=1, stable=True).astype(jnp.int32)
        count_N = jnp.sum(mix_NT != 0, axis=1, dtype=jnp.int32)
        is_user = jnp.arange(T) < count_N[:, None]
        user_NT = jnp.where(is_user, order_NT, T)
        factor_NT = jnp.where(is_user, jnp.take_along_axis(mix_NT, order_NT, axis=1), 0)
        saved = jnp.sum(-(-count_N // V)) - jnp.sum(-(-jnp.maximum(count_N - U, 0) // V))
        has_round = saved * TURN_COST >= N
        is_left = is_user & (jnp.arange(T) >= jnp.where(has_round, U, 0))
        pad = ((0, 0), (0, -T % V))
        user_NPV = jnp.pad(jnp.where(is_left, user_NT, T), pad, constant_values=T).reshape(N, -1, V)
        factor_NPV = jnp.pad(jnp.where(is_left, factor_NT, 0), pad).reshape(N, -1, V)
        is_piece = jnp.any(user_NPV < T, axis=2).reshape(-1)
        # Pieces with users first; what is appended fills the last turn.
        piece_E = jnp.argsort(~is_piece, stable=True)
        piece_E = jnp.pad(piece_E, (0, -len(piece_E) % TURN_BLOCKS), constant_values=len(piece_E))
        return cls(
            user_NT[:, :U],
            factor_NT[:, :U],
            has_round.astype(jnp.int32),
            jnp.minimum(piece_E // user_NPV.shape[1], N - 1).astype(jnp.int32),
            jnp.take(user_NPV.reshape(-1, V), piece_E, axis=0, mode="fill", fill_value=T),
            jnp.take(factor_NPV.reshape(-1, V), piece_E, axis=0, mode="fill", fill_value=0),
            -(-jnp.sum(is_piece, dtype=jnp.int32) // TURN_BLOCKS),
        )


def users_of_a_round(num_blocks: int, num_tokens: int) -> int:
    """First users of each block that a round takes: twice as many in all as there are tokens, a divisor of these."""
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
    scale_NC, const_NC = (_by_block(table, N, C) for table in (scale_MR, const_MR))
    whole = a_NIC, list(b_MNKO), scale_NC, const_NC

    def add(sums: list[jax.Array], blocks: Any, user_KU: jax.Array, factor_KU: jax.Array) -> list[jax.Array]:
        """The sums with what these blocks give their users."""
        a_KIC, b_MKRO, scale_KC, const_KC = blocks
        x_KUI = jnp.take(x_TI, user_KU, axis=0, mode="clip")
        s = jax.lax.dot_general(x_KUI, a_KIC, (((2,), (1,)), ((0,), (0,))), preferred_element_type=_F32)
        if axis_name is not None:
            s = jax.lax.psum(s, axis_name)
        # `where` and not a product, as in lora_shrink.
        s = jnp.where(scale_KC[:, None] != 0, s * scale_KC[:, None], 0) + const_KC[:, None]
        s = jnp.where(factor_KU[..., None] != 0, s * factor_KU[..., None], 0).astype(x.dtype)
        user_V, result = user_KU.reshape(-1), []
        for m, (old_TO, b_KRO) in enumerate(zip(sums, b_MKRO, strict=True)):
            s_KUR = s[..., m * BLOCK_ROWS : (m + 1) * BLOCK_ROWS]
            y = jax.lax.dot_general(s_KUR, b_KRO, (((2,), (1,)), ((0,), (0,))), preferred_element_type=_F32)
            result.append(old_TO.at[user_V].add(y.reshape(len(user_V), -1), mode="drop"))
        return result

    def turn(index: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        block_K, user_KV, factor_KV = (
            jax.lax.dynamic_slice_in_dim(table, index * TURN_BLOCKS, TURN_BLOCKS)
            for table in (users.block_E, users.user_EV, users.factor_EV)
        )  # fmt: skip
        blocks = jax.tree.map(lambda table: jnp.take(table, block_K, axis=0, mode="clip"), whole)
        return add(sums, blocks, user_KV, factor_KV)

    def round_(sums: list[jax.Array]) -> list[jax.Array]:
        return add(sums, whole, users.user_NU, users.factor_NU)

    sums = [jnp.zeros((len(x_TI), b.shape[2]), _F32) for b in b_MNKO]
    # Not a loop of no or one turn: XLA would take what stays the same, which is all products, out of it.
    sums = jax.lax.cond(users.num_rounds > 0, round_, lambda sums: sums, sums)
    sums = jax.lax.fori_loop(0, users.num_turns, turn, sums)
    return [y_TO.T if features_first else y_TO for y_TO in sums]


def _by_block(table_MR: jax.Array, num_blocks: int, columns: int) -> jax.Array:
    """[M, R] as the columns of A lie in their blocks: [N, M * BLOCK_ROWS]."""
    return table_MR.reshape(len(table_MR), num_blocks, BLOCK_ROWS).swapaxes(0, 1).reshape(num_blocks, columns)
