"""Adapters read in place: the deltas of a layer by kernels that follow page tables into the pool.

What `projections.LayerDeltas` does with dense buffers of rank rows, without them: a table of unit addresses for each
row, and a plan of which tokens meet which rows. Activations are laid out [T, features].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from multilora_jax.memory.geometry import MODULES, PoolGeometry
from multilora_jax.models.batch import LayerInputs, UnitTable
from multilora_jax.models.layers import LlamaSpec
from pallas_kernels.segmented_lora import LayerRankRows, Plan, lora_constants, lora_delta

_F32 = jnp.float32

GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Modules that share their input."""

_NORM_MODULES = ("o_proj", "down_proj")
"""Whose rows of B hold the deltas of the norms, see lora.layout."""


def table_columns(geometry: PoolGeometry) -> dict[tuple[str, str], slice]:
    """Columns of UnitTable: of each (module, "a" or "b"); in a group the rows of A, then those of B side by side."""
    columns, start = {}, 0
    for group in GROUPS:
        for side, kind in enumerate("ab"):
            for module in group:
                length = geometry.module_dims(module)[side] // geometry.unit
                columns[module, kind] = slice(start, start + length)
                start += length
    return columns


def insert_units(table: UnitTable, units_LCU: jax.Array, start: jax.Array) -> UnitTable:
    """Puts the unit addresses of C rank rows into the table from row `start` on. DONATES table when jitted so."""
    return UnitTable(jax.lax.dynamic_update_slice(table.units_LRU, units_LCU, (0, start, 0)))


@dataclass(frozen=True)
class InPlaceDeltas:
    """What the adapters of a step add to one layer. The pool is the one that the step has written so far."""

    table: UnitTable
    pool: jax.Array  # uint[L, P, E], this shard's
    plan: Plan
    layer: jax.Array  # int32 scalar
    inputs: LayerInputs

    def at(self, pool: jax.Array) -> InPlaceDeltas:
        """The same after keys and values were written: whoever read the older pool would make a copy of it."""
        return replace(self, pool=pool)

    def touches(self, module: str) -> bool:
        """Rows that a module does not have cost nothing."""
        return True

    @property
    def has_gains(self) -> bool:
        """Whether the step has an adapter with gains (DoRA)."""
        return self.inputs.gain_LMR is not None

    @property
    def has_norms(self) -> bool:
        """Whether the step has an adapter that changes the layer's norms."""
        return self.inputs.norm_L2R is not None

    def add(self, spec: LlamaSpec, y_TO: jax.Array, x_TI: jax.Array, modules: tuple[str, ...]) -> jax.Array:
        """y plus the deltas of modules that share the input x: this shard's features of x and of the outputs."""
        rows = self._rows(spec, modules, self.inputs.scale_LMR, self.inputs.const_LMR, MODULES.index(modules[0]))
        return lora_delta(
            x_TI, self.pool, rows, self.plan, y_TO, unit=_unit(spec), axis_name=spec.axis_name,
            own_rows=spec.own_rows, implementation=spec.lora_backend, interpret=spec.interpret,
        )  # fmt: skip

    def gains(self, spec: LlamaSpec, modules: tuple[str, ...]) -> jax.Array:
        """sum_i w_i g_i, float32[T, O], this shard's outputs of the modules side by side."""
        return self._constants(spec, modules, self.inputs.gain_LMR, MODULES.index(modules[0]))

    def norm_delta(self, spec: LlamaSpec, which: int) -> jax.Array:
        """sum_i w_i of the deltas of the input norm (0) or the other (1), float32[T, D], this shard's features."""
        return self._constants(spec, (_NORM_MODULES[which],), self.inputs.norm_L2R, which)

    def _constants(self, spec: LlamaSpec, modules: tuple[str, ...], flags_LMR: Any, first: int) -> jax.Array:
        rows = self._rows(spec, modules, flags_LMR, flags_LMR, first)
        return lora_constants(
            self.pool, rows, self.plan, len(self.inputs.positions_T), unit=_unit(spec), dtype=spec.dtype,
            implementation=spec.lora_backend, interpret=spec.interpret,
        )  # fmt: skip

    def _rows(
        self, spec: LlamaSpec, modules: tuple[str, ...], scale_LMR: Any, const_LMR: Any, first: int
    ) -> LayerRankRows:
        g, columns = spec.geometry, table_columns(spec.geometry)
        out_dims = tuple(g.module_dims(module)[1] // g.tp for module in modules)
        return LayerRankRows(
            self.table.units_LRU, scale_LMR, const_LMR, self.layer,
            columns_a=tuple(columns[module, "a"].start for module in modules),
            column_b=columns[modules[0], "b"].start,
            units_in=g.module_dims(modules[0])[0] // g.unit,
            units_out=sum(out_dims) // _unit(spec),
            first_module=first, out_dims=out_dims,
        )  # fmt: skip


def _unit(spec: LlamaSpec) -> int:
    """Elements of a unit that a shard holds."""
    return spec.geometry.unit // spec.geometry.tp
