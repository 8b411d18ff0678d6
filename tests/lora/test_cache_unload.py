"""Adapters that are unloaded or pinned: whose pages go when, and whose stay."""

from __future__ import annotations

import gc
import weakref

import pytest

from multilora_jax.memory.allocator import PageKind, PoolIntegrityError
from tests.lora.fake_adapter import FakeAdapter, evict, fakes, load, make, use


def test_two_versions_of_one_name_coexist():
    _, cache = make()
    old, new = FakeAdapter("a", digest="1" * 64), FakeAdapter("a", digest="2" * 64)
    load(cache, old, new)
    assert cache.acquire(old)
    assert cache.acquire(new)
    assert not set(cache.pages_of(old)) & set(cache.pages_of(new))
    cache.drop(old)
    assert cache.is_resident(old)
    assert (cache.is_dropped(old), cache.is_dropped(new)) == (True, False)
    cache.release(old)
    assert cache.residents() == [new]


def test_drop_frees_an_idle_adapter_at_once_and_one_in_use_at_its_last_release():
    allocator, cache = make()
    a = FakeAdapter("a")
    use(cache, a)
    cache.drop(a)
    assert allocator.num_free == allocator.num_total
    b = FakeAdapter("b")
    load(cache, b)
    assert cache.acquire(b)
    assert cache.acquire(b)
    cache.drop(b)
    cache.release(b)
    assert cache.is_resident(b)
    cache.release(b)
    assert allocator.num_free == allocator.num_total
    assert cache.evictions == 0
    cache.check_integrity()


def test_drop_while_loading_frees_the_pages_and_forgets_the_writes():
    allocator, cache = make()
    a = FakeAdapter("a", 3)
    assert cache.reserve(a)
    cache.take_writes(1)
    cache.drop(a)
    assert cache.take_writes() == []
    assert allocator.num_free == allocator.num_total
    with pytest.raises(PoolIntegrityError, match="'a' was unloaded: nobody can want it"):
        cache.reserve(a)
    cache.check_integrity()


def test_dropped_adapter_that_a_live_request_names_can_be_loaded_and_goes_with_that_request():
    allocator, cache = make()
    a = FakeAdapter("a")
    cache.claim(a)
    cache.claim(a)
    cache.drop(a)
    load(cache, a)
    assert cache.acquire(a)
    cache.release(a)
    cache.unclaim(a)
    assert cache.is_resident(a)  # the other request has not run yet
    cache.check_integrity()
    cache.unclaim(a)
    assert allocator.num_free == allocator.num_total
    with pytest.raises(PoolIntegrityError, match="named by no live request"):
        cache.unclaim(a)


def test_dropped_adapter_may_still_be_evicted_before_its_request_runs():
    _, cache = make()
    a = FakeAdapter("a")
    cache.claim(a)
    load(cache, a)
    cache.drop(a)
    evict(cache)
    assert not cache.is_resident(a)
    load(cache, a)
    cache.check_integrity()


def test_d13_load_unload_cycles_leave_pages_and_adapters_as_at_start():
    allocator, cache = make(num_pages=5)  # room for two
    gone: list[weakref.ref[FakeAdapter]] = []
    for i in range(20):
        adapter = FakeAdapter(f"adapter-{i}")
        cache.claim(adapter)
        cache.expect({adapter: (1,)}, next_up=[adapter])
        cache.set_fetching([adapter])
        if i % 4 == 0:
            cache.pin(adapter)
        assert cache.reserve(adapter)
        if i % 3:
            cache.take_writes()
            assert cache.acquire(adapter)
        if i % 2:
            cache.drop(adapter)
        if i % 3:
            cache.release(adapter)
        cache.unclaim(adapter)
        if not i % 2:
            cache.drop(adapter)
        assert (allocator.num_free, allocator.count(PageKind.ADAPTER), cache.pinned_pages) == (4, 0, 0)
        assert cache.take_writes() == []
        cache.check_integrity()
        gone.append(weakref.ref(adapter))
    del adapter
    gc.collect()
    assert [ref() for ref in gone] == [None] * 20


def test_pinned_adapter_stays_until_unpinned():
    _, cache = make(num_pages=7)
    a, b = fakes("ab")
    cache.pin(a)
    cache.pin(a)
    assert (cache.pinned_pages, cache.pinned(), cache.is_resident(a), cache.loads) == (2, [a], False, 0)
    load(cache, a)
    assert (cache.pinned(), cache.is_resident(a), cache.loads, cache.misses) == ([a], True, 1, 0)
    use(cache, a, b)
    assert [cache.is_pinned(adapter) for adapter in (a, b)] == [True, False]
    evict(cache)
    assert cache.residents() == [a]
    cache.check_integrity()
    cache.unpin(a)
    cache.unpin(a)
    cache.check_integrity()
    evict(cache)
    assert (cache.residents(), cache.pinned_pages) == ([], 0)


def test_pinned_adapter_is_not_evicted_while_it_loads():
    _, cache = make(num_pages=7)
    a = FakeAdapter("a")
    cache.pin(a)
    assert cache.reserve(a)
    assert len(cache.order) == 0
    cache.unpin(a)
    assert list(cache.order) == [a]
    cache.check_integrity()


def test_pin_of_an_adapter_in_use_outlives_its_release():
    _, cache = make(num_pages=7)
    a = FakeAdapter("a")
    load(cache, a)
    assert cache.acquire(a)
    cache.pin(a)
    cache.release(a)
    assert cache.order.num_pages == 0
    assert cache.acquire(a)
    cache.unpin(a)
    assert cache.order.num_pages == 0
    cache.release(a)
    assert cache.order.num_pages == 2
    cache.check_integrity()


def test_drop_undoes_a_pin_and_an_unloaded_adapter_cannot_be_pinned():
    allocator, cache = make()
    a = FakeAdapter("a")
    cache.pin(a)
    load(cache, a)
    cache.drop(a)
    assert allocator.num_free == allocator.num_total
    assert cache.pinned_pages == 0
    with pytest.raises(PoolIntegrityError, match="unloaded"):
        cache.pin(a)
    cache.check_integrity()
