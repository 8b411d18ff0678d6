"""Which adapters are in device memory, who uses them, and what has to be copied there (host only, no jax).

The cache keeps the books; it copies nothing. An adapter is absent, or `loading` (its pages are reserved and are being
filled, a few in each step), or `ready`. It is identified by its object, not by its name: after a reload under one
name the old and the new version are two adapters, so that running requests finish on the version they started with.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Generic

from multilora_jax.lora.residency import EXPECTED, LOADING, NEXT, AdapterT, PageWrite, Residency, UseTally
from multilora_jax.lora.share import PoolShare
from multilora_jax.memory.allocator import PageAllocator, PageKind, PoolIntegrityError
from multilora_jax.memory.recency import EvictionOrder, EvictionPolicy, Rank


class AdapterCache(PoolShare, Generic[AdapterT]):
    """Residency of adapters in the unified pool. Not thread-safe.

    An adapter is in use while running sequences hold references to it (`acquire`, `release`); once the last one goes
    it is idle: it keeps its pages until somebody needs them. One in use or pinned is never evicted. One that is still
    loading is idle too: its pages can be taken, and the rest of its load is forgotten.

    Args:
        allocator: the pool's free list, shared with the KV cache.
        max_adapter_pages: see PoolShare.set_cap.
        policy: who of the idle goes first, see EvictionOrder.

    Attributes:
        order: of eviction, for whatever else may be idle in the pool too.
        hits: acquisitions that found the adapter resident, without a load made for them.
        misses: loads that requests caused (those for a pin are not counted).
        tally: hits and misses of each adapter.
        loads: page sets reserved.
        evictions: adapters that lost their pages to make room (unloads are not counted).
    """

    def __init__(
        self, allocator: PageAllocator, max_adapter_pages: int | None = None, *, policy: EvictionPolicy = "lru"
    ) -> None:
        super().__init__(allocator, max_adapter_pages)
        self.order = EvictionOrder(policy)
        self.hits = self.misses = self.loads = self.evictions = 0
        self.tally = UseTally()
        self._pinned: dict[AdapterT, None] = {}  # resident or not
        self._claims: Counter[AdapterT] = Counter()
        # Weak, because nothing may outlive an unloaded adapter's last request.
        self._dropped: weakref.WeakSet[AdapterT] = weakref.WeakSet()
        self._lost: weakref.WeakSet[AdapterT] = weakref.WeakSet()
        self._pinned_pages = 0
        self.clear()

    def clear(self) -> None:
        """Nothing is resident any more; pins stay, allocator and order are cleared beside it."""
        self._resident: dict[AdapterT, Residency] = {}
        self._loading: dict[AdapterT, None] = {}  # first reserved first
        self._expected: dict[AdapterT, Rank] = {}
        self._next, self._fetching = frozenset[AdapterT](), set[AdapterT]()
        self._adapter_pages = 0

    # What is where

    def residents(self) -> list[AdapterT]:
        """Adapters that hold pages, loading ones too, longest resident first."""
        return list(self._resident)

    def is_resident(self, adapter: AdapterT) -> bool:
        """Whether it holds pages, filled or not."""
        return adapter in self._resident

    def is_loading(self, adapter: AdapterT) -> bool:
        return adapter in self._loading

    def is_ready(self, adapter: AdapterT) -> bool:
        """Whether all its pages are filled by the time the next step runs."""
        return adapter in self._resident and adapter not in self._loading

    def is_coming(self, adapter: AdapterT) -> bool:
        """Whether it is loading, or its host copy is on the way (`set_fetching`)."""
        return adapter in self._loading or adapter in self._fetching

    def is_dropped(self, adapter: AdapterT) -> bool:
        """Whether it was unloaded; requests that named it before still run."""
        return adapter in self._dropped

    def was_lost(self, adapter: AdapterT) -> bool:
        """Whether it was loaded in vain: it lost its pages before anybody ran it, and nobody did since."""
        return adapter in self._lost

    def is_pinned(self, adapter: AdapterT) -> bool:
        return adapter in self._pinned

    @property
    def pinned_pages(self) -> int:
        """Pages that the pinned adapters take, the absent ones too."""
        return self._pinned_pages

    def pinned(self) -> list[AdapterT]:
        """Pinned adapters, wherever they are."""
        return list(self._pinned)

    def references(self, adapter: AdapterT) -> int:
        """Running references to the adapter; 0 where it is idle or absent."""
        return self._resident[adapter].references if adapter in self._resident else 0

    def pages_of(self, adapter: AdapterT) -> list[int]:
        """Page ids of a resident adapter (else PoolIntegrityError), in the order of its own pages."""
        return self._entry(adapter).page_ids

    def pages_available(self, beside: Iterable[AdapterT] = ()) -> int:
        """Pages that KV could get now, by eviction if need be, without evicting an adapter of `beside`."""
        order = self.order
        return self._allocator.num_free - self.num_kept + order.num_pages - sum(map(order.pages_of, set(beside)))

    # Use

    def acquire(self, adapter: AdapterT) -> bool:
        """Add one running reference; False, and nothing changed, if the adapter is not ready."""
        if not self.is_ready(adapter):
            return False
        entry = self._resident[adapter]
        self.hits += self.tally.hit(adapter, not entry.counts_as_miss)
        entry.counts_as_miss = entry.unused = False
        entry.references += 1
        self._lost.discard(adapter)
        self.order.set_in_use(adapter)
        return True

    def release(self, adapter: AdapterT) -> None:
        """Take one running reference back; an unloaded adapter that no live request names is freed with its last.

        Raises:
            PoolIntegrityError: there is no reference to take back.
        """
        entry = self._entry(adapter)
        if entry.references < 1:
            raise PoolIntegrityError(f"adapter {adapter.name!r} was released more often than acquired")
        entry.references -= 1
        self._settle(adapter)

    def claim(self, adapter: AdapterT) -> None:
        """Note that a live request, waiting or running, names the adapter: an unload leaves it loadable till then."""
        self._claims[adapter] += 1

    def unclaim(self, adapter: AdapterT) -> None:
        """Undo one `claim`; PoolIntegrityError if there is none."""
        if self._claims[adapter] < 1:
            raise PoolIntegrityError(f"adapter {adapter.name!r} is named by no live request")
        self._claims[adapter] -= 1
        if not self._claims[adapter]:
            del self._claims[adapter]
            self._settle(adapter)

    def pin(self, adapter: AdapterT) -> None:
        """Keep the adapter resident from now on, or from when it is loaded, until `unpin` or `drop`.

        Whether the pool can afford that is for Scheduler.check_pin to say.

        Raises:
            PoolIntegrityError: the adapter was unloaded.
        """
        if adapter in self._dropped:
            raise PoolIntegrityError(f"adapter {adapter.name!r} was unloaded and cannot be pinned")
        if adapter not in self._pinned:
            self._pinned[adapter] = None
            self._pinned_pages += adapter.num_pages
            self.order.set_in_use(adapter)

    def unpin(self, adapter: AdapterT) -> None:
        """Undo `pin`; nothing to do for an adapter that is not pinned."""
        if adapter in self._pinned:
            del self._pinned[adapter]
            self._pinned_pages -= adapter.num_pages
            self._settle(adapter)

    def drop(self, adapter: AdapterT) -> None:
        """Unload: free its pages, filled or not, as soon as no live request names it; a pin does not hold it."""
        self._dropped.add(adapter)
        self.unpin(adapter)
        self._settle(adapter)

    # Loading

    def expect(self, urgency: Mapping[AdapterT, Rank], next_up: Iterable[AdapterT] = ()) -> None:
        """Say which adapters waiting requests will want, replacing what was said before: they are evicted late.

        Args:
            urgency: of the adapters of the requests in sight; the lowest is evicted first.
            next_up: those of the first of these requests; they are evicted last, and filled first.
        """
        changed = self._expected.keys() - urgency.keys() | self._next.symmetric_difference(next_up)
        changed.update(adapter for adapter, rank in urgency.items() if self._expected.get(adapter) != rank)
        self._expected, self._next = dict(urgency), frozenset(next_up)
        for adapter in changed:
            self.order.set_rank(adapter, self._rank(adapter))

    def set_fetching(self, adapters: Iterable[AdapterT]) -> None:
        """Say which adapters' host copies are on the way, replacing what was said before."""
        self._fetching = set(adapters)

    def reserve(self, adapter: AdapterT, protect: Collection[AdapterT] = (), spare: int = 0) -> bool:
        """Allocate pages for an adapter, evicting idle items if need be; it is loading from then on.

        Args:
            protect: adapters that must not be evicted for it.
            spare: pages that must still be free or evictable (none of `protect`) afterwards, for KV; a split pool has
                them anyway.

        Returns:
            True also for one that is resident already; False, with nothing changed, when there is no room.

        Raises:
            PoolIntegrityError: it was unloaded and no live request names it.
        """
        if adapter in self._resident:
            return True
        if adapter in self._dropped and not self._claims[adapter]:
            raise PoolIntegrityError(f"adapter {adapter.name!r} was unloaded: nobody can want it loaded")
        victims = self._choose_victims(adapter.num_pages, protect, spare)
        if victims is None:
            return False
        self.order.evict(victims)
        page_ids = self._allocator.allocate(adapter.num_pages, PageKind.ADAPTER)
        assert page_ids is not None
        self._resident[adapter] = Residency(page_ids, counts_as_miss=adapter not in self._pinned)
        self._loading[adapter] = None
        self._adapter_pages += adapter.num_pages
        self.loads += 1
        self.misses += self.tally.miss(adapter, adapter not in self._pinned)
        self.order.enter(adapter)
        self._settle(adapter)
        return True

    def could_reserve(self, adapter: AdapterT, protect: Collection[AdapterT] = (), spare: int = 0) -> bool:
        """Whether `reserve` would find room now."""
        return adapter in self._resident or self._choose_victims(adapter.num_pages, protect, spare) is not None

    def take_writes(self, max_pages: int | None = None) -> list[PageWrite[AdapterT]]:
        """The next pages to copy to the device, each listed once; an adapter is ready with its last one.

        The caller copies them before it runs the next step. Adapters are filled in the order of their reservation,
        those of the next request (`expect`) before all others.

        Args:
            max_pages: most pages; None for all.
        """
        writes: list[PageWrite[AdapterT]] = []
        for adapter in sorted(self._loading, key=lambda adapter: adapter not in self._next):
            entry = self._resident[adapter]
            first, end = entry.num_written, len(entry.page_ids)
            if max_pages is not None:
                end = min(end, first + max_pages - len(writes))
            writes += [PageWrite(adapter, i, entry.page_ids[i]) for i in range(first, end)]
            entry.num_written = end
            if end == len(entry.page_ids):
                del self._loading[adapter]
                self.order.set_rank(adapter, self._rank(adapter))
            if len(writes) == max_pages:
                break
        return writes

    def check_integrity(self) -> None:
        """Prove that the books agree with the allocator's and with the order of eviction.

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
        if self.num_kept > self._allocator.num_free:
            raise PoolIntegrityError(
                f"KV is in pages set apart: {self.num_kept} of {self._allocator.num_free} are kept"
            )
        self.order.check_integrity()
        for adapter, entry in self._resident.items():
            busy = entry.references > 0 or adapter in self._pinned
            if busy == self.order.is_idle(adapter) or self.order.pages_of(adapter) not in (0, adapter.num_pages):
                raise PoolIntegrityError(f"adapter {adapter.name!r} is in use or idle, and listed as the other")
            if (entry.num_written < len(entry.page_ids)) > (adapter in self._loading):
                raise PoolIntegrityError(f"adapter {adapter.name!r} counts as ready but is not written")
            if adapter in self._dropped and not entry.references and not self._claims[adapter]:
                raise PoolIntegrityError(f"adapter {adapter.name!r} was unloaded but keeps its pages")
        pinned = sum(adapter.num_pages for adapter in self._pinned)
        if pinned != self._pinned_pages or not self._loading.keys() <= self._resident.keys():
            raise PoolIntegrityError(f"{pinned} pages are pinned but {self._pinned_pages} counted, or a load is stale")

    def _entry(self, adapter: AdapterT) -> Residency:
        entry = self._resident.get(adapter)
        if entry is None:
            raise PoolIntegrityError(f"adapter {adapter.name!r} is not resident")
        return entry

    def _rank(self, adapter: AdapterT) -> Rank:
        urgency = self._expected.get(adapter)
        if adapter in self._next:
            return (NEXT,)
        if adapter in self._loading:
            return (LOADING, *(urgency or ()))
        return () if urgency is None else (EXPECTED, *urgency)

    def _choose_victims(self, needed: int, protect: Collection[AdapterT], spare: int) -> list[Hashable] | None:
        """Whom to evict for `needed` pages; None where there is no room."""
        over = self._adapter_pages + needed - self.max_adapter_pages
        adapters: list[Hashable] = []
        if over > 0:  # the cap is on adapters alone, so that only their own pages count
            for item in self.order:
                if over > 0 and item in self._resident and item not in protect:
                    adapters.append(item)
                    over -= item.num_pages
            if over > 0:
                return None
        if self.is_split:  # what they free is for adapters only: the order lists it as 0 pages
            return adapters
        return self.order.choose(needed, self._allocator.num_free, protect=protect, spare=spare, chosen=adapters)

    def _settle(self, adapter: AdapterT) -> None:
        """Put an adapter where it belongs after something let go of it: away if unloaded, else among the idle."""
        unwanted = adapter in self._dropped and not self._claims[adapter]
        if unwanted:
            self._expected.pop(adapter, None)
            self._next -= {adapter}
            self._fetching.discard(adapter)
        entry = self._resident.get(adapter)
        if entry is None or entry.references or adapter in self._pinned:
            return
        if unwanted:
            self._free(adapter)
        elif not self.order.is_idle(adapter):
            self.order.set_idle(adapter, 0 if self.is_split else adapter.num_pages, self._evict, self._rank(adapter))

    def _evict(self, adapter: AdapterT) -> None:
        if self._resident[adapter].unused:
            self._lost.add(adapter)
        self._free(adapter)
        self.evictions += 1

    def _free(self, adapter: AdapterT) -> None:
        self.order.leave(adapter)
        self._loading.pop(adapter, None)
        self._allocator.free(self._resident.pop(adapter).page_ids, PageKind.ADAPTER)
        self._adapter_pages -= adapter.num_pages
