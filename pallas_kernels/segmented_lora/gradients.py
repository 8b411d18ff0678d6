"""Gradients of the rank rows: two products over all tokens of the batch, scattered to the units of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.segmented_lora.plan import Plan
from pallas_kernels.segmented_lora.rank_rows import RankRows, as_units
from pallas_kernels.segmented_lora.xla_pool import gather_rows, mix_of, scaled

_F32 = jnp.float32


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
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
) -> tuple[Any, Any]:
    """Cotangents of A's and of B's pool, given that of y; float0 zeros where a pool holds integers."""
    if not all(jnp.issubdtype(pool.dtype, jnp.floating) for pool in pools):
        return tuple(np.zeros(pool.shape, jax.dtypes.float0) for pool in pools)  # type: ignore[return-value]
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
    return (
        _scatter(pools[0], rows.units_a_MRU, da_MRI, units[0]),
        _scatter(pools[1], rows.units_b_RV, db_RO, units[1]),
    )
