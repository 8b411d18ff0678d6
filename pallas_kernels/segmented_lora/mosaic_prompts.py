"""The segmented kernels of long segments on Pallas' Mosaic GPU backend: products in wgmma (compute capability 9.x).

Tokens are wgmma's M, 64 of a block at a time, and a tile's rank rows its N (shrink) and its K (expand): both go in
eights, so that no rank is padded beyond its own tile. Rank rows lie anywhere in the pool, and wgmma's operands in atoms
of eight swizzled rows. TMA fetches 256 bytes of a row at a time into plain shared memory, some turns ahead, and the
warpgroup carries them on into atoms, zeros in place of rows that are not there. Outputs are changed where they lie,
token by token: TMA fetches the old ones meanwhile and takes the new ones back.

Before the launch XLA picks the page table's entries of every tile (a few megabytes at most), so that a program finds
eight in one line of cache, and puts the tokens into the order of their blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.segmented_lora.blocks import divisor
from pallas_kernels.segmented_lora.plan import Segments
from pallas_kernels.segmented_lora.rank_rows import Rows, Tables

_F32 = jnp.float32

TOKENS = 64
"""Of a program: wgmma's M."""

SPAN = 128
"""Elements of a rank row in a turn; two atoms."""

STAGES = 2
"""Turns whose rank rows lie in shared memory or are on their way."""

_ATOM = 8
_MOST_ROWS = 128
"""Rank rows of all modules in a program of a shrink: two stages have 32 barriers, as many as Pallas puts in a group."""

_PROGRAMS = 264
_MOST_SPLITS = 4


def takes(part: Segments, modules: int, dtype: Any) -> bool:
    """Whether these kernels run a part of a plan. float32 does not: wgmma would round it to 10 bits."""
    fits = part.block_tokens % TOKENS == 0 and part.tile_rows * modules <= _MOST_ROWS
    return fits and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)


class _Sizes(NamedTuple):
    """What is static of a launch."""

    tile_rows: int
    groups: int  # of 64 tokens in a block
    per_unit: int  # spans of a unit
    steps: int = 0  # turns of a program (shrink)
    parts: int = 0  # of the input (expand)
    swizzle: int = 128  # of a product's operands, in bytes
    out_starts: tuple[int, ...] = ()
    has_const: bool = False


