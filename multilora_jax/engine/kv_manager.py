"""KV pages of sequences: sharing, growth, and eviction of what is idle to make room (host only, no jax)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator, PageKind
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.memory.prefix_cache import PrefixCache
from multilora_jax.request import Sequence


class KVManager:
    """Owns every sequence's `page_ids`. Not thread-safe.

    While a sequence runs its list of pages only grows, and none of them is exchanged for another.

    Args:
        allocator: the pool's free list.
        geometry: sizes of a page.
        cache: the adapters in the same pool; whatever is idle in its `order` gives way to KV.

    Attributes:
        prefix: full pages by their content, for sequences that have a `prefix` of their own.
    """

    def __init__(self, allocator: PageAllocator, geometry: PoolGeometry, cache: AdapterCache[Any]):
        self._allocator = allocator
        self._cache = cache
        self.prefix = PrefixCache(allocator, cache.order)
        self._page_tokens = geometry.page_tokens

    def pages_for_tokens(self, num_tokens: int) -> int:
        """Pages that the KV of `num_tokens` tokens takes."""
        return -(-num_tokens // self._page_tokens)

    def pages_outstanding(self, seq: Sequence) -> int:
        """Pages that the sequence still lacks for the tokens it has now, shared or not."""
        return self.pages_for_tokens(len(seq.token_ids)) - len(seq.page_ids)

    def pages_to_start(self, seq: Sequence) -> int:
        """The same of a waiting sequence, without the pages that others use now and that it can share."""
        return self.pages_outstanding(seq) - self.prefix.num_in_use(self._find(seq))

    def pages_to_the_end(self, seq: Sequence) -> int:
        """Pages that the sequence lacks for all the tokens it may reach."""
        return self.pages_for_tokens(max(len(seq.token_ids), seq.max_total_tokens)) - len(seq.page_ids)

    def attach(self, seq: Sequence) -> None:
        """Give a sequence without pages those of its prefix that are there; `num_computed_tokens` says how many.

        Its last token is never among them: something has to be run before the next one can be sampled.
        """
        if seq.prefix is None:
            return
        pages = self._find(seq)
        self.prefix.share(pages)
        seq.page_ids.extend(pages)
        seq.num_computed_tokens = len(pages) * self._page_tokens
        seq.prefix.num_offered = len(pages)
        if seq.prefix.reads and seq.first_scheduled_time is None:  # not one that was preempted
            seq.num_cached_tokens = seq.num_computed_tokens
            if not seq.index:
                self.prefix.queries += seq.num_prompt_tokens
                self.prefix.hits += seq.num_cached_tokens

    def allocate_for(self, seq: Sequence, num_tokens: int, protect: Collection[Any] = ()) -> bool:
        """Grow `seq.page_ids` so that its next `num_tokens` tokens fit behind the computed ones.

        Args:
            protect: what must not be evicted for it, though idle.

        Returns:
            False, with nothing allocated and nothing evicted, when even evicting all that is idle would not do.
        """
        if seq.prefix is not None and seq.prefix.num_offered < seq.num_computed_tokens // self._page_tokens:
            self._offer(seq)
        missing = -(-(seq.num_computed_tokens + num_tokens) // self._page_tokens) - len(seq.page_ids)
        if missing <= 0:
            return True
        allocator = self._allocator
        num_free, order = allocator.num_free - self._cache.num_kept, self._cache.order
        if missing > num_free:
            victims = order.choose(missing, num_free, protect=protect)
            if victims is None:
                return False
            order.evict(victims)
        pages = allocator.allocate(missing, PageKind.KV)
        assert pages is not None
        seq.page_ids.extend(pages)
        return True

    def free(self, seq: Sequence) -> None:
        """Give all of the sequence's pages back; what was computed in full stays for others until it is evicted."""
        keys: list[bytes] = []
        if seq.prefix is not None:
            seq.prefix.num_offered = 0  # a page whose key had another page may be the only one by now
            keys = self._offer(seq)
        self.prefix.release(seq.page_ids, keys)
        seq.page_ids.clear()

    def forget(self, seq: Sequence) -> None:
        """Free what is cached of the sequence's pages, which no other sequence could take."""
        if seq.prefix is not None:
            self.prefix.forget(seq.prefix.keys(seq.token_ids, len(seq.token_ids)))

    def _find(self, seq: Sequence) -> list[int]:
        """Pages of its prefix that a sequence could share now."""
        chain = seq.prefix
        return self.prefix.find(chain.keys(seq.token_ids, len(seq.token_ids) - 1)) if chain and chain.reads else []

    def _offer(self, seq: Sequence) -> list[bytes]:
        """Let others find the pages that the sequence has computed in full; returns their keys."""
        chain = seq.prefix
        assert chain is not None
        keys = chain.keys(seq.token_ids, seq.num_computed_tokens)
        for page, key in zip(seq.page_ids[chain.num_offered :], keys[chain.num_offered :], strict=False):
            self.prefix.publish(page, key)
        chain.num_offered = seq.num_computed_tokens // self._page_tokens
        return keys
