"""When adapters move to the device: a forecast over the waiting queue, in bounded slices (host only, no jax).

Which adapters the next steps will want is written in the waiting queue (S-LoRA's prefetch). `plan` looks at the first
`lookahead` waiting sequences, in their order, before each step:

- It asks for the host copies that are missing, which other threads then read.
- It reserves pages for the host copies that are there: free ones, and those of idle adapters that no sequence in
  sight wants. So the queued requests of a resident adapter run before it is evicted for another (they pass those that
  are not in yet), and adapters that take turns are not loaded for one request each. A sequence may take the pages
  of adapters that later ones want when it was overtaken too often, or when they all are of a lower priority.
- It hands out at most `pages_per_step` pages to copy, so that no step of the running sequences takes much longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any, Protocol

import numpy as np

from multilora_jax.engine.scheduler import Scheduler
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.lora.residency import PageWrite
from multilora_jax.request import Sequence

STAGE_AHEAD = 32
"""Steps ahead that seats are counted as coming free: about what staging the rows of a large adapter takes."""


class PageSource(Protocol):
    """Where host copies come from."""

    def get(self, adapter: Any, /) -> np.ndarray | None:
        """The adapter's pages [num_pages, ...], None where they are not in host memory."""
        ...

    def request(self, adapter: Any, /) -> None:
        """Have them read; returns at once, and does nothing while that is under way or its failure is unheard."""
        ...


