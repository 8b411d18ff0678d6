"""What the host's bookkeeping reads of an adapter, without one."""

from __future__ import annotations

from dataclasses import dataclass

from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator
from multilora_jax.memory.recency import EvictionPolicy


@dataclass(eq=False)
class FakeAdapter:
    name: str
    num_pages: int = 2
    rank: int = 8
    digest: str = "0" * 64

    @property
    def num_rows(self) -> int:
        return self.rank


def make(
    num_pages: int = 11, max_adapter_pages: int | None = None, policy: EvictionPolicy = "lru"
) -> tuple[PageAllocator, AdapterCache[FakeAdapter]]:
    allocator = PageAllocator(num_pages)
    return allocator, AdapterCache(allocator, max_adapter_pages, policy=policy)


def fakes(names: str, num_pages: int = 2) -> list[FakeAdapter]:
    """One adapter per letter."""
    return [FakeAdapter(name, num_pages) for name in names]


def load(cache: AdapterCache[FakeAdapter], *adapters: FakeAdapter) -> None:
    for adapter in adapters:
        assert cache.reserve(adapter)
    cache.take_writes()


def use(cache: AdapterCache[FakeAdapter], *adapters: FakeAdapter) -> None:
    for adapter in adapters:
        load(cache, adapter)
        assert cache.acquire(adapter)
        cache.release(adapter)


def evict(cache: AdapterCache[FakeAdapter], num_items: int | None = None) -> None:
    cache.order.evict(list(cache.order)[:num_items])
