"""Segmented LoRA for mixed batches: from adapters in a pool, or from dense weights. Differentiable.

Ranks and adapters of a batch differ freely (S-LoRA section 5.3, Punica section 4). The plan of a batch (see plan.py)
says which tokens meet which rank rows, RankRows which units of the pool those are; both are arrays of fixed sizes, so
that no batch, rank or adapter recompiles anything.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.segmented_lora import pallas_mosaic_gpu, pallas_triton, xla_pool
from pallas_kernels.segmented_lora.gradients import pool_gradients
from pallas_kernels.segmented_lora.plan import MIN_BLOCK, Plan, as_plan, trace_plan
from pallas_kernels.segmented_lora.rank_rows import RankRows, Rows, as_arrays, check, check_pool, check_tokens, whole

_F32 = jnp.float32

BACKENDS: dict[str, Callable[..., jax.Array]] = {
    "triton": pallas_triton.delta, "xla": xla_pool.delta, "mosaic_gpu": pallas_mosaic_gpu.delta
}  # fmt: skip
"""Implementations in the order of preference. No GPU has run the mosaic_gpu kernels: they run where they are named."""

_BACKENDS_OF_SEGMENTS = {**BACKENDS, "xla": xla_pool.delta_of_own_rows}
"""Those of lora_matmul: no token meets another adapter's rows, which may hold NaN while it is trained."""

_CONSTANTS = {"triton": pallas_triton.constants, "xla": xla_pool.constants, "mosaic_gpu": pallas_mosaic_gpu.constants}
_CHECKS = {"triton": pallas_triton.check_supported, "mosaic_gpu": pallas_mosaic_gpu.check_supported}


def pick(unit: int, dtype: str, implementation: str | None = None, *, interpret: bool = False) -> str:
    """The implementation of lora_delta that runs on this device.

    Args:
        unit: elements of a unit as each shard holds it; dtype: of activations.
        implementation, interpret: see lora_delta.

    Raises:
        ValueError: no such implementation.
        NotImplementedError: the one asked for cannot run on this device, or not with these sizes.
    """
    for name in dispatch.choose("lora_delta", BACKENDS, implementation, interpret=interpret):
        try:
            if name in _CHECKS:
                _CHECKS[name]((unit, unit), dtype)
            return name
        except NotImplementedError as error:
            if implementation is not None:
                raise NotImplementedError(f"lora_delta, {name}: {error}") from error
    raise AssertionError("xla takes everything")


