"""What the scheduler does with its books as a whole: proofs, and a new beginning (host only, no jax)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from multilora_jax.engine.admission import ActiveAdapters
from multilora_jax.engine.entrance import Entrance
from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.policies.base import Entry
from multilora_jax.engine.waiting import WaitingQueue
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator, PoolIntegrityError
from multilora_jax.request import Sequence


class SchedulerBooks:
    """The part of Scheduler that looks at all of its books together."""

    active: ActiveAdapters
    _allocator: PageAllocator
    _cache: AdapterCache[Any]
    _entrance: Entrance
    _kv: KVManager
    _live: dict[str, Entry]
    _running: dict[str, Entry]
    _waiting: WaitingQueue

    def running(self) -> list[Sequence]:
        """The running sequences in the order of their admission."""
        return [entry.seq for entry in self._running.values()]

    def start_only(self, seqs: frozenset[Sequence]) -> None:
        """Let nobody but these start from now on; everybody where there are none."""
        if seqs != self._waiting.only:
            self._waiting.only = seqs
            self._waiting.changed()

    def restart(self) -> None:
        """Begin anew after a failed step: all pages are free, no adapter is resident, and whoever ran waits.

        It believes nothing but which sequences are live and which tokens they have, so that books which contradict
        themselves are mended too.
        """
        for books in (self._allocator, self._cache.order, self._kv.prefix, self._cache, self.active):
            books.clear()
        for entry in self._live.values():
            seq, entry.running = entry.seq, False
            seq.page_ids.clear()
            seq.num_computed_tokens = seq.num_in_flight = 0
            if seq.prefix is not None:
                seq.prefix.num_offered = 0
        self._running.clear()
        self._entrance.stalled = None
        self._waiting.restart(self._live.values())

    def check_integrity(self) -> None:
        """Prove the allocator's equation and that every page belongs to one running sequence or resident adapter.

        Raises:
            PoolIntegrityError: the books disagree.
        """
        self._allocator.check_integrity()
        self._cache.check_integrity()
        self._kv.prefix.check_integrity(Counter(p for e in self._running.values() for p in e.seq.page_ids))
        self._waiting.check_integrity()
        if any(seq.page_ids for seq in self._waiting.sequences()):
            raise PoolIntegrityError("a waiting sequence holds pages")
        if len(self._waiting) + len(self._running) != len(self._live):
            raise PoolIntegrityError(f"{len(self._live)} sequences are live but not each waits or runs")
        if any(self._cache.references(adapter) != n for adapter, n in self.active.users.items()):
            raise PoolIntegrityError("an adapter's references differ from the running sequences that use it")
