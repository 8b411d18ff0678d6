"""The pool as a row of cells for a viewer that asks again and again: what each holds, and when it changed (no jax).

A cell is a page, or several neighbouring ones in a pool of more than MAX_CELLS pages. The engine's thread only copies
its books (`capture`); the rest is done wherever the viewer is answered.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from multilora_jax.memory.allocator import PageKind

if TYPE_CHECKING:
    from multilora_jax.engine.llm_engine import LLMEngine

MAX_CELLS = 4096
"""Most cells of a view."""

FREE, KV, CACHED, OTHER_ADAPTERS, FIRST_SLOT = range(5)
"""What a cell's code says; FIRST_SLOT and above are adapters with a slot of their own."""

MAX_SLOTS = 250
"""Most adapters with a slot; a code fits in a byte."""

_CODES = np.zeros(256, np.uint8)
_CODES[[PageKind.KV, PageKind.CACHED, PageKind.ADAPTER]] = KV, CACHED, OTHER_ADAPTERS


@dataclass(frozen=True)
class PoolCapture:
    """The pool's books at one moment.

    Attributes:
        kinds: PageKind of pages 1..P-1, a byte each.
        adapters: (adapter, its page ids) of each that holds pages. The lists are the cache's own, which never change.
    """

    kinds: bytes
    adapters: list[tuple[Any, list[int]]]


def capture(engine: LLMEngine) -> PoolCapture:
    """Copies the books; call it on the engine's thread, between two steps. O(resident adapters), and a memory copy."""
    cache = engine.cache
    return PoolCapture(engine.allocator.kind_bytes(), [(a, cache.pages_of(a)) for a in cache.residents()])


class Slots:
    """Small numbers for adapter names, which a viewer's colours follow. Not thread-safe.

    A name keeps its slot for as long as there is room; names that hold pages are preferred to others.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free = list(range(FIRST_SLOT + MAX_SLOTS - 1, FIRST_SLOT - 1, -1))

    def keep(self, names: Collection[str]) -> None:
        """Frees the slots of all names but these."""
        for name in self._slots.keys() - names:
            self._free.append(self._slots.pop(name))
        self._free.sort(reverse=True)

    def take(self, name: str, resident: Collection[str] = ()) -> int:
        """The slot of a name, a new one if need be; OTHER_ADAPTERS where all are taken.

        Args:
            resident: names whose slots may not be taken from them. None may be by a name that is not among them.
        """
        slot = self._slots.get(name)
        if slot is None and not self._free and name in resident:
            idle = next((other for other in self._slots if other not in resident), None)
            if idle is not None:
                self._free.append(self._slots.pop(idle))
        if slot is None and self._free:
            slot = self._slots[name] = self._free.pop()
        return OTHER_ADAPTERS if slot is None else slot


class PoolView:
    """The cells of one pool over time, or of several side by side. Not thread-safe.

    Args:
        num_pages: pages of each pool that can be handed out, page 0 not among them.

    Attributes:
        pages_per_cell: the last cell may hold fewer.
        num_cells: at most MAX_CELLS.
        sequence: number of the latest capture, from 1.
        pages_by_slot: pages of each adapter code in the latest capture.
    """

    def __init__(self, *num_pages: int):
        self._first_page = [0, *itertools.accumulate(num_pages)]
        total = self._first_page[-1]
        self.pages_per_cell = max(1, -(-total // MAX_CELLS))
        self.num_cells = -(-total // self.pages_per_cell)
        self.sequence = 0
        self.slots = Slots()
        self.pages_by_slot: dict[int, int] = {}
        self._cell_of_P = np.arange(total) // self.pages_per_cell
        self._code_C = np.zeros(self.num_cells, np.uint8)
        self._used_C = np.zeros(self.num_cells, np.int64)
        self._changed_C = np.zeros(self.num_cells, np.int64)
        self._page_indices: weakref.WeakKeyDictionary[Any, tuple[list[int], np.ndarray]] = weakref.WeakKeyDictionary()

    def update(self, *books: PoolCapture) -> None:
        """Takes a capture of each pool as the latest one."""
        self.sequence += 1
        codes_P = _CODES[np.frombuffer(b"".join(part.kinds for part in books), np.uint8)]
        resident = {adapter.name for part in books for adapter, _ in part.adapters}
        self.pages_by_slot = {}
        for first, part in zip(self._first_page, books, strict=False):
            for adapter, page_ids in part.adapters:
                slot = self.slots.take(adapter.name, resident)
                codes_P[first + self._indices(adapter, page_ids)] = slot
                self.pages_by_slot[slot] = self.pages_by_slot.get(slot, 0) + len(page_ids)
        code_C, used_C = self._cells(codes_P)
        self._changed_C[(code_C != self._code_C) | (used_C != self._used_C)] = self.sequence
        self._code_C, self._used_C = code_C, used_C

    def runs(self, since: int = -1) -> list[tuple[int, int, int, int]]:
        """The cells that changed after capture number `since`, all of them for -1.

        Returns:
            (first cell, cells, code, used) for each run of equal neighbours. `code` is what most used pages of each
            cell hold, FREE where none is used; `used` how many are.
        """
        index = np.flatnonzero(self._changed_C > since)
        if not len(index):
            return []
        code, used = self._code_C[index], self._used_C[index]
        differs = (np.diff(index) != 1) | (np.diff(code) != 0) | (np.diff(used) != 0)
        starts = np.concatenate([[0], np.flatnonzero(differs) + 1])
        lengths = np.diff([*starts, len(index)])
        columns = (index[starts], lengths, code[starts], used[starts])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _cells(self, codes_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.pages_per_cell == 1:
            return codes_P, (codes_P != FREE).astype(np.int64)
        counts_CK = np.bincount(self._cell_of_P * 256 + codes_P, minlength=self.num_cells * 256).reshape(-1, 256)
        counts_CK[:, FREE] = 0
        return counts_CK.argmax(axis=1).astype(np.uint8), counts_CK.sum(axis=1)

    def _indices(self, adapter: Any, page_ids: list[int]) -> np.ndarray:
        """The pages' places in the capture of their pool; made once for each stay of an adapter in the pool."""
        known = self._page_indices.get(adapter)
        if known is None or known[0] is not page_ids:
            known = self._page_indices[adapter] = (page_ids, np.asarray(page_ids, np.int64) - 1)
        return known[1]
