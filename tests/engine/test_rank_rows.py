"""Placement of active adapters in the buffers of rank rows, against a model of what the buffers then hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.engine.rank_rows import ROW_BLOCK, SHRINK_PATIENCE, RankRows, row_buckets

LAYERS = 2


@dataclass(eq=False)
class Adapter:
    """What RankRows reads of a HostAdapter."""

    rank: int
    scale: float = 2.0
    ranks_LM: np.ndarray = field(init=False)
    scale_LM: np.ndarray = field(init=False)

    def __post_init__(self):
        self.ranks_LM = np.full((LAYERS, 7), self.rank, np.int32)
        self.ranks_LM[1, 3] = 0
        self.ranks_LM[0, 2] = (self.rank + 1) // 2
        self.scale_LM = np.where(self.ranks_LM > 0, np.float32(self.scale), np.float32(0))


class Buffers:
    """What the device would hold: block of the buffer -> (adapter, its block)."""

    def __init__(self, rows: RankRows):
        self.rows = rows
        self.content: dict[int, tuple[Any, int]] = {}
        self.owner_R: np.ndarray = np.zeros(0)
        self.scale_LMR: np.ndarray = np.zeros(0)

    def step(self, adapters):
        """Follows a plan and proves that a step over `adapters` would read the right rows; returns the plan."""
        plan = self.rows.plan(adapters)
        if plan.rebuild:
            self.content = {}
        for adapter, first, start in plan.copies:
            assert first % ROW_BLOCK == start % ROW_BLOCK == 0
            assert 0 <= start <= plan.bucket - ROW_BLOCK
            self.content[start // ROW_BLOCK] = (adapter, first // ROW_BLOCK)
        if plan.changed:
            self.owner_R, self.scale_LMR = self.rows.tables()
        if adapters:
            assert len(self.owner_R) == plan.bucket == self.scale_LMR.shape[2]
        indices = [self.rows.index_of(adapter) for adapter in adapters]
        assert len(set(indices)) == len(indices)
        for adapter, index in zip(adapters, indices, strict=True):
            owned = np.flatnonzero(self.owner_R == index)
            blocks = owned[::ROW_BLOCK] // ROW_BLOCK
            assert len(owned) == -(-adapter.rank // ROW_BLOCK) * ROW_BLOCK
            assert sorted(self.content[b] for b in blocks) == [(adapter, n) for n in range(len(blocks))]
            for b in blocks:
                n = self.content[b][1]
                live = n * ROW_BLOCK + np.arange(ROW_BLOCK) < adapter.ranks_LM[:, :, None]
                wanted = np.where(live, adapter.scale_LM[:, :, None], 0)
                np.testing.assert_array_equal(self.scale_LMR[:, :, b * ROW_BLOCK : (b + 1) * ROW_BLOCK], wanted)
        return plan


def test_buckets():
    assert row_buckets(8) == [8]
    assert row_buckets(17) == [16, 24]
    assert row_buckets(65) == [16, 64, 72]
    assert row_buckets(512) == [16, 64, 256, 512]
    assert all(size % ROW_BLOCK == 0 for n in range(1, 600) for size in row_buckets(n))


def test_no_adapters_need_nothing():
    assert RankRows([16], LAYERS).plan([]) == RankRows([16], LAYERS).plan([])
    assert RankRows([16], LAYERS).plan([]).bucket == 0


def test_rows_stay_where_they_are_from_step_to_step():
    a, b, c = Adapter(8), Adapter(3), Adapter(16)
    buffers = Buffers(RankRows([16, 64], LAYERS))
    first = buffers.step([a, b])
    assert (first.bucket, first.rebuild, len(first.copies), first.changed) == (16, True, 2, True)
    for adapters in ([a, b], [b], [a], [], [b, a]):
        plan = buffers.step(adapters)
        assert (plan.rebuild, plan.copies, plan.changed) == (False, [], False)
    grown = buffers.step([a, b, c])
    assert (grown.bucket, grown.rebuild, len(grown.copies)) == (64, True, 4)
    joined = buffers.step([c, Adapter(1)])
    assert (joined.rebuild, len(joined.copies), joined.changed) == (False, 1, True)
    assert buffers.step([a, b, c]).copies == []  # the newcomer found free rows


def test_the_least_recently_used_adapter_gives_way():
    a, b, c, d = (Adapter(8) for _ in range(4))
    buffers = Buffers(RankRows([16], LAYERS))
    buffers.step([a, b])
    buffers.step([a])
    buffers.step([c])  # takes b's rows, the longest unused
    assert buffers.step([a, c]).copies == []
    buffers.step([c])
    assert [adapter for adapter, _, _ in buffers.step([d, c]).copies] == [d]
    assert [adapter for adapter, _, _ in buffers.step([a, c]).copies] == [a]


def test_a_bucket_that_is_long_too_large_shrinks():
    a, b = Adapter(8), Adapter(16)
    buffers = Buffers(RankRows([16, 64], LAYERS))
    buffers.step([a, b])
    for _ in range(SHRINK_PATIENCE):
        assert buffers.step([a]).bucket == 64
    buffers.step([a, b])  # needs the rows: patience starts anew
    for _ in range(SHRINK_PATIENCE):
        assert buffers.step([a]).bucket == 64
    plan = buffers.step([a])
    assert (plan.bucket, plan.rebuild) == (16, True)


def test_a_forgotten_adapter_leaves_its_rows():
    a, b, c = Adapter(8), Adapter(8), Adapter(8)
    rows = RankRows([16], LAYERS)
    buffers = Buffers(rows)
    buffers.step([a, b])
    rows.forget(a)
    rows.forget(a)
    with pytest.raises(KeyError):
        rows.index_of(a)
    buffers.step([b, c])
    assert [adapter for adapter, _, _ in buffers.step([a, c]).copies] == [a]


def test_too_many_rows_are_an_error():
    with pytest.raises(ValueError, match="24 rank rows in one step exceed the largest bucket 16"):
        RankRows([16], LAYERS).plan([Adapter(8), Adapter(9)])


@settings(max_examples=100)
@given(
    ranks=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    steps=st.lists(st.tuples(st.sets(st.integers(0, 7), max_size=5), st.booleans(), st.integers(1, 70)), max_size=25),
)
def test_any_sequence_of_steps(ranks, steps):
    adapters = [Adapter(rank, scale=1.0 + i) for i, rank in enumerate(ranks)]
    rows = RankRows(row_buckets(72), LAYERS)
    buffers = Buffers(rows)
    for chosen, forget, repeat in steps:
        step, need = [], 0
        for i in sorted(chosen):
            if i < len(adapters) and need + -(-ranks[i] // 8) * 8 <= 72:
                step.append(adapters[i])
                need += -(-ranks[i] // 8) * 8
        for _ in range(repeat if repeat > 60 else 1):
            buffers.step(step)
        if forget and step:
            rows.forget(step[0])
