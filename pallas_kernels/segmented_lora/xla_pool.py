"""The segmented entries for any XLA device: rows gathered out of the pool, then products.

Mostly two dense ones of all tokens with all rows, masked by owner. Where rows are many and blocks well filled (prompts
of many adapters) nearly all of that is masked work, and each tile is multiplied by its own block instead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.segmented_lora.own_rows import packed_size, sum_dense
from pallas_kernels.segmented_lora.plan import Plan
from pallas_kernels.segmented_lora.rank_rows import RankRows, Rows, as_compute, as_units, whole

_F32 = jnp.float32


def mix_of(plan: Plan, num_rows: int, num_tokens: int) -> jax.Array:
    """float32[R, T]: the factor of each token on each rank row."""
    mix_RT = jnp.zeros((num_rows, num_tokens), _F32)
    for part in plan:
        tile_K = jnp.arange(part.tile_rows)
        row_WK = jnp.where(tile_K < part.num_rows_W[:, None], part.row_W[:, None] + tile_K, num_rows)
        token_WC = jnp.asarray(part.token_NC)[part.block_W]
        mix_RT = mix_RT.at[row_WK[:, :, None], token_WC[:, None, :]].add(part.mix_WC[:, None, :], mode="drop")
    return mix_RT


def gather_rows(pool: jax.Array, units_RU: jax.Array, unit: int, dtype: jnp.dtype) -> jax.Array:
    """[R, U*u]: rows of the pool's units, zeros where the index is -1."""
    index_RU = jnp.where(units_RU < 0, jnp.iinfo(jnp.int32).max, units_RU)
    rows = as_units(pool, unit).at[index_RU].get(mode="fill", fill_value=0)
    return as_compute(rows, dtype).reshape(*units_RU.shape[:-1], -1)


def scaled(s_MTR: jax.Array, rows: RankRows) -> jax.Array:
    """Projections times their scale, plus the constants; 0 where a module has no such row."""
    scale_MR = jnp.asarray(rows.scale_MR)[:, None]
    s_MTR = jnp.where(scale_MR != 0, s_MTR * scale_MR, 0)
    return s_MTR if rows.const_MR is None else s_MTR + jnp.asarray(rows.const_MR)[:, None]


_UNITS = {"bfloat16": ("amx_bf16", "avx512_bf16"), "float16": ("amx_fp16", "avx512_fp16")}


@functools.cache
def dense_units(dtype: str) -> bool:
    """Whether this device multiplies such numbers in units of their own, so fast that masked work costs little.

    A CPU without them converts every operand to float32.
    """
    if dtype == "float32" or jax.default_backend() != "cpu":
        return dtype != "float32"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True
    return any(unit in flags for unit in _UNITS.get(dtype, ()))


def prefers_tiles(plan: Plan, num_tokens: int, num_rows: int, dtype: Any) -> bool:
    """Whether products by tiles beat dense ones: far less work, in blocks that are not nearly empty.

    In float32 they do from a third of the work on. Other types are converted operand by operand, of which dense
    products have more: half of the work is enough, a quarter whatever the blocks.
    """
    places = sum(len(part.row_W) * part.block_tokens for part in plan)
    work = sum(len(part.row_W) * part.block_tokens * part.tile_rows for part in plan)
    dense = num_tokens * num_rows
    if jnp.dtype(dtype) == _F32:
        return 3 * work <= dense and places <= 4 * num_tokens
    fewer = 4 * work <= dense or (2 * work <= dense and places <= 8 * num_tokens)
    return fewer and not dense_units(jnp.dtype(dtype).name)


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
) -> jax.Array:
    """See api.lora_delta; `pools` and `units` are A's and B's."""
    rows, T, dtype = whole(rows), len(x_TI), x_TI.dtype
    if axis_name is None and prefers_tiles(plan, T, rows.units_b_RV.shape[0], dtype):
        return delta_by_tiles(x_TI, pools, rows, plan, y_TO, units=units)
    return delta_of_all_rows(x_TI, pools, rows, plan, y_TO, units=units, axis_name=axis_name, own_rows=own_rows)


def delta_of_own_rows(
    x_TI: jax.Array, pools: Sequence[jax.Array], rows: Rows, plan: Plan, y_TO: jax.Array, *,
    units: tuple[int, int], axis_name: str | None = None, own_rows: int = 0,
) -> jax.Array:  # fmt: skip
    """`delta` of one device where no token may meet the rows of another's adapter, which need not be finite."""
    assert axis_name is None, f"no product by tiles is summed over {axis_name}, of {own_rows} own rows"
    return delta_by_tiles(x_TI, pools, whole(rows), plan, y_TO, units=units)


