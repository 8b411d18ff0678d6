"""Adapter residency: references, eviction order, pins, unloads, pending writes."""

from __future__ import annotations

import gc
import weakref

import pytest

from multilora_jax.errors import ConfigError, UserError
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageKind, PoolIntegrityError
from tests.lora.fake_adapter import FakeAdapter, make


def use(cache: AdapterCache[FakeAdapter], *adapters: FakeAdapter) -> None:
    for adapter in adapters:
        assert cache.acquire(adapter)
        cache.release(adapter)


def test_acquire_allocates_once_and_counts_references():
    allocator, cache = make()
    a = FakeAdapter("a", 3)
    assert cache.pages_missing(a) == 3
    assert cache.acquire(a)
    assert cache.acquire(a)
    assert (cache.references(a), allocator.count(PageKind.ADAPTER)) == (2, 3)
    assert cache.is_resident(a)
    assert len(cache.pages_of(a)) == 3
    assert cache.pages_missing(a) == 0
    assert (cache.hits, cache.misses, cache.loads, cache.evictions) == (1, 1, 1, 0)
    cache.release(a)
    assert cache.evictable_pages == 0
    cache.release(a)
    assert cache.evictable_pages == 3
    assert cache.is_resident(a)
    cache.check_integrity()


def test_least_recently_used_idle_adapter_goes_first():
    _, cache = make(num_pages=7)
    a, b, c, d = (FakeAdapter(name) for name in "abcd")
    use(cache, a, b, c)
    use(cache, a)
    use(cache, d)
    assert cache.residents() == [a, c, d]
    assert cache.evictions == 1
    use(cache, b)
    assert cache.residents() == [a, d, b]
    cache.check_integrity()


def test_recency_is_the_last_release_not_the_last_acquire():
    _, cache = make(num_pages=5)
    a, b, c = (FakeAdapter(name) for name in "abc")
    assert cache.acquire(a)
    use(cache, b)
    cache.release(a)
    use(cache, c)
    assert cache.residents() == [a, c]


def test_adapter_in_use_is_never_evicted():
    allocator, cache = make(num_pages=5)
    a, b = FakeAdapter("a"), FakeAdapter("b")
    assert cache.acquire(a)
    use(cache, b)
    assert cache.evict_idle(100) == 2
    assert cache.residents() == [a]
    assert not cache.acquire(FakeAdapter("c", 3))
    assert allocator.num_free == 2
    assert (cache.misses, cache.loads) == (2, 2)


def test_acquire_that_cannot_succeed_evicts_nothing():
    _, cache = make(num_pages=7)
    a, b, big = FakeAdapter("a"), FakeAdapter("b"), FakeAdapter("big", 5)
    assert cache.acquire(a)
    use(cache, b)
    assert not cache.can_acquire(big)
    assert not cache.acquire(big)
    assert cache.residents() == [a, b]
    assert cache.evictions == 0
    cache.check_integrity()


def test_max_adapter_pages_evicts_though_pages_are_free():
    allocator, cache = make(num_pages=100, max_adapter_pages=5)
    a, b, c = (FakeAdapter(name) for name in "abc")
    use(cache, a, b)
    assert cache.acquire(c)
    assert cache.residents() == [b, c]
    assert allocator.count(PageKind.ADAPTER) == 4
    assert not cache.can_acquire(FakeAdapter("d", 4))
    assert cache.can_acquire(FakeAdapter("e", 3))


def test_evict_idle_stops_when_enough_came_free():
    _, cache = make()
    a, b, c = (FakeAdapter(name) for name in "abc")
    use(cache, a, b, c)
    assert cache.evict_idle(3) == 4
    assert cache.residents() == [c]
    assert cache.evict_idle(0) == 0


def test_pages_available_counts_idle_ones_but_not_the_adapter_beside():
    _, cache = make(num_pages=11)
    a, b = FakeAdapter("a", 3), FakeAdapter("b", 2)
    use(cache, a)
    assert cache.acquire(b)
    assert cache.pages_available() == 8
    assert cache.pages_available(beside=a) == 5
    assert cache.pages_available(beside=b) == 8
    assert cache.pages_available(beside=None) == 8


def test_pending_writes_are_listed_once_and_dropped_with_their_pages():
    _, cache = make(num_pages=5)
    a, b, c = (FakeAdapter(name) for name in "abc")
    use(cache, a, b)
    use(cache, c)  # takes a's pages before a was ever written
    assert cache.take_pending_writes() == [(b, cache.pages_of(b)), (c, cache.pages_of(c))]
    use(cache, b)
    assert cache.take_pending_writes() == []
    cache.evict_idle(100)
    use(cache, b)
    assert cache.take_pending_writes() == [(b, cache.pages_of(b))]


def test_two_versions_of_one_name_coexist():
    _, cache = make()
    old, new = FakeAdapter("a", digest="1" * 64), FakeAdapter("a", digest="2" * 64)
    assert cache.acquire(old)
    assert cache.acquire(new)
    assert not set(cache.pages_of(old)) & set(cache.pages_of(new))
    cache.drop(old)
    assert cache.is_resident(old)
    cache.release(old)
    assert cache.residents() == [new]


