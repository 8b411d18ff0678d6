"""How much of the pool adapters may have (host only, no jax)."""

from __future__ import annotations

from multilora_jax.errors import ConfigError
from multilora_jax.memory.allocator import PageAllocator, PoolIntegrityError


class PoolShare:
    """The part of AdapterCache that says how many pages adapters may hold, and whether anything else may be in these.

    Args:
        allocator: the pool's free list.
        max_adapter_pages: see `set_cap`.

    Attributes:
        max_adapter_pages, is_split: see `set_cap`.
    """

    def __init__(self, allocator: PageAllocator, max_adapter_pages: int | None) -> None:
        self._allocator = allocator
        self._adapter_pages = 0
        self.set_cap(max_adapter_pages)

    def set_cap(self, max_adapter_pages: int | None, *, split: bool = False) -> None:
        """Say how much of the pool adapters may have; only while all of it is free.

        Args:
            max_adapter_pages: most pages that they may hold together; None for no cap.
            split: set these pages apart, as a server without a unified pool does: nothing else is ever in them, so
                that adapters and KV never make room for each other.

        Raises:
            ConfigError: a cap below 1, or a split that leaves nothing for KV.
            PoolIntegrityError: pages are held.
        """
        total = self._allocator.num_total
        cap = total if max_adapter_pages is None else min(max_adapter_pages, total)
        if cap < 1 or (split and cap == total):
            most = f" and below the pool's {total} pages where they are set apart" if split else ""
            what = f"max_adapter_pages must be at least 1{most}, got {max_adapter_pages}"
            raise ConfigError(what, reason="max_adapter_pages", param="max_adapter_pages")
        if self._allocator.num_free < total:
            raise PoolIntegrityError("adapters' share of the pool changes while pages are held")
        self.max_adapter_pages, self.is_split = cap, split

    @property
    def num_kept(self) -> int:
        """Free pages that only adapters may have: none unless the pool is split."""
        return self.max_adapter_pages - self._adapter_pages if self.is_split else 0
