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
        changed: owners and scales are to be uploaded again.
    """

    bucket: int
    rebuild: bool = False
    copies: list[tuple[Any, int, int]] = field(default_factory=list)
    changed: bool = False


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
        """The adapter's number in `adapter_T` and `owner_R`."""
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
        fitting = [b for b in self.buckets if b >= need]
        if not fitting:
            raise ValueError(f"{need} rank rows in one step exceed the largest bucket {self.buckets[-1]}")
        for adapter in adapters:  # most recently used last
            if adapter in self._blocks:
                self._blocks[adapter] = self._blocks.pop(adapter)
        self._too_large = self._too_large + 1 if fitting[0] < self.bucket else 0
        if need > self.bucket or self._too_large > SHRINK_PATIENCE:
            return self._rebuild(adapters, fitting[0])
        missing = [a for a in adapters if a not in self._blocks]
        if not missing:
            return RowPlan(self.bucket)
        return RowPlan(self.bucket, copies=self._place(missing, set(adapters)), changed=True)

    def _rebuild(self, adapters: list[Any], bucket: int) -> RowPlan:
        self.reset()
        self.bucket = bucket
        return RowPlan(bucket, rebuild=True, copies=self._place(adapters, set(adapters)), changed=True)

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

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """owner_R int32[R] (-2 where free) and scale_LMR float32[L, 7, R] of the current bucket."""
        owner_R = np.full(self.bucket, -2, np.int32)
        scale_LMR = np.zeros((self.num_layers, len(MODULES), self.bucket), np.float32)
        for adapter, blocks in self._blocks.items():
            for n, block in enumerate(blocks):
                rows = slice(block * ROW_BLOCK, (block + 1) * ROW_BLOCK)
                owner_R[rows] = self._index[adapter]
                rank_row = n * ROW_BLOCK + np.arange(ROW_BLOCK)
                live = rank_row[None, None, :] < adapter.ranks_LM[:, :, None]
                scale_LMR[:, :, rows] = np.where(live, adapter.scale_LM[:, :, None], 0)
        return owner_R, scale_LMR


def _num_blocks(adapter: Any) -> int:
    return -(-adapter.rank // ROW_BLOCK)


def row_buckets(max_rows: int) -> list[int]:
    """Buffer sizes up to `max_rows`: 16, then each four times the one before, and `max_rows` itself."""
    largest = -(-max_rows // ROW_BLOCK) * ROW_BLOCK
    buckets = [size for size in (16 * 4**n for n in range(8)) if size < largest]
    return [*buckets, largest]
