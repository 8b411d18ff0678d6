"""Adapter residency under random use, against a model of the books."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from multilora_jax.memory.allocator import PageKind
from tests.lora.fake_adapter import FakeAdapter, make

NUM_ADAPTERS, CAP, POOL = 6, 9, 12
WHICH = st.integers(0, NUM_ADAPTERS - 1)


class CacheMachine(RuleBasedStateMachine):
    """Against a model: references, claims, pins, drops, writes and the order of last use, by plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator, self.cache = make(num_pages=POOL + 1, max_adapter_pages=CAP)
        self.adapters = [FakeAdapter(f"a{i}", num_pages=1 + i % 4) for i in range(NUM_ADAPTERS)]
        self.references: Counter[FakeAdapter] = Counter()
        self.claims: Counter[FakeAdapter] = Counter()
        self.residents: set[FakeAdapter] = set()
        self.order: list[FakeAdapter] = []  # idle, least recently used first
        self.to_write: dict[FakeAdapter, list[int]] = {}  # indices, first reserved first
        self.written: dict[FakeAdapter, list[int]] = {}  # page ids, in order
        self.pinned: set[FakeAdapter] = set()
        self.dropped: set[FakeAdapter] = set()
        self.lost: set[FakeAdapter] = set()
        self.unused: set[FakeAdapter] = set()
        self.expected: dict[FakeAdapter, tuple[float, ...]] = {}
        self.kv: list[int] = []

    def rank(self, adapter: FakeAdapter) -> tuple[float, ...]:
        if adapter in self.to_write:
            return (2, *self.expected.get(adapter, ()))
        return (1, *self.expected[adapter]) if adapter in self.expected else ()

    def eviction_order(self) -> list[FakeAdapter]:
        return sorted(self.order, key=self.rank)  # stable: by age within a rank

    def go(self, adapter: FakeAdapter, *, evicted: bool) -> None:
        if evicted and adapter in self.unused:
            self.lost.add(adapter)
        self.residents.remove(adapter)
        if adapter in self.order:
            self.order.remove(adapter)
        self.to_write.pop(adapter, None)
        self.written.pop(adapter, None)

    def settle(self, adapter: FakeAdapter) -> None:
        if adapter not in self.residents or self.references[adapter] or adapter in self.pinned:
            return
        if adapter in self.dropped and not self.claims[adapter]:
            self.go(adapter, evicted=False)
        elif adapter not in self.order:
            self.order.append(adapter)

    @rule(i=WHICH, protect=st.sets(WHICH, max_size=3), spare=st.integers(0, 2))
    def reserve(self, i: int, protect: set[int], spare: int) -> None:
        adapter, protected = self.adapters[i], {self.adapters[j] for j in protect}
        if adapter in self.residents:
            assert self.cache.reserve(adapter, protected, spare)
            return
        idle = [a for a in self.eviction_order() if a not in protected]
        victims: list[FakeAdapter] = []

        def held() -> int:
            return sum(a.num_pages for a in self.residents) - sum(a.num_pages for a in victims)

        while held() + adapter.num_pages > CAP or held() + adapter.num_pages + len(self.kv) > POOL:
            if len(victims) == len(idle):
                break
            victims.append(idle[len(victims)])
        fits = held() + adapter.num_pages <= CAP and held() + adapter.num_pages + len(self.kv) <= POOL
        rest = sum(a.num_pages for a in idle[len(victims) :])
        fits = fits and POOL - len(self.kv) - held() - adapter.num_pages + rest >= spare
        assert self.cache.reserve(adapter, protected, spare) == fits
        if fits:
            for victim in victims:
                self.go(victim, evicted=True)
            self.residents.add(adapter)
            self.unused.add(adapter)
            self.to_write[adapter] = list(range(adapter.num_pages))
            self.settle(adapter)

    @rule(max_pages=st.one_of(st.none(), st.integers(1, 5)))
    def write(self, max_pages: int | None) -> None:
        expected = [(a, i) for a, indices in self.to_write.items() for i in indices][:max_pages]
        writes = self.cache.take_writes(max_pages)
        assert [(w.adapter, w.index) for w in writes] == expected
        for adapter, index, page_id in writes:
            self.written.setdefault(adapter, []).append(page_id)
            self.to_write[adapter].remove(index)
            if not self.to_write[adapter]:
                del self.to_write[adapter]

    @rule(i=WHICH)
    def acquire(self, i: int) -> None:
        adapter = self.adapters[i]
        ready = adapter in self.residents and adapter not in self.to_write
        assert self.cache.acquire(adapter) == ready
        if ready:
            self.references[adapter] += 1
            self.lost.discard(adapter)
            self.unused.discard(adapter)
            if adapter in self.order:
                self.order.remove(adapter)

    @rule(i=WHICH)
    def release(self, i: int) -> None:
        adapter = self.adapters[i]
        if self.references[adapter]:
            self.references[adapter] -= 1
            self.cache.release(adapter)
            self.settle(adapter)

    @rule(i=WHICH)
    def claim(self, i: int) -> None:
        self.cache.claim(self.adapters[i])
        self.claims[self.adapters[i]] += 1

    @rule(i=WHICH)
    def unclaim(self, i: int) -> None:
        adapter = self.adapters[i]
        if self.claims[adapter]:
            self.claims[adapter] -= 1
            self.cache.unclaim(adapter)
            self.settle(adapter)
            self.replace_if_gone(i)

    @rule(i=WHICH)
    def pin(self, i: int) -> None:
        adapter = self.adapters[i]
        pinned_pages = sum(a.num_pages for a in self.pinned | {adapter})
        if adapter not in self.dropped and pinned_pages <= 4:
            self.cache.pin(adapter)
            self.pinned.add(adapter)
            if adapter in self.order:
                self.order.remove(adapter)

    @rule(i=WHICH)
    def unpin(self, i: int) -> None:
        adapter = self.adapters[i]
        self.cache.unpin(adapter)
        if adapter in self.pinned:
            self.pinned.remove(adapter)
            self.settle(adapter)

    @rule(i=WHICH)
    def unload(self, i: int) -> None:
        adapter = self.adapters[i]
        self.cache.drop(adapter)
        self.dropped.add(adapter)
        self.pinned.discard(adapter)
        self.settle(adapter)
        self.replace_if_gone(i)

    def replace_if_gone(self, i: int) -> None:
        """The adapter's place is taken by a new version once nobody uses or names the old one."""
        old = self.adapters[i]
        if old in self.dropped and not self.references[old] and not self.claims[old]:
            assert not self.cache.is_resident(old)
            self.expected.pop(old, None)
            self.adapters[i] = FakeAdapter(old.name, old.num_pages)

    @rule(urgency=st.dictionaries(WHICH, st.integers(0, 9), max_size=4))
    def expect(self, urgency: dict[int, int]) -> None:
        self.expected = {self.adapters[i]: (n,) for i, n in urgency.items()}
        self.cache.expect(self.expected)

    @rule(num_pages=st.integers(0, 5))
    def take_kv_pages(self, num_pages: int) -> None:
        self.kv += self.allocator.allocate(num_pages, PageKind.KV) or []

    @rule()
    def give_kv_pages_back(self) -> None:
        self.allocator.free(self.kv, PageKind.KV)
        self.kv = []

    @rule(num_items=st.integers(0, 3))
    def evict(self, num_items: int) -> None:
        victims = list(self.cache.order)[:num_items]
        assert victims == self.eviction_order()[:num_items]
        self.cache.order.evict(victims)
        for victim in victims:
            assert isinstance(victim, FakeAdapter)
            self.go(victim, evicted=True)

    @invariant()
    def books_agree(self) -> None:
        self.allocator.check_integrity()
        self.cache.check_integrity()
        assert set(self.cache.residents()) == self.residents
        assert list(self.cache.order) == self.eviction_order()
        assert self.cache.pages_available() == POOL - len(self.kv) - sum(
            a.num_pages for a in self.residents if a not in self.order
        )
        assert self.allocator.count(PageKind.ADAPTER) <= CAP
        for adapter in self.adapters:
            assert self.cache.references(adapter) == self.references[adapter]
            assert self.cache.was_lost(adapter) == (adapter in self.lost)
            assert self.cache.is_pinned(adapter) == (adapter in self.pinned)
        for adapter in self.residents:
            written = self.written.get(adapter, [])
            assert self.cache.pages_of(adapter)[: len(written)] == written
            assert self.cache.is_ready(adapter) == (len(written) == adapter.num_pages)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
