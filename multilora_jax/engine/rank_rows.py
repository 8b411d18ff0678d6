"""Which adapters' rank rows are active on the device, and where (host bookkeeping, no jax).

The XLA path copies the rank rows of the adapters in use out of the pool into dense buffers, whose size is one of a few
buckets. Copying costs more than using, so an adapter keeps its place from step to step: rows are rewritten only when
an adapter joins, and the bucket changes only when it must grow or has long been too large. Rows can be placed and
copied some steps before they are used, so that no step has to wait for all of a large adapter's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from multilora_jax.lora.layout import Reach
from multilora_jax.memory.geometry import MODULES

ROW_BLOCK = 8
"""Rank rows are placed in blocks of this many."""

SHRINK_PATIENCE = 64
"""Steps that a smaller bucket would have done before the rows move to it."""


RowCopy = tuple[Any, int, int]
"""(adapter, first rank row, first buffer row) of a block of ROW_BLOCK rows to copy from the pool."""


@dataclass
class RowPlan:
    """What to do before a step.

    Attributes:
        bucket: rows of the buffers; 0 when no adapter is in the step.
        reach: what of the model the adapters of the step change together.
        rebuild: the buffers are replaced by fresh ones of `bucket` rows.
        copies: what must be copied first.
    """

    bucket: int
    reach: Reach = Reach.ATTENTION
    rebuild: bool = False
    copies: list[RowCopy] = field(default_factory=list)


@dataclass(frozen=True)
class HostTables:
    """What each of the R buffer rows is (numpy; see LoRARows and ExtraTables)."""

    owner_R: np.ndarray
    scale_LMR: np.ndarray
    const_LMR: np.ndarray
    gain_LMR: np.ndarray
    norm_L2R: np.ndarray

    @classmethod
    def empty(cls, num_layers: int, num_rows: int) -> HostTables:
        """Tables of rows that are all free."""
        owner_R = np.full(num_rows, -2, np.int32)
        scale_LMR, const_LMR, gain_LMR = np.zeros((3, num_layers, len(MODULES), num_rows), np.float32)
        return cls(owner_R, scale_LMR, const_LMR, gain_LMR, np.zeros((num_layers, 2, num_rows), np.float32))


class RankRows:
    """Placement of active adapters in a buffer of rank rows.

    Args:
        buckets: ascending buffer sizes in rows, each a multiple of ROW_BLOCK.
        num_layers: L.
        bucket: size of the buffers now, 0 for none.

    Attributes:
        changed: the tables differ from what they were when `tables` was last called.
    """

    def __init__(self, buckets: list[int], num_layers: int, bucket: int = 0):
        self.buckets = buckets
        self.num_layers = num_layers
        self.bucket = bucket
        self.changed = False
        self._blocks: dict[Any, list[int]] = {}  # adapter -> its blocks, least recently used adapter first
        self._missing: dict[Any, list[RowCopy]] = {}  # of those, what was not copied yet
        self._index: dict[Any, int] = {}
        self._too_large = 0

    def index_of(self, adapter: Any) -> int:
        """The adapter's slot: its column in `mix_SX`, its number in `owner_R`."""
        return self._index[adapter]

    def rows_of(self, adapter: Any) -> list[int]:
        """The first row of each of its blocks."""
        return [block * ROW_BLOCK for block in self._blocks[adapter]]

    def num_rows_X(self) -> np.ndarray:
        """int[X], rows of the adapter in each slot, whole blocks; 0 where there is none."""
        num_rows_X = np.zeros(num_slots(self.bucket), np.int64)
        for adapter, slot in self._index.items():
            num_rows_X[slot] = len(self._blocks[adapter]) * ROW_BLOCK
        return num_rows_X

    def holds(self, adapter: Any) -> bool:
        """Whether all its rows are in the buffers."""
        return adapter in self._blocks and adapter not in self._missing

    def forget(self, adapter: Any) -> None:
        """Drops an adapter; its rows become free without being touched."""
        for kept in (self._blocks, self._missing, self._index):
            kept.pop(adapter, None)

    def reset(self, bucket: int = 0) -> None:
        """Forgets all places, for fresh buffers."""
        self.__init__(self.buckets, self.num_layers, bucket)
        self.changed = True

    def bucket_for(self, adapters: Collection[Any]) -> int:
        """The smallest buffers that hold these adapters.

        Raises:
            ValueError: none does (the scheduler's budget prevents it).
        """
        need = sum(_num_blocks(a) for a in adapters) * ROW_BLOCK
        # Extended steps are compiled for one size only.
        extended = reach_of(adapters) is Reach.EXTENDED
        fitting = [b for b in (self.buckets[-1:] if extended else self.buckets) if b >= need]
        if not fitting:
            raise ValueError(f"{need} rank rows in one step exceed the largest bucket {self.buckets[-1]}")
        return fitting[0]

    def target(self, adapters: Collection[Any]) -> int:
        """The size that the buffers should have for these adapters: larger at once, smaller after SHRINK_PATIENCE."""
        fitting = self.bucket_for(adapters)
        self._too_large = self._too_large + 1 if fitting < self.bucket else 0
        return fitting if fitting > self.bucket or self._too_large > SHRINK_PATIENCE else self.bucket

    def plan(self, adapters: list[Any], *, ahead: Iterable[Any] = (), after_idle: bool = False) -> RowPlan:
        """Makes room for the adapters of a step, which begins now, and says what must be copied.

        Args:
            ahead: those that are expected beside them soon; fresh buffers have room for all.
            after_idle: nothing ran before it. Then buffers twice as large as it needs are given up at once: copying
                its adapters again takes less than a few steps with so many rows.
        """
        if not adapters:
            return RowPlan(0)
        soon = self.bucket_for(list(dict.fromkeys((*adapters, *ahead))))
        rebuild = self.bucket_for(adapters) > self.bucket or (after_idle and 2 * soon <= self.bucket)
        if rebuild:
            self.reset(soon)
        self.place(adapters, adapters)
        for adapter in adapters:  # most recently used last
            self._blocks[adapter] = self._blocks.pop(adapter)
        return RowPlan(
            self.bucket, reach_of(adapters), rebuild, [copy for a in adapters for copy in self.take_copies(a)]
        )

    def place(self, adapters: Iterable[Any], keep: Iterable[Any]) -> None:
        """Gives each of these adapters blocks, where it has none, taken from adapters that are not to be kept."""
        absent = [adapter for adapter in adapters if adapter not in self._blocks]
        if not absent:
            return
        keep, self.changed = set(keep), True
        taken = {block for blocks in self._blocks.values() for block in blocks}
        free = [block for block in range(self.bucket // ROW_BLOCK) if block not in taken]
        idle = [a for a in self._blocks if a not in keep]
        for adapter in absent:
            count = _num_blocks(adapter)
            while len(free) < count:
                out = idle.pop(0)
                free += self._blocks[out]
                self.forget(out)
            blocks, free = free[:count], free[count:]
            self._blocks[adapter] = blocks
            self._missing[adapter] = [(adapter, n * ROW_BLOCK, b * ROW_BLOCK) for n, b in enumerate(blocks)]
            used = set(self._index.values())
            self._index[adapter] = next(i for i in range(len(used) + 1) if i not in used)

    def take_copies(self, adapter: Any, most: int | None = None) -> list[RowCopy]:
        """Up to `most` of the copies that a placed adapter still needs; the caller makes them."""
        missing = self._missing.get(adapter, [])
        taken, left = missing[:most], missing[len(missing[:most]) :]
        if left:
            self._missing[adapter] = left
        else:
            self._missing.pop(adapter, None)
        return taken

    def tables(self) -> HostTables:
        """What the rows of the current bucket are."""
        self.changed = False
        tables = HostTables.empty(self.num_layers, self.bucket)
        for adapter, blocks in self._blocks.items():
            own = adapter.layout.row_tables()
            rows_R = np.concatenate([block * ROW_BLOCK + np.arange(ROW_BLOCK) for block in blocks])
            tables.owner_R[rows_R] = self._index[adapter]
            rows_R = rows_R[: adapter.num_rows]
            tables.scale_LMR[..., rows_R] = own.scale_LMR
            tables.const_LMR[..., rows_R] = own.const_LMR
            tables.gain_LMR[..., rows_R] = own.gain_LMR
            tables.norm_L2R[..., rows_R] = own.norm_L2R
        return tables


def reach_of(adapters: Iterable[Any]) -> Reach:
    """What the adapters of a step change together."""
    return max((adapter.layout.reach for adapter in adapters), default=Reach.ATTENTION)


def num_slots(num_rows: int) -> int:
    """Adapters that rank rows can belong to: each takes a block at least."""
    return num_rows // ROW_BLOCK


def _num_blocks(adapter: Any) -> int:
    return -(-adapter.num_rows // ROW_BLOCK)


def row_buckets(max_rows: int, *, fine: bool = True) -> list[int]:
    """Buffer sizes up to `max_rows`, and itself: 16, 64, 128 and on by doubling, from 512 on with one between.

    A step multiplies by whole buffers, so where rows are many a size too large costs more than a few programs. Not
    `fine`, where compiling is dear: by four times each.
    """
    largest = -(-max_rows // ROW_BLOCK) * ROW_BLOCK
    if not fine:
        return [*(size for size in (16 * 4**n for n in range(8)) if size < largest), largest]
    doubled = [64 * 2**n for n in range(12)]
    sizes = sorted([16, *doubled, *(size + size // 2 for size in doubled if size >= 512)])
    return [*(size for size in sizes if size < largest), largest]
