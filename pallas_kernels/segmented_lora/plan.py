"""What a batch asks of the segmented kernels: which tokens meet which rank rows, as arrays of fixed sizes.

Tokens that use the same adapters (mostly one) make up a group, a group's tokens lie in *blocks* of up to C, and a
group's rank rows in *tiles* of up to `tile_rows`, each tile of one adapter. A kernel runs over blocks or over
(block, tile) pairs, of which a batch has as many as its adapters' own ranks ask for: nothing is padded to the largest
rank. Tokens of the base model are in no block. A token that mixes several adapters is in one block as well, with the
tiles of all of them, so that no two blocks write the same row (Punica's SGMV, section 4, made to work for mixes).

Sizes are those of a bucket: blocks and tiles that a batch does not need stay idle, and no batch recompiles anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NOBODY = np.iinfo(np.int32).max
"""A free place of a block: no token of any batch. Were it the plan's T, several blocks would write row T of an x that
is longer."""

MIN_BLOCK = 16
"""Fewest tokens and fewest rank rows of a block or tile: a tensor core's own."""


@dataclass(frozen=True)
class SegmentShape:
    """Sizes of a Segments.

    Attributes:
        blocks: N, most blocks of a batch.
        tiles: W, most pairs of a block and a tile.
        block_tokens: C, tokens of a block; tile_rows: rank rows of a tile; powers of two of at least MIN_BLOCK.
    """

    blocks: int
    tiles: int
    block_tokens: int = MIN_BLOCK
    tile_rows: int = MIN_BLOCK

    def __post_init__(self) -> None:
        for name, value in (("block_tokens", self.block_tokens), ("tile_rows", self.tile_rows)):
            if value < MIN_BLOCK or value & (value - 1):
                raise ValueError(f"{name} is {value}: it must be a power of two of at least {MIN_BLOCK}")
        if self.blocks < 1 or self.tiles < 1:
            raise ValueError(f"a plan needs room for a block and a tile, not {self.blocks} and {self.tiles}")


@jax.tree_util.register_dataclass
@dataclass
class Segments:
    """Blocks of one size. A block's tiles follow each other, in the order of the blocks."""

    token_NC: Any  # int32[N, C], tokens of a block; NOBODY where the place is free
    first_tile_N: Any  # int32[N]
    num_tiles_N: Any  # int32[N], 0: the block is idle
    block_W: Any  # int32[W], block of a tile
    row_W: Any  # int32[W], its first rank row
    num_rows_W: Any  # int32[W], how many it has; 0: the tile is idle
    mix_WC: Any  # float32[W, C], factor of the block's tokens on the tile's rows
    tile_rows: int = field(metadata={"static": True})

    @property
    def block_tokens(self) -> int:
        """C."""
        return self.token_NC.shape[1]


Plan = tuple[Segments, ...]
"""All blocks of a batch: small ones (decodes) and, where the bucket has prompts, large ones. Each is a launch."""


def as_plan(plan: Any) -> Plan:
    """The plan's tables as jax arrays.

    Raises:
        TypeError: no plan.
    """
    if not isinstance(plan, tuple | list) or not all(isinstance(part, Segments) for part in plan):
        raise TypeError(f"plan must be a tuple of Segments, as make_plan gives it, not {type(plan).__name__}")
    return tuple(jax.tree.map(jnp.asarray, part) for part in plan)


def count_own_rows(plan: Plan) -> int:
    """Rank rows that the tokens of a batch meet, over all tokens (numpy leaves); see own_rows.packed_size."""
    tokens = [(part.token_NC != NOBODY).sum(1)[part.block_W] for part in plan]
    return int(sum((part.num_rows_W * tokens_W).sum() for part, tokens_W in zip(plan, tokens, strict=True)))


