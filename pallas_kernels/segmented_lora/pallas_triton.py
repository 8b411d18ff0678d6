"""The segmented kernels on Pallas' Triton backend (compute capability 8.0 and later).

Both read the page tables themselves and fetch rank rows from the pool in place, a vector of units at a time. `shrink`
runs over (tiles, part of the input) and leaves one partial sum for each part, so that no program waits for another and
the result is the same in every run; `expand` adds the parts up, scales them and runs over (block, columns). A tile
needs no more rows than its adapter has: places past the end are masked, and cost no memory traffic.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.segmented_lora.blocks import (
    SHRINK_PROGRAMS,
    ExpandBlocks,
    ShrinkBlocks,
    check_unit,
    expand_blocks,
    shrink_blocks,
)
from pallas_kernels.segmented_lora.own_rows import sum_tiles
from pallas_kernels.segmented_lora.plan import Plan, Segments
from pallas_kernels.segmented_lora.rank_rows import Rows, Tables, as_compute, as_units

_F32 = jnp.float32


def _dot(a: jax.Array, b: jax.Array, contract_b: int) -> jax.Array:
    # HIGHEST matters for float32 alone: TF32 would keep 10 bits.
    return jax.lax.dot_general(
        a, b, (((1,), (contract_b,)), ((), ())), preferred_element_type=_F32, precision=jax.lax.Precision.HIGHEST
    )


def _load_block(ref: Any, row_R: jax.Array, column_C: jax.Array, live_R: jax.Array) -> jax.Array:
    """ref[row_R, column_C], [R, C]: a block of gathered rows, zeros where a row is not live."""
    # Integer arrays throughout: that kind of index is masked alike in the compiled and in the interpreted kernel.
    shape = (row_R.shape[0], column_C.shape[0])
    index = jnp.broadcast_to(row_R[:, None], shape), jnp.broadcast_to(column_C[None, :], shape)
    return plgpu.load(ref.at[index], mask=jnp.broadcast_to(live_R[:, None], shape), other=jnp.zeros((), ref.dtype))


def _place(number: jax.Array, per_unit: int, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Of a chunk of a rank row: which of the row's units it lies in, and int32[chunk], its columns there."""
    # A product comes last: from it the compiler knows that the columns begin aligned, and loads 16 bytes at a time.
    return jax.lax.div(number, per_unit), jax.lax.rem(number, per_unit) * chunk + jnp.arange(chunk)


def _load_weights(pool_ref: Any, unit_R: jax.Array, column_C: jax.Array, dtype: Any) -> jax.Array:
    """[R, C]: columns of the pool's units, zeros where the index is -1, or past the pool as XLA's gather has it."""
    return as_compute(_load_block(pool_ref, unit_R, column_C, (unit_R >= 0) & (unit_R < pool_ref.shape[0])), dtype)


def _unit_numbers(units_ref: Any, lead: Any, row_K: jax.Array, column: jax.Array, live_K: jax.Array) -> jax.Array:
    """int32[K]: an entry of the page tables for each row, -1 where it is not live."""
    place = units_ref.at[jnp.full(row_K.shape, lead), row_K, jnp.full(row_K.shape, column)]
    return plgpu.load(place, mask=live_K, other=-1)