def delta_of_all_rows(
    x_TI: jax.Array, pools: Sequence[jax.Array], rows: RankRows, plan: Plan, y_TO: jax.Array, *,
    units: tuple[int, int], axis_name: str | None = None, own_rows: int = 0,
) -> jax.Array:  # fmt: skip
    """Dense products of all tokens with all rows, masked by owner."""
    T, dtype = len(x_TI), x_TI.dtype
    mix_TR = mix_of(plan, rows.units_b_RV.shape[0], T).T
    a_MRI = gather_rows(pools[0], jnp.asarray(rows.units_a_MRU), units[0], dtype)
    b_RO = gather_rows(pools[1], jnp.asarray(rows.units_b_RV), units[1], dtype)
    high = jax.lax.Precision.HIGHEST  # float32 in tensor cores would keep 10 bits
    s_MTR = jnp.einsum("ti,mri->mtr", x_TI, a_MRI, preferred_element_type=_F32, precision=high)
    if axis_name is not None:
        s_MTR = sum_dense(s_MTR, mix_TR != 0, packed_size(T, mix_TR.shape[1], own_rows), axis_name)
    s_MTR = jnp.where(mix_TR != 0, scaled(s_MTR, rows) * mix_TR, 0).astype(dtype)
    return _add_outputs(y_TO, s_MTR, b_RO, rows)


def delta_by_tiles(
    x_TI: jax.Array, pools: Sequence[jax.Array], rows: RankRows, plan: Plan, y_TO: jax.Array, *,
    units: tuple[int, int],
) -> jax.Array:  # fmt: skip
    """Batched products, each tile with the tokens of its block."""
    dtype, starts, R = x_TI.dtype, rows.out_starts, rows.units_b_RV.shape[0]
    high = jax.lax.Precision.HIGHEST
    sum_TO = y_TO.astype(_F32)
    for part in plan:
        place_K = jnp.arange(part.tile_rows)
        row_WK = jnp.where(place_K < part.num_rows_W[:, None], part.row_W[:, None] + place_K, R)
        token_WC = jnp.asarray(part.token_NC)[part.block_W]
        tile: Any = {"mode": "fill", "fill_value": 0}
        a_MWKI = gather_rows(pools[0], taken(rows.units_a_MRU, row_WK, 1, -1), units[0], dtype)
        b_WKO = gather_rows(pools[1], taken(rows.units_b_RV, row_WK, 0, -1), units[1], dtype)
        x_WCI = x_TI.at[token_WC].get(**tile)
        s_MWCK = jnp.einsum("wci,mwki->mwck", x_WCI, a_MWKI, preferred_element_type=_F32, precision=high)
        scale_MW1K = taken(rows.scale_MR, row_WK, 1, 0)[:, :, None]
        s_MWCK = jnp.where(scale_MW1K != 0, s_MWCK * scale_MW1K, 0)
        if rows.const_MR is not None:
            s_MWCK += taken(rows.const_MR, row_WK, 1, 0)[:, :, None]
        mix_WC1 = jnp.asarray(part.mix_WC)[..., None]
        s_MWCK = jnp.where(mix_WC1 != 0, s_MWCK * mix_WC1, 0).astype(dtype)
        outputs = [
            jnp.einsum("wck,wko->wco", s_WCK, b_WKO[:, :, starts[m] : starts[m + 1]], preferred_element_type=_F32,
                       precision=high)
            for m, s_WCK in enumerate(s_MWCK)
        ]  # fmt: skip
        sum_TO = sum_TO.at[token_WC].add(jnp.concatenate(outputs, 2), mode="drop")
    return sum_TO.astype(y_TO.dtype)


def taken(table: Any, row_WK: jax.Array, axis: int, none: float) -> jax.Array:
    """Rows of a table in place of its axis of rows; `none` where there is no such row."""
    return jnp.take(jnp.asarray(table), row_WK, axis, mode="fill", fill_value=none)


def constants(pool: jax.Array, rows: Rows, plan: Plan, y_TO: jax.Array, *, unit: int, dtype: jnp.dtype) -> jax.Array:
    """See api.lora_constants."""
    rows = whole(rows)
    mix_TR = mix_of(plan, rows.units_b_RV.shape[0], len(y_TO)).T
    const_MR = jnp.zeros_like(jnp.asarray(rows.scale_MR)) if rows.const_MR is None else jnp.asarray(rows.const_MR)
    b_RO = gather_rows(pool, jnp.asarray(rows.units_b_RV), unit, dtype)
    return _add_outputs(y_TO, (const_MR[:, None] * mix_TR).astype(dtype), b_RO, rows)


def _add_outputs(y_TO: jax.Array, s_MTR: jax.Array, b_RO: jax.Array, rows: RankRows) -> jax.Array:
    starts, high = rows.out_starts, jax.lax.Precision.HIGHEST
    outputs = [
        jnp.einsum(
            "tr,ro->to", s_MTR[m], b_RO[:, starts[m] : starts[m + 1]], preferred_element_type=_F32, precision=high
        )
        for m in range(len(rows.out_dims))
    ]
    return (y_TO.astype(_F32) + jnp.concatenate(outputs, 1)).astype(y_TO.dtype)
