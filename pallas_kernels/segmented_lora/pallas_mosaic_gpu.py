"""The segmented kernels of short segments on Pallas' Mosaic GPU backend (compute capability 9.x).

A decode batch multiplies tokens x rank rows x width numbers whatever the mix of adapters: a microsecond of a Hopper's
plain arithmetic units, several times less than reading distinct adapters takes. So these kernels have no use for
tensor cores, whose operands would have to lie swizzled in shared memory, eight rows of one atom side by side, and rank
rows lie anywhere. Each program asks for its rank rows with one TMA copy a row and unit, waits once, and multiplies
them with its tokens one after another; many small programs on a multiprocessor keep enough copies in flight.

Long segments are prompts, bound by arithmetic: mosaic_prompts has their kernels. What those do not take (float32)
`delta` leaves to the Triton kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.segmented_lora import mosaic_prompts, pallas_triton
from pallas_kernels.segmented_lora.blocks import divisor, power_of_two_divisor
from pallas_kernels.segmented_lora.own_rows import sum_tiles
from pallas_kernels.segmented_lora.plan import MIN_BLOCK, Plan, Segments
from pallas_kernels.segmented_lora.rank_rows import Rows, Tables, as_compute

_F32 = jnp.float32
_WEIGHT_BYTES = 32 << 10
"""Rank rows of a program: six programs on a multiprocessor, 190 KB on their way."""


class Sizes(NamedTuple):
    """How a launch cuts rank rows up."""

    span: int  # elements of a copy, of one unit
    copies: int  # copies of a rank row in a program
    box: int  # elements of a line of a copy

    @property
    def width(self) -> int:
        """Elements of a rank row in a program."""
        return self.span * self.copies

    @property
    def lines(self) -> int:
        """Of a copy, as shared memory holds it."""
        return self.span // self.box


def _most_elements(tile_rows: int, dtype: Any) -> int:
    return max(mosaic.THREADS, _WEIGHT_BYTES // (tile_rows * jnp.dtype(dtype).itemsize))


def shrink_sizes(part: Segments, in_dim: int, unit: int, dtype: Any) -> Sizes:
    """A program has a part of the input, and of it a vector at a time in registers."""
    most = _most_elements(part.tile_rows, dtype)
    span = power_of_two_divisor(unit, min(1024, most))
    return Sizes(span, in_dim // span // divisor(in_dim // span, -(-in_dim // most)), min(span, mosaic.BOX))


def expand_sizes(part: Segments, out_dims: tuple[int, ...], unit: int, dtype: Any) -> Sizes:
    """A program's outputs are of one module."""
    most = min(1024, _most_elements(part.tile_rows, dtype))
    span = power_of_two_divisor(unit, most)
    columns = math.gcd(*out_dims) // span
    copies = max(d for d in range(1, most // span + 1) if columns % d == 0)
    return Sizes(span, copies, min(span, mosaic.BOX))


def _request(
    pool_gmem: Any, unit_of: Any, numbers: Sequence[Any], per_unit: int, num_rows: Any, weights_smem: Any,
    arrived: Any, sizes: Sizes,
) -> None:  # fmt: skip
    """Starts the copies of every rank row; a row that is not there copies any unit, of which nothing is used.

    Args:
        unit_of: of a row and a place in it to its unit.
        numbers: which spans of a rank row.
        arrived: a barrier for each row.
    """
    last = pool_gmem.shape[0] - 1

    def row(k: Any, carry: Any) -> Any:
        # All entries of the table first: a copy waits for nothing but its own.
        units = [jnp.clip(unit_of(k, jax.lax.div(n, per_unit)), 0, last) for n in numbers]
        for copy, (n, number) in enumerate(zip(numbers, units, strict=True)):
            lines = pl.ds(jax.lax.rem(n, per_unit) * sizes.lines, sizes.lines)
            plgpu.copy_gmem_to_smem(pool_gmem.at[number, lines], weights_smem.at[copy, k], arrived.at[k])
        return carry

    jax.lax.fori_loop(0, num_rows, row, jnp.int32(0))


def _await(num_rows: Any, arrived: Any) -> None:
    def row(k: Any, carry: Any) -> Any:
        plgpu.barrier_wait(arrived.at[k])
        return carry

    jax.lax.fori_loop(0, num_rows, row, jnp.int32(0))


def _each_token(token_gmem: Any, block: Any, num_tokens: int, run: Any) -> None:
    """run(place, token) for the tokens of a block; they lie in its first places."""
    C = token_gmem.shape[1]

    def live(place: Any) -> Any:
        return (place < C) & (token_gmem[block, jnp.minimum(place, C - 1)] < num_tokens)

    def step(place: Any) -> Any:
        run(place, token_gmem[block, place])
        return place + 1

    jax.lax.while_loop(live, step, jnp.int32(0))


def _shrink_body(
    x_gmem: Any, token_gmem: Any, block_gmem: Any, row_gmem: Any, num_rows_gmem: Any, layer_gmem: Any, units_gmem: Any,
    pool_gmem: Any, s_gmem: Any, weights_smem: Any, arrived: Any, *, sizes: Sizes, unit: int,
    places: tuple[tuple[int, int], ...],
) -> None:  # fmt: skip
    tile, module, part = (jax.lax.axis_index(name) for name in "012")
    num_rows, row, block = num_rows_gmem[tile], row_gmem[tile], block_gmem[tile]
    lead, start = layer_gmem[0] + _pick(module, [p[0] for p in places]), _pick(module, [p[1] for p in places])
    numbers = [part * sizes.copies + copy for copy in range(sizes.copies)]

    def unit_of(k: Any, place: Any) -> Any:
        return units_gmem[lead, row + k, start + place]

    _request(pool_gmem, unit_of, numbers, unit // sizes.span, num_rows, weights_smem, arrived, sizes)
    _await(num_rows, arrived)

    def run(place: Any, token: Any) -> None:
        x = [x_gmem[token, pl.ds(n * sizes.lines, sizes.lines)].astype(_F32) for n in numbers]

        def multiply(k: Any, carry: Any) -> Any:
            total = jnp.zeros((sizes.lines, sizes.box), _F32)
            for copy in range(sizes.copies):
                total += as_compute(weights_smem[copy, k], x_gmem.dtype).astype(_F32) * x[copy]
            # Of a row that the module is without: anything. Its scale is 0.
            s_gmem[part, module, tile, place, k] = jnp.sum(total)
            return carry

        jax.lax.fori_loop(0, num_rows, multiply, jnp.int32(0))

    @pl.when(num_rows > 0)
    def _() -> None:
        _each_token(token_gmem, block, x_gmem.shape[0], run)


def _pick(index: Any, values: list[int]) -> Any:
    """values[index]."""
    return sum((jnp.where(index == i, value, 0) for i, value in enumerate(values) if value), jnp.int32(0))


def shrink(x_TI: jax.Array, pool: jax.Array, rows: Rows, part: Segments, *, unit: int, interpret: bool) -> jax.Array:
    """Partial projections of every tile, float32[splits, M, W, C, tile_rows]; undefined in idle tiles and places."""
    tables = Tables.of(rows)
    modules, (num_tokens, in_dim), tile_rows = len(tables.places_a), x_TI.shape, part.tile_rows
    sizes = shrink_sizes(part, in_dim, unit, x_TI.dtype)
    splits, num_tiles = in_dim // sizes.width, len(part.row_W)

    def body(*refs: Any) -> None:
        _shrink_body(*refs, sizes=sizes, unit=unit, places=tables.places_a)

    return mosaic.fill(
        body,
        (
            x_TI.reshape(num_tokens, -1, sizes.box), part.token_NC, part.block_W, part.row_W, part.num_rows_W,
            tables.layer_1, tables.units_a_ARU, pool.reshape(-1, unit // sizes.box, sizes.box),
        ),
        jax.ShapeDtypeStruct((splits, modules, num_tiles, part.block_tokens, tile_rows), _F32),
        grid=(num_tiles, modules, splits),
        scratch=[
            plgpu.SMEM((sizes.copies, tile_rows, sizes.lines, sizes.box), pool.dtype),
            plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=tile_rows),
        ],
        name="lora_shrink", interpret=interpret,
    )  # fmt: skip


class _Places(NamedTuple):
    """What is static of Tables for an expand."""

    column_b: int
    modules_of_layer: int
    first_module: int
    out_starts: tuple[int, ...]


def _expand_body(
    s_gmem: Any, token_gmem: Any, first_tile_gmem: Any, num_tiles_gmem: Any, row_gmem: Any, num_rows_gmem: Any,
    mix_gmem: Any, layer_gmem: Any, scale_gmem: Any, const_gmem: Any, units_gmem: Any, pool_gmem: Any, y_gmem: Any,
    weights_smem: Any, s_smem: Any, arrived: Any, ready: Any, *, sizes: Sizes, unit: int, places: _Places, dtype: Any,
    has_const: bool,
) -> None:  # fmt: skip
    block, group = (jax.lax.axis_index(name) for name in "01")
    K, layer, first_tile = weights_smem.shape[1], layer_gmem[0], first_tile_gmem[block]
    numbers = [group * sizes.copies + copy for copy in range(sizes.copies)]
    first = group * sizes.width
    module = sum(((first >= start).astype(jnp.int32) for start in places.out_starts[1:-1]), jnp.int32(0))
    lead = layer * places.modules_of_layer + places.first_module + module

    def run_tile(turn: Any, carry: Any) -> Any:
        tile = first_tile + turn
        row, num_rows = row_gmem[tile], num_rows_gmem[tile]

        def unit_of(k: Any, place: Any) -> Any:
            return units_gmem[layer, row + k, places.column_b + place]

        _request(pool_gmem, unit_of, numbers, unit // sizes.span, num_rows, weights_smem, arrived, sizes)

        def add_part(split: Any, total: jax.Array) -> jax.Array:
            return total + s_gmem[split, module, tile]

        s_smem[...] = jax.lax.fori_loop(1, s_gmem.shape[0], add_part, s_gmem[0, module, tile])
        mosaic.sync(ready)
        _await(num_rows, arrived)

        def run(place: Any, token: Any) -> None:
            mix = mix_gmem[tile, place]

            def multiply(k: Any, sums: Any) -> Any:
                scale = scale_gmem[lead, row + k]
                # What a row or a token is without may be anything, in s as in the pool.
                factor = jnp.where(scale != 0, s_smem[place * K + k] * scale, 0.0)
                if has_const:
                    factor += const_gmem[lead, row + k]
                factor = jnp.where(mix != 0, factor * mix, 0.0).astype(dtype).astype(_F32)
                return tuple(
                    old
                    + jnp.where(factor != 0, as_compute(weights_smem[copy, k, line], dtype).astype(_F32) * factor, 0.0)
                    for old, (copy, line, _) in zip(sums, lines, strict=True)
                )

            lines = [
                (copy, line, n * sizes.lines + line) for copy, n in enumerate(numbers) for line in range(sizes.lines)
            ]
            begin = tuple(y_gmem[token, number] for _, _, number in lines)
            for (_, _, number), new in zip(lines, jax.lax.fori_loop(0, num_rows, multiply, begin), strict=True):
                y_gmem[token, number] = new

        _each_token(token_gmem, block, y_gmem.shape[0], run)
        plgpu.commit_smem()  # copies are a proxy of their own: they come behind what was read
        mosaic.sync(ready)  # the next tile's rows and projections come to the same place
        return carry

    jax.lax.fori_loop(0, num_tiles_gmem[block], run_tile, jnp.int32(0))


def expand(
    s_ZMWCK: jax.Array, pool: jax.Array, rows: Rows, part: Segments, y_TO: jax.Array, *, unit: int, dtype: Any,
    interpret: bool,
) -> jax.Array:  # fmt: skip
    """float32 y plus the expansions of all modules side by side; rows of tokens in no block stay as they are."""
    tables = Tables.of(rows)
    sizes = expand_sizes(part, rows.out_dims, unit, dtype)
    has_const = tables.const_SR is not None
    places = _Places(tables.column_b, tables.modules_of_layer, tables.first_module, tables.out_starts)
    num_tokens, outputs = y_TO.shape
    elements = part.block_tokens * part.tile_rows

    def body(*refs: Any) -> None:
        _expand_body(*refs, sizes=sizes, unit=unit, places=places, dtype=dtype, has_const=has_const)

    y = mosaic.update(
        body,
        (
            s_ZMWCK.reshape(*s_ZMWCK.shape[:3], elements), part.token_NC, part.first_tile_N, part.num_tiles_N,
            part.row_W, part.num_rows_W, part.mix_WC, tables.layer_1, tables.scale_SR,
            tables.const_SR if has_const else tables.scale_SR, tables.units_b_BRU,
            pool.reshape(-1, unit // sizes.box, sizes.box),
        ),
        y_TO.reshape(num_tokens, -1, sizes.box),
        grid=(len(part.token_NC), outputs // sizes.width),
        scratch=[
            plgpu.SMEM((sizes.copies, part.tile_rows, sizes.lines, sizes.box), pool.dtype),
            plgpu.SMEM((elements,), _F32),
            plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=part.tile_rows), plgpu.Barrier(),
        ],
        name="lora_expand", interpret=interpret,
    )  # fmt: skip
    return y.reshape(num_tokens, outputs)


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
    modules = len(rows.out_dims)
    parts = [
        _kernels(part, modules, x_TI.dtype)[0](x_TI, pools[0], rows, part, unit=units[0], interpret=interpret)
        for part in plan
    ]
    if axis_name is not None:
        parts = sum_tiles(parts, plan, len(x_TI), Tables.of(rows).num_rows, own_rows, axis_name)
    return _expand_all(parts, pools[1], rows, plan, y_TO, unit=units[1], dtype=x_TI.dtype, interpret=interpret)


def _kernels(part: Segments, modules: int, dtype: Any) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Shrink and expand of a part of a plan: prompts' blocks are for tensor cores."""
    if part.block_tokens == MIN_BLOCK:
        return shrink, expand
    module = mosaic_prompts if mosaic_prompts.takes(part, modules, dtype) else pallas_triton
    return module.shrink, module.expand


def _expand_all(
    parts: Sequence[jax.Array], pool: jax.Array, rows: Rows, plan: Plan, y_TO: jax.Array, *, dtype: Any, **options: Any
) -> jax.Array:
    """The parts' expansions added to y; in float32, whatever y's type."""
    sum_TO = y_TO if y_TO.dtype == _F32 else jnp.zeros(y_TO.shape, _F32)
    for part, s_ZMWCK in zip(plan, parts, strict=True):
        _, expand_part = _kernels(part, len(rows.out_dims), dtype)
        sum_TO = expand_part(s_ZMWCK, pool, rows, part, sum_TO, dtype=dtype, **options)
    return sum_TO if y_TO.dtype == _F32 else (y_TO.astype(_F32) + sum_TO).astype(y_TO.dtype)


def constants(
    pool: jax.Array, rows: Rows, plan: Plan, y_TO: jax.Array, *, unit: int, dtype: Any, interpret: bool = False
) -> jax.Array:
    """See api.lora_constants: an expand of projections whose scale is 0."""
    check_supported((unit, unit), dtype)
    modules = len(rows.out_dims)
    parts = [jnp.zeros((1, modules, len(part.row_W), part.block_tokens, part.tile_rows), _F32) for part in plan]
    return _expand_all(parts, pool, rows, plan, y_TO, unit=unit, dtype=dtype, interpret=interpret)


def check_supported(units: tuple[int, int], dtype: Any) -> None:
    """Raises NotImplementedError for what other implementations can and this one cannot."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, _F32):
        raise NotImplementedError(f"the kernels take bfloat16, float16 and float32, not {jnp.dtype(dtype)}")
    for unit in units:
        if unit % mosaic.THREADS:
            raise NotImplementedError(
                f"units of {unit} elements are no whole number of {mosaic.THREADS}, the threads of a warpgroup"
            )
