"""The cells that a viewer is sent are what the pool's books say, whole or as changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_jax.engine import pool_view
from multilora_jax.engine.pool_view import CACHED, FIRST_SLOT, FREE, KV, MAX_SLOTS, OTHER_ADAPTERS, PoolView, Slots
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator, PageKind


class Adapter:
    def __init__(self, name: str, num_pages: int):
        self.name, self.num_pages, self.rank, self.num_rows = name, num_pages, 8, 8


def make_engine(num_pages: int) -> Any:
    allocator = PageAllocator(num_pages + 1)
    return SimpleNamespace(allocator=allocator, cache=AdapterCache(allocator))


def look(view: PoolView, engine: Any) -> None:
    view.update(pool_view.capture(engine))


def cells(
    view: PoolView, since: int = -1, into: dict[int, tuple[int, int]] | None = None
) -> dict[int, tuple[int, int]]:
    """Cell to (code, used), as a viewer that holds `into` knows them after an answer."""
    found = dict(into or {})
    for first, length, code, used in view.runs(since):
        found.update(dict.fromkeys(range(first, first + length), (code, used)))
    return found


def test_each_kind_of_page_has_its_code():
    engine, view = make_engine(10), PoolView(10)
    engine.cache.reserve(Adapter("upper", 3))
    engine.allocator.allocate(2, PageKind.KV)
    engine.cache.reserve(Adapter("json", 2))
    engine.allocator.allocate(1, PageKind.CACHED)
    look(view, engine)
    upper, json = view.slots.take("upper"), view.slots.take("json")
    assert upper == FIRST_SLOT
    assert json == FIRST_SLOT + 1
    assert view.runs() == [
        (0, 3, upper, 1), (3, 2, KV, 1), (5, 2, json, 1), (7, 1, CACHED, 1), (8, 2, FREE, 0)
    ]  # fmt: skip
    assert view.pages_by_slot == {upper: 3, json: 2}


def test_a_large_pool_is_shown_by_the_most_of_what_is_used(monkeypatch):
    monkeypatch.setattr(pool_view, "MAX_CELLS", 3)
    engine, view = make_engine(8), PoolView(8)  # cells of 3, 3 and 2 pages
    engine.allocator.allocate(1, PageKind.CACHED)
    engine.allocator.allocate(3, PageKind.KV)
    look(view, engine)
    assert (view.pages_per_cell, view.num_cells) == (3, 3)
    assert view.runs() == [(0, 1, KV, 3), (1, 1, KV, 1), (2, 1, FREE, 0)]


def test_more_adapters_than_slots():
    slots = Slots()
    names = [f"n{i}" for i in range(MAX_SLOTS)]
    assert [slots.take(name) for name in names] == list(range(FIRST_SLOT, FIRST_SLOT + MAX_SLOTS))
    assert slots.take("late") == OTHER_ADAPTERS
    assert slots.take("late", resident={"late", *names[1:]}) == FIRST_SLOT, "one without pages gives way"
    assert slots.take("n0", resident={"late", *names[1:]}) == OTHER_ADAPTERS
    assert slots.take("n5") == FIRST_SLOT + 5, "the others keep theirs"
    slots.keep({"n7"})
    assert (slots.take("new"), slots.take("n7")) == (FIRST_SLOT, FIRST_SLOT + 7)


@pytest.mark.parametrize("most_cells", [1000, 7])
@given(data=st.data())
def test_changes_add_up_to_the_whole(most_cells, data):
    """A viewer that looks now and then knows the same as one that is told everything."""
    engine = make_engine(40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_view, "MAX_CELLS", most_cells)
        view = PoolView(40)
    held: list[list[int]] = []
    known: dict[int, tuple[int, int]] = {}
    since = -1
    for step in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["kv", "free", "adapter", "drop"]))
        if action == "kv":
            held.append(engine.allocator.allocate(data.draw(st.integers(0, 4)), PageKind.KV) or [])
        elif action == "free" and held:
            engine.allocator.free(held.pop(data.draw(st.integers(0, len(held) - 1))), PageKind.KV)
        elif action == "adapter":
            engine.cache.reserve(Adapter(f"a{step}", data.draw(st.integers(1, 5))))
        elif action == "drop" and engine.cache.residents():
            engine.cache.drop(engine.cache.residents()[0])
        look(view, engine)
        if data.draw(st.booleans()):
            known, since = cells(view, since, known), view.sequence
    known = cells(view, since, known)
    assert known == cells(view)
    assert sum(used for _, used in known.values()) == 40 - engine.allocator.num_free
    assert sum(view.pages_by_slot.values()) == engine.allocator.count(PageKind.ADAPTER)


def test_a_page_that_went_to_another_adapter_is_a_change():
    engine, view = make_engine(4), PoolView(4)
    first = Adapter("first", 4)
    engine.cache.reserve(first)
    look(view, engine)
    seen = view.sequence
    engine.cache.drop(first)
    engine.cache.reserve(Adapter("second", 4))
    look(view, engine)
    assert view.runs(seen) == [(0, 4, view.slots.take("second"), 1)]
    assert view.runs(view.sequence) == []


def test_kinds_are_copied_as_bytes():
    engine = make_engine(3)
    engine.allocator.allocate(1, PageKind.CACHED)
    assert engine.allocator.kind_bytes() == bytes([PageKind.CACHED, PageKind.FREE, PageKind.FREE])
    assert list(engine.allocator.kind_bytes()) == engine.allocator.kinds()


def test_a_capture_is_not_changed_by_what_follows():
    engine, view = make_engine(4), PoolView(4)
    books = pool_view.capture(engine)
    engine.allocator.allocate(4, PageKind.KV)
    view.update(books)
    assert view.runs() == [(0, 4, FREE, 0)]


def test_a_million_pages_are_shown_in_milliseconds():
    engine, view = make_engine(1_000_000), PoolView(1_000_000)
    engine.cache.reserve(Adapter("big", 300_000))
    engine.allocator.allocate(200_000, PageKind.KV)
    look(view, engine)
    codes = {code for _, _, code, _ in view.runs()}
    assert view.num_cells <= pool_view.MAX_CELLS
    assert codes == {KV, FREE, FIRST_SLOT}
    assert len(view.runs()) <= 6
    assert np.sum([length for _, length, _, _ in view.runs()]) == view.num_cells
