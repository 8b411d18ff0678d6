"""Where the rank rows of a projection group lie: the page tables that the kernels read.

A pool of any shape is a matrix of units `[.., u]`; a rank row of A (length I) is I/u units and a row of B transposed
(length O) O/u units, anywhere in it. The modules of a group share the input (q, k, v; or gate, up; or one alone).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MOST_UNITS = 2**31 - 1
"""Units of a pool that int32 can number."""


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


@jax.tree_util.register_dataclass
@dataclass
class LayerRankRows:
    """The same for one layer and one group of modules in tables of all of them, as an engine keeps them.

    A kernel reads the tables where they lie: slices for each layer and group would be some hundred small copies a step.
    """

    units_LRU: Any  # int32[L, R, U], of each layer and row the units of A and B of every module, -1 where there is none
    scale_LMR: Any  # float32[L, all modules, R]; see RankRows
    const_LMR: Any  # likewise
    layer: Any  # int32 scalar
    columns_a: tuple[int, ...] = field(metadata={"static": True})  # where in U each module's row of A begins
    column_b: int = field(metadata={"static": True})  # where those of B begin, module beside module
    units_in: int = field(metadata={"static": True})  # units of a row of A
    units_out: int = field(metadata={"static": True})  # units of the rows of B of all modules
    first_module: int = field(metadata={"static": True})  # of the group among all modules
    out_dims: tuple[int, ...] = field(metadata={"static": True})

    def whole(self) -> RankRows:
        """The group's own tables."""
        units_RU = jnp.asarray(self.units_LRU)[self.layer]
        part = slice(self.first_module, self.first_module + len(self.out_dims))
        return RankRows(
            jnp.stack([units_RU[:, start : start + self.units_in] for start in self.columns_a]),
            units_RU[:, self.column_b : self.column_b + self.units_out],
            jnp.asarray(self.scale_LMR)[self.layer, part], jnp.asarray(self.const_LMR)[self.layer, part], self.out_dims,
        )  # fmt: skip


Rows = RankRows | LayerRankRows


def whole(rows: Rows) -> RankRows:
    """The tables of one group, whichever form they come in."""
    return rows if isinstance(rows, RankRows) else rows.whole()


