"""KV pages of sequences: growth, and eviction of what is idle to make room for it (host only, no jax)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator, PageKind
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.request import Sequence


class KVManager:
    """Owns every sequence's `page_ids`. Not thread-safe.

    Args:
        allocator: the pool's free list.
        geometry: sizes of a page.
        cache: the adapters in the same pool; whatever is idle in its `order` gives way to KV.
    """

    def __init__(self, allocator: PageAllocator, geometry: PoolGeometry, cache: AdapterCache[Any]):
        self._allocator = allocator
        self._order = cache.order
        self._page_tokens = geometry.page_tokens

    def pages_for_tokens(self, num_tokens: int) -> int:
        """Pages that the KV of `num_tokens` tokens takes."""
        return -(-num_tokens // self._page_tokens)

    def pages_outstanding(self, seq: Sequence) -> int:
        """Pages that the sequence still lacks for the tokens it has now."""
        return self.pages_for_tokens(len(seq.token_ids)) - len(seq.page_ids)

    def pages_to_the_end(self, seq: Sequence) -> int:
        """Pages that the sequence lacks for all the tokens it may reach."""
        return self.pages_for_tokens(max(len(seq.token_ids), seq.max_total_tokens)) - len(seq.page_ids)

    def allocate_for(self, seq: Sequence, num_tokens: int, protect: Collection[Any] = ()) -> bool:
        """Grow `seq.page_ids` so that its next `num_tokens` tokens fit behind the computed ones.

        Args:
            protect: what must not be evicted for it, though idle.

        Returns:
            False, with nothing allocated and nothing evicted, when even evicting all that is idle would not do.
        """
        missing = -(-(seq.num_computed_tokens + num_tokens) // self._page_tokens) - len(seq.page_ids)
        if missing <= 0:
            return True
        allocator = self._allocator
        if missing > allocator.num_free:
            victims = self._order.choose(missing, allocator.num_free, protect=protect)
            if victims is None:
                return False
            self._order.evict(victims)
        pages = allocator.allocate(missing, PageKind.KV)
        assert pages is not None
        seq.page_ids.extend(pages)
        return True

    def free(self, seq: Sequence) -> None:
        """Give all of the sequence's pages back."""
        self._allocator.free(seq.page_ids, PageKind.KV)
        seq.page_ids.clear()
