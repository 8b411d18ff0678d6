"""Keys of pages, and who uses which."""

from __future__ import annotations

from collections import Counter

import pytest

from multilora_jax.memory.allocator import PageAllocator, PageKind, PoolIntegrityError
from multilora_jax.memory.prefix_cache import PrefixCache, PrefixChain, prefix_root
from multilora_jax.memory.recency import EvictionOrder

A, B = "a" * 64, "b" * 64


def test_d09_whatever_decides_the_content_decides_the_root():
    roots = [
        prefix_root([], []), prefix_root([], [], "x"), prefix_root([], [], "y"), prefix_root([], [], "s"),
        prefix_root([A], [1.0]), prefix_root([B], [1.0]), prefix_root([A], [1.5]), prefix_root([A], [1.0], "x"),
        prefix_root([A], [-1.0]), prefix_root([A], [0.0]), prefix_root([A, B], [1.0, 1.0]),
        prefix_root([A, B], [1.0, 2.0]), prefix_root([A, B], [2.0, 1.0]), prefix_root([], [], f"{A}*0x1.0p+0"),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)
    assert prefix_root([A, B], [1.0, 2.0], "x") == prefix_root([B, A], [2.0, 1.0], "x")
    assert prefix_root([A], [1]) == prefix_root([A], [1.0])
    assert prefix_root([], [], "\ud800") != prefix_root([], [], "?")


def test_keys_depend_on_all_tokens_before_them():
    def keys(tokens: list[int], root: bytes = b"r") -> list[bytes]:
        return PrefixChain(root, 4).keys(tokens, len(tokens))

    text = list(range(12))
    assert len(keys(text)) == len(set(keys(text))) == 3
    assert len(keys(text[:11])) == 2
    assert keys([*text[:8], 99, 9, 10, 11])[:2] == keys(text)[:2]
    assert not set(keys([99, *text[1:]])) & set(keys(text))
    assert not set(keys(text, b"q")) & set(keys(text))
    assert keys([5] * 8)[0] != keys([5] * 8)[1]
    chain = PrefixChain(b"r", 4)
    assert chain.keys(text, 5) == keys(text)[:1]
    assert chain.keys(text, 12) == keys(text)
    assert chain.keys(text, 4) == keys(text)[:1]
    assert PrefixChain(b"r", 4, max_pages=2).keys(text, 12) == keys(text)[:2]


def make(num_pages: int = 9) -> tuple[PageAllocator, EvictionOrder, PrefixCache]:
    allocator, order = PageAllocator(num_pages), EvictionOrder()
    return allocator, order, PrefixCache(allocator, order)


def compute(allocator: PageAllocator, cache: PrefixCache, keys: list[bytes], more: int = 0) -> list[int]:
    pages = allocator.allocate(len(keys) + more, PageKind.KV)
    assert pages is not None
    for page, key in zip(pages, keys, strict=False):
        cache.publish(page, key)
    return pages


def test_pages_are_counted_kept_and_taken_again():
    allocator, order, cache = make()
    first = compute(allocator, cache, [b"1", b"2"], more=1)
    found = cache.find([b"1", b"2", b"3"])
    assert found == first[:2]
    assert cache.num_in_use(found) == 2
    cache.share(found)
    cache.check_integrity(Counter([*first, *found]))
    cache.release(first)
    cache.check_integrity(Counter(found))
    assert (allocator.count(PageKind.KV), allocator.count(PageKind.CACHED), len(order)) == (2, 0, 0)
    cache.release(found)
    cache.check_integrity({})
    assert (allocator.count(PageKind.KV), allocator.count(PageKind.CACHED), len(order)) == (0, 2, 2)
    assert list(order) == [first[1], first[0]]  # the end of the text goes before its start
    assert cache.num_in_use(cache.find([b"1"])) == 0
    cache.share(cache.find([b"1"]))
    cache.check_integrity({first[0]: 1})
    order.evict(list(order))
    assert cache.find([b"1", b"2"]) == first[:1]
    cache.check_integrity({first[0]: 1})
    allocator.check_integrity()


def test_a_text_that_lacks_its_start_is_not_found():
    allocator, order, cache = make()
    cache.release(compute(allocator, cache, [b"1", b"2", b"3"]))
    order.evict([cache.find([b"1"])[0]])
    assert cache.find([b"1", b"2", b"3"]) == []


def test_one_page_is_kept_of_two_with_one_content_and_counts_as_used():
    allocator, order, cache = make()
    first = compute(allocator, cache, [b"1"])
    other = compute(allocator, cache, [b"2"])
    second = compute(allocator, cache, [b"1"])
    cache.release(first, [b"1"])
    cache.release(other, [b"2"])
    assert list(order) == [*first, *other]
    cache.release(second, [b"1"])
    assert allocator.count(PageKind.CACHED) == 2
    assert list(order) == [*other, *first]
    cache.check_integrity({})


def test_forgotten_keys_free_their_pages():
    allocator, _, cache = make()
    cache.release(compute(allocator, cache, [b"1", b"2"]))
    cache.forget([b"1", b"2", b"3"])
    assert allocator.num_free == allocator.num_total
    assert cache.find([b"1"]) == []
    cache.check_integrity({})


def test_integrity_names_a_count_that_is_wrong():
    allocator, _, cache = make()
    pages = compute(allocator, cache, [b"1"])
    with pytest.raises(PoolIntegrityError, match="has 2 users, the prefix cache counts 1"):
        cache.check_integrity({pages[0]: 2})
    with pytest.raises(PoolIntegrityError, match="list 0 KV pages, the allocator 1"):
        cache.check_integrity({})
    cache.release(pages)
    allocator.convert(pages, PageKind.CACHED, PageKind.KV)
    with pytest.raises(PoolIntegrityError, match="1 pages are cached, the allocator says 0"):
        cache.check_integrity({})


def test_pages_change_their_kind_only_from_the_one_they_have():
    allocator, _, _ = make()
    pages = allocator.allocate(2, PageKind.KV)
    assert pages is not None
    for kind, to in ((PageKind.CACHED, PageKind.KV), (PageKind.KV, PageKind.FREE)):
        with pytest.raises(PoolIntegrityError, match="cannot go from"):
            allocator.convert(pages, kind, to)
    with pytest.raises(PoolIntegrityError):
        allocator.convert([*pages, 0], PageKind.KV, PageKind.CACHED)
    allocator.convert(pages, PageKind.KV, PageKind.CACHED)
    assert [allocator.count(kind) for kind in PageKind] == [6, 0, 0, 2]
    allocator.check_integrity()
