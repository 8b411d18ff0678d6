"""Where the rank rows of a projection group lie: the page tables that the kernels read.

A pool of any shape is a matrix of units `[.., u]`; a rank row of A (length I) is I/u units and a row of B transposed
(length O) O/u units, anywhere in it. The modules of a group share the input (q, k, v; or gate, up; or one alone).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass
class RankRows:
    """R rank rows of M modules with a common input. Every number below counts units, but the dimensions."""

    units_a_MRU: Any  # int32[M, R, I/u], units of each row of A; -1 where the module has no such row
    units_b_RV: Any  # int32[R, sum of O/u], units of each row of B transposed, module beside module; -1 likewise
    scale_MR: Any  # float32[M, R], alpha / r of the row's adapter, 0 where the module has no such row of A
    const_MR: Any  # float32[M, R] or None, added to the scaled projection: 1 makes the row of B a bias
    out_dims: tuple[int, ...] = field(metadata={"static": True})  # O of each module

    @property
    def out_starts(self) -> tuple[int, ...]:
        """Where each module's outputs begin among all; one more for the end."""
        return tuple(itertools.accumulate(self.out_dims, initial=0))

    def swapped(self, module: int, units: tuple[int, int]) -> RankRows:
        """The rows of one module with A and B in each other's place: what carries a gradient back to x.

        Args:
            units: widths of A's and of B's units.
        """
        start, end = (edge // units[1] for edge in self.out_starts[module : module + 2])
        a_RU = self.units_a_MRU[module]
        b_RV = self.units_b_RV[:, start:end]
        return RankRows(b_RV[None], a_RU, self.scale_MR[module, None], None, (a_RU.shape[-1] * units[0],))


def as_units(pool: jax.Array, unit: int) -> jax.Array:
    """The pool as `[.., unit]`; no data moves."""
    return pool.reshape(-1, unit)


def as_compute(bits: jax.Array, dtype: Any) -> jax.Array:
    """Elements of the pool in the compute type: the pool keeps their bits as unsigned integers, or themselves."""
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


def check(x_TI: jax.Array, pools: Sequence[jax.Array], rows: RankRows, units: tuple[int, int]) -> None:
    """Raises a ValueError or TypeError that says what does not fit."""
    if x_TI.ndim != 2 or not jnp.issubdtype(x_TI.dtype, jnp.floating):
        raise TypeError(f"x must be float[T, I], not {x_TI.dtype}{list(x_TI.shape)}")
    for pool, unit, name, dims in zip(
        pools, units, ("input", "outputs"), ([x_TI.shape[1]], rows.out_dims), strict=True
    ):
        unsigned = jnp.issubdtype(pool.dtype, jnp.unsignedinteger) and pool.dtype.itemsize == x_TI.dtype.itemsize
        if pool.dtype != x_TI.dtype and not unsigned:
            raise TypeError(
                f"the pool is {pool.dtype}: it must have x's type, {x_TI.dtype}, or hold its bits as unsigned"
            )
        if pool.shape[-1] % unit or any(dim % unit for dim in dims):
            raise ValueError(
                f"units of {unit} divide not both the pool's rows of {pool.shape[-1]} and the {name} {dims}"
            )
    M, R = len(rows.out_dims), rows.units_b_RV.shape[0]
    wanted = {
        "units_a_MRU": (rows.units_a_MRU, (M, R, x_TI.shape[1] // units[0])),
        "units_b_RV": (rows.units_b_RV, (R, sum(rows.out_dims) // units[1])),
        "scale_MR": (rows.scale_MR, (M, R)),
        "const_MR": (rows.const_MR, (M, R)),
    }
    for name, (array, shape) in wanted.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} is {list(array.shape)}: for this x and these outputs it must be {list(shape)}")