def lora_delta(
    x_TI: jax.Array,
    pool: jax.Array,
    rows: Rows,
    plan: Plan,
    y_TO: jax.Array | None = None,
    *,
    unit: int,
    axis_name: str | None = None,
    own_rows: int = 0,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Adds each token's own LoRA products to y: y_t + sum over its adapters i of w_ti (scale_i A_i x_t + const_i) B_i.

    Args:
        x_TI: float[T, I]: bfloat16, float16 or float32.
        pool: any array whose last axis is a whole number of units; x's type, or unsigned integers that hold its bits.
            It is read in place. The rank rows of the batch must be finite: `xla` multiplies some by 0.
        rows: where the rank rows of the M modules lie, which all take x: tables of their own (RankRows), or those of
            all layers and modules (LayerRankRows).
        plan: of this batch, from make_plan; its rank rows must be some of the tables'.
        y_TO: float[T, O], O being the outputs of all modules side by side. None: zeros in float32. Its buffer is
            reused where it is not needed any more.
        unit: elements of a unit.
        axis_name: mesh axis over which I (of x and of the rows of A) and O are split: the projections are summed over
            it, one all-reduce.
        own_rows: with axis_name: most rank rows that a token's own adapters have, on average over the T tokens. So
            many are summed for each; rows beyond that are lost. 0: any number, and the sum is of all rows.
        implementation: see dispatch.IMPLEMENTATIONS; None leaves it to the device.
        interpret: run the kernels in Pallas' interpreter, on any device.

    Returns:
        float[T, O] in y's type. Products accumulate in float32; the projections are rounded once to x's type.

    Differentiable in x and y, and in the pool where that is of a floating type (its gradient is as large as itself);
    in reverse mode, any number of times. scale, const and the plan are constants.

    Raises:
        TypeError, ValueError: what does not fit, by name.
        NotImplementedError: the implementation that was asked for cannot run here, or not in this shape.
    """
    options = _Options((unit, unit), axis_name, own_rows, implementation, interpret)
    return _run(x_TI, (pool, pool), rows, plan, y_TO, options)


def lora_constants(
    pool: jax.Array,
    rows: Rows,
    plan: Plan,
    num_tokens: int,
    *,
    unit: int,
    dtype: Any,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Sums of rows of B alone: of each token, over its adapters i and their rows r, w_ti const_r B_r.

    Args:
        pool, rows, plan, unit, implementation, interpret: see lora_delta. The rows' scale is not read, their constants
            are there.
        num_tokens: T.
        dtype: compute type, in which the factors w const are rounded.

    Returns:
        float32[T, O]. Not differentiable in the Pallas implementations.

    Raises: see lora_delta.
    """
    pool, rows, plan = jnp.asarray(pool), as_arrays(rows), as_plan(plan)
    check_pool(pool, unit, jnp.dtype(dtype))
    if any(out % unit for out in rows.out_dims):
        raise ValueError(f"units of {unit} do not divide the outputs {rows.out_dims}")
    y_TO = jnp.zeros((num_tokens, sum(rows.out_dims)), _F32)
    if not num_tokens:
        return y_TO
    name = "scale_MR" if isinstance(rows, RankRows) else "scale_LMR"
    rows = replace(rows, **{name: jnp.zeros_like(getattr(rows, name))})
    return dispatch.call(
        "lora_constants", _CONSTANTS, pool, rows, plan, y_TO, unit=unit, dtype=dtype, implementation=implementation,
        interpret=interpret,
    )  # fmt: skip


def lora_matmul(
    x_TI: jax.Array,
    a_ARI: jax.Array,
    b_ARO: jax.Array,
    segment_T: jax.Array,
    *,
    scale_A: jax.Array | None = None,
    rank_A: jax.Array | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """scale_i (x_t A_i^T) B_i for each token t of adapter i, from dense weights: for training code that has no pool.

    Args:
        x_TI: float[T, I].
        a_ARI, b_ARO: x's type, rank rows of A adapters: those of A, and those of B transposed.
        segment_T: int32[T], the adapter of each token in any order; -1, or any other number that is none's, for none.
        scale_A: float32[A], 1 if None; a constant.
        rank_A: int32[A], rank rows that count (the others are not even read); all if None, or where it is more.
        implementation, interpret: see lora_delta.

    Returns:
        float32[T, O]. Differentiable in x, a and b, in reverse mode, any number of times. What an adapter, or the
        gradient of one of its tokens, holds (NaN, say) reaches its own tokens and weights alone.

    Raises: see lora_delta.
    """
    x_TI, a_ARI, b_ARO, segment_T = map(jnp.asarray, (x_TI, a_ARI, b_ARO, segment_T))
    if a_ARI.ndim != 3 or b_ARO.ndim != 3 or a_ARI.shape[:2] != b_ARO.shape[:2]:
        raise ValueError(f"a is {list(a_ARI.shape)} and b {list(b_ARO.shape)}: they must be [A, R, I] and [A, R, O]")
    A, R, in_dim = a_ARI.shape
    out_dim = b_ARO.shape[2]
    if x_TI.ndim != 2 or x_TI.shape[1] != in_dim or segment_T.shape != x_TI.shape[:1]:
        raise ValueError(
            f"x is {list(x_TI.shape)} and segment_T {list(segment_T.shape)}: they must be [T, {in_dim}] and [T]"
        )
    if not jnp.issubdtype(segment_T.dtype, jnp.integer):
        raise TypeError(f"segment_T must be integers, not {segment_T.dtype}")
    scale_A = jnp.ones(A, _F32) if scale_A is None else jnp.asarray(scale_A, _F32)
    rank_A = jnp.full(A, R, jnp.int32) if rank_A is None else jnp.asarray(rank_A)
    if scale_A.shape != (A,) or rank_A.shape != (A,):
        raise ValueError(f"scale_A is {list(scale_A.shape)} and rank_A {list(rank_A.shape)}: they must be [{A}]")
    if not jnp.issubdtype(rank_A.dtype, jnp.integer):
        raise TypeError(f"rank_A must be integers, not {rank_A.dtype}")
    if not a_ARI.dtype == b_ARO.dtype == x_TI.dtype:
        raise TypeError(f"x is {x_TI.dtype}, a {a_ARI.dtype} and b {b_ARO.dtype}: they must be of one type")
    check_tokens(x_TI)
    if 0 in (len(x_TI), A, R):
        return jnp.zeros((len(x_TI), out_dim), _F32)
    rank_A = jnp.clip(rank_A, 0, R).astype(jnp.int32)
    tokens = MIN_BLOCK if len(x_TI) < 4 * MIN_BLOCK * A else 4 * MIN_BLOCK
    tile_rows = MIN_BLOCK if R <= MIN_BLOCK else 2 * MIN_BLOCK
    plan = trace_plan(segment_T, rank_A, R, tokens, tile_rows)
    row_R1 = jnp.arange(A * R, dtype=jnp.int32)[:, None]
    rows = RankRows(row_R1[None], row_R1, jnp.repeat(scale_A, R)[None], None, (out_dim,))
    options = _Options((in_dim, out_dim), None, 0, implementation, interpret, of_segments=True)
    return _run(x_TI, (a_ARI, b_ARO), rows, plan, None, options)


def _run(
    x_TI: jax.Array, pools: tuple[jax.Array, jax.Array], rows: Rows, plan: Plan, y_TO: jax.Array | None,
    options: _Options,
) -> jax.Array:  # fmt: skip
    x_TI, rows, plan = jnp.asarray(x_TI), as_arrays(rows), as_plan(plan)
    pools = (jnp.asarray(pools[0]), jnp.asarray(pools[1]))
    check(x_TI, pools, rows, options.units)
    shape = (len(x_TI), sum(rows.out_dims))
    y_TO = jnp.zeros(shape, _F32) if y_TO is None else jnp.asarray(y_TO)
    if y_TO.shape != shape:
        raise ValueError(f"y is {list(y_TO.shape)}: for this x and these outputs it must be {list(shape)}")
    if not jnp.issubdtype(y_TO.dtype, jnp.floating):
        raise TypeError(f"y must be floating, not {y_TO.dtype}")
    if not shape[0]:
        return y_TO
    return _delta(options, x_TI, pools, y_TO, rows, plan)


@dataclass(frozen=True)
class _Options:
    """What does not change while a program runs."""

    units: tuple[int, int]
    axis_name: str | None
    own_rows: int
    implementation: str | None
    interpret: bool
    of_segments: bool = False

    def call(self, x_TI: jax.Array, pools: Sequence[jax.Array], rows: Rows, plan: Plan, y_TO: jax.Array) -> jax.Array:
        return dispatch.call(
            "lora_delta", _BACKENDS_OF_SEGMENTS if self.of_segments else BACKENDS, x_TI, pools, rows, plan, y_TO,
            units=self.units, axis_name=self.axis_name, own_rows=self.own_rows, implementation=self.implementation,
            interpret=self.interpret,
        )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delta(
    options: _Options, x_TI: jax.Array, pools: tuple[jax.Array, jax.Array], y_TO: jax.Array, rows: Rows, plan: Plan
) -> jax.Array:
    return options.call(x_TI, pools, rows, plan, y_TO)


def _forward(options: _Options, x_TI: jax.Array, pools: Any, y_TO: jax.Array, rows: Rows, plan: Plan) -> Any:
    return _delta(options, x_TI, pools, y_TO, rows, plan), (x_TI, pools, rows, plan)


def _backward(options: _Options, saved: Any, g_TO: jax.Array) -> Any:
    """x's gradient is the same operation with A and B in each other's place, module after module."""
    x_TI, pools, rows, plan = saved
    rows = whole(rows)
    h_TO = g_TO.astype(x_TI.dtype)
    dx_TI: Any = jnp.zeros(x_TI.shape, _F32)
    units = options.units
    back = replace(options, units=units[::-1])
    for module, (start, end) in enumerate(itertools.pairwise(rows.out_starts)):
        swapped = rows.swapped(module, units)
        dx_TI = _delta(back, h_TO[:, start:end], pools[::-1], dx_TI, swapped, plan)
    d_pools = pool_gradients(
        x_TI, h_TO, pools, rows, plan, units=units, axis_name=options.axis_name, of_segments=options.of_segments
    )
    return dx_TI.astype(x_TI.dtype), d_pools, g_TO, None, None


_delta.defvjp(_forward, _backward)
