"""Segmented LoRA over prompts on CPUs: pieces of neighbouring tokens of one adapter, by a few of its rank rows each.

Prompts lie one behind another, so the tokens of an adapter are a few long segments. A piece takes PIECE_TOKENS of one
by PIECE_BLOCKS blocks of rank rows (S-LoRA's MBGMM, section 5.3: tiles within a segment, no padding to the largest
rank): its work goes with the tokens and the rank of their own adapter, where a product over all rows of the step's
prompts is mostly masked away. Each piece adds to its window of the output in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.segmented_lora.xla_blocks import BLOCK_ROWS, is_blocked

_F32 = jnp.float32

PIECE_TOKENS, PIECE_BLOCKS = 64, 2
"""Most tokens of a piece, and its blocks of rank rows. Of 32 or 64 tokens by 2 or 4 blocks this was the best or close
to it for 50-token prompts of rank 16, for one of 256, and for ranks 64 to 8 mixed."""

PIECES_FROM = 64
"""Rank rows of a step from which on its prompts are cut into pieces."""

Segment = tuple[int, int, list[tuple[int, float]]]
"""First token, number of tokens, and (block, factor on its adapter) of each block of rank rows that they use."""


@jax.tree_util.register_dataclass
@dataclass
class PromptPieces:
    """What to multiply for the prompts of a step.

    Attributes:
        first_N, end_N: int32[N], the tokens of each piece, at most PIECE_TOKENS; counted from the first prompt token.
        block_NG: int32[N, PIECE_BLOCKS], its blocks of rank rows.
        factor_NG: float32[N, PIECE_BLOCKS], the tokens' factor on each block's adapter; 0 where there is no block.
        num_pieces: int32[], how many there are; what lies behind them means nothing.
    """

    first_N: Any
    end_N: Any
    block_NG: Any
    factor_NG: Any
    num_pieces: Any

    @classmethod
    def empty(cls, num_tokens: int, num_segments: int, num_rows: int) -> PromptPieces:
        """None yet, in numpy, with room for so many segments, whatever rank rows out of num_rows each uses."""
        N = (num_tokens // PIECE_TOKENS + num_segments) * -(-num_rows // (BLOCK_ROWS * PIECE_BLOCKS))
        first_N, end_N = np.zeros((2, N), np.int32)
        block_NG = np.zeros((N, PIECE_BLOCKS), np.int32)
        return cls(first_N, end_N, block_NG, np.zeros((N, PIECE_BLOCKS), np.float32), np.int32(0))

    def fill(self, segments: Iterable[Segment]) -> None:
        """Cuts these segments, which do not overlap, in ascending order; neighbours that use the same are one."""
        pieces = [
            (first, min(first + PIECE_TOKENS, end), blocks[at : at + PIECE_BLOCKS])
            for start, end, blocks in _joined(segments)
            for first in range(start, end, PIECE_TOKENS)
            for at in range(0, len(blocks), PIECE_BLOCKS)
        ]
        for n, (first, end, blocks) in enumerate(pieces):
            self.first_N[n], self.end_N[n] = first, end
            for g, (block, factor) in enumerate(blocks):
                self.block_NG[n, g], self.factor_NG[n, g] = block, factor
        self.num_pieces = np.int32(len(pieces))


def _joined(segments: Iterable[Segment]) -> list[tuple[int, int, list[tuple[int, float]]]]:
    """(first, end, blocks) of the segments that use any block."""
    joined: list[tuple[int, int, list[tuple[int, float]]]] = []
    for first, count, blocks in segments:
        if joined and joined[-1][1] == first and joined[-1][2] == blocks:
            joined[-1] = joined[-1][0], first + count, blocks
        elif blocks:
            joined.append((first, first + count, blocks))
    return joined


def add_lora_of_pieces(
    y_TO: jax.Array,
    x_TI: jax.Array,
    a: jax.Array,
    b_M: Sequence[jax.Array],
    scale_MR: jax.Array,
    const_MR: jax.Array,
    pieces: PromptPieces,
    num_prompt_tokens: int,
    *,
    axis_name: str | None = None,
) -> jax.Array:
    """Adds the deltas of the prompts, which are the last tokens, to y.

    Args:
        y_TO: float32[T, O], the outputs of the M modules side by side.
        x_TI: [T, I], compute type.
        a: rank rows of A, compute type: [M, R, I], or in blocks [N, I, M * BLOCK_ROWS].
        b_M: of each module its [O, R], or in blocks [N, BLOCK_ROWS, O]; finite in the rows of the pieces.
        scale_MR, const_MR: see lora_shrink.
        pieces: of these prompts.
        num_prompt_tokens: how many of the T there are.
        axis_name: mesh axis over which I is sharded.

    Returns:
        float32[T, O]. y is written in place where nothing else reads it.
    """
    M, W = len(b_M), min(PIECE_TOKENS, num_prompt_tokens)
    blocked, before = is_blocked(b_M[0]), len(y_TO) - num_prompt_tokens

    def rows_of(table_MR: jax.Array, block: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(table_MR, block * BLOCK_ROWS, BLOCK_ROWS, 1).reshape(1, -1)

    def shrink(x_WI: jax.Array, block: jax.Array) -> jax.Array:
        """[W, M * BLOCK_ROWS], not yet scaled."""
        if blocked:
            a_IC = jax.lax.dynamic_slice_in_dim(a, block, 1)[0]
            return jnp.matmul(x_WI, a_IC, preferred_element_type=_F32)
        a_CI = jax.lax.dynamic_slice_in_dim(a, block * BLOCK_ROWS, BLOCK_ROWS, 1).reshape(-1, a.shape[2])
        return jax.lax.dot_general(x_WI, a_CI, (((1,), (1,)), ((), ())), preferred_element_type=_F32)

    def expand(s_WK: jax.Array, b: jax.Array, block_G: list[jax.Array]) -> jax.Array:
        if blocked:
            b_KO = jnp.concatenate([jax.lax.dynamic_slice_in_dim(b, block, 1)[0] for block in block_G])
            return jnp.matmul(s_WK, b_KO, preferred_element_type=_F32)
        b_OK = [jax.lax.dynamic_slice_in_dim(b, block * BLOCK_ROWS, BLOCK_ROWS, 1) for block in block_G]
        rows = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(s_WK, jnp.concatenate(b_OK, 1), rows, preferred_element_type=_F32)

    def piece(index: jax.Array, y_TO: jax.Array) -> jax.Array:
        first, end = pieces.first_N[index], pieces.end_N[index]
        # The last window ends with the tokens, however many of them are the piece's.
        start = jnp.minimum(first, num_prompt_tokens - W)
        token_W = start + jnp.arange(W)
        is_own_W1 = ((token_W >= first) & (token_W < end))[:, None]
        x_WI = jax.lax.dynamic_slice_in_dim(x_TI, before + start, W)
        block_G = [pieces.block_NG[index, g] for g in range(PIECE_BLOCKS)]
        s_G = jnp.concatenate([shrink(x_WI, block) for block in block_G], 1)
        if axis_name is not None:
            s_G = jax.lax.psum(s_G, axis_name)
        shrunk = []
        for g, (block, s) in enumerate(zip(block_G, jnp.split(s_G, PIECE_BLOCKS, 1), strict=True)):
            scale, factor = rows_of(scale_MR, block), pieces.factor_NG[index, g]
            # `where` and not a product, as in lora_shrink.
            s = jnp.where(scale != 0, s * scale, 0) + rows_of(const_MR, block)
            shrunk.append(jnp.where(is_own_W1 & (factor != 0), s * factor, 0).astype(x_TI.dtype))
        column = 0
        for m, b in enumerate(b_M):
            own = slice(m * BLOCK_ROWS, (m + 1) * BLOCK_ROWS)
            y_WO = expand(jnp.concatenate([s[:, own] for s in shrunk], 1), b, block_G)
            at = (before + start, column)
            y_WO += jax.lax.dynamic_slice(y_TO, at, y_WO.shape)
            y_TO = jax.lax.dynamic_update_slice(y_TO, y_WO, at)
            column += y_WO.shape[1]
        return y_TO

    assert len(scale_MR) == M
    return jax.lax.fori_loop(0, pieces.num_pieces, piece, y_TO)
