"""Which adapters' rank rows are active on the device, and where (host bookkeeping, no jax).

The XLA path copies the rank rows of the adapters in use out of the pool into dense buffers, whose size is one of a few
buckets. Copying costs more than using, so an adapter keeps its place from step to step: rows are rewritten only when
an adapter joins, and the bucket changes only when it must grow or has long been too large.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from multilora_jax.memory.geometry import MODULES

ROW_BLOCK = 8
"""Rank rows are placed in blocks of this many."""

SHRINK_PATIENCE = 64
"""Steps that a smaller bucket would have done before the rows move to it."""


@dataclass
class RowPlan:
    """What to do before a step.

    Attributes:
        bucket: rows of the buffers; 0 when no adapter is in the step.
        rebuild: the buffers are replaced by fresh ones of `bucket` rows.
        copies: (adapter, first rank row, first buffer row) of each block of ROW_BLOCK rows to copy from the pool.
        changed: the tables are to be uploaded again.
        extended: an adapter of the step changes more than LoRA rows and biases can.
    """

    bucket: int
    extended: bool = False
    rebuild: bool = False
    copies: list[tuple[Any, int, int]] = field(default_factory=list)
    changed: bool = False


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
    """

    def __init__(self, buckets: list[int], num_layers: int):
        self.buckets = buckets
        self.num_layers = num_layers
        self.bucket = 0
        self._blocks: dict[Any, list[int]] = {}  # adapter -> its blocks, least recently used adapter first
        self._index: dict[Any, int] = {}
        self._too_large = 0

    def index_of(self, adapter: Any) -> int:
        """The adapter's slot: its column in `mix_SX`, its number in `owner_R`."""
        return self._index[adapter]

    def forget(self, adapter: Any) -> None:
        """Drops an unloaded adapter; its rows become free without being touched."""
        self._blocks.pop(adapter, None)
        self._index.pop(adapter, None)

    def reset(self) -> None:
        """Forgets all places: the next step with adapters begins with fresh buffers of the size it needs."""
        self.bucket, self._too_large = 0, 0
        self._blocks, self._index = {}, {}

    def plan(self, adapters: list[Any]) -> RowPlan:
        """Makes room for the adapters of a step and says what must be copied.

        Raises:
            ValueError: they need more rows than the largest bucket (the scheduler's budget prevents it).
        """
        if not adapters:
            return RowPlan(0)
        need = sum(_num_blocks(a) for a in adapters) * ROW_BLOCK
        extended = any(a.layout.extended for a in adapters)
        # Extended steps are compiled for one size only.
        fitting = [b for b in (self.buckets[-1:] if extended else self.buckets) if b >= need]
        if not fitting:
            raise ValueError(f"{need} rank rows in one step exceed the largest bucket {self.buckets[-1]}")
        for adapter in adapters:  # most recently used last
            if adapter in self._blocks:
                self._blocks[adapter] = self._blocks.pop(adapter)
        self._too_large = self._too_large + 1 if fitting[0] < self.bucket else 0
        if fitting[0] > self.bucket or self._too_large > SHRINK_PATIENCE:
            self.reset()
            self.bucket = fitting[0]
            copies = self._place(adapters, set(adapters))
            return RowPlan(self.bucket, extended, rebuild=True, copies=copies, changed=True)
        missing = [a for a in adapters if a not in self._blocks]
        if not missing:
            return RowPlan(self.bucket, extended)
        return RowPlan(self.bucket, extended, copies=self._place(missing, set(adapters)), changed=True)

    def _place(self, missing: list[Any], wanted: set[Any]) -> list[tuple[Any, int, int]]:
        taken = {block for blocks in self._blocks.values() for block in blocks}
        free = [block for block in range(self.bucket // ROW_BLOCK) if block not in taken]
        idle = [a for a in self._blocks if a not in wanted]
        copies = []
        for adapter in missing:
            count = _num_blocks(adapter)
            while len(free) < count:
                out = idle.pop(0)
                free += self._blocks.pop(out)
                del self._index[out]
            blocks, free = free[:count], free[count:]
            self._blocks[adapter] = blocks
            used = set(self._index.values())
            self._index[adapter] = next(i for i in range(len(used) + 1) if i not in used)
            copies += [(adapter, n * ROW_BLOCK, block * ROW_BLOCK) for n, block in enumerate(blocks)]
        return copies

    def tables(self) -> HostTables:
        """What the rows of the current bucket are."""
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


def num_slots(num_rows: int) -> int:
    """Adapters that rank rows can belong to: each takes a block at least."""
    return num_rows // ROW_BLOCK


def _num_blocks(adapter: Any) -> int:
    return -(-adapter.num_rows // ROW_BLOCK)


def row_buckets(max_rows: int) -> list[int]:
    """Buffer sizes up to `max_rows`: 16, then each four times the one before, and `max_rows` itself."""
    largest = -(-max_rows // ROW_BLOCK) * ROW_BLOCK
    buckets = [size for size in (16 * 4**n for n in range(8)) if size < largest]
    return [*buckets, largest]
