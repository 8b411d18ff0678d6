"""Which tokens of a step meet which rank rows, for kernels that read adapters in place (host only: numpy in and out).

Decode rows and prompt tokens are planned apart, in small and in large blocks. A bucket has room for whatever mix its
rank rows allow, so no batch is refused: with Q blocks of ROW_BLOCK rows in a step an adapter has at most as many tiles
as it has such blocks, all of them together at most Q.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from multilora_jax.engine.batch import BatchShape
from multilora_jax.engine.rank_rows import ROW_BLOCK
from pallas_kernels.segmented_lora.plan import NOBODY, Plan, Segments, SegmentShape, group_segments, group_tiles

_DECODE_TOKENS, _DECODE_ROWS = 16, 16
_PROMPT_TOKENS, _PROMPT_ROWS = 64, 32


def segment_shapes(shape: BatchShape, num_rows: int) -> tuple[SegmentShape, ...]:
    """Sizes of the plan of a step with so many rank rows: for the decode rows, and for the prompts if there are any.

    Of n tokens in blocks of C, groups that share their adapters are at most Q of one adapter and one of all that mix
    several: at most n, and at most Q + 1 + n // C blocks. Those of one adapter have at most Q + (n // C) Q tiles, the
    others at most (1 + n // C) Q, and a token is in one of them.
    """
    Q = num_rows // ROW_BLOCK

    def sizes(tokens: int, rows: int, block_tokens: int, tile_rows: int) -> SegmentShape:
        whole = tokens // block_tokens
        return SegmentShape(min(tokens, min(Q + 1, rows) + whole), (2 + whole) * Q, block_tokens, tile_rows)

    found = (sizes(shape.num_decodes, shape.num_decodes, _DECODE_TOKENS, _DECODE_ROWS),)
    if not shape.num_prompt_tokens:
        return found
    return *found, sizes(shape.num_prompt_tokens, shape.num_blocks, _PROMPT_TOKENS, _PROMPT_ROWS)


def empty_plan(shape: BatchShape, num_rows: int) -> Plan:
    """A plan without a token."""

    def empty(size: SegmentShape) -> Segments:
        N, W, C = size.blocks, size.tiles, size.block_tokens
        per_block, per_tile = np.zeros(N, np.int32), np.zeros(W, np.int32)
        return Segments(
            np.full((N, C), NOBODY, np.int32), per_block, per_block, per_tile, per_tile, per_tile,
            np.zeros((W, C), np.float32), size.tile_rows,
        )  # fmt: skip

    return tuple(map(empty, segment_shapes(shape, num_rows)))


def build_plan(
    shape: BatchShape, num_rows: int, mix_SX: np.ndarray, row_P: np.ndarray, num_prompt: int, first_row_X: np.ndarray,
    num_rows_X: np.ndarray,
) -> Plan:  # fmt: skip
    """The plan of a step.

    Args:
        shape: of the step; num_rows: its bucket of rank rows.
        mix_SX: float32[S, X], the factor of each row on each adapter.
        row_P: int32[P], row of each prompt token; num_prompt: how many of them are no padding.
        first_row_X, num_rows_X: int[X], the rows of each adapter in the tables, 0 rows where there is none.
    """
    B, sizes = shape.num_decodes, segment_shapes(shape, num_rows)
    group_S, members = _groups(mix_SX)
    plan = [_region(group_S[:B], members, first_row_X, num_rows_X, mix_SX[:B], sizes[0], 0)]
    if shape.num_prompt_tokens:
        group_P = np.where(np.arange(len(row_P)) < num_prompt, group_S[row_P], -1)
        plan.append(_region(group_P, members, first_row_X, num_rows_X, mix_SX[row_P], sizes[1], B))
    return tuple(plan)


def _groups(mix_SX: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """int[S], the group of each row (those on the same adapters share one; -1: the base), and each group's adapters."""
    group_S = np.full(len(mix_SX), -1)
    row_U, slot_U = np.nonzero(mix_SX)
    slots: dict[int, list[int]] = {}
    for row, slot in zip(row_U.tolist(), slot_U.tolist(), strict=True):
        slots.setdefault(row, []).append(slot)
    numbers: dict[tuple[int, ...], int] = {}
    for row, members in slots.items():
        group_S[row] = numbers.setdefault(tuple(members), len(numbers))
    return group_S, [np.array(members) for members in numbers]


def _region(
    group_T: np.ndarray, members: list[np.ndarray], first_row_X: np.ndarray, num_rows_X: np.ndarray,
    mix_TX: np.ndarray, size: SegmentShape, first_token: int,
) -> Segments:  # fmt: skip
    if not members:
        members = [np.zeros(0, np.int64)]
    arguments: Any = (first_row_X, num_rows_X, mix_TX, size)
    if _fits(group_T, members, num_rows_X, size):
        found = group_segments(group_T, members, *arguments)
    else:
        # Many different mixes: the tokens of all of them share blocks, with factors of 0 on each other's adapters.
        mixed_G = np.array([len(group) > 1 for group in members])
        union = np.unique(np.concatenate([group for group in members if len(group) > 1]))
        mixed_T = (group_T >= 0) & mixed_G[np.maximum(group_T, 0)]
        found = group_segments(np.where(mixed_T, len(members), group_T), [*members, union], *arguments)
    token_NC: Any = found.token_NC
    found.token_NC = np.where(token_NC == NOBODY, NOBODY, token_NC + np.int32(first_token))
    return found


def _fits(group_T: np.ndarray, members: list[np.ndarray], num_rows_X: np.ndarray, size: SegmentShape) -> bool:
    count_G = np.bincount(group_T[group_T >= 0], minlength=len(members))
    blocks_G = -(-count_G // size.block_tokens)
    _, _, tiles_G = group_tiles(members, num_rows_X, size.tile_rows)
    return int(blocks_G.sum()) <= size.blocks and int((blocks_G * tiles_G).sum()) <= size.tiles
