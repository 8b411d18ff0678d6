"""The picture of the pool shows what its books say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator, PageKind
from multilora_jax.pool_map import pool_map


class Adapter:
    def __init__(self, name: str, num_pages: int):
        self.name, self.num_pages, self.digest, self.rank = name, num_pages, name * 12, 8


def make_engine(num_pages: int) -> Any:
    allocator = PageAllocator(num_pages)
    geometry = SimpleNamespace(page_bytes=3 * 1024, page_tokens=16)
    return SimpleNamespace(allocator=allocator, cache=AdapterCache(allocator), geometry=geometry)


def test_an_empty_pool():
    assert pool_map(make_engine(5)) == (
        "4 pages of 3 KiB (16 tokens each)\n  .  free: 4\n  #  keys and values: 0\n1 ...."
    )


def test_every_kind_has_its_mark():
    engine = make_engine(13)
    assert engine.cache.reserve(Adapter("upper", 3))
    engine.allocator.allocate(2, PageKind.KV)
    assert engine.cache.reserve(Adapter("json", 2))
    engine.allocator.allocate(1, PageKind.CACHED)
    assert pool_map(engine, width=5).splitlines() == [
        "12 pages of 3 KiB (16 tokens each)",
        "  .  free: 4",
        "  #  keys and values: 2",
        "  =  cached prefixes: 1",
        "  a  adapter upper: 3",
        "  b  adapter json: 2",
        " 1 aaa##",
        " 6 bb=..",
        "11 ..",
    ]


def test_a_large_pool_shares_characters():
    engine = make_engine(1001)
    engine.allocator.allocate(500, PageKind.KV)
    lines = pool_map(engine, width=50, max_lines=2).splitlines()
    assert lines[0].endswith(", 10 to a character")
    assert lines[-2:] == ["   1 " + "#" * 50, " 501 " + "." * 50]


def test_more_adapters_than_letters():
    engine = make_engine(101)
    for number in range(60):
        assert engine.cache.reserve(Adapter(f"n{number}", 1))
    text = pool_map(engine)
    assert "  Z  adapter n51: 1" in text
    assert "  +  adapter n52: 1" in text
    assert "1 abc" in text


@pytest.mark.parametrize("freed", [0, 2])
def test_kinds_follow_the_books(freed):
    allocator = PageAllocator(6)
    pages = allocator.allocate(4, PageKind.KV)
    assert pages is not None
    allocator.free(pages[:freed], PageKind.KV)
    assert [page for page, kind in enumerate(allocator.kinds(), 1) if kind == PageKind.KV] == pages[freed:]
    assert len(allocator.kinds()) == allocator.num_total