class Tables(NamedTuple):
    """Either form as the kernels read it: an entry lies at (layer + offset, row, column)."""

    layer_1: Any  # int32[1]
    units_a_ARU: Any  # int32
    units_b_BRU: Any  # int32
    scale_SR: Any  # float32
    const_SR: Any  # float32, None without constants
    places_a: tuple[tuple[int, int], ...]  # of each module its offset on the first axis and its first column
    column_b: int  # first column of the rows of B
    modules_of_layer: int  # rows of scale_SR from one layer to the next
    first_module: int
    out_starts: tuple[int, ...]

    @classmethod
    def of(cls, rows: Rows) -> Tables:
        """No data moves."""
        starts = tuple(itertools.accumulate(rows.out_dims, initial=0))
        if isinstance(rows, RankRows):
            zero, places = np.zeros(1, np.int32), tuple((m, 0) for m in range(len(rows.out_dims)))
            return cls(
                zero, rows.units_a_MRU, rows.units_b_RV[None], rows.scale_MR, rows.const_MR, places, 0, 0, 0, starts
            )  # fmt: skip
        modules, num_rows = rows.scale_LMR.shape[1:]
        scale_SR, const_SR = (table.reshape(-1, num_rows) for table in (rows.scale_LMR, rows.const_LMR))
        return cls(
            jnp.asarray(rows.layer, jnp.int32).reshape(1), rows.units_LRU, rows.units_LRU, scale_SR, const_SR,
            tuple((0, column) for column in rows.columns_a), rows.column_b, modules, rows.first_module, starts,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """R."""
        return self.units_b_BRU.shape[1]


def as_units(pool: jax.Array, unit: int) -> jax.Array:
    """The pool as `[.., unit]`; no data moves."""
    return pool.reshape(-1, unit)


def as_compute(bits: jax.Array, dtype: Any) -> jax.Array:
    """Elements of the pool in the compute type: the pool keeps their bits as unsigned integers, or themselves."""
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


def as_arrays(rows: Rows) -> Rows:
    """The tables as jax arrays.

    Raises:
        TypeError: neither form of tables, or one of another type.
    """
    if not isinstance(rows, RankRows | LayerRankRows):
        raise TypeError(f"rows must be RankRows or LayerRankRows, not {type(rows).__name__}")
    rows = jax.tree.map(jnp.asarray, rows)
    for name, table in vars(rows).items():
        if isinstance(table, jax.Array):
            wanted = jnp.int32 if name.startswith("units_") or name == "layer" else jnp.float32
            if table.dtype != wanted:
                raise TypeError(f"{name} is {table.dtype}: it must be {jnp.dtype(wanted)}")
    return rows


def check_tokens(x_TI: jax.Array) -> None:
    """Raises a TypeError if x is no matrix of floats."""
    if x_TI.ndim != 2 or not jnp.issubdtype(x_TI.dtype, jnp.floating):
        raise TypeError(f"x must be float[T, I], not {x_TI.dtype}{list(x_TI.shape)}")


def check_pool(pool: jax.Array, unit: int, dtype: Any) -> None:
    """Raises a ValueError or TypeError that says what does not fit."""
    unsigned = jnp.issubdtype(pool.dtype, jnp.unsignedinteger) and pool.dtype.itemsize == dtype.itemsize
    if pool.dtype != dtype and not unsigned:
        raise TypeError(f"the pool is {pool.dtype}: it must have x's type, {dtype}, or hold its bits as unsigned")
    if unit < 1 or not pool.ndim:
        raise ValueError(f"a pool of shape {pool.shape} has no units of {unit}")
    if pool.shape[-1] % unit:
        raise ValueError(f"units of {unit} do not divide the pool's rows of {pool.shape[-1]}")
    if pool.size // unit > MOST_UNITS:
        raise ValueError(f"a pool of {pool.size // unit} units of {unit}: 32 bits number {MOST_UNITS} of them")


def check(x_TI: jax.Array, pools: Sequence[jax.Array], rows: Rows, units: tuple[int, int]) -> None:
    """Raises a ValueError or TypeError that says what does not fit."""
    check_tokens(x_TI)
    for pool, unit, name, dims in zip(
        pools, units, ("input", "outputs"), ([x_TI.shape[1]], rows.out_dims), strict=True
    ):
        check_pool(pool, unit, x_TI.dtype)
        if any(dim % unit for dim in dims):
            raise ValueError(f"units of {unit} do not divide the {name} {dims}")
    if isinstance(rows, LayerRankRows):
        _check_layer_rows(x_TI, rows, units[0])
        return
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


def _check_layer_rows(x_TI: jax.Array, rows: LayerRankRows, unit: int) -> None:
    units_in, units_out = x_TI.shape[1] // unit, sum(rows.out_dims) // unit
    if (rows.units_in, rows.units_out) != (units_in, units_out):
        raise ValueError(
            f"rows of {rows.units_in} and {rows.units_out} units: x and the outputs have {units_in} and {units_out}"
        )
    L, R, U = rows.units_LRU.shape
    ends = [start + units_in for start in rows.columns_a] + [rows.column_b + units_out]
    if len(rows.columns_a) != len(rows.out_dims) or max(ends) > U:
        raise ValueError(
            f"columns {rows.columns_a} and {rows.column_b} reach past the {U} of units_LRU, or are too few"
        )
    for name, table in (("scale_LMR", rows.scale_LMR), ("const_LMR", rows.const_LMR)):
        last = rows.first_module + len(rows.out_dims)
        if table.ndim != 3 or table.shape[::2] != (L, R) or table.shape[1] < last:
            raise ValueError(f"{name} is {list(table.shape)}: it must be [{L}, {last} or more, {R}]")
