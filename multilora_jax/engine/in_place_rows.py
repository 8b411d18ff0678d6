"""Adapters that kernels read in place: where the rank rows of those in use lie, as a table on the device.

What `row_buffers.RowBuffers` is to dense buffers of rows, without a row being copied: an adapter that joins costs the
upload of its unit addresses, a thousandth of its weights, so there is nothing to stage ahead. Its rows stand side by
side in the table; when they find no gap that is wide enough, everybody else's are dropped and placed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from multilora_jax.engine.batch import BuiltBatch
from multilora_jax.engine.lora_plans import build_plan
from multilora_jax.engine.programs import Programs
from multilora_jax.engine.rank_rows import ROW_BLOCK, HostTables, RowPlan, num_slots, reach_of
from multilora_jax.engine.vocab_tables import vocab_tables
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.layout import Reach
from multilora_jax.memory.geometry import MODULES, PoolGeometry
from multilora_jax.models.batch import ExtraTables, ForwardBatch, LoRARows, UnitTable
from multilora_jax.models.in_place import table_columns
from pallas_kernels.segmented_lora import Plan

PagesOf = Callable[[Adapter], list[int]]


class _Place:
    """Rows [first, first + rows) of the table, for one adapter in some pages."""

    def __init__(self, slot: int, first: int, rows: int):
        self.slot = slot
        self.first = first
        self.rows = rows
        self.pages: list[int] = []  # those that the table has its addresses for


class InPlaceRows:
    """The table of one runner; it has RowBuffers' methods.

    Args:
        geometry: of the pool.
        programs: compiled ones.
        put: places a tree of host arrays on the devices.
        buckets: sizes of steps in rank rows, ascending; the table has room for the largest. Empty for a runner without
            adapters.

    Attributes:
        buckets: the sizes.
        tables: what the rows are, without extras; None before the first adapter.
        extra: of extended steps.
    """

    def __init__(self, geometry: PoolGeometry, programs: Programs, put: Callable[[Any], Any], buckets: list[int]):
        self.tables: LoRARows | None = None
        self.extra: ExtraTables | None = None
        self.buckets = buckets
        self._geometry = geometry
        self._programs = programs
        self._put = put
        self._num_rows = max(buckets, default=0)
        self._columns = table_columns(geometry)
        self._places: dict[Adapter, _Place] = {}  # least recently used first
        self._table: UnitTable | None = None
        self._changed = False
        self._extra_key: list[Any] = []
        self._plan_key: Any = None
        self._plan: Plan = ()
        X = num_slots(self._num_rows)
        self.first_row_X, self.num_rows_X = np.zeros((2, X), np.int64)

    @property
    def num_slots(self) -> int:
        """X: adapters that the table has room for."""
        return num_slots(self._num_rows)

    def layers_for(self, reach: Reach) -> UnitTable:
        """What the layers of a step with adapters read."""
        table = self._table
        if table is None:
            table = self._table = self._programs.get("units")()
        return table

    def slot_of(self, adapter: Adapter) -> int:
        """The adapter's column in mix_SX."""
        return self._places[adapter].slot

    def holds(self, adapter: Adapter) -> bool:
        """Whether a step can use a resident adapter without waiting for a copy: always."""
        return True

    def reset(self) -> None:
        """Forgets all places."""
        self._places.clear()
        self.num_rows_X[:] = 0
        self._changed = True

    def keep_largest(self) -> None:
        """Leaves only the largest size, so that there is less to compile."""
        self.buckets = self.buckets[-1:]

    def forget(self, adapter: Adapter) -> None:
        """Drops an adapter that was unloaded or made room."""
        place = self._places.pop(adapter, None)
        if place is not None:
            self.num_rows_X[place.slot] = 0

    def saw_step(self, seconds: float, num_prompt_tokens: int = 0) -> None:
        """Nothing is rationed by the time of a step."""

    def time_copies(self, pool: jax.Array) -> None:
        """Runs the program once that later writes into the table."""
        if self.buckets:
            g = self._geometry
            self._insert(0, np.full((g.num_layers, ROW_BLOCK, self._width), -1, np.int32))

    def stage(
        self,
        active: list[Adapter],
        wanted: list[Adapter],
        pool: jax.Array,
        pages_of: PagesOf,
        *,
        empty_seats: float = 0.0,
        spent_s: float = 0.0,
    ) -> None:
        """Nothing has to be prepared."""

    def activate(
        self,
        adapters: list[Adapter],
        pool: jax.Array,
        pages_of: PagesOf,
        *,
        ahead: Iterable[Adapter] = (),
        after_idle: bool = False,
        num_prompt_tokens: int = 0,
    ) -> RowPlan:
        """Brings table and extras up to date for the adapters of a step; arguments as of RowBuffers.activate.

        Raises:
            ValueError: they have more rank rows than the largest size (the scheduler's budget prevents it).
        """
        if not adapters:
            return RowPlan(0)
        reach, need = reach_of(adapters), sum(map(_rows_of, adapters))
        fitting = [b for b in (self.buckets[-1:] if reach is Reach.EXTENDED else self.buckets) if b >= need]
        if not fitting:
            raise ValueError(f"{need} rank rows in one step exceed the largest bucket {self.buckets[-1]}")
        self._place(adapters)
        for adapter in adapters:
            place, pages = self._places[adapter], pages_of(adapter)
            # An adapter may have been evicted and brought back to other pages.
            if place.pages != pages:
                self._write(adapter, place, list(pages))
        if self._changed or self.tables is None:
            self._upload_tables()
        if reach is Reach.EXTENDED:
            self._upload_extra(adapters, pages_of)
        return RowPlan(fitting[0], reach)

    def plan_step(self, built: BuiltBatch, plan: RowPlan) -> ForwardBatch:
        """The batch with its plan of tokens and rank rows; only vocabularies still need the factors themselves."""
        batch, num_prompt = built.batch, sum(count for _, _, count in built.chunks)
        mix_SX, row_P = np.asarray(batch.mix_SX), np.asarray(batch.row_P)
        # Decodes go on as they were for many steps.
        rows = (self.first_row_X.tobytes(), self.num_rows_X.tobytes())
        key = (built.shape, plan.bucket, mix_SX.tobytes(), row_P.tobytes(), num_prompt, rows)
        if key != self._plan_key:
            self._plan_key = key
            self._plan = build_plan(
                built.shape, plan.bucket, mix_SX, row_P, num_prompt, self.first_row_X, self.num_rows_X
            )
        return replace(batch, plan=self._plan, mix_SX=batch.mix_SX if plan.reach is Reach.EXTENDED else None)

    def _place(self, adapters: list[Adapter]) -> None:
        keep = set(adapters)
        for adapter in adapters:
            if adapter in self._places:
                self._places[adapter] = self._places.pop(adapter)  # most recently used last
                continue
            first = self._gap(_rows_of(adapter))
            for idle in [a for a in self._places if a not in keep]:
                if first is not None:
                    break
                self.forget(idle)
                first = self._gap(_rows_of(adapter))
            if first is None:  # gaps between adapters of this step: all of them fit where they stand side by side
                self.reset()
                self._place(adapters)
                return
            slot = int(np.flatnonzero(self.num_rows_X == 0)[0])
            self._places[adapter] = _Place(slot, first, _rows_of(adapter))
            self.first_row_X[slot], self.num_rows_X[slot] = first, adapter.num_rows
            self._changed = True

    def _gap(self, rows: int) -> int | None:
        """The first row of the first gap of so many rows."""
        start = 0
        for place in sorted(self._places.values(), key=lambda place: place.first):
            if place.first - start >= rows:
                return start
            start = place.first + place.rows
        return start if self._num_rows - start >= rows else None

    @property
    def _width(self) -> int:
        """U of the table."""
        return max(columns.stop for columns in self._columns.values())

    def _write(self, adapter: Adapter, place: _Place, pages: list[int]) -> None:
        """Puts an adapter's unit addresses into the table."""
        units_LRU = np.full((self._geometry.num_layers, place.rows, self._width), -1, np.int32)
        for number, module in enumerate(MODULES):
            pair = adapter.layout.row_units(number, 0, place.rows)
            for kind, own_LRU in zip("ab", pair, strict=True):
                units_LRU[:, :, self._columns[module, kind]] = own_LRU
        units_LRU = self._geometry.unit_addresses(np.asarray(pages), units_LRU)
        for row in range(0, place.rows, ROW_BLOCK):
            self._insert(place.first + row, units_LRU[:, row : row + ROW_BLOCK])
        place.pages = pages

    def _insert(self, row: int, units_LCU: np.ndarray) -> None:
        table, program = self.layers_for(Reach.PROJECTIONS), self._programs.get("insert_units")
        self._table = program(table, np.ascontiguousarray(units_LCU), np.int32(row))

    def _host_tables(self) -> HostTables:
        tables = HostTables.empty(self._geometry.num_layers, self._num_rows)
        for adapter, place in self._places.items():
            own = adapter.layout.row_tables()
            tables.owner_R[place.first : place.first + place.rows] = place.slot
            rows = slice(place.first, place.first + adapter.num_rows)
            for name in ("scale_LMR", "const_LMR", "gain_LMR", "norm_L2R"):
                getattr(tables, name)[..., rows] = getattr(own, name)
        return tables

    def _upload_tables(self) -> None:
        host = self._host_tables()
        owner_R, scale_LMR, const_LMR = self._put((host.owner_R, host.scale_LMR, host.const_LMR))
        self.tables = LoRARows([], owner_R, scale_LMR, const_LMR, None)
        self.extra, self._changed = None, False

    def _upload_extra(self, adapters: list[Adapter], pages_of: PagesOf) -> None:
        key = [(adapter, list(pages_of(adapter))) for adapter in adapters if adapter.layout.vocab is not None]
        if self.extra is None or key != self._extra_key:
            host, num_pages = self._host_tables(), self._geometry.num_pages
            vocab: Any = vocab_tables(adapters, pages_of, self.slot_of, num_pages, self.num_slots)
            self.extra = ExtraTables(*self._put((host.gain_LMR, host.norm_L2R, vocab)))
            self._extra_key = key


def _rows_of(adapter: Adapter) -> int:
    """Rows of the table that an adapter takes: whole blocks."""
    return -(-adapter.num_rows // ROW_BLOCK) * ROW_BLOCK
