"""Growth of a sequence's pages, and who makes room for it."""

from __future__ import annotations

import pytest

from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator, PageKind
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.request import SamplingParams, Sequence
from tests.lora.fake_adapter import FakeAdapter


def make(num_pages: int, page_tokens: int = 4):
    geometry = PoolGeometry(
        num_layers=2, num_pages=num_pages, page_tokens=page_tokens, hidden=8, q_dim=8, kv_dim=8, ffn=16,
        num_kv_heads=2, head_dim=4,
    )  # fmt: skip
    allocator = PageAllocator(num_pages)
    cache: AdapterCache[FakeAdapter] = AdapterCache(allocator)
    return allocator, cache, KVManager(allocator, geometry, cache)


def sequence(num_tokens: int) -> Sequence:
    return Sequence("r", [1] * num_tokens, num_tokens, SamplingParams())


def idle(cache: AdapterCache[FakeAdapter], *adapters: FakeAdapter) -> None:
    for adapter in adapters:
        assert cache.reserve(adapter)
        cache.take_writes()
        assert cache.acquire(adapter)
        cache.release(adapter)


def test_grows_only_at_page_boundaries():
    allocator, _, kv = make(10)
    seq = sequence(20)
    held = []
    for num_computed in range(9):
        seq.num_computed_tokens = num_computed
        assert kv.allocate_for(seq, 1)
        held.append(len(seq.page_ids))
    assert held == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert allocator.count(PageKind.KV) == 3
    assert kv.pages_outstanding(seq) == 2
    before = list(seq.page_ids)
    assert kv.allocate_for(seq, 9)
    assert seq.page_ids[:3] == before
    assert len(set(seq.page_ids)) == 5


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for_tokens_agrees_with_the_geometry(num_tokens: int, pages: int):
    _, _, kv = make(10)
    assert kv.pages_for_tokens(num_tokens) == pages


def test_evicts_least_recently_used_adapters_and_no_more_than_needed():
    _, cache, kv = make(9)
    a, b, c = (FakeAdapter(name) for name in "abc")
    idle(cache, a, b, c)
    seq = sequence(16)
    assert kv.allocate_for(seq, 12)  # 3 pages, 2 are free
    assert cache.residents() == [b, c]
    assert len(seq.page_ids) == 3


def test_evicts_nothing_when_that_would_not_be_enough():
    allocator, cache, kv = make(7)
    used, unused = FakeAdapter("used"), FakeAdapter("unused")
    idle(cache, unused, used)
    assert cache.acquire(used)
    seq = sequence(40)
    assert not kv.allocate_for(seq, 20)  # 5 pages; 2 free + 2 idle
    assert seq.page_ids == []
    assert set(cache.residents()) == {used, unused}
    assert allocator.num_free == 2
    assert kv.allocate_for(seq, 16)
    assert cache.residents() == [used]


def test_free_returns_every_page():
    allocator, _, kv = make(6)
    seq = sequence(10)
    assert kv.allocate_for(seq, 10)
    kv.free(seq)
    assert seq.page_ids == []
    assert allocator.num_free == allocator.num_total
    kv.free(seq)
    allocator.check_integrity()


def test_takes_pages_of_every_kind_of_idle_item_by_one_order():
    allocator, cache, kv = make(9)
    a, b = FakeAdapter("a"), FakeAdapter("b")
    prefix = allocator.allocate(2, PageKind.CACHED)
    assert prefix is not None
    idle(cache, a)

    def evict(item: str) -> None:
        cache.order.leave(item)
        allocator.free(prefix, PageKind.CACHED)

    cache.order.enter("prefix")
    cache.order.set_idle("prefix", 2, evict)
    idle(cache, b)
    seq = sequence(40)
    assert kv.allocate_for(seq, 20)  # 5 pages, 2 are free
    assert list(cache.order) == [b]
    assert len(seq.page_ids) == 5


def test_protected_adapters_stay_though_they_are_idle():
    _, cache, kv = make(7)
    a, b = FakeAdapter("a"), FakeAdapter("b")
    idle(cache, a, b)
    seq = sequence(40)
    assert not kv.allocate_for(seq, 20, protect=(a,))
    assert kv.allocate_for(seq, 16, protect=(a,))
    assert cache.residents() == [a]


def test_pages_to_the_end_counts_from_what_is_held():
    _, _, kv = make(10)
    seq = sequence(6)
    seq.max_total_tokens = 17
    assert kv.pages_to_the_end(seq) == 5
    assert kv.allocate_for(seq, 6)
    assert kv.pages_to_the_end(seq) == 3