def _shrink_kernel(
    x_ref: Any, token_ref: Any, first_tile_ref: Any, num_tiles_ref: Any, block_ref: Any, row_ref: Any,
    num_rows_ref: Any, layer_ref: Any, units_ref: Any, pool_ref: Any, s_ref: Any, *, blocks: ShrinkBlocks,
    tile_rows: int, programs: int, places: tuple[tuple[int, int], ...],
) -> None:  # fmt: skip
    first_tile, part = pl.program_id(0), pl.program_id(1)
    num_tokens, in_dim = x_ref.shape
    unit, chunk = pool_ref.shape[1], blocks.chunk
    steps = in_dim // chunk // blocks.splits
    place_K, layer = jnp.arange(tile_rows), layer_ref[0]

    def run_tile(turn: jax.Array, carry: int) -> int:
        tile = first_tile + turn * programs
        token_C = token_ref[block_ref[tile], :]
        row_K, live_K = row_ref[tile] + place_K, place_K < num_rows_ref[tile]

        def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            number = part * steps + index
            first = number * chunk
            x_CI = _load_block(x_ref, token_C, first + jnp.arange(chunk), token_C < num_tokens)
            unit_column, column = _place(number, unit // chunk, chunk)
            new = []
            for sum_CK, (lead, start) in zip(sums, places, strict=True):
                unit_K = _unit_numbers(units_ref, layer + lead, row_K, start + unit_column, live_K)
                new.append(sum_CK + _dot(x_CI, _load_weights(pool_ref, unit_K, column, x_ref.dtype), 1))
            return tuple(new)

        zero = jnp.zeros((token_C.shape[0], tile_rows), _F32)
        sums = jax.lax.fori_loop(0, steps, step, (zero,) * len(places))
        for module, sum_CK in enumerate(sums):
            s_ref[part, module, tile, :, :] = sum_CK
        return carry

    # Live tiles come first. However many a bucket has room for, a launch has no more programs than a device can run.
    last = token_ref.shape[0] - 1
    num_live = first_tile_ref[last] + num_tiles_ref[last]
    jax.lax.fori_loop(0, pl.cdiv(num_live - first_tile, programs), run_tile, 0)


def shrink(
    x_TI: jax.Array, pool: jax.Array, rows: Rows, part: Segments, *, unit: int, interpret: bool,
    blocks: ShrinkBlocks | None = None,
) -> jax.Array:  # fmt: skip
    """Partial projections of every tile, float32[splits, M, W, C, tile_rows]; undefined in idle tiles."""
    tables = Tables.of(rows)
    modules, in_dim = len(tables.places_a), x_TI.shape[1]
    blocks = blocks or shrink_blocks(part, in_dim, modules, unit, x_TI.dtype.name)
    if unit % blocks.chunk or in_dim % (blocks.chunk * blocks.splits):
        raise ValueError(f"{blocks} leave out a part of {in_dim} inputs in units of {unit}")
    num_tiles, tokens = len(part.row_W), part.block_tokens
    programs = min(num_tiles, pl.cdiv(SHRINK_PROGRAMS, blocks.splits))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(
            _shrink_kernel, blocks=blocks, tile_rows=part.tile_rows, programs=programs, places=tables.places_a
        ),
        grid=(programs, blocks.splits),
        in_specs=[whole] * 10,
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((blocks.splits, modules, num_tiles, tokens, part.tile_rows), _F32),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="lora_shrink",
    )(
        x_TI, part.token_NC, part.first_tile_N, part.num_tiles_N, part.block_W, part.row_W, part.num_rows_W,
        tables.layer_1, tables.units_a_ARU, as_units(pool, unit),
    )  # fmt: skip


class _ExpandPlaces(NamedTuple):
    """What is static of Tables for an expand."""

    column_b: int
    modules_of_layer: int
    first_module: int
    out_starts: tuple[int, ...]