def _segments(
    xp: Any,
    group_T: Any,
    wanted_G: Any,
    first_G: Any,
    tiles_G: Any,
    row_E: Any,
    num_rows_E: Any,
    adapter_E: Any,
    mix_TX: Any,
    shape: SegmentShape,
) -> tuple[Segments, Any, Any]:
    """The blocks of the wanted groups; also how many blocks and tiles they need.

    Args:
        xp: numpy, or jax.numpy while tracing.
        group_T: int[T], -1 for none.
        first_G, tiles_G: where a group's tiles lie in row_E, num_rows_E and adapter_E, and how many it has.
        mix_TX: float[T, X] or None for factors of 1.
    """
    T, G, C = len(group_T), len(tiles_G), shape.block_tokens
    used_G = wanted_G & (tiles_G > 0)
    group_T = xp.where((group_T >= 0) & used_G[xp.maximum(group_T, 0)], group_T, G)
    order_T = xp.argsort(group_T, stable=True)
    count_G = (group_T[:, None] == xp.arange(G)).sum(0)
    start_G = xp.cumsum(count_G) - count_G
    blocks_G = -(-count_G // C)
    end_G = xp.cumsum(blocks_G)
    index_N = xp.arange(shape.blocks)
    group_N = xp.minimum(xp.searchsorted(end_G, index_N, side="right"), G - 1)
    place_NC = (index_N - (end_G - blocks_G)[group_N])[:, None] * C + xp.arange(C)
    live_N = index_N < end_G[-1]
    live_NC = live_N[:, None] & (place_NC < count_G[group_N][:, None])
    token_NC = xp.where(live_NC, order_T[xp.minimum(start_G[group_N][:, None] + place_NC, T - 1)], NOBODY)
    tiles_N = xp.where(live_N, tiles_G[group_N], 0)
    end_N = xp.cumsum(tiles_N)
    index_W = xp.arange(shape.tiles)
    block_W = xp.minimum(xp.searchsorted(end_N, index_W, side="right"), shape.blocks - 1)
    live_W = index_W < end_N[-1]
    entry_W = xp.where(live_W, first_G[group_N[block_W]] + index_W - (end_N - tiles_N)[block_W], 0)
    live_WC = live_W[:, None] & live_NC[block_W]
    factor_WC = 1.0 if mix_TX is None else mix_TX[xp.minimum(token_NC[block_W], T - 1), adapter_E[entry_W][:, None]]
    segments = Segments(
        token_NC.astype(xp.int32), (end_N - tiles_N).astype(xp.int32), tiles_N.astype(xp.int32),
        block_W.astype(xp.int32), xp.where(live_W, row_E[entry_W], 0).astype(xp.int32),
        xp.where(live_W, num_rows_E[entry_W], 0).astype(xp.int32),
        xp.where(live_WC, factor_WC, 0).astype(xp.float32), shape.tile_rows,
    )  # fmt: skip
    return segments, end_G[-1], end_N[-1]


def _groups_of_mix(mix_TX: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """int[T], -1 for the base, and of each group its adapters: tokens with a factor on the same ones."""
    pattern_GX, group_T = np.unique(mix_TX != 0, axis=0, return_inverse=True)
    adapters = [np.flatnonzero(pattern_X) for pattern_X in pattern_GX]
    base = np.array([len(members) == 0 for members in adapters])
    number_G = np.where(base, -1, np.cumsum(~base) - 1)
    return number_G[group_T.reshape(-1)], [members for members in adapters if len(members)]


def _integers(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} is {list(array.shape)}: it must have one axis")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    return array.astype(np.int64)


def make_plan(
    first_row_X: np.ndarray,
    num_rows_X: np.ndarray,
    shapes: tuple[SegmentShape, ...],
    *,
    adapter_T: np.ndarray | None = None,
    mix_TX: np.ndarray | None = None,
    long_segment: int = 32,
) -> Plan:
    """The plan of a batch, made on the host (numpy arrays).

    Args:
        first_row_X, num_rows_X: int[X], the rank rows that each adapter owns in the tables. That they are there is the
            caller's to see to.
        shapes: of the blocks of short segments, and optionally of those of long ones.
        adapter_T: int[T], the adapter of each token, -1 for the base; or else
        mix_TX: float[T, X], the factor that each token puts on each adapter.
        long_segment: tokens from which on a segment is long.

    Raises:
        TypeError: numbers of rows or adapters that are no integers; shapes that are no SegmentShape.
        ValueError: neither or both of adapter_T and mix_TX; an adapter that is not there; arrays that do not go
            together; a batch that is too large for the shapes (the message says what it needs).
    """
    if (adapter_T is None) == (mix_TX is None):
        raise ValueError("a plan needs either adapter_T or mix_TX")
    if not isinstance(shapes, tuple | list) or not all(isinstance(shape, SegmentShape) for shape in shapes):
        raise TypeError("shapes must be a tuple of one SegmentShape or two")
    if len(shapes) not in (1, 2):
        raise ValueError(f"{len(shapes)} shapes: there must be one, or one of short segments and one of long ones")
    first_row_X, num_rows_X = _integers(first_row_X, "first_row_X"), _integers(num_rows_X, "num_rows_X")
    if len(first_row_X) != len(num_rows_X) or min(first_row_X.min(initial=0), num_rows_X.min(initial=0)) < 0:
        raise ValueError(f"adapters own rows from {first_row_X} on, {num_rows_X} each: as many numbers, none negative")
    if mix_TX is not None:
        mix_TX = np.asarray(mix_TX, np.float32)
        if mix_TX.ndim != 2 or mix_TX.shape[1] != len(num_rows_X):
            raise ValueError(f"mix_TX is {list(mix_TX.shape)}: it must be [T, {len(num_rows_X)}], a column per adapter")
        if not np.isfinite(mix_TX).all():
            raise ValueError("mix_TX has factors that are not finite")
        group_T, members = _groups_of_mix(mix_TX)
    else:
        group_T = _integers(adapter_T, "adapter_T")
        if len(group_T) and (group_T.max() >= len(num_rows_X) or group_T.min() < -1):
            raise ValueError(f"adapter_T names an adapter outside of -1 .. {len(num_rows_X) - 1}")
        members = [np.array([x]) for x in range(len(num_rows_X))]
    if len(group_T) == 0 or not members:
        group_T, members = np.full(max(len(group_T), 1), -1), [np.zeros(0, np.int64)]
    if not len(num_rows_X):
        first_row_X = num_rows_X = np.zeros(1, np.int64)  # of nobody, for idle tiles to point at
    count_G = np.bincount(group_T[group_T >= 0], minlength=len(members))
    plan = []
    for index, shape in enumerate(shapes):
        wanted_G = None if len(shapes) == 1 else (count_G >= long_segment) == (index == 1)
        plan.append(group_segments(group_T, members, first_row_X, num_rows_X, mix_TX, shape, wanted_G))
    return tuple(plan)


def group_segments(
    group_T: np.ndarray, members: Sequence[np.ndarray], first_row_X: np.ndarray, num_rows_X: np.ndarray,
    mix_TX: np.ndarray | None, shape: SegmentShape, wanted_G: np.ndarray | None = None,
) -> Segments:  # fmt: skip
    """Blocks of one size for groups of tokens, made on the host (numpy arrays).

    Args:
        group_T: int[T], the group of each token, -1 for none.
        members: of each group its adapters. A token may have a factor of 0 on some of them.
        first_row_X, num_rows_X: see make_plan.
        mix_TX: float[T, X]; None for factors of 1.
        wanted_G: bool[G], the groups to take; all if None.

    Raises:
        ValueError: they do not fit into the shape; the message says what they need.
    """
    G, step = len(members), shape.tile_rows
    adapter_U, tiles_U, tiles_G = group_tiles(members, num_rows_X, step)
    adapter_E = np.repeat(adapter_U, tiles_U)
    offset_E = (np.arange(len(adapter_E)) - np.repeat(np.cumsum(tiles_U) - tiles_U, tiles_U)) * step
    if not len(adapter_E):
        adapter_E = offset_E = np.zeros(1, np.int64)
    rows_E = np.minimum(num_rows_X[adapter_E] - offset_E, step)
    segments, blocks, used = _segments(
        np, group_T, np.ones(G, bool) if wanted_G is None else wanted_G, np.cumsum(tiles_G) - tiles_G, tiles_G,
        first_row_X[adapter_E] + offset_E, rows_E, adapter_E, mix_TX, shape,
    )  # fmt: skip
    if blocks > shape.blocks or used > shape.tiles:
        raise ValueError(
            f"the batch needs {blocks} blocks of {shape.block_tokens} tokens and {used} tiles of {step} rows, and "
            f"the shape has {shape.blocks} and {shape.tiles}: take a larger bucket"
        )
    return segments


def group_tiles(
    members: Sequence[np.ndarray], num_rows_X: np.ndarray, tile_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int[U], the adapters of all groups one after another; int[U], tiles of each; int[G], tiles of each group."""
    adapter_U = np.concatenate(members).astype(np.int64)
    tiles_U = -(-num_rows_X[adapter_U] // tile_rows)
    group_U = np.repeat(np.arange(len(members)), [len(group) for group in members])
    return adapter_U, tiles_U, np.bincount(group_U, tiles_U, len(members)).astype(np.int64)


def trace_plan(adapter_T: jax.Array, num_rows_X: jax.Array, stride: int, block_tokens: int, tile_rows: int) -> Plan:
    """The plan of a batch whose adapters are known on the device only; for dense weights.

    Args:
        adapter_T: int32[T], -1 (or anything that is no adapter) for the base.
        num_rows_X: int32[X], rank rows of each adapter, at most `stride`.
        stride: rank rows from one adapter to the next.
    """
    T, X = len(adapter_T), len(num_rows_X)
    per_adapter = -(-stride // tile_rows)
    num_blocks = min(X, T) + T // block_tokens
    shape = SegmentShape(num_blocks, num_blocks * per_adapter, block_tokens, tile_rows)
    offset_K = jnp.arange(per_adapter) * tile_rows
    adapter_E = jnp.repeat(jnp.arange(X), per_adapter)
    row_E = (jnp.arange(X)[:, None] * stride + offset_K).reshape(-1)
    left_E = (num_rows_X[:, None] - offset_K).reshape(-1)
    tiles_X = -(-num_rows_X // tile_rows)
    group_T = jnp.where((adapter_T >= 0) & (adapter_T < X), adapter_T, -1)
    segments, _, _ = _segments(
        jnp, group_T, jnp.ones(X, bool), jnp.arange(X) * per_adapter, tiles_X, row_E, jnp.clip(left_E, 0, tile_rows),
        adapter_E, None, shape,
    )  # fmt: skip
    return (segments,)
