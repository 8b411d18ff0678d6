"""What the host's bookkeeping reads of an adapter, without one."""

from __future__ import annotations

from dataclasses import dataclass

from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator


@dataclass(eq=False)
class FakeAdapter:
    name: str
    num_pages: int = 2
    rank: int = 8
    digest: str = "0" * 64


def make(
    num_pages: int = 11, max_adapter_pages: int | None = None, max_pinned_pages: int = 0
) -> tuple[PageAllocator, AdapterCache[FakeAdapter]]:
    allocator = PageAllocator(num_pages)
    return allocator, AdapterCache(allocator, max_adapter_pages, max_pinned_pages=max_pinned_pages)
