"""Paged attention on Hopper through Pallas' Mosaic GPU backend: TMA copies of pages, products in wgmma.

One program takes up to 64 lanes (queries times the query heads of one KV head: wgmma's least M, so a decode leaves most
of them idle, which tensor cores can afford where reading the context is what takes the time), walks over its part of
the row's context in tiles of slots, whose pages TMA copies ahead into a ring of stages, and keeps an online softmax
(Dao et al. 2022; the split of long contexts is flash decoding's). Weights pass through shared memory on their way to
the second product.

Queries and results are gathered and scattered by XLA, eight lanes at a time: wgmma's operands lie swizzled, eight rows
to an atom, and the heads of a query need not be eight. XLA weighs the parts of a context as well.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.paged_attention.triton_config import (
    LEAST_PART,
    MOST_PART,
    MOST_PARTIAL_BYTES,
    MOST_PARTS,
    PROGRAMS_WANTED_OF_PROMPTS,
)

_F32 = jnp.float32
_MASKED = -1e30
_LOG2_E = math.log2(math.e)

LANES = 64
"""Queries times heads of a program."""

SLOTS = 64
"""Of a context in a turn."""

STAGES = 3
"""Turns whose keys and values lie in shared memory: 96 KB at a head_dim of 128."""

ATOM = 8
"""Rows of a swizzled atom."""


class _Sizes(NamedTuple):
    """What is static about one region of rows."""

    first_row: int
    num_rows: int
    queries: int  # most of a row
    kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    page_tokens: int
    num_pages: int
    window: int | None
    parts: int  # most of a context

    @property
    def tiles(self) -> int:
        """Programs for the queries of a row and KV head."""
        return pl.cdiv(self.queries * self.group, LANES)

    @property
    def lanes(self) -> int:
        """Of a program, as queries and results lie in memory."""
        return LANES if self.tiles > 1 else pl.cdiv(self.queries * self.group, ATOM) * ATOM

    def span(self, begin: Any, part: Any, count: Any, context: Any) -> tuple[Any, Any]:
        """First turn of a program and one past its last; none where the program has nothing to do.

        Args:
            begin: its first lane; part: of the context; all may be arrays.
        """
        before = context - count  # position of the row's first query
        seen = jnp.minimum(context, before + jax.lax.div(begin + LANES - 1, self.group) + 1)
        first = jnp.zeros_like(seen)
        if self.window is not None:
            nearest = before + jax.lax.div(begin, self.group) - self.window + 1
            first = jax.lax.div(jnp.maximum(nearest, 0), SLOTS)
        end = jax.lax.div(seen + SLOTS - 1, SLOTS)
        per_part = jnp.maximum(jax.lax.div(end - first + self.parts - 1, self.parts), pl.cdiv(LEAST_PART, SLOTS))
        first = first + part * per_part
        return first, jnp.where(begin < count * self.group, jnp.minimum(first + per_part, end), 0)


def paged_attention_mosaic_gpu(
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
    interpret: bool = False,
) -> jax.Array:
    """See `api.ragged_paged_attention`."""
    T, N, H = q_TNH.shape
    check_supported(H, q_TNH.dtype, page_tokens)
    L, P, _ = pool_LPE.shape
    S, width = table_SP.shape
    if L * P * 2 * num_kv_heads >= 2**31:
        raise NotImplementedError(f"a pool of {L * P * 2 * num_kv_heads} pages of a head: 32 bits number 2**31 of them")
    # No copy: XLA takes bits of another type for what they are.
    pool = jax.lax.bitcast_convert_type(pool_LPE, q_TNH.dtype).reshape(-1, page_tokens, H)
    layer_1 = jnp.asarray(layer, jnp.int32).reshape(1)
    out_TNH = jnp.zeros_like(q_TNH)
    for first_row, num_rows, queries in ((0, num_decodes, 1), (num_decodes, S - num_decodes, most_queries)):
        if num_rows:
            sizes = _Sizes(
                first_row, num_rows, queries, num_kv_heads, N // num_kv_heads, H, page_tokens, P, window, parts=1
            )
            sizes = sizes._replace(parts=_parts(sizes, width * page_tokens))
            own = slice(first_row, first_row + num_rows)
            token_RQ = start_S[own, None] + jnp.arange(queries)
            q_RQNH = q_TNH[jnp.minimum(token_RQ, T - 1)]
            out_RQNH = _region(q_RQNH, pool, layer_1, table_SP, count_S, context_S, sizes, interpret)
            token_RQ = jnp.where(jnp.arange(queries) < count_S[own, None], token_RQ, T)
            out_TNH = out_TNH.at[token_RQ].set(out_RQNH, mode="drop")
    return out_TNH


def _parts(sizes: _Sizes, most_slots: int) -> int:
    """Contexts are split where there are few programs, and where one long row would hold up a whole step."""
    programs = sizes.num_rows * sizes.tiles * sizes.kv_heads
    parts = max(pl.cdiv(PROGRAMS_WANTED_OF_PROMPTS, programs), pl.cdiv(most_slots, MOST_PART))
    bytes_of_part = 4 * programs * sizes.lanes * sizes.head_dim
    most = min(pl.cdiv(most_slots, LEAST_PART), MOST_PARTS, MOST_PARTIAL_BYTES // bytes_of_part)
    return max(1, min(parts, most))


def _region(
    q_RQNH: jax.Array, pool: jax.Array, layer_1: jax.Array, table_SP: jax.Array, count_S: jax.Array,
    context_S: jax.Array, sizes: _Sizes, interpret: bool,
) -> jax.Array:  # fmt: skip
    """Attention of rows that share sizes: [R, Q, N, H] in q's type; anything behind a row's queries."""
    R, Q, K, G, H = sizes.num_rows, sizes.queries, sizes.kv_heads, sizes.group, sizes.head_dim
    lanes, dtype, stages = sizes.tiles * sizes.lanes, q_RQNH.dtype, (STAGES, SLOTS, H)
    q_RKMH = q_RQNH.reshape(R, Q, K, G, H).swapaxes(1, 2).reshape(R, K, Q * G, H)
    q_RKMH = jnp.pad(q_RKMH, ((0, 0), (0, 0), (0, lanes - Q * G), (0, 0)))

    def body(*refs: Any) -> None:
        _body(*refs, sizes=sizes)

    def swizzled(kind: Any, *shape: int) -> Any:
        tiling = plgpu.TilingTransform((ATOM, 128 // jnp.dtype(kind).itemsize))
        return plgpu.SMEM(shape, kind, transforms=(tiling, plgpu.SwizzleTransform(128)))

    pages = SLOTS // sizes.page_tokens
    partial_ZRKMH, weight_ZRKM = mosaic.fill(
        body,
        (q_RKMH, pool, layer_1, table_SP, count_S, context_S),
        (
            jax.ShapeDtypeStruct((sizes.parts, R, K, lanes, H), _F32),
            jax.ShapeDtypeStruct((sizes.parts, R, K, lanes), _F32),
        ),
        grid=(R * sizes.tiles, K, sizes.parts),
        scratch=[
            swizzled(dtype, LANES, H), swizzled(dtype, *stages), swizzled(dtype, *stages),
            swizzled(dtype, LANES, SLOTS), swizzled(_F32, LANES, H), plgpu.SMEM((LANES,), _F32),
            plgpu.Barrier(), plgpu.Barrier(num_arrivals=pages, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=pages, num_barriers=STAGES), plgpu.Barrier(),
        ],
        name=f"paged_attention_{'decode' if Q == 1 else 'prompt'}", interpret=interpret,
    )  # fmt: skip
    # Programs with nothing to do wrote nothing.
    own = slice(sizes.first_row, sizes.first_row + R)
    begin_1M = (jnp.arange(lanes) // LANES * LANES)[None]
    part_Z11 = jnp.arange(sizes.parts)[:, None, None]
    shape = (sizes.parts, R, lanes)
    count_ZRM, context_ZRM = (jnp.broadcast_to(x[own][:, None], shape) for x in (count_S, context_S))
    first, end = sizes.span(jnp.broadcast_to(begin_1M, shape), part_Z11, count_ZRM, context_ZRM)
    used_ZR1M = (first < end)[:, :, None]
    weight_ZRKM = jnp.where(used_ZR1M, weight_ZRKM, _MASKED)
    factor_ZRKM = jnp.where(used_ZR1M, jnp.exp2(weight_ZRKM - weight_ZRKM.max(0)), 0)
    sum_RKMH = (factor_ZRKM[..., None] * jnp.where(used_ZR1M[..., None], partial_ZRKMH, 0)).sum(0)
    out_RKMH = (sum_RKMH / jnp.maximum(factor_ZRKM.sum(0), 1e-30)[..., None])[:, :, : Q * G]
    return out_RKMH.reshape(R, K, Q, G, H).swapaxes(1, 2).reshape(R, Q, K * G, H).astype(dtype)


def _body(
    q_gmem: Any, pool_gmem: Any, layer_gmem: Any, table_gmem: Any, count_gmem: Any, context_gmem: Any,
    partial_gmem: Any, weight_gmem: Any, q_smem: Any, k_smem: Any, v_smem: Any, p_smem: Any, out_smem: Any,
    weight_smem: Any, q_arrived: Any, k_arrived: Any, v_arrived: Any, done: Any, *, sizes: _Sizes,
) -> None:  # fmt: skip
    index, head, part = (jax.lax.axis_index(name) for name in "012")
    row_of_region, begin = jax.lax.div(index, sizes.tiles), jax.lax.rem(index, sizes.tiles) * LANES
    row = sizes.first_row + row_of_region
    count, context = count_gmem[row], context_gmem[row]
    first, end = sizes.span(begin, part, count, context)
    own = pl.ds(begin, sizes.lanes)

    def request(turn: Any) -> None:
        stage = jax.lax.rem(turn - first, STAGES)
        for at in range(0, SLOTS, sizes.page_tokens):
            # No page behind the context is read: its table entries may be anything. A wrong id reads some page.
            place = jax.lax.div(jnp.minimum(turn * SLOTS + at, context - 1), sizes.page_tokens)
            page = jnp.clip(table_gmem[row, place], 0, sizes.num_pages - 1) + layer_gmem[0] * sizes.num_pages
            number = page * (2 * sizes.kv_heads) + head
            slots = pl.ds(at, sizes.page_tokens)
            plgpu.copy_gmem_to_smem(pool_gmem.at[number], k_smem.at[stage, slots], k_arrived.at[stage])
            plgpu.copy_gmem_to_smem(pool_gmem.at[number + sizes.kv_heads], v_smem.at[stage, slots], v_arrived.at[stage])

    @pl.when(first < end)
    def _() -> None:
        plgpu.copy_gmem_to_smem(q_gmem.at[row_of_region, head, own], q_smem.at[pl.ds(0, sizes.lanes)], q_arrived)
        for ahead in range(STAGES):
            pl.when(first + ahead < end)(lambda ahead=ahead: request(first + ahead))
        plgpu.barrier_wait(q_arrived)

        def turn(i: Any, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            stage = jax.lax.rem(i - first, STAGES)
            plgpu.barrier_wait(k_arrived.at[stage])
            score_MC = mosaic.product(q_smem, k_smem.at[stage].T, (LANES, SLOTS))
            visible_MC = _visible(begin, i, context - count, sizes)
            top_M, total_M, p_MC, shrink_M = _softmax(score_MC, visible_MC, carry[0], carry[1], sizes.head_dim)
            p_smem[...] = p_MC.astype(p_smem.dtype)
            plgpu.commit_smem()
            plgpu.barrier_wait(v_arrived.at[stage])
            add_MH = mosaic.product(p_smem, v_smem.at[stage], (LANES, sizes.head_dim))
            out_MH = carry[2] * jax.lax.broadcast_in_dim(shrink_M, add_MH.shape, (0,)) + add_MH
            mosaic.sync(done)  # every warp has its products: the stage is free
            pl.when(i + STAGES < end)(lambda: request(i + STAGES))
            return top_M, total_M, out_MH

        def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
            return plgpu.layout_cast(jnp.full(shape, value, _F32), layout)

        per_lane = plgpu.Layout.WGMMA.reduce(1)
        begin_with = (
            filled((LANES,), _MASKED, per_lane), filled((LANES,), 0.0, per_lane),
            filled((LANES, sizes.head_dim), 0.0, plgpu.Layout.WGMMA),
        )  # fmt: skip
        top_M, total_M, out_MH = jax.lax.fori_loop(first, end, turn, begin_with)
        total_M = jnp.maximum(total_M, 1e-30)
        out_smem[...] = out_MH / jax.lax.broadcast_in_dim(total_M, out_MH.shape, (0,))
        weight_smem[...] = top_M + jnp.log(total_M) * _LOG2_E
        plgpu.commit_smem()
        lanes = pl.ds(0, sizes.lanes)
        plgpu.copy_smem_to_gmem(out_smem.at[lanes], partial_gmem.at[part, row_of_region, head, own])
        plgpu.copy_smem_to_gmem(weight_smem.at[lanes], weight_gmem.at[part, row_of_region, head, own])
        plgpu.wait_smem_to_gmem(0)


def _visible(begin: Any, turn: Any, before: Any, sizes: _Sizes) -> jax.Array:
    """bool[M, C]: the slots up to each lane's own position, before + lane // G, and not further off than the window."""

    def places(axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (LANES, SLOTS), axis, layout=plgpu.Layout.WGMMA)

    lane_MC = begin + places(0)
    # slot - before <= lane // G, without the division of every lane.
    ahead_MC = (turn * SLOTS - before + places(1)) * sizes.group
    visible_MC = ahead_MC <= lane_MC
    if sizes.window is not None:
        visible_MC &= lane_MC < ahead_MC + sizes.window * sizes.group
    return visible_MC