def _expand_kernel(
    s_ref: Any, token_ref: Any, first_tile_ref: Any, num_tiles_ref: Any, row_ref: Any, num_rows_ref: Any, mix_ref: Any,
    layer_ref: Any, scale_ref: Any, const_ref: Any, units_ref: Any, pool_ref: Any, _: Any, y_ref: Any, *,
    blocks: ExpandBlocks, places: _ExpandPlaces, dtype: Any, has_const: bool,
) -> None:  # fmt: skip
    block, group = pl.program_id(0), pl.program_id(1)  # outside of the loops: the interpreter knows them here alone
    splits, _modules, _tiles, tokens, tile_rows = s_ref.shape
    unit, chunk = pool_ref.shape[1], blocks.chunk
    num_tiles, first_tile = num_tiles_ref[block], first_tile_ref[block]

    @pl.when(num_tiles > 0)
    def _():
        token_C = token_ref[block, :]
        live_C = token_C < y_ref.shape[0]
        place_K, layer = jnp.arange(tile_rows), layer_ref[0]
        first_scale = layer * places.modules_of_layer + places.first_module

        def projections(tile: jax.Array, module: jax.Array, row_K: jax.Array, live_K: jax.Array) -> jax.Array:
            """The finished projections of a tile, [C, tile_rows]: scaled and mixed; 0 in places that are not live."""
            live_CK = jnp.broadcast_to(live_C[:, None], (tokens, tile_rows))  # rows that are not live are 0 already

            def add_part(index: jax.Array, sum_CK: jax.Array) -> jax.Array:
                return sum_CK + plgpu.load(s_ref.at[index, module, tile, :, :], mask=live_CK, other=0.0)

            s_CK = jax.lax.fori_loop(0, splits, add_part, jnp.zeros((tokens, tile_rows), _F32))
            module_K = jnp.full((tile_rows,), first_scale + module)
            scale_K = plgpu.load(scale_ref.at[module_K, row_K], mask=live_K, other=0.0)
            s_CK = jnp.where((scale_K != 0)[None, :], s_CK * scale_K[None, :], 0.0)
            if has_const:
                s_CK += plgpu.load(const_ref.at[module_K, row_K], mask=live_K, other=0.0)[None, :]
            mix_C = mix_ref[tile, :]
            return jnp.where((mix_C != 0)[:, None], s_CK * mix_C[:, None], 0.0).astype(dtype)

        def step(index: jax.Array, carry: int) -> int:
            number = group * blocks.steps + index
            first = number * chunk
            module = sum(((first >= start).astype(jnp.int32) for start in places.out_starts[1:-1]), jnp.int32(0))
            unit_column, column = _place(number, unit // chunk, chunk)

            def add(position: jax.Array, sum_CO: jax.Array) -> jax.Array:
                tile = first_tile + position
                row_K, live_K = row_ref[tile] + place_K, place_K < num_rows_ref[tile]
                unit_K = _unit_numbers(units_ref, layer, row_K, places.column_b + unit_column, live_K)
                b_KO = _load_weights(pool_ref, unit_K, column, dtype)
                return sum_CO + _dot(projections(tile, module, row_K, live_K), b_KO, 0)

            sum_CO = jax.lax.fori_loop(0, num_tiles, add, jnp.zeros((tokens, chunk), _F32))
            old_CO = _load_block(y_ref, token_C, first + jnp.arange(chunk), live_C)
            shape = (tokens, chunk)
            place = jnp.broadcast_to(token_C[:, None], shape), jnp.broadcast_to(first + jnp.arange(chunk)[None], shape)
            new_CO = (old_CO.astype(_F32) + sum_CO).astype(y_ref.dtype)
            plgpu.store(y_ref.at[place], new_CO, mask=jnp.broadcast_to(live_C[:, None], shape))
            return carry

        jax.lax.fori_loop(0, blocks.steps, step, 0)


def expand(
    s_ZMWCK: jax.Array, pool: jax.Array, rows: Rows, part: Segments, y_TO: jax.Array, *, unit: int, dtype: Any,
    interpret: bool, blocks: ExpandBlocks | None = None,
) -> jax.Array:  # fmt: skip
    """y plus the expansions of all modules side by side; rows of tokens in no block stay as they are."""
    blocks = blocks or expand_blocks(part, rows.out_dims, unit, jnp.dtype(dtype).name)
    if unit % blocks.chunk or sum(rows.out_dims) % (blocks.chunk * blocks.steps):
        raise ValueError(f"{blocks} leave out a part of the outputs {rows.out_dims} in units of {unit}")
    tables = Tables.of(rows)
    has_const = tables.const_SR is not None
    places = _ExpandPlaces(tables.column_b, tables.modules_of_layer, tables.first_module, tables.out_starts)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    kernel = functools.partial(_expand_kernel, blocks=blocks, places=places, dtype=dtype, has_const=has_const)
    return pl.pallas_call(
        kernel,
        grid=(len(part.token_NC), sum(rows.out_dims) // blocks.chunk // blocks.steps),
        in_specs=[whole] * 13,
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(y_TO.shape, y_TO.dtype),
        input_output_aliases={12: 0},
        compiler_params=plgpu.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="lora_expand",
    )(
        s_ZMWCK, part.token_NC, part.first_tile_N, part.num_tiles_N, part.row_W, part.num_rows_W, part.mix_WC,
        tables.layer_1, tables.scale_SR, tables.const_SR if has_const else tables.scale_SR, tables.units_b_BRU,
        as_units(pool, unit), y_TO,
    )  # fmt: skip


def delta(
    x_TI: jax.Array,
    pools: Sequence[jax.Array],
    rows: Rows,
    plan: Plan,
    y_TO: jax.Array,
    *,
    units: tuple[int, int],
    axis_name: str | None = None,
    own_rows: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """See api.lora_delta; `pools` and `units` are A's and B's."""
    check_supported(units, x_TI.dtype)
    parts = [shrink(x_TI, pools[0], rows, part, unit=units[0], interpret=interpret) for part in plan]
    if axis_name is not None:
        parts = sum_tiles(parts, plan, len(x_TI), Tables.of(rows).num_rows, own_rows, axis_name)
    for part, s_ZMWCK in zip(plan, parts, strict=True):
        y_TO = expand(s_ZMWCK, pools[1], rows, part, y_TO, unit=units[1], dtype=x_TI.dtype, interpret=interpret)
    return y_TO


def constants(
    pool: jax.Array, rows: Rows, plan: Plan, y_TO: jax.Array, *, unit: int, dtype: Any, interpret: bool = False
) -> jax.Array:
    """See api.lora_constants: an expand of projections whose scale is 0."""
    check_supported((unit, unit), dtype)
    for part in plan:
        tiles = (1, len(rows.out_dims), len(part.row_W), part.block_tokens, part.tile_rows)
        y_TO = expand(jnp.zeros(tiles, _F32), pool, rows, part, y_TO, unit=unit, dtype=dtype, interpret=interpret)
    return y_TO


def check_supported(units: tuple[int, int], dtype: Any) -> None:
    """Raises NotImplementedError for what other implementations can and this one cannot."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, _F32):
        raise NotImplementedError(f"the kernels take bfloat16, float16 and float32, not {jnp.dtype(dtype)}")
    for unit in units:
        check_unit(unit)
