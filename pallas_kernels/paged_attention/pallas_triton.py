"""Paged attention on NVIDIA GPUs through Pallas' Triton backend (sm_80 and later).

One program takes a tile of a row's queries (all query heads of one KV head, flattened to M lanes), walks over its part
of the row's context in tiles of slots, gathered through the page table, and keeps an online softmax. The parts of a
long context are programs of their own (flash decoding's split over keys and values); a second kernel weighs them.

Rows are read as ragged: how many queries a row has and how far its context goes are values, so that nothing is
compiled anew for another mix. A program with nothing to do ends at once.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.paged_attention.triton_config import (
    LEAST_PART,
    MOST_PARTIAL_BYTES,
    TritonConfig,
    check_supported,
    pick_config,
)

_F32 = jnp.float32
_MASKED = -1e30


def paged_attention_triton(
    q_TNH: jax.Array,
    pool_LPE: jax.Array,
    layer: jax.Array | int,
    table_SP: jax.Array,
    start_S: jax.Array,
    count_S: jax.Array,
    context_S: jax.Array,
    *,
    num_decodes: int,
    most_queries: int,
    num_kv_heads: int,
    page_tokens: int,
    window: int | None = None,
    configs: tuple[TritonConfig | None, TritonConfig | None] = (None, None),
    interpret: bool = False,
) -> jax.Array:
    """See `api.ragged_paged_attention`; configs are those of the decode rows and of the others."""
    check_supported(q_TNH.shape[-1], q_TNH.dtype)
    T, N, H = q_TNH.shape
    L, P, _ = pool_LPE.shape
    S, width = table_SP.shape
    if pool_LPE.size // H >= 2**31:
        raise NotImplementedError(f"a pool of {pool_LPE.size // H} vectors: 32 bits number 2**31 of them")
    q = q_TNH.reshape(T * N, H)
    pool = pool_LPE.reshape(L * P * 2 * num_kv_heads * page_tokens, H)
    layer_1 = jnp.asarray(layer, jnp.int32).reshape(1)
    out = jnp.zeros_like(q)
    for rows, queries, config in (
        (range(num_decodes), 1, configs[0]),
        (range(num_decodes, S), most_queries, configs[1]),
    ):
        if len(rows):
            config = config or pick_config(
                len(rows), queries, num_kv_heads, N // num_kv_heads, H, q.dtype, width * page_tokens
            )
            sizes = _Sizes(
                first_row=rows[0], kind="decode" if queries == 1 else "prompt", width=width, num_pages=P, heads=N,
                kv_heads=num_kv_heads, page_tokens=page_tokens, window=window,
                tiles=pl.cdiv(queries * (N // num_kv_heads), config.lanes), config=config,
            )  # fmt: skip
            out = _region(q, pool, layer_1, table_SP, start_S, count_S, context_S, out, len(rows), sizes, interpret)
    return out.reshape(T, N, H)


@dataclass(frozen=True)
class _Sizes:
    """What is static about one region of rows."""

    first_row: int
    kind: str  # of rows, for the kernels' names
    width: int  # pages of a table
    num_pages: int
    heads: int
    kv_heads: int
    page_tokens: int
    window: int | None
    tiles: int  # of the queries of a row
    config: TritonConfig

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def _region(
    q: jax.Array,
    pool: jax.Array,
    layer_1: jax.Array,
    table_SP: jax.Array,
    start_S: jax.Array,
    count_S: jax.Array,
    context_S: jax.Array,
    out: jax.Array,
    num_rows: int,
    sizes: _Sizes,
    interpret: bool,
) -> jax.Array:
    """Rows that share tile sizes; fills in their places of out, which is handed on."""
    most_parts = max(1, MOST_PARTIAL_BYTES // (4 * q.size))
    config = replace(sizes.config, parts=min(sizes.config.parts, most_parts))
    sizes = replace(sizes, config=config)
    grid = (num_rows * sizes.tiles, sizes.kv_heads)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    params = plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    ragged = (start_S, count_S, context_S)
    same = jax.ShapeDtypeStruct(out.shape, out.dtype)
    if config.parts == 1:
        return pl.pallas_call(
            functools.partial(_attend_kernel, sizes=sizes),
            grid=(*grid, 1),
            in_specs=[whole] * 8,
            out_specs=whole,
            out_shape=same,
            input_output_aliases={7: 0},
            compiler_params=params,
            interpret=interpret,
            name=f"paged_attention_{sizes.kind}",
        )(q, pool, layer_1, table_SP.reshape(-1), *ragged, out)
    partial, weight = pl.pallas_call(
        functools.partial(_part_kernel, sizes=sizes),
        grid=(*grid, config.parts),
        in_specs=[whole] * 7,
        out_specs=[whole, whole],
        out_shape=[
            jax.ShapeDtypeStruct((config.parts * len(q), q.shape[1]), _F32),
            jax.ShapeDtypeStruct((config.parts * len(q),), _F32),
        ],
        compiler_params=params,
        interpret=interpret,
        name=f"paged_attention_{sizes.kind}_parts",
    )(q, pool, layer_1, table_SP.reshape(-1), *ragged)
    return pl.pallas_call(
        functools.partial(_combine_kernel, sizes=sizes),
        grid=grid,
        in_specs=[whole] * 6,
        out_specs=whole,
        out_shape=same,
        input_output_aliases={5: 0},
        compiler_params=plgpu.CompilerParams(
            num_warps=max(2, config.lanes // 4 if q.dtype == _F32 else config.lanes // 8), num_stages=2
        ),
        interpret=interpret,
        name=f"paged_attention_{sizes.kind}_combine",
    )(partial, weight, *ragged, out)


@dataclass(frozen=True)
class _Tile:
    """Where one program's queries lie, and which tiles of slots they see."""

    used: Any  # bool: the row has queries here
    lane_M: Any  # int32[M], row of [T * N, H] of each lane
    valid_M: Any  # bool[M]
    position_M: Any  # int32[M]
    context: Any
    row: Any
    head: Any  # KV head
    first: Any  # first tile of slots
    per_part: Any  # tiles of a part
    end: Any  # one past the last tile


