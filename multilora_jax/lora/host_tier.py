"""Adapters in host memory, in the shape of pool pages: between the files and the pool (no device, no engine)."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from multilora_jax.errors import ConfigError
from multilora_jax.lora.adapter import Adapter


@dataclass(slots=True)
class _Entry:
    pages: np.ndarray
    keep: bool


class HostTier:
    """Page-shaped copies of adapters, up to a number of adapters, of bytes, or both. Safe from any thread.

    What is put in is always held, and what is put out for it are others: so an adapter larger than `max_bytes` is
    held for as long as nothing else comes, and a load that succeeded is never in vain. An entry goes with its
    adapter: once nobody refers to an Adapter any more, its pages are freed without being asked for.

    Args:
        max_adapters: most adapters held, None for any number.
        max_bytes: most bytes of pages held, None for any number.
        policy: who goes first, "lru" the least recently used one, "fifo" the one that came first.

    Attributes:
        evictions: entries that had to go for others.

    Raises:
        ConfigError: a limit below 1.
    """

    def __init__(
        self,
        *,
        max_adapters: int | None = None,
        max_bytes: int | None = None,
        policy: Literal["lru", "fifo"] = "lru",
    ) -> None:
        for name, limit in (("max_cpu_loras", max_adapters), ("max_cpu_lora_gib", max_bytes)):
            if limit is not None and limit < 1:
                raise ConfigError(f"{name} leaves room for no adapter: raise it", reason=name, param=name)
        self.evictions = 0
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._policy = policy
        self._lock = threading.Lock()
        self._entries: OrderedDict[weakref.ref[Adapter], _Entry] = OrderedDict()  # the next to go first
        self._bytes = 0
        # Filled by the garbage collector, at any moment and in any thread, so perhaps while this one holds the lock.
        self._dead: deque[weakref.ref[Adapter]] = deque()
        # Not a bound method: that would be a cycle, and the pages would outlive the tier until the next collection.
        this = weakref.ref(self)

        def died(reference: weakref.ref[Adapter]) -> None:
            tier = this()
            if tier is not None:
                tier._bury(reference)

        self._died = died

    def put(self, adapter: Adapter, pages: np.ndarray, *, keep: bool = False) -> None:
        """Holds an adapter, and lets go of others where a limit is passed.

        Args:
            adapter: whose pages they are; ones that are here already are replaced.
            pages: [num_pages, L, TP, E/TP] of the pool's storage type, never written to again.
            keep: never evict it (nothing could bring it back); it counts toward the limits all the same.
        """
        with self._lock:
            self._forget_dead()
            reference = weakref.ref(adapter, self._died)
            entry = self._entries.get(reference)
            if entry is None:
                entry = self._entries[reference] = _Entry(pages, keep)
            else:
                self._bytes -= entry.pages.nbytes
                entry.pages, entry.keep = pages, entry.keep or keep
                self._touch(reference)
            self._bytes += pages.nbytes
            while self._over():
                victims = (other for other, held in self._entries.items() if held is not entry and not held.keep)
                victim = next(victims, None)
                if victim is None:
                    break
                self._pop(victim)
                self.evictions += 1

    def get(self, adapter: Adapter) -> np.ndarray | None:
        """The pages of an adapter, None where they are not here; a use, in the order of eviction."""
        with self._lock:
            reference = weakref.ref(adapter)
            entry = self._entries.get(reference)
            if entry is None:
                return None
            self._touch(reference)
            return entry.pages

    def remove(self, adapter: Adapter) -> None:
        """Lets go of an adapter, a kept one too; nothing happens if it is not here. Not an eviction."""
        with self._lock:
            self._pop(weakref.ref(adapter))

    def adapters(self) -> list[Adapter]:
        """What is here, the next to be evicted first (kept ones are passed over)."""
        with self._lock:
            return [adapter for reference in self._entries if (adapter := reference()) is not None]

    @property
    def bytes(self) -> int:
        """Bytes of all pages here."""
        with self._lock:
            self._forget_dead()
            return self._bytes

    def __len__(self) -> int:
        with self._lock:
            self._forget_dead()
            return len(self._entries)

    def __contains__(self, adapter: Adapter) -> bool:
        with self._lock:
            return weakref.ref(adapter) in self._entries

    def _touch(self, reference: weakref.ref[Adapter]) -> None:
        if self._policy == "lru":
            self._entries.move_to_end(reference)

    def _over(self) -> bool:
        return (self._max_adapters is not None and len(self._entries) > self._max_adapters) or (
            self._max_bytes is not None and self._bytes > self._max_bytes
        )

    def _pop(self, reference: weakref.ref[Adapter]) -> None:
        entry = self._entries.pop(reference, None)
        if entry is not None:
            self._bytes -= entry.pages.nbytes

    def _bury(self, reference: weakref.ref[Adapter]) -> None:
        self._dead.append(reference)
        if self._lock.acquire(blocking=False):  # else the next caller does it
            try:
                self._forget_dead()
            finally:
                self._lock.release()

    def _forget_dead(self) -> None:
        while self._dead:
            self._pop(self._dead.popleft())
