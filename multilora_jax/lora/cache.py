"""Which adapters are in device memory, who uses them, and whom to evict (host only, no jax).

The cache decides and keeps the books; the model runner does the copies that `take_pending_writes` lists. An adapter
is identified by its host object, not by its name: after a reload under one name the old and the new version are two
adapters, so that running requests finish on the version they started with.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from multilora_jax.errors import ConfigError, UserError
from multilora_jax.memory.allocator import PageAllocator, PageKind, PoolIntegrityError


class CacheableAdapter(Protocol):
    """What the host's bookkeeping reads of a HostAdapter; hashed by identity."""

    @property
    def name(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_pages(self) -> int: ...


AdapterT = TypeVar("AdapterT", bound=CacheableAdapter)


@dataclass(eq=False, slots=True)
class _Resident:
    page_ids: list[int]
    references: int = 0
    pinned: bool = False


class AdapterCache(Generic[AdapterT]):
    """Residency of adapters in the unified pool, least recently used first out. Not thread-safe.

    An adapter is in use while running sequences hold references to it (`acquire`, `release`); once the last one goes
    it is idle: it keeps its pages until somebody needs them. One in use or pinned is never evicted. "Recently used"
    is the time of the last release (or unpin).

    Args:
        allocator: the pool's free list, shared with the KV cache.
        max_adapter_pages: most pages that adapters may hold together; None for no cap.
        max_pinned_pages: most pages that pinned adapters may hold together. The scheduler promises every accepted
            request that it fits beside this many, so a pin can never strand a request that is already queued.

    Attributes:
        hits: acquisitions that found the adapter resident.
        misses: acquisitions that had to load it; refused ones are not counted, as they are tried again.
        loads: page sets allocated, by `acquire` or `pin`.
        evictions: adapters that lost their pages to make room (unloads are not counted).

    Raises:
        ConfigError: a cap that is out of range.
    """

    def __init__(
        self, allocator: PageAllocator, max_adapter_pages: int | None = None, *, max_pinned_pages: int = 0
    ) -> None:
        cap = allocator.num_total if max_adapter_pages is None else min(max_adapter_pages, allocator.num_total)
        if cap < 1 or not 0 <= max_pinned_pages <= cap:
            raise ConfigError(
                f"max_adapter_pages must be at least 1 and max_pinned_pages from 0 to that or to the pool's "
                f"{allocator.num_total} pages, got {max_adapter_pages} and {max_pinned_pages}",
                reason="max_adapter_pages", param="max_adapter_pages",
            )  # fmt: skip
        self.max_adapter_pages = cap
        self.max_pinned_pages = max_pinned_pages
        self.hits = self.misses = self.loads = self.evictions = 0
        self._allocator = allocator
        self._resident: dict[AdapterT, _Resident] = {}
        self._idle: dict[AdapterT, None] = {}  # in order of last use
        self._pending: dict[AdapterT, list[int]] = {}
        # Weak, because an unloaded adapter's host copy must go as soon as its last request does.
        self._dropped: weakref.WeakSet[AdapterT] = weakref.WeakSet()
        self._adapter_pages = 0
        self._idle_pages = 0
        self._pinned_pages = 0

    @property
    def evictable_pages(self) -> int:
        """Pages of idle adapters: what `evict_idle` could free at most."""
        return self._idle_pages

    @property
    def pinned_pages(self) -> int:
        return self._pinned_pages

    def residents(self) -> list[AdapterT]:
        """Adapters that hold pages, longest resident first."""
        return list(self._resident)

    def is_resident(self, adapter: AdapterT) -> bool:
        return adapter in self._resident

    def is_pinned(self, adapter: AdapterT) -> bool:
        """Whether `pin` holds the adapter; False for an absent one."""
        entry = self._resident.get(adapter)
        return entry is not None and entry.pinned

    def references(self, adapter: AdapterT) -> int:
        """Running references to the adapter; 0 where it is idle or absent."""
        entry = self._resident.get(adapter)
        return entry.references if entry else 0

    def pages_of(self, adapter: AdapterT) -> list[int]:
        """Page ids of a resident adapter, in the order of its own pages.

        Raises:
            PoolIntegrityError: it is not resident.
        """
        return self._entry(adapter).page_ids

    def pages_missing(self, adapter: AdapterT) -> int:
        """Pages that `acquire` would have to allocate: 0 for a resident adapter."""
        return 0 if adapter in self._resident else adapter.num_pages

    def pages_available(self, beside: AdapterT | None = None) -> int:
        """Pages that could be had now, by eviction if need be, without evicting the adapter `beside`."""
        available = self._allocator.num_free + self._idle_pages
        return available - beside.num_pages if beside in self._idle else available

    def can_acquire(self, adapter: AdapterT) -> bool:
        """Whether `acquire` would succeed now; changes nothing."""
        if adapter in self._resident:
            return True
        in_use = self._adapter_pages - self._idle_pages
        return adapter.num_pages <= min(self.pages_available(), self.max_adapter_pages - in_use)

    def acquire(self, adapter: AdapterT) -> bool:
        """Make the adapter resident, evicting idle ones if need be, and add one running reference.

        Returns:
            False, and nothing changed or evicted, when even evicting every idle adapter would not make room.
        """
        if adapter in self._resident:
            self.hits += 1
        elif self._load(adapter):
            self.misses += 1
        else:
            return False
        entry = self._resident[adapter]
        entry.references += 1
        self._leave_idle(adapter)
        return True

    def release(self, adapter: AdapterT) -> None:
        """Take one running reference back; an unloaded adapter is freed with its last one.

        Raises:
            PoolIntegrityError: there is no reference to take back.
        """
        entry = self._entry(adapter)
        if entry.references < 1:
            raise PoolIntegrityError(f"adapter {adapter.name!r} was released more often than acquired")
        entry.references -= 1
        self._settle(adapter, entry)

    def pin(self, adapter: AdapterT) -> bool:
        """Make the adapter resident and keep it so until `unpin` or `drop`.

        Returns:
            False, and nothing changed, when there is no room for it now.

        Raises:
            UserError: pinned adapters would hold more than max_pinned_pages.
            PoolIntegrityError: the adapter was unloaded.
        """
        if adapter in self._dropped:
            raise PoolIntegrityError(f"adapter {adapter.name!r} was unloaded and cannot be pinned")
        entry = self._resident.get(adapter)
        if entry and entry.pinned:
            return True
        if self._pinned_pages + adapter.num_pages > self.max_pinned_pages:
            raise UserError(
                f"pinning adapter {adapter.name!r} ({adapter.num_pages} pages) would bring the pinned pages to "
                f"{self._pinned_pages + adapter.num_pages}, above the limit of {self.max_pinned_pages}: unpin another",
                reason="pin_limit", param="lora_name",
            )  # fmt: skip
        if entry is None:
            if not self._load(adapter):
                return False
            entry = self._resident[adapter]
        entry.pinned = True
        self._pinned_pages += adapter.num_pages
        self._leave_idle(adapter)
        return True

    def unpin(self, adapter: AdapterT) -> None:
        """Undo `pin`; nothing to do for an adapter that is not pinned."""
        entry = self._resident.get(adapter)
        if entry and entry.pinned:
            entry.pinned = False
            self._pinned_pages -= adapter.num_pages
            self._settle(adapter, entry)

    def drop(self, adapter: AdapterT) -> None:
        """Unload: free its pages at once if idle (pinned or not), else when the last running reference goes.

        Queued sequences that already name it may still acquire it; it never stays behind idle.
        """
        self._dropped.add(adapter)
        self.unpin(adapter)
        entry = self._resident.get(adapter)
        if entry:
            self._settle(adapter, entry)

    def evict_idle(self, num_pages: int) -> int:
        """Evict least recently used idle adapters until `num_pages` pages came free or none is left.

        Returns:
            pages freed: more than asked for when the last adapter was larger, less when none was left.
        """
        freed = 0
        while freed < num_pages and self._idle:
            freed += self._evict_oldest()
        return freed

    def take_pending_writes(self) -> list[tuple[AdapterT, list[int]]]:
        """(adapter, page ids) that must be copied to the device before the next step; each is listed once."""
        writes = list(self._pending.items())
        self._pending.clear()
        return writes

    def check_integrity(self) -> None:
        """Prove that the books agree with the allocator's.

        Raises:
            PoolIntegrityError: they do not.
        """
        pages = [page for entry in self._resident.values() for page in entry.page_ids]
        held = self._allocator.count(PageKind.ADAPTER)
        if not len(pages) == len(set(pages)) == self._adapter_pages == held:
            raise PoolIntegrityError(
                f"residents list {len(pages)} pages ({len(set(pages))} distinct), the counter says "
                f"{self._adapter_pages}, the allocator {held}"
            )
        idle = {a for a, e in self._resident.items() if not e.references and not e.pinned}
        if idle != set(self._idle) or sum(a.num_pages for a in idle) != self._idle_pages:
            raise PoolIntegrityError(f"{len(idle)} adapters are idle but {len(self._idle)} are listed as evictable")
        pinned = sum(a.num_pages for a, e in self._resident.items() if e.pinned)
        if pinned != self._pinned_pages or not set(self._pending) <= set(self._resident):
            raise PoolIntegrityError(f"{pinned} pages are pinned but {self._pinned_pages} counted, or a write is stale")

    def _entry(self, adapter: AdapterT) -> _Resident:
        entry = self._resident.get(adapter)
        if entry is None:
            raise PoolIntegrityError(f"adapter {adapter.name!r} ({adapter.digest[:12]}) is not resident")
        return entry

    def _load(self, adapter: AdapterT) -> bool:
        if not self.can_acquire(adapter):
            return False
        needed = adapter.num_pages
        while self._allocator.num_free < needed or self._adapter_pages + needed > self.max_adapter_pages:
            self._evict_oldest()
        page_ids = self._allocator.allocate(needed, PageKind.ADAPTER)
        assert page_ids is not None
        self._resident[adapter] = _Resident(page_ids)
        self._pending[adapter] = page_ids
        self._adapter_pages += needed
        self._idle[adapter] = None
        self._idle_pages += needed
        self.loads += 1
        return True

    def _settle(self, adapter: AdapterT, entry: _Resident) -> None:
        """Put an adapter that nobody holds where it belongs: away if unloaded, else last in the order of eviction."""
        if entry.references or entry.pinned:
            return
        if adapter not in self._idle:
            self._idle[adapter] = None
            self._idle_pages += adapter.num_pages
        if adapter in self._dropped:
            self._free(adapter)

    def _leave_idle(self, adapter: AdapterT) -> None:
        if adapter in self._idle:
            del self._idle[adapter]
            self._idle_pages -= adapter.num_pages

    def _evict_oldest(self) -> int:
        adapter = next(iter(self._idle))
        self._free(adapter)
        self.evictions += 1
        return adapter.num_pages

    def _free(self, adapter: AdapterT) -> None:
        self._leave_idle(adapter)
        self._pending.pop(adapter, None)
        self._allocator.free(self._resident.pop(adapter).page_ids, PageKind.ADAPTER)
        self._adapter_pages -= adapter.num_pages