class AdapterTransfers:
    """Brings adapters into the pool for the sequences that wait for them. Not thread-safe.

    Args:
        cache: the pool's books; nobody else reserves pages in it or takes its writes.
        source: of host copies.
        scheduler: whose queue it is.
        pages_per_step: most pages copied in a step in which sequences run.
        prefetch: False: bring in adapters only for sequences that could run at once.
        lookahead: how many waiting sequences are in sight.
        max_reads: most host copies asked for at a time; no more than the host tier can hold.
    """

    def __init__(
        self,
        cache: AdapterCache[Any],
        source: PageSource,
        scheduler: Scheduler,
        *,
        pages_per_step: int,
        prefetch: bool = True,
        lookahead: int = 64,
        max_reads: int = 16,
    ) -> None:
        self._cache = cache
        self._source = source
        self._scheduler = scheduler
        self._pages_per_step = max(1, pages_per_step)
        self._prefetch = prefetch
        self._lookahead = max(1, lookahead)
        self._max_reads = max(1, max_reads)
        self._fetching: dict[Any, None] = {}
        self._turned_away: set[Any] = set()  # wanted ones whose host copy was there when there was no room
        self._pages: dict[Any, np.ndarray] = {}  # of the loading adapters: the source may drop its copy meanwhile

    def awaited(self) -> list[Any]:
        """Adapters whose host copies were asked for and had not come when `plan` was last called."""
        return list(self._fetching)

    def forget(self, adapter: Any) -> None:
        """Stop waiting for an adapter whose host copy cannot be had.

        The caller ends the sequences that wait for it, else it is asked for again. A pin that could not be served yet
        is undone.
        """
        self._fetching.pop(adapter, None)
        self._cache.set_fetching(self._fetching)
        if not self._cache.is_resident(adapter):
            self._cache.unpin(adapter)

    def restart(self) -> None:
        """Forget what was under way; whatever is wanted is asked for again."""
        self._fetching, self._turned_away, self._pages = {}, set(), {}

    def plan(self, waiting: Iterable[Sequence], busy: bool) -> list[tuple[PageWrite[Any], np.ndarray]]:
        """What to copy to the device before the next step; call it before every `Scheduler.schedule`.

        Costs O(lookahead), and next to nothing while the queue is empty.

        Args:
            waiting: the scheduler's waiting sequences, in order; no more than `lookahead` of them are looked at.
            busy: whether sequences are running; if not, the number of pages is not bounded.

        Returns:
            (where to, page of the host copy). Copy all of them, in any order, before the next step runs: the
            scheduler takes their adapters to be there. A page may get another owner while that step is planned, so no
            copy may be put off until after the step.
        """
        cache = self._cache
        in_sight = list(islice(waiting, self._lookahead))
        wanted: dict[Any, tuple[float, ...]] = {}
        for seq in in_sight:
            for adapter in seq.adapters:
                if adapter not in wanted:
                    wanted[adapter] = (-seq.priority, -seq.arrival_time)
        next_up = next((seq.adapters for seq in in_sight if seq.adapters), ())
        cache.expect(wanted, next_up)
        self._fetching = {}
        if not all(map(cache.is_resident, wanted)):
            self._bring_in(in_sight, None if self._prefetch else self._due(in_sight))
        for adapter in cache.pinned():
            if not cache.is_resident(adapter):
                self._bring(adapter, next_up, self._scheduler.num_running)
        self._turned_away &= wanted.keys()
        cache.set_fetching(self._fetching)
        writes = cache.take_writes(self._pages_per_step if busy else None)
        copies = [(write, self._pages[write.adapter][write.index]) for write in writes]
        if self._pages:
            self._pages = {adapter: pages for adapter, pages in self._pages.items() if cache.is_loading(adapter)}
        return copies

    @property
    def empty_seats(self) -> float:
        """Share of the seats that stand empty while any sequence waits: the fewer run, the fewer feel what is done for
        it, and the longer it would wait for a small share of short steps."""
        scheduler = self._scheduler
        return scheduler.num_free_seats / scheduler.config.max_num_seqs if scheduler.num_waiting else 0.0

    def to_stage(self) -> tuple[list[Any], list[Any]]:
        """The adapters of the running sequences, and those in the pool that the next ones to start will add."""
        scheduler, active, wanted = self._scheduler, self._scheduler.active, dict[Any, None]()
        # Seats about to come free are prepared for, one at least: else others would always be there first.
        seats = max(1, scheduler.seats_within(STAGE_AHEAD))
        for seq in scheduler.waiting(self._lookahead):
            together = tuple(dict.fromkeys((*wanted, *seq.adapters)))
            if all(map(self._cache.is_ready, seq.adapters)) and active.has_room_for(together):
                wanted.update(dict.fromkeys(seq.adapters))
                seats -= 1
            if not seats:
                break
        return list(active.users), list(wanted)

    def _due(self, in_sight: Iterable[Sequence]) -> set[Sequence]:
        """The sequences that could run now but for their adapters, one for each free seat."""
        due: set[Sequence] = set()
        seats = self._scheduler.num_free_seats
        for seq in in_sight:
            if len(due) >= seats:
                break
            if self._scheduler.could_run(seq):
                due.add(seq)
        return due

    def _bring_in(self, in_sight: list[Sequence], due: Collection[Sequence] | None) -> None:
        """Ask for and reserve what is missing, in the order of the queue, for those that are `due`; None for all.

        Room that was refused once is not asked for again within a call: what one sequence may not take, no later one
        of its priority may.
        """
        scheduler, is_resident = self._scheduler, self._cache.is_resident
        wanted: dict[int, set[Any]] = {}  # by priority: adapters of the sequences that are as urgent
        refused: dict[int, int] = {}  # by priority: pages
        # Not to be taken: what running sequences, and those that may start before this one, are about to need for KV.
        spare, seats = scheduler.num_running, scheduler.num_free_seats
        for place, seq in enumerate(in_sight):
            kv_pages = scheduler.pages_outstanding(seq) if place < seats else 0
            if place == seats:
                spare += scheduler.pages_of_growth()
            spare += kv_pages
            if not all(map(is_resident, seq.adapters)) and (due is None or seq in due):
                priority, displaces = seq.priority, scheduler.may_displace(seq)
                if displaces:
                    protect = {adapter for earlier in in_sight[: place + 1] for adapter in earlier.adapters}
                elif priority in wanted:
                    protect = wanted[priority]
                else:
                    protect = {a for other in in_sight if other.priority <= priority for a in other.adapters}
                    wanted[priority] = protect
                for adapter in seq.adapters:
                    limit = None if displaces else refused.get(priority)
                    if not is_resident(adapter) and not self._bring(adapter, protect, spare, limit) and not displaces:
                        refused[priority] = adapter.num_pages if limit is None else min(limit, adapter.num_pages)
            spare += kv_pages > 0

    def _bring(self, adapter: Any, protect: Collection[Any], spare: int, refused: int | None = None) -> bool:
        """Reserve pages for an adapter, or ask for its host copy; False if there is no room.

        Args:
            protect, spare: see AdapterCache.reserve.
            refused: pages that cannot be had.
        """
        if adapter in self._fetching:
            return True
        pages = self._source.get(adapter)
        if pages is None:
            # Read ahead of its room once. A small host tier may drop the copy again before there is room, and reading
            # it over and over would look as if it were on its way.
            if adapter in self._turned_away and (
                (refused is not None and adapter.num_pages >= refused)
                or not self._cache.could_reserve(adapter, protect, spare)
            ):
                return False
            if len(self._fetching) < self._max_reads or self._cache.is_pinned(adapter):
                self._source.request(adapter)
                self._fetching[adapter] = None
            return True
        if (refused is not None and adapter.num_pages >= refused) or not self._cache.reserve(adapter, protect, spare):
            self._turned_away.add(adapter)
            return False
        self._turned_away.discard(adapter)
        self._pages[adapter] = pages
        return True