def test_drop_frees_an_idle_adapter_at_once_and_one_in_use_at_its_last_release():
    allocator, cache = make()
    a = FakeAdapter("a")
    use(cache, a)
    cache.drop(a)
    assert allocator.num_free == allocator.num_total
    b = FakeAdapter("b")
    assert cache.acquire(b)
    assert cache.acquire(b)
    cache.drop(b)
    cache.release(b)
    assert cache.is_resident(b)
    cache.release(b)
    assert allocator.num_free == allocator.num_total
    assert cache.evictions == 0
    cache.check_integrity()


def test_dropped_adapter_that_a_queued_request_acquires_again_goes_with_its_last_reference():
    allocator, cache = make()
    a = FakeAdapter("a")
    cache.drop(a)
    assert cache.acquire(a)
    assert cache.take_pending_writes() == [(a, cache.pages_of(a))]
    cache.release(a)
    assert not cache.is_resident(a)
    assert allocator.num_free == allocator.num_total


def test_d13_load_unload_cycles_leave_pages_and_host_copies_as_at_start():
    allocator, cache = make(num_pages=5)  # room for two
    gone: list[weakref.ref[FakeAdapter]] = []
    for i in range(20):
        adapter = FakeAdapter(f"adapter-{i}")
        assert cache.acquire(adapter)
        if i % 2:
            cache.drop(adapter)
            cache.release(adapter)
        else:
            cache.release(adapter)
            cache.drop(adapter)
        assert (allocator.num_free, allocator.count(PageKind.ADAPTER)) == (4, 0)
        assert cache.take_pending_writes() == []
        cache.check_integrity()
        gone.append(weakref.ref(adapter))
    del adapter
    gc.collect()
    assert [ref() for ref in gone] == [None] * 20


def test_pinned_adapter_stays_until_unpinned():
    _, cache = make(num_pages=7, max_pinned_pages=4)
    a, b = FakeAdapter("a"), FakeAdapter("b")
    assert cache.pin(a)
    assert cache.pin(a)
    assert (cache.pinned_pages, cache.loads, cache.misses) == (2, 1, 0)
    use(cache, a, b)
    assert [cache.is_pinned(adapter) for adapter in (a, b)] == [True, False]
    assert cache.evict_idle(100) == 2
    assert cache.residents() == [a]
    cache.check_integrity()
    cache.unpin(a)
    cache.unpin(a)
    cache.check_integrity()
    assert cache.evict_idle(100) == 2
    assert cache.pinned_pages == 0


def test_pin_of_an_adapter_in_use_outlives_its_release():
    _, cache = make(num_pages=7, max_pinned_pages=2)
    a = FakeAdapter("a")
    assert cache.acquire(a)
    assert cache.pin(a)
    cache.release(a)
    assert cache.evictable_pages == 0
    assert cache.acquire(a)
    cache.unpin(a)
    assert cache.evictable_pages == 0
    cache.release(a)
    assert cache.evictable_pages == 2
    cache.check_integrity()


def test_pin_beyond_its_budget_is_refused_and_changes_nothing():
    allocator, cache = make(num_pages=20, max_pinned_pages=3)
    assert cache.pin(FakeAdapter("a"))
    with pytest.raises(UserError, match="pinning adapter 'b'") as caught:
        cache.pin(FakeAdapter("b"))
    assert caught.value.reason == "pin_limit"
    assert allocator.count(PageKind.ADAPTER) == cache.pinned_pages == 2


def test_pin_without_room_is_false_and_changes_nothing():
    _, cache = make(num_pages=4, max_pinned_pages=2)
    a, b = FakeAdapter("a"), FakeAdapter("b")
    assert cache.acquire(a)
    assert not cache.pin(b)
    assert cache.pinned_pages == 0
    cache.check_integrity()


def test_drop_undoes_a_pin_and_an_unloaded_adapter_cannot_be_pinned():
    allocator, cache = make(max_pinned_pages=2)
    a = FakeAdapter("a")
    assert cache.pin(a)
    cache.drop(a)
    assert allocator.num_free == allocator.num_total
    with pytest.raises(PoolIntegrityError, match="unloaded"):
        cache.pin(a)
    cache.check_integrity()


def test_release_without_reference_and_pages_of_an_absent_adapter_raise():
    _, cache = make()
    a = FakeAdapter("a")
    with pytest.raises(PoolIntegrityError, match="not resident"):
        cache.pages_of(a)
    use(cache, a)
    with pytest.raises(PoolIntegrityError, match="released more often"):
        cache.release(a)
    cache.check_integrity()


@pytest.mark.parametrize(("cap", "pinned"), [(0, 0), (5, 6), (None, 11), (100, 11), (5, -1)])
def test_caps_out_of_range_are_refused(cap: int | None, pinned: int):
    with pytest.raises(ConfigError, match="max_adapter_pages"):
        make(num_pages=11, max_adapter_pages=cap, max_pinned_pages=pinned)


@pytest.mark.parametrize("counter", ["_adapter_pages", "_idle_pages", "_pinned_pages"])
def test_check_integrity_finds_a_wrong_counter(counter: str):
    _, cache = make()
    use(cache, FakeAdapter("a"))
    setattr(cache, counter, getattr(cache, counter) + 1)
    with pytest.raises(PoolIntegrityError):
        cache.check_integrity()