def _softmax(
    score_MC: jax.Array, visible_MC: jax.Array, top_M: jax.Array, total_M: jax.Array, head_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A turn of the online softmax, in powers of two: top, total, the turn's weights, the factor on all before."""
    score_MC = jnp.where(visible_MC, score_MC * (_LOG2_E / math.sqrt(head_dim)), _MASKED)
    new_M = jnp.maximum(top_M, score_MC.max(1))
    # Once more a mask: where a lane has seen nothing so far, the difference is 0.
    p_MC = jnp.where(visible_MC, jnp.exp2(score_MC - jax.lax.broadcast_in_dim(new_M, score_MC.shape, (0,))), 0.0)
    shrink_M = jnp.exp2(top_M - new_M)
    return new_M, total_M * shrink_M + p_MC.sum(1), p_MC, shrink_M


def check_supported(head_dim: int, dtype: Any, page_tokens: int) -> None:
    """Raises NotImplementedError for what other implementations can and this one cannot."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"wgmma multiplies bfloat16 and float16, and not {jnp.dtype(dtype)} to its last bits")
    if head_dim % 64 or head_dim > mosaic.BOX:
        raise NotImplementedError(f"head_dim must be a multiple of 64 up to {mosaic.BOX}, not {head_dim}")
    if page_tokens % ATOM or SLOTS % page_tokens:
        raise NotImplementedError(f"pages of {page_tokens} tokens: they must be of 8, 16, 32 or 64")
