"""Gradients of the rank rows, scattered to the units of the pool.

Segmented like the forward pass: each tile of rows meets the tokens of its own block (S-LoRA section 5.3 has the forward
half). Where a batch's tiles have room for more than all tokens times all rows, that one dense product is less work; it
is for finite numbers, as what it masks it has multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.segmented_lora.plan import Plan
from pallas_kernels.segmented_lora.rank_rows import RankRows, as_units
from pallas_kernels.segmented_lora.xla_pool import gather_rows, mix_of, scaled, taken

_F32 = jnp.float32


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    if dispatch.current_device().platform == "cpu":
        a, b = a.astype(_F32), b.astype(_F32)  # exact, and XLA has no bfloat16 there for some of the batched products
    return jnp.einsum(subscripts, a, b, preferred_element_type=_F32, precision=jax.lax.Precision.HIGHEST)


def _scatter(pool: jax.Array, units: jax.Array, rows: jax.Array, unit: int) -> Any:
    """The gradient of the pool: zeros but for the units of the rows."""
    index = jnp.where(units < 0, jnp.iinfo(jnp.int32).max, units)
    zeros = jnp.zeros(as_units(pool, unit).shape, _F32)
    sums = zeros.at[index].add(rows.reshape(*units.shape, unit), mode="drop")  # units may be shared by two rows
    return sums.reshape(pool.shape).astype(pool.dtype)


def pool_gradients(
    x_TI: jax.Array,
    g_TO: jax.Array,
    pools: Sequence[jax.Array],
    rows: RankRows,
    plan: Plan,
    *,
    units: tuple[int, int],
    axis_name: str | None,
    of_segments: bool,
) -> tuple[Any, Any]:
    """Cotangents of A's and of B's pool, given that of y; float0 zeros where a pool holds integers.

    Args:
        of_segments: never by the dense product.
    """
    if not all(jnp.issubdtype(pool.dtype, jnp.floating) for pool in pools):
        return tuple(np.zeros(pool.shape, jax.dtypes.float0) for pool in pools)  # type: ignore[return-value]
    places = sum(len(part.row_W) * part.block_tokens * part.tile_rows for part in plan)
    by_tiles = of_segments or places < len(x_TI) * rows.units_b_RV.shape[0]
    da_MRI, db_RO = (_of_tiles if by_tiles else _of_all)(x_TI, g_TO, pools, rows, plan, units, axis_name)
    return (
        _scatter(pools[0], rows.units_a_MRU, da_MRI, units[0]),
        _scatter(pools[1], rows.units_b_RV, db_RO, units[1]),
    )


def _of_all(
    x_TI: jax.Array, g_TO: jax.Array, pools: Sequence[jax.Array], rows: RankRows, plan: Plan, units: tuple[int, int],
    axis_name: str | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """float32[M, R, I] and [R, O] by products over all tokens and rows."""
    dtype, starts = x_TI.dtype, rows.out_starts
    mix_TR = mix_of(plan, rows.units_b_RV.shape[0], len(x_TI)).T
    a_MRI = gather_rows(pools[0], rows.units_a_MRU, units[0], dtype)
    b_RO = gather_rows(pools[1], rows.units_b_RV, units[1], dtype)
    s_MTR = _product("ti,mri->mtr", x_TI, a_MRI)
    parts = [slice(*starts[m : m + 2]) for m in range(len(rows.out_dims))]
    ds_MTR = jnp.stack([_product("to,ro->tr", g_TO[:, part], b_RO[:, part]) for part in parts])
    if axis_name is not None:
        s_MTR, ds_MTR = jax.lax.psum((s_MTR, ds_MTR), axis_name)
    s_MTR = jnp.where(mix_TR != 0, scaled(s_MTR, rows) * mix_TR, 0).astype(dtype)
    factor_MTR = rows.scale_MR[:, None] * mix_TR
    ds_MTR = jnp.where(factor_MTR != 0, ds_MTR * factor_MTR, 0).astype(dtype)
    da_MRI = _product("mtr,ti->mri", ds_MTR, x_TI)
    db_RO = jnp.concatenate([_product("tr,to->ro", s_MTR[m], g_TO[:, part]) for m, part in enumerate(parts)], 1)
    return da_MRI, db_RO


def _of_tiles(
    x_TI: jax.Array, g_TO: jax.Array, pools: Sequence[jax.Array], rows: RankRows, plan: Plan, units: tuple[int, int],
    axis_name: str | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The same by products of each tile with its block."""
    M, R, dtype, starts = len(rows.out_dims), rows.units_b_RV.shape[0], x_TI.dtype, rows.out_starts
    parts = [slice(*starts[m : m + 2]) for m in range(M)]
    da_MRI, db_RO = jnp.zeros((M, R, x_TI.shape[1]), _F32), jnp.zeros((R, starts[-1]), _F32)
    for part in plan:
        place_K = jnp.arange(part.tile_rows)
        row_WK = jnp.where(place_K < part.num_rows_W[:, None], part.row_W[:, None] + place_K, R)
        token_WC = jnp.asarray(part.token_NC)[part.block_W]
        x_WCI, g_WCO = (table.at[token_WC].get(mode="fill", fill_value=0) for table in (x_TI, g_TO))
        a_MWKI = gather_rows(pools[0], taken(rows.units_a_MRU, row_WK, 1, -1), units[0], dtype)
        b_WKO = gather_rows(pools[1], taken(rows.units_b_RV, row_WK, 0, -1), units[1], dtype)
        s_MWCK = _product("wci,mwki->mwck", x_WCI, a_MWKI)
        ds_MWCK = jnp.stack([_product("wco,wko->wck", g_WCO[..., p], b_WKO[..., p]) for p in parts])
        if axis_name is not None:
            s_MWCK, ds_MWCK = jax.lax.psum((s_MWCK, ds_MWCK), axis_name)
        mix_WC1 = jnp.asarray(part.mix_WC)[..., None]
        scale_MW1K = taken(rows.scale_MR, row_WK, 1, 0)[:, :, None]
        s_MWCK = jnp.where(scale_MW1K != 0, s_MWCK * scale_MW1K, 0)
        if rows.const_MR is not None:
            s_MWCK += taken(rows.const_MR, row_WK, 1, 0)[:, :, None]
        s_MWCK = jnp.where(mix_WC1 != 0, s_MWCK * mix_WC1, 0).astype(dtype)
        factor_MWCK = scale_MW1K * mix_WC1
        ds_MWCK = jnp.where(factor_MWCK != 0, ds_MWCK * factor_MWCK, 0).astype(dtype)
        da_MRI = da_MRI.at[:, row_WK].add(_product("mwck,wci->mwki", ds_MWCK, x_WCI), mode="drop")
        outs = [_product("wck,wco->wko", s_WCK, g_WCO[..., p]) for s_WCK, p in zip(s_MWCK, parts, strict=True)]
        db_RO = db_RO.at[row_WK].add(jnp.concatenate(outs, 2), mode="drop")
    return da_MRI, db_RO
