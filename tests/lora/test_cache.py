"""Adapter residency: reservations, writes, references, eviction, pins, claims and unloads."""

from __future__ import annotations

from typing import Any

import pytest

from multilora_jax.errors import ConfigError
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.lora.residency import PageWrite
from multilora_jax.memory.allocator import PageAllocator, PageKind, PoolIntegrityError
from tests.lora.fake_adapter import FakeAdapter, evict, fakes, load, make, use

Cache = AdapterCache[FakeAdapter]


def stage(cache: Cache, adapter: FakeAdapter) -> tuple[bool, bool, bool]:
    return cache.is_resident(adapter), cache.is_loading(adapter), cache.is_ready(adapter)


def test_adapter_is_absent_then_loading_then_ready():
    allocator, cache = make()
    a = FakeAdapter("a", 3)
    assert stage(cache, a) == (False, False, False)
    assert not cache.acquire(a)
    assert cache.reserve(a)
    assert stage(cache, a) == (True, True, False)
    assert cache.is_coming(a)
    assert not cache.acquire(a)
    assert allocator.count(PageKind.ADAPTER) == 3
    pages = cache.pages_of(a)
    assert cache.take_writes(2) == [PageWrite(a, 0, pages[0]), PageWrite(a, 1, pages[1])]
    assert stage(cache, a) == (True, True, False)
    cache.check_integrity()
    assert cache.take_writes(2) == [PageWrite(a, 2, pages[2])]
    assert stage(cache, a) == (True, False, True)
    assert not cache.is_coming(a)
    assert cache.take_writes() == []
    assert cache.acquire(a)
    cache.check_integrity()


def test_reserve_twice_is_one_load():
    _, cache = make()
    a = FakeAdapter("a")
    assert cache.reserve(a)
    assert cache.reserve(a)
    assert len(cache.take_writes()) == 2
    assert cache.reserve(a)
    assert cache.take_writes() == []
    assert (cache.loads, cache.misses) == (1, 1)


def test_writes_are_bounded_and_in_the_order_of_reservation_but_the_next_request_s_come_first():
    _, cache = make()
    a, b, c = fakes("abc")
    for adapter in (a, b, c):
        assert cache.reserve(adapter)
    assert [(w.adapter.name, w.index) for w in cache.take_writes(3)] == [("a", 0), ("a", 1), ("b", 0)]
    cache.expect({a: (0,), b: (0,), c: (0,)}, next_up=[c])
    assert [(w.adapter.name, w.index) for w in cache.take_writes(1)] == [("c", 0)]
    assert [(w.adapter.name, w.index) for w in cache.take_writes()] == [("c", 1), ("b", 1)]
    assert all(cache.is_ready(adapter) for adapter in (a, b, c))


def test_acquisitions_count_as_hits_but_for_the_one_that_the_load_was_made_for():
    _, cache = make()
    a, p = fakes("ap")
    load(cache, a)
    assert (cache.hits, cache.misses, cache.loads) == (0, 1, 1)
    assert cache.acquire(a)
    assert (cache.hits, cache.misses) == (0, 1)
    assert cache.acquire(a)
    assert cache.references(a) == 2
    assert (cache.hits, cache.misses) == (1, 1)
    cache.pin(p)
    load(cache, p)  # no request caused this one
    assert (cache.hits, cache.misses, cache.loads) == (1, 1, 2)
    assert cache.acquire(p)
    assert (cache.hits, cache.misses, cache.evictions) == (2, 1, 0)


@pytest.mark.parametrize(("policy", "left"), [("lru", "acd"), ("fifo", "bcd")])
def test_policy_decides_which_idle_adapter_goes_first(policy: Any, left: str):
    _, cache = make(num_pages=7, policy=policy)
    a, b, c, d = fakes("abcd")
    use(cache, a, b, c)
    use(cache, a)
    use(cache, d)
    assert "".join(sorted(x.name for x in cache.residents())) == left
    assert cache.evictions == 1
    cache.check_integrity()


def test_recency_is_the_last_release_not_the_last_acquire():
    _, cache = make(num_pages=5)
    a, b, c = fakes("abc")
    load(cache, a)
    assert cache.acquire(a)
    use(cache, b)
    cache.release(a)
    use(cache, c)
    assert cache.residents() == [a, c]


def test_adapter_in_use_is_never_evicted():
    allocator, cache = make(num_pages=5)
    a, b = fakes("ab")
    load(cache, a)
    assert cache.acquire(a)
    use(cache, b)
    evict(cache)
    assert cache.residents() == [a]
    assert not cache.reserve(FakeAdapter("c", 3))
    assert allocator.num_free == 2
    assert (cache.misses, cache.loads) == (2, 2)


def test_reservation_that_cannot_succeed_evicts_nothing():
    _, cache = make(num_pages=7)
    a, b, big = FakeAdapter("a"), FakeAdapter("b"), FakeAdapter("big", 5)
    load(cache, a)
    assert cache.acquire(a)
    use(cache, b)
    assert not cache.reserve(big)
    assert cache.residents() == [a, b]
    assert (cache.evictions, cache.loads) == (0, 2)
    cache.check_integrity()


def test_protected_adapters_stay_and_spare_pages_are_left():
    _, cache = make(num_pages=7)
    a, b, c = fakes("abc")
    use(cache, a, b, c)
    d = FakeAdapter("d", 2)
    assert not cache.reserve(d, protect=[a, b, c])
    assert not cache.reserve(d, protect=[a, b], spare=1)
    assert cache.reserve(d, protect=[a], spare=2)
    assert cache.residents() == [a, c, d]