def _tile(start_ref: Any, count_ref: Any, context_ref: Any, sizes: _Sizes) -> _Tile:
    config, G = sizes.config, sizes.group
    index, head = pl.program_id(0), pl.program_id(1)
    row = sizes.first_row + index // sizes.tiles
    begin = (index % sizes.tiles) * config.lanes
    start, count, context = start_ref[row], count_ref[row], context_ref[row]
    flat_M = begin + jnp.arange(config.lanes)
    query_M = flat_M // G
    lane_M = (start + query_M) * sizes.heads + head * G + flat_M % G
    before = context - count  # position of the row's first query
    seen = jnp.minimum(context, before + (begin + config.lanes - 1) // G + 1)
    first = jnp.int32(0)
    if sizes.window is not None:
        first = jnp.maximum(before + begin // G - sizes.window + 1, 0) // config.slots
    end = pl.cdiv(seen, config.slots)
    per_part = jnp.maximum(pl.cdiv(end - first, config.parts), pl.cdiv(LEAST_PART, config.slots))
    return _Tile(begin < count * G, lane_M, query_M < count, before + query_M, context, row, head, first, per_part, end)


def _both(lane_M: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Row and column of every element of [M, H]."""
    shape = (len(lane_M), head_dim)
    return jax.lax.broadcast_in_dim(lane_M, shape, (0,)), jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    # DEFAULT would round float32 operands to the 10 bits of TF32.
    precision = jax.lax.Precision.HIGHEST if a.dtype == _F32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=_F32)


def _softmax_part(
    q_ref: Any, pool_ref: Any, layer_ref: Any, table_ref: Any, tile: _Tile, first: Any, end: Any, sizes: _Sizes
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Online softmax of a tile's queries over some tiles of slots: (top, total, out), powers of two."""
    config, S = sizes.config, sizes.page_tokens
    H, head = q_ref.shape[1], tile.head
    # Lanes without a query read some other row of q; nothing of them is kept.
    q_MH = q_ref[jnp.minimum(tile.lane_M, q_ref.shape[0] - 1), :]
    dtype = q_MH.dtype
    scale = math.log2(math.e) / math.sqrt(H)
    page_0 = layer_ref[0] * sizes.num_pages

    def body(i: Any, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top_M, total_M, out_MH = carry
        slot_C = i * config.slots + jnp.arange(config.slots)
        # No page behind the context is read: its table entries may be anything.
        near_C = jnp.minimum(slot_C, tile.context - 1)
        # As a gather clamps: a wrong id must not become a fault that takes the whole process with it.
        page_C = jnp.clip(table_ref[tile.row * sizes.width + near_C // S], 0, sizes.num_pages - 1) + page_0
        key_C = (page_C * (2 * sizes.kv_heads) + head) * S + near_C % S
        k_CH = jax.lax.bitcast_convert_type(pool_ref[key_C, :], dtype)
        v_CH = jax.lax.bitcast_convert_type(pool_ref[key_C + sizes.kv_heads * S, :], dtype)
        score_MC = _dot(q_MH, k_CH, (1, 1)) * scale
        visible_MC = slot_C[None, :] <= tile.position_M[:, None]
        if sizes.window is not None:
            visible_MC &= slot_C[None, :] > tile.position_M[:, None] - sizes.window
        score_MC = jnp.where(visible_MC, score_MC, _MASKED)
        new_M = jnp.maximum(top_M, jnp.max(score_MC, 1))
        # Once more a mask: where a lane has seen nothing so far, the difference is 0.
        p_MC = jnp.where(visible_MC, jnp.exp2(score_MC - new_M[:, None]), 0.0)
        shrink_M = jnp.exp2(top_M - new_M)
        total_M = total_M * shrink_M + jnp.sum(p_MC, 1)
        out_MH = out_MH * shrink_M[:, None] + _dot(p_MC.astype(dtype), v_CH, (1, 0))
        return new_M, total_M, out_MH

    M = config.lanes
    zeros = (jnp.full(M, _MASKED, _F32), jnp.zeros(M, _F32), jnp.zeros((M, H), _F32))
    return jax.lax.fori_loop(first, end, body, zeros)


def _attend_kernel(
    q_ref: Any, pool_ref: Any, layer_ref: Any, table_ref: Any, start_ref: Any, count_ref: Any, context_ref: Any,
    _: Any, out_ref: Any, *, sizes: _Sizes,
) -> None:  # fmt: skip
    tile = _tile(start_ref, count_ref, context_ref, sizes)

    @pl.when(tile.used)
    def _run() -> None:
        _, total_M, out_MH = _softmax_part(q_ref, pool_ref, layer_ref, table_ref, tile, tile.first, tile.end, sizes)
        out_MH = out_MH / jnp.maximum(total_M, 1e-30)[:, None]
        _store(out_ref, tile.lane_M, tile.valid_M, out_MH)


def _store(out_ref: Any, lane_M: Any, valid_M: Any, out_MH: jax.Array) -> None:
    H = out_MH.shape[1]
    mask = jax.lax.broadcast_in_dim(valid_M, out_MH.shape, (0,))
    plgpu.store(out_ref.at[_both(lane_M, H)], out_MH.astype(out_ref.dtype), mask=mask)


def _part_kernel(
    q_ref: Any, pool_ref: Any, layer_ref: Any, table_ref: Any, start_ref: Any, count_ref: Any, context_ref: Any,
    partial_ref: Any, weight_ref: Any, *, sizes: _Sizes,
) -> None:  # fmt: skip
    tile = _tile(start_ref, count_ref, context_ref, sizes)
    part = pl.program_id(2)
    first = tile.first + part * tile.per_part
    end = jnp.minimum(first + tile.per_part, tile.end)

    @pl.when(tile.used & (first < end))
    def _run() -> None:
        top_M, total_M, out_MH = _softmax_part(q_ref, pool_ref, layer_ref, table_ref, tile, first, end, sizes)
        lane_M = part * q_ref.shape[0] + tile.lane_M
        total_M = jnp.maximum(total_M, 1e-30)
        _store(partial_ref, lane_M, tile.valid_M, out_MH / total_M[:, None])
        plgpu.store(weight_ref.at[lane_M], top_M + jnp.log2(total_M), mask=tile.valid_M)


def _combine_kernel(
    partial_ref: Any, weight_ref: Any, start_ref: Any, count_ref: Any, context_ref: Any, _: Any, out_ref: Any, *,
    sizes: _Sizes,
) -> None:  # fmt: skip
    tile = _tile(start_ref, count_ref, context_ref, sizes)
    M, H, rows = sizes.config.lanes, out_ref.shape[1], out_ref.shape[0]

    @pl.when(tile.used)
    def _run() -> None:
        near_M = jnp.minimum(tile.lane_M, rows - 1)

        def body(part: Any, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            top_M, total_M, out_MH = carry
            weight_M = weight_ref[part * rows + near_M]
            new_M = jnp.maximum(top_M, weight_M)
            shrink_M, grow_M = jnp.exp2(top_M - new_M), jnp.exp2(weight_M - new_M)
            add_MH = partial_ref[part * rows + near_M, :] * grow_M[:, None]
            return new_M, total_M * shrink_M + grow_M, out_MH * shrink_M[:, None] + add_MH

        zeros = (jnp.full(M, -jnp.inf, _F32), jnp.zeros(M, _F32), jnp.zeros((M, H), _F32))
        used = pl.cdiv(tile.end - tile.first, tile.per_part)
        _, total_M, out_MH = jax.lax.fori_loop(0, used, body, zeros)
        _store(out_ref, tile.lane_M, tile.valid_M, out_MH / total_M[:, None])