def _atoms(kind: Any, *shape: int, swizzle: int = 128) -> Any:
    """Shared memory as wgmma and TMA take it; a product's operands have the same swizzle, in bytes."""
    tiling = plgpu.TilingTransform((_ATOM, swizzle // jnp.dtype(kind).itemsize))
    return plgpu.SMEM(shape, kind, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _entries(table_ARU: jax.Array, lead: Any, part: Segments, column_U: jax.Array, num_units: int) -> jax.Array:
    """int32[W, U, K]: units of every tile's rank rows, -1 where there is none."""
    place_K = jnp.arange(part.tile_rows)
    row_W1K = part.row_W[:, None, None] + jnp.minimum(place_K, part.num_rows_W[:, None, None] - 1)
    units_WUK = table_ARU.at[lead, row_W1K, column_U[:, None]].get(mode="fill", fill_value=-1)
    live_WUK = (place_K < part.num_rows_W[:, None, None]) & (units_WUK < num_units)
    return jnp.where(live_WUK, units_WUK, -1)


def _eights(number: Any, run: Callable[[Any], None]) -> None:
    """run(group) for every eight of `number` things."""

    def step(group: Any, carry: Any) -> Any:
        run(group)
        return carry

    jax.lax.fori_loop(0, jax.lax.div(number + _ATOM - 1, _ATOM), step, jnp.int32(0))


def _in_order(x_TI: jax.Array, part: Segments) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens block behind block, [T + TOKENS, I]: no block reads past the end. Of each its first, its tokens."""
    is_token_NC = part.token_NC < len(x_TI)
    count_N = jnp.sum(is_token_NC, 1, dtype=jnp.int32)
    start_N = jnp.cumsum(count_N, dtype=jnp.int32) - count_N
    size = len(x_TI) + TOKENS
    place_NC = jnp.where(is_token_NC, start_N[:, None] + jnp.arange(part.block_tokens), size)
    token_S = jnp.zeros(size, jnp.int32).at[place_NC].set(part.token_NC, mode="drop")
    return x_TI[token_S], start_N, count_N


def _request(
    pool_gmem: Any, unit_of: Callable[[Any], Any], column: Any, num_rows: Any, raw_smem: Any, arrived: Any, first: Any
) -> None:
    """Starts the copies of a span of every rank row, eight to a barrier.

    Args:
        unit_of: of a row to its unit. A row that is not there copies any; it is masked later.
        raw_smem: [K, SPAN].
        first: barrier of the tile's first rows.
    """
    last = pool_gmem.shape[0] - 1

    def eight(group: Any) -> None:
        # All entries of the table first: a copy waits for nothing but its own.
        units = [jnp.clip(unit_of(group * _ATOM + k), 0, last) for k in range(_ATOM)]
        for k, unit in enumerate(units):
            plgpu.copy_gmem_to_smem(
                pool_gmem.at[unit, column], raw_smem.at[group * _ATOM + k], arrived.at[first + group]
            )

    _eights(num_rows, eight)


def _await(num_rows: Any, arrived: Any, first: Any) -> None:
    _eights(num_rows, lambda group: plgpu.barrier_wait(arrived.at[first + group]))


def _carry(raw_smem: Any, units_gmem: Any, atoms_smem: Any, swizzle: int) -> None:
    """A tile's rows from where TMA put them into atoms; zeros for those that are not there.

    Args:
        units_gmem: [K], their units.
    """
    layout = plgpu.Layout.SMEM_GMEM_COPY(raw_smem.shape, raw_smem.dtype, swizzle)
    row_KS = mosaic.load(raw_smem, layout)
    unit_K = mosaic.load(units_gmem, layout.reduce(1))
    live_KS = mosaic.spread(unit_K >= 0, row_KS.shape, 0, layout)
    atoms_smem[...] = jnp.where(live_KS, row_KS, jnp.zeros((), row_KS.dtype))


def _shrink_body(
    x_gmem: Any, start_gmem: Any, count_gmem: Any, block_gmem: Any, num_rows_gmem: Any, units_gmem: Any,
    pool_gmem: Any, s_gmem: Any, x_smem: Any, raw_smem: Any, a_smem: Any, x_arrived: Any, arrived: Any, done: Any, *,
    sizes: _Sizes,
) -> None:  # fmt: skip
    index, part = (jax.lax.axis_index(name) for name in "01")
    tile, begin = jax.lax.div(index, sizes.groups), jax.lax.rem(index, sizes.groups) * TOKENS
    num_rows, block, modules = num_rows_gmem[tile], block_gmem[tile], units_gmem.shape[1]
    own, barriers = pl.ds(start_gmem[block] + begin, TOKENS), sizes.tile_rows // _ATOM
    first, end = part * sizes.steps, (part + 1) * sizes.steps

    def place(turn: Any, module: int) -> tuple[Any, Any]:
        """Stage, and first barrier of a module there."""
        stage = jax.lax.rem(turn - first, STAGES)
        return stage, (stage * modules + module) * barriers

    def request(turn: Any) -> None:
        unit, column = jax.lax.div(turn, sizes.per_unit), jax.lax.rem(turn, sizes.per_unit)
        stage, _ = place(turn, 0)
        for m in range(modules):
            barrier = place(turn, m)[1]
            _request(
                pool_gmem, lambda k, m=m: units_gmem[tile, m, unit, k], column, num_rows, raw_smem.at[stage, m],
                arrived, barrier,
            )  # fmt: skip
        columns = pl.ds(turn * SPAN, SPAN)
        plgpu.copy_gmem_to_smem(x_gmem.at[own, columns], x_smem.at[stage], x_arrived.at[stage])

    @pl.when((num_rows > 0) & (begin < count_gmem[block]))
    def _() -> None:
        for ahead in range(STAGES):
            pl.when(first + ahead < end)(lambda ahead=ahead: request(first + ahead))

        def turn(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            unit = jax.lax.div(i, sizes.per_unit)
            for m in range(modules):
                stage, barrier = place(i, m)
                _await(num_rows, arrived, barrier)
                _carry(raw_smem.at[stage, m], units_gmem.at[tile, m, unit], a_smem.at[m], sizes.swizzle)
            plgpu.commit_smem()
            plgpu.barrier_wait(x_arrived.at[stage])
            new = tuple(old + mosaic.product(x_smem.at[stage], a_smem.at[m].T, old.shape) for m, old in enumerate(sums))
            mosaic.sync(done)  # every warp has its products: the stage is free
            pl.when(i + STAGES < end)(lambda: request(i + STAGES))
            return new

        zero = plgpu.layout_cast(jnp.zeros((TOKENS, sizes.tile_rows), _F32), plgpu.Layout.WGMMA)
        sums = jax.lax.fori_loop(first, end, turn, (zero,) * modules)
        for m, sum_CK in enumerate(sums):
            mosaic.store(s_gmem.at[part, m, tile, pl.ds(begin, TOKENS)], sum_CK)


def shrink(x_TI: jax.Array, pool: jax.Array, rows: Rows, part: Segments, *, unit: int, interpret: bool) -> jax.Array:
    """Partial projections of every tile, float32[splits, M, W, C, tile_rows]; undefined in idle tiles and places."""
    tables, dtype = Tables.of(rows), x_TI.dtype
    modules, num_tiles, in_dim = len(tables.places_a), len(part.row_W), x_TI.shape[1]
    K, C, turns = part.tile_rows, part.block_tokens, in_dim // SPAN
    units = pool_of(pool, dtype, unit)
    units_WMUK = jnp.stack([
        _entries(tables.units_a_ARU, tables.layer_1[0] + lead, part, start + jnp.arange(in_dim // unit), len(units))
        for lead, start in tables.places_a
    ], 1)  # fmt: skip
    splits = divisor(turns, min(pl.cdiv(_PROGRAMS, min(num_tiles, len(part.token_NC))), _MOST_SPLITS))
    sizes = _Sizes(K, C // TOKENS, unit // SPAN, steps=turns // splits)

    def body(*refs: Any) -> None:
        _shrink_body(*refs, sizes=sizes)

    return mosaic.fill(
        body,
        (*_in_order(x_TI, part), part.block_W, part.num_rows_W, units_WMUK, units),
        jax.ShapeDtypeStruct((splits, modules, num_tiles, C, K), _F32),
        grid=(num_tiles * sizes.groups, splits),
        scratch=[
            _atoms(dtype, STAGES, TOKENS, SPAN), plgpu.SMEM((STAGES, modules, K, SPAN), dtype),
            _atoms(dtype, modules, K, SPAN), plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=_ATOM, num_barriers=STAGES * modules * K // _ATOM), plgpu.Barrier(),
        ],
        name="lora_shrink_prompt", interpret=interpret,
    )  # fmt: skip


def pool_of(pool: jax.Array, dtype: Any, unit: int) -> jax.Array:
    """The pool by unit and span, in the compute type: XLA takes bits of another type for what they are."""
    return jax.lax.bitcast_convert_type(pool, dtype).reshape(-1, unit // SPAN, SPAN)


def _expand_body(
    s_gmem: Any, count_gmem: Any, token_gmem: Any, first_tile_gmem: Any, num_tiles_gmem: Any, num_rows_gmem: Any,
    mix_gmem: Any, gain_gmem: Any, const_gmem: Any, units_gmem: Any, pool_gmem: Any, y_gmem: Any, y_smem: Any,
    raw_smem: Any, b_smem: Any, s_smem: Any, y_arrived: Any, arrived: Any, done: Any, *, sizes: _Sizes,
) -> None:  # fmt: skip
    index, number = (jax.lax.axis_index(name) for name in "01")
    block, begin = jax.lax.div(index, sizes.groups), jax.lax.rem(index, sizes.groups) * TOKENS
    unit, column = jax.lax.div(number, sizes.per_unit), jax.lax.rem(number, sizes.per_unit)
    starts = sizes.out_starts[1:-1]
    module = sum(((number * SPAN >= start).astype(jnp.int32) for start in starts), jnp.int32(0))
    first_tile, num_tiles = first_tile_gmem[block], num_tiles_gmem[block]
    count, own = jnp.minimum(count_gmem[block] - begin, TOKENS), pl.ds(begin, TOKENS)
    barriers, shape = sizes.tile_rows // _ATOM, (TOKENS, sizes.tile_rows)

    def request(turn: Any) -> None:
        tile, stage = first_tile + turn, jax.lax.rem(turn, STAGES)
        _request(
            pool_gmem, lambda k: units_gmem[tile, unit, k], column, num_rows_gmem[tile], raw_smem.at[stage], arrived,
            stage * barriers,
        )  # fmt: skip

    def token_of(place: Any) -> Any:
        return token_gmem[block, begin + jnp.minimum(place, count - 1)]

    def request_old(group: Any) -> None:
        for place in [group * _ATOM + k for k in range(_ATOM)]:
            plgpu.copy_gmem_to_smem(y_gmem.at[token_of(place), number], y_smem.at[place], y_arrived.at[group])

    def give_back(place: Any, carry: Any) -> Any:
        plgpu.copy_smem_to_gmem(y_smem.at[place], y_gmem.at[token_of(place), number])
        return carry

    def factors(tile: Any) -> jax.Array:
        """The finished projections of a tile, [C, K]: scaled and mixed; 0 where a row or a token is not there."""
        by_row, by_token = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)

        def part(z: Any) -> jax.Array:
            return mosaic.load(s_gmem.at[z, module, tile, own], plgpu.Layout.WGMMA)

        s_CK = jax.lax.fori_loop(1, sizes.parts, lambda z, total: total + part(z), part(0))
        gain_K = mosaic.load(gain_gmem.at[tile, module], by_row)
        gain_CK = mosaic.spread(gain_K, shape, 1, plgpu.Layout.WGMMA)
        s_CK = jnp.where(gain_CK != 0, s_CK * gain_CK, 0.0)
        if sizes.has_const:
            const_K = mosaic.load(const_gmem.at[tile, module], by_row)
            s_CK += mosaic.spread(const_K, shape, 1, plgpu.Layout.WGMMA)
        mix_C = mosaic.load(mix_gmem.at[tile, own], by_token)
        mix_CK = mosaic.spread(mix_C, shape, 0, plgpu.Layout.WGMMA)
        return jnp.where(mix_CK != 0, s_CK * mix_CK, 0.0)

    @pl.when((num_tiles > 0) & (count > 0))
    def _() -> None:
        for ahead in range(STAGES):
            pl.when(ahead < num_tiles)(lambda ahead=ahead: request(jnp.int32(ahead)))
        _eights(count, request_old)

        def turn(i: Any, total_CS: jax.Array) -> jax.Array:
            tile, stage = first_tile + i, jax.lax.rem(i, STAGES)
            s_smem[...] = factors(tile).astype(s_smem.dtype)
            _await(num_rows_gmem[tile], arrived, stage * barriers)
            _carry(raw_smem.at[stage], units_gmem.at[tile, unit], b_smem, sizes.swizzle)
            plgpu.commit_smem()
            new_CS = total_CS + mosaic.product(s_smem, b_smem, total_CS.shape)
            mosaic.sync(done)  # every warp has its products: the operands' places are free
            pl.when(i + STAGES < num_tiles)(lambda: request(i + STAGES))
            return new_CS

        zero = plgpu.layout_cast(jnp.zeros((TOKENS, SPAN), _F32), plgpu.Layout.WGMMA)
        total_CS = jax.lax.fori_loop(0, num_tiles, turn, zero)
        _await(count, y_arrived, 0)
        old_CS = mosaic.load(y_smem, plgpu.Layout.WGMMA)
        mosaic.store(y_smem, old_CS + total_CS)
        plgpu.commit_smem()
        jax.lax.fori_loop(0, count, give_back, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def expand(
    s_ZMWCK: jax.Array, pool: jax.Array, rows: Rows, part: Segments, y_TO: jax.Array, *, unit: int, dtype: Any,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """float32 y plus the expansions of all modules side by side; rows of tokens in no block stay as they are."""
    tables = Tables.of(rows)
    (num_tokens, outputs), modules = y_TO.shape, len(rows.out_dims)
    K, C = part.tile_rows, part.block_tokens
    units = pool_of(pool, dtype, unit)
    columns = tables.column_b + jnp.arange(outputs // unit)
    units_WUK = _entries(tables.units_b_BRU, tables.layer_1[0], part, columns, len(units))
    place_K = jnp.arange(K)
    row_WK = jnp.where(place_K < part.num_rows_W[:, None], part.row_W[:, None] + place_K, tables.num_rows)
    module_M1 = (tables.layer_1 * tables.modules_of_layer + tables.first_module + jnp.arange(modules))[:, None]
    has_const = tables.const_SR is not None
    gains = [
        table_SR.at[module_M1, row_WK[:, None]].get(mode="fill", fill_value=0)
        for table_SR in (tables.scale_SR, tables.const_SR if has_const else tables.scale_SR)
    ]
    sizes = _Sizes(
        K, C // TOKENS, unit // SPAN, parts=len(s_ZMWCK), swizzle=min(128, K * jnp.dtype(dtype).itemsize),
        out_starts=tables.out_starts, has_const=has_const,
    )  # fmt: skip

    def body(*refs: Any) -> None:
        _expand_body(*refs, sizes=sizes)

    y = mosaic.update(
        body,
        (
            s_ZMWCK, jnp.sum(part.token_NC < num_tokens, 1, dtype=jnp.int32), part.token_NC, part.first_tile_N,
            part.num_tiles_N, part.num_rows_W, part.mix_WC, *gains, units_WUK, units,
        ),
        y_TO.reshape(num_tokens, -1, SPAN),
        grid=(len(part.token_NC) * sizes.groups, outputs // SPAN),
        scratch=[
            plgpu.SMEM((TOKENS, SPAN), _F32), plgpu.SMEM((STAGES, K, SPAN), dtype),
            _atoms(dtype, K, SPAN, swizzle=sizes.swizzle), _atoms(dtype, TOKENS, K, swizzle=sizes.swizzle),
            plgpu.Barrier(num_arrivals=_ATOM, num_barriers=TOKENS // _ATOM),
            plgpu.Barrier(num_arrivals=_ATOM, num_barriers=STAGES * K // _ATOM), plgpu.Barrier(),
        ],
        name="lora_expand_prompt", interpret=interpret,
    )  # fmt: skip
    return y.reshape(num_tokens, outputs)
