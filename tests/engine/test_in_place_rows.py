"""The table of unit addresses: places side by side, addresses that follow an adapter to other pages, tables of rows."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from multilora_jax.engine.in_place_rows import InPlaceRows
from multilora_jax.lora.layout import Reach, RowTables
from multilora_jax.memory.geometry import MODULES, PoolGeometry
from multilora_jax.models.batch import UnitTable
from multilora_jax.models.in_place import GROUPS, table_columns

GEOMETRY = PoolGeometry(
    num_layers=2, num_pages=9, page_tokens=4, hidden=32, q_dim=32, kv_dim=16, ffn=48, num_kv_heads=2, head_dim=8
)


PAGES = [1, 5, 2, 3]


class Adapter:
    """One with so many rank rows, whose row r of a module has the units r and r + 1 of its own."""

    def __init__(self, num_rows: int, reach=Reach.PROJECTIONS):
        self.num_rows = num_rows
        self.layout: Any = self
        self.reach = reach
        self.vocab = None

    def row_units(self, module, first_row, num_rows):
        rows_R = np.arange(first_row, first_row + num_rows)
        live_R = np.where(rows_R < self.num_rows, rows_R, -1)
        lengths = (length // GEOMETRY.unit for length in GEOMETRY.module_dims(MODULES[module]))
        return tuple(np.broadcast_to(live_R[None, :, None], (2, num_rows, n)).astype(np.int32) for n in lengths)

    def row_tables(self):
        def table(value):
            return np.full((2, len(MODULES), self.num_rows), value, np.float32)

        return RowTables(table(self.num_rows), table(0), table(0), np.zeros((2, 2, self.num_rows), np.float32))


def insert(table, units_LCU, start):
    units_LRU: Any = np.array(table.units_LRU)
    units_LRU[:, start : start + units_LCU.shape[1]] = units_LCU
    return UnitTable(units_LRU)


@pytest.fixture
def rows():
    width = max(columns.stop for columns in table_columns(GEOMETRY).values())
    made = {
        "units": lambda: UnitTable(np.full((2, 64, width), -1, np.int32)),  # pyright: ignore[reportArgumentType]
        "insert_units": insert,
    }
    return InPlaceRows(GEOMETRY, SimpleNamespace(get=made.__getitem__), lambda tree: tree, [16, 64])  # type: ignore


def addresses(rows, adapter):
    """int32[rows, L] of the first unit of each of its rows, and those behind them up to the next block."""
    first = rows._places[adapter].first
    return rows.layers_for(Reach.PROJECTIONS).units_LRU[:, first : first + adapter.num_rows, 0].T


def test_columns_of_a_group_lie_together():
    columns = table_columns(GEOMETRY)
    for group in GROUPS:
        for kind in "ab":
            edges = [columns[module, kind] for module in group]
            assert [edge.start for edge in edges[1:]] == [edge.stop for edge in edges[:-1]]
    assert sum(c.stop - c.start for c in columns.values()) == max(c.stop for c in columns.values())


def test_addresses_follow_the_pages(rows):
    adapter = Adapter(3)
    for pages in ([4], [4], [7]):
        plan = rows.activate([adapter], None, lambda _, pages=pages: pages)
        assert (plan.bucket, plan.reach, plan.copies) == (16, Reach.PROJECTIONS, [])
        wanted = GEOMETRY.unit_addresses(np.array(pages), np.arange(3))
        np.testing.assert_array_equal(addresses(rows, adapter), np.stack([wanted] * 2, 1))
    assert rows.holds(adapter)


def test_what_adapters_are_is_in_the_tables(rows):
    few, many = Adapter(3), Adapter(20)
    assert rows.activate([few, many], None, lambda _: PAGES).bucket == 64
    for adapter in (few, many):
        first = rows.first_row_X[rows.slot_of(adapter)]
        assert rows.num_rows_X[rows.slot_of(adapter)] == adapter.num_rows
        scale_R = rows.tables.scale_LMR[0, 0]
        np.testing.assert_array_equal(scale_R[first : first + adapter.num_rows], adapter.num_rows)
    assert np.count_nonzero(rows.tables.scale_LMR[0, 0]) == 23


def test_idle_adapters_make_room_and_gaps_are_closed(rows):
    eight = [Adapter(8) for _ in range(8)]
    rows.activate(eight, None, lambda _: PAGES)
    # Every second one stays: two gaps of a block are no place for a rank of 16, four are.
    kept, large = eight[::2], Adapter(16)
    rows.activate([*kept, large], None, lambda _: PAGES)
    places = sorted((rows._places[a].first, rows._places[a].rows) for a in [*kept, large])
    for (first, size), (after, _) in itertools.pairwise(places):
        assert first + size <= after
    assert {rows.slot_of(a) for a in [*kept, large]} <= set(range(8))
    assert np.flatnonzero(rows.num_rows_X).size == len(rows._places)
    for adapter in (*kept, large):
        assert (addresses(rows, adapter) >= 0).all()


def test_least_recently_used_goes_first(rows):
    old, warm, fresh = Adapter(32), Adapter(24), Adapter(16)
    for adapter in (old, warm, old, fresh):
        rows.activate([adapter], None, lambda _: PAGES)
    assert set(rows._places) == {old, fresh}
    rows.forget(old)
    assert set(rows._places) == {fresh}
    assert np.flatnonzero(rows.num_rows_X).tolist() == [rows.slot_of(fresh)]


def test_more_rows_than_there_are_is_an_error(rows):
    with pytest.raises(ValueError, match="72 rank rows in one step exceed the largest bucket 64"):
        rows.activate([Adapter(64), Adapter(1)], None, lambda _: PAGES)
    assert rows.activate([], None, lambda _: PAGES).bucket == 0
