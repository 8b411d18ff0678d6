"""Adapter residency under random use, against a model of the books."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from multilora_jax.errors import UserError
from multilora_jax.memory.allocator import PageKind
from tests.lora.fake_adapter import FakeAdapter, make


class CacheMachine(RuleBasedStateMachine):
    """Against a model: reference counts, pins, drops and the order of last use, by plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator, self.cache = make(num_pages=13, max_adapter_pages=9, max_pinned_pages=4)
        self.adapters = [FakeAdapter(f"a{i}", num_pages=1 + i % 4) for i in range(6)]
        self.references = dict.fromkeys(self.adapters, 0)
        self.order: list[FakeAdapter] = []  # idle and resident, least recent first
        self.pinned: set[FakeAdapter] = set()
        self.dropped: set[FakeAdapter] = set()
        self.written: dict[FakeAdapter, list[int]] = {}
        self.kv: list[int] = []

    @property
    def expected_residents(self) -> set[FakeAdapter]:
        return {a for a in self.adapters if self.references[a]} | self.pinned | set(self.order)

    def expect_load(self, adapter: FakeAdapter) -> bool:
        """Plays the load on the model: whether it succeeds, and who has to go."""
        if adapter in self.expected_residents:
            return True
        residents, idle = self.expected_residents, list(self.order)
        while True:
            held = sum(a.num_pages for a in residents)
            if held + adapter.num_pages <= 9 and held + adapter.num_pages + len(self.kv) <= 12:
                break
            if not idle:
                return False
            residents.discard(idle.pop(0))
        self.order = idle
        return True

    @rule(i=st.integers(0, 5))
    def acquire(self, i: int) -> None:
        adapter = self.adapters[i]
        expected = self.expect_load(adapter)
        assert self.cache.can_acquire(adapter) == expected
        assert self.cache.acquire(adapter) == expected
        if expected:
            self.references[adapter] += 1
            if adapter in self.order:
                self.order.remove(adapter)

    @rule(i=st.integers(0, 5))
    def release(self, i: int) -> None:
        adapter = self.adapters[i]
        if self.references[adapter]:
            self.cache.release(adapter)
            self.references[adapter] -= 1
            if not self.references[adapter] and adapter not in self.pinned and adapter not in self.dropped:
                self.order.append(adapter)

    @rule(i=st.integers(0, 5))
    def pin(self, i: int) -> None:
        adapter = self.adapters[i]
        if adapter in self.dropped or adapter in self.pinned:
            return
        if sum(a.num_pages for a in self.pinned) + adapter.num_pages > 4:
            with pytest.raises(UserError):
                self.cache.pin(adapter)
            return
        expected = self.expect_load(adapter)
        assert self.cache.pin(adapter) == expected
        if expected:
            self.pinned.add(adapter)
            if adapter in self.order:
                self.order.remove(adapter)

    @rule(i=st.integers(0, 5))
    def unpin(self, i: int) -> None:
        adapter = self.adapters[i]
        self.cache.unpin(adapter)
        if adapter in self.pinned:
            self.pinned.remove(adapter)
            if not self.references[adapter]:
                self.order.append(adapter)

    @rule(i=st.integers(0, 5))
    def unload(self, i: int) -> None:
        """The adapter's place is taken by a new version once nobody runs the old one."""
        adapter = self.adapters[i]
        self.cache.drop(adapter)
        self.dropped.add(adapter)
        self.pinned.discard(adapter)
        if adapter in self.order:
            self.order.remove(adapter)
        if not self.references[adapter]:
            del self.references[adapter]
            self.adapters[i] = FakeAdapter(adapter.name, adapter.num_pages)
            self.references[self.adapters[i]] = 0

    @rule(num_pages=st.integers(0, 5))
    def take_kv_pages(self, num_pages: int) -> None:
        self.kv += self.allocator.allocate(num_pages, PageKind.KV) or []

    @rule()
    def give_kv_pages_back(self) -> None:
        self.allocator.free(self.kv, PageKind.KV)
        self.kv = []

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages: int) -> None:
        freed = self.cache.evict_idle(num_pages)
        expected = 0
        while expected < num_pages and self.order:
            expected += self.order.pop(0).num_pages
        assert freed == expected

    @rule()
    def write(self) -> None:
        self.written.update(self.cache.take_pending_writes())

    @invariant()
    def books_agree(self) -> None:
        self.allocator.check_integrity()
        self.cache.check_integrity()
        assert set(self.cache.residents()) == self.expected_residents
        assert list(self.cache._idle) == self.order
        assert all(self.cache.references(a) == n for a, n in self.references.items())
        assert self.allocator.count(PageKind.ADAPTER) <= 9
        pending = self.cache._pending
        for adapter in self.cache.residents():
            assert adapter in pending or self.written[adapter] == self.cache.pages_of(adapter)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
