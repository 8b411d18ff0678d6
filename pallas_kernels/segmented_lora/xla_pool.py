"""The segmented entries for any XLA device: rows gathered out of the pool, two dense products, a mask by owner."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

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


def delta(
    x_TI: jax.Array,
    pools: Sequence[jax.Array],
    rows: Rows,
    plan: Plan,
    y_TO: jax.Array,
    *,
    units: tuple[int, int],
    axis_name: str | None = None,
) -> jax.Array:
    """See api.lora_delta; `pools` and `units` are A's and B's."""
    rows, T, dtype = whole(rows), len(x_TI), x_TI.dtype
    mix_TR = mix_of(plan, rows.units_b_RV.shape[0], T).T
    a_MRI = gather_rows(pools[0], jnp.asarray(rows.units_a_MRU), units[0], dtype)
    b_RO = gather_rows(pools[1], jnp.asarray(rows.units_b_RV), units[1], dtype)
    high = jax.lax.Precision.HIGHEST  # float32 in tensor cores would keep 10 bits
    s_MTR = jnp.einsum("ti,mri->mtr", x_TI, a_MRI, preferred_element_type=_F32, precision=high)
    if axis_name is not None:
        s_MTR = jax.lax.psum(s_MTR, axis_name)
    s_MTR = jnp.where(mix_TR != 0, scaled(s_MTR, rows) * mix_TR, 0).astype(dtype)
    return _add_outputs(y_TO, s_MTR, b_RO, rows)


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