def test_max_adapter_pages_evicts_though_pages_are_free():
    allocator, cache = make(num_pages=100, max_adapter_pages=5)
    a, b, c = fakes("abc")
    use(cache, a, b)
    load(cache, c)
    assert cache.acquire(c)
    assert cache.residents() == [b, c]
    assert allocator.count(PageKind.ADAPTER) == 4
    assert not cache.reserve(FakeAdapter("d", 4))
    assert not cache.reserve(FakeAdapter("e", 3), protect=[b])
    assert cache.reserve(FakeAdapter("e", 3))


def test_max_adapter_pages_is_met_by_adapters_alone():
    allocator, cache = make(num_pages=20, max_adapter_pages=4)
    pages = allocator.allocate(3, PageKind.CACHED)
    cache.order.enter("prefix")
    cache.order.set_idle("prefix", 3, lambda item: None)
    a, b, c = fakes("abc")
    use(cache, a, b)
    assert cache.reserve(c)
    assert (cache.residents(), cache.order.is_idle("prefix")) == ([b, c], True)
    assert pages is not None
    allocator.free(pages, PageKind.CACHED)


def test_evicted_first_are_those_nobody_wants_then_the_least_urgent_then_loading_ones_then_the_next():
    _, cache = make(num_pages=20)
    plain, urgent, late, upcoming, loading, slow = fakes("peuxls", 1)
    use(cache, upcoming, late, urgent, plain)
    for adapter in (slow, loading):
        assert cache.reserve(adapter)
    cache.expect({upcoming: (9,), urgent: (8,), late: (7,), slow: (6,), loading: (5,)}, next_up=[upcoming])
    assert list(cache.order) == [plain, late, urgent, loading, slow, upcoming]
    cache.take_writes()
    assert list(cache.order) == [plain, loading, slow, late, urgent, upcoming]
    cache.expect({plain: (1,), late: (2,)})
    assert list(cache.order)[-2:] == [plain, late]
    assert list(cache.order)[:4] == [upcoming, urgent, slow, loading]  # by age again
    assert cache.acquire(plain)
    cache.expect({late: (2,)})
    cache.release(plain)
    assert list(cache.order)[-2:] == [plain, late]
    cache.check_integrity()


def test_loading_adapter_that_is_evicted_loses_its_writes_and_is_known_as_lost():
    allocator, cache = make(num_pages=5)
    a, b = fakes("ab")
    assert cache.reserve(a)
    cache.take_writes(1)
    evict(cache)
    assert stage(cache, a) == (False, False, False)
    assert cache.was_lost(a)
    assert cache.take_writes() == []
    assert allocator.num_free == 4
    assert cache.reserve(b)
    assert cache.reserve(a)
    assert [w.adapter.name for w in cache.take_writes()] == ["b", "b", "a", "a"]  # from its first page again
    assert cache.was_lost(a)
    assert cache.acquire(a)
    assert not cache.was_lost(a)
    cache.release(a)
    evict(cache)
    assert not cache.was_lost(a)  # it was of use
    assert cache.was_lost(b)


def test_pages_available_counts_idle_ones_but_not_the_adapters_beside():
    _, cache = make(num_pages=11)
    a, b, c = FakeAdapter("a", 3), FakeAdapter("b", 2), FakeAdapter("c", 1)
    use(cache, a, c)
    load(cache, b)
    assert cache.acquire(b)
    assert cache.pages_available() == 8
    assert cache.pages_available(beside=(a,)) == 5
    assert cache.pages_available(beside=(b,)) == 8
    assert cache.pages_available(beside=(a, c, a)) == 4


def test_fetching_adapters_are_coming_until_something_else_is_said():
    _, cache = make()
    a, b = fakes("ab")
    cache.set_fetching([a])
    assert [cache.is_coming(x) for x in (a, b)] == [True, False]
    cache.set_fetching([b])
    assert [cache.is_coming(x) for x in (a, b)] == [False, True]


def test_release_without_reference_and_pages_of_an_absent_adapter_raise():
    _, cache = make()
    a = FakeAdapter("a")
    with pytest.raises(PoolIntegrityError, match="not resident"):
        cache.pages_of(a)
    use(cache, a)
    with pytest.raises(PoolIntegrityError, match="released more often"):
        cache.release(a)
    cache.check_integrity()


@pytest.mark.parametrize("cap", [0, -1])
def test_cap_out_of_range_is_refused(cap: int):
    with pytest.raises(ConfigError, match="max_adapter_pages must be at least 1"):
        AdapterCache(PageAllocator(11), cap)


def _miscount(cache: Any) -> None:
    cache._adapter_pages += 1


def _miscount_pins(cache: Any) -> None:
    cache._pinned_pages += 1


def _hide_an_idle_one(cache: Any) -> None:
    cache.order.set_in_use(next(iter(cache.order)))


def _forget_a_load(cache: Any) -> None:
    cache._loading.clear()


def _keep_a_dropped_one(cache: Any) -> None:
    cache._dropped.update(cache.residents())


@pytest.mark.parametrize("damage", [_miscount, _miscount_pins, _hide_an_idle_one, _forget_a_load, _keep_a_dropped_one])
def test_check_integrity_finds_damage(damage):
    _, cache = make()
    use(cache, FakeAdapter("a"))
    assert cache.reserve(FakeAdapter("b"))
    cache.check_integrity()
    damage(cache)
    with pytest.raises(PoolIntegrityError):
        cache.check_integrity()
