"""Placement of active adapters in the buffers of rank rows, against a model of what the buffers then hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.engine.rank_rows import ROW_BLOCK, SHRINK_PATIENCE, HostTables, RankRows, num_slots, row_buckets
from multilora_jax.lora.layout import AdapterLayout, Reach

LAYERS = 2


def layout(rank, *, scale=2.0, bias=False, gain=False, norm=False):
    """An adapter's layout: one module absent, one of half the rank, and special rows behind the LoRA rows."""
    ranks_LM = np.full((LAYERS, 7), rank, np.int32)
    ranks_LM[1, 3] = 0
    ranks_LM[0, 2] = (rank + 1) // 2
    none_LM, none_M, none_L2 = np.full((LAYERS, 7), -1), np.ones(7, np.int32), np.full((LAYERS, 2), -1)
    places = np.cumsum([bias, gain, norm]) - 1 + rank
    return AdapterLayout(
        rank=rank, num_rows=rank + bias + gain + norm, num_pages=1, num_units=1, ranks_LM=ranks_LM,
        scale_LM=np.where(ranks_LM > 0, np.float32(scale), np.float32(0)), start_a_LM=none_LM, start_b_LM=none_LM,
        units_a_M=none_M, units_b_M=none_M,
        start_bias_LM=none_LM + 1 if bias else none_LM, start_gain_LM=none_LM + 1 if gain else none_LM,
        start_norm_L2=none_L2 + 1 if norm else none_L2,
        bias_row=int(places[0]) if bias else -1, gain_row=int(places[1]) if gain else -1,
        norm_row=int(places[2]) if norm else -1,
    )  # fmt: skip


class Adapter:
    """What RankRows reads of an adapter."""

    def __init__(self, rank, **options):
        self.layout = layout(rank, **options)
        self.num_rows = self.layout.num_rows


class Buffers:
    """What the device would hold: block of the buffer -> (adapter, its block)."""

    def __init__(self, rows: RankRows):
        self.rows = rows
        self.content: dict[int, tuple[Any, int]] = {}
        self.tables = HostTables.empty(LAYERS, 0)

    def step(self, adapters):
        """Follows a plan and proves that a step over `adapters` would read the right rows; returns the plan."""
        plan = self.rows.plan(adapters)
        if plan.rebuild:
            self.content = {}
        for adapter, first, start in plan.copies:
            assert first % ROW_BLOCK == start % ROW_BLOCK == 0
            assert 0 <= start <= plan.bucket - ROW_BLOCK
            self.content[start // ROW_BLOCK] = (adapter, first // ROW_BLOCK)
        if self.rows.changed:
            self.tables = self.rows.tables()
        if adapters:
            assert len(self.tables.owner_R) == plan.bucket == self.tables.scale_LMR.shape[2]
        indices = [self.rows.index_of(adapter) for adapter in adapters]
        assert len(set(indices)) == len(indices)
        for adapter, index in zip(adapters, indices, strict=True):
            owned = np.flatnonzero(self.tables.owner_R == index)
            blocks = owned[::ROW_BLOCK] // ROW_BLOCK
            assert len(owned) == -(-adapter.num_rows // ROW_BLOCK) * ROW_BLOCK
            assert sorted(self.content[b] for b in blocks) == [(adapter, n) for n in range(len(blocks))]
            own = adapter.layout.row_tables()
            for b in blocks:
                first = self.content[b][1] * ROW_BLOCK
                for name in ("scale_LMR", "const_LMR", "gain_LMR", "norm_L2R"):
                    wanted = getattr(own, name)[..., first : first + ROW_BLOCK]
                    got = getattr(self.tables, name)[..., b * ROW_BLOCK : (b + 1) * ROW_BLOCK]
                    np.testing.assert_array_equal(got[..., : wanted.shape[-1]], wanted)
                    assert not got[..., wanted.shape[-1] :].any()
        return plan


def test_buckets():
    assert row_buckets(8) == [8]
    assert row_buckets(17) == [16, 24]
    assert row_buckets(65) == [16, 64, 72]
    assert row_buckets(512, fine=False) == [16, 64, 256, 512]
    assert row_buckets(1024) == [16, 64, 128, 256, 512, 768, 1024]
    assert row_buckets(1600) == [16, 64, 128, 256, 512, 768, 1024, 1536, 1600]
    assert all(size % ROW_BLOCK == 0 for n in range(1, 600) for size in row_buckets(n))


def test_no_adapters_need_nothing():
    assert RankRows([16], LAYERS).plan([]) == RankRows([16], LAYERS).plan([])
    assert RankRows([16], LAYERS).plan([]).bucket == 0


def test_buffers_far_too_large_go_when_nothing_ran():
    a, b, c = Adapter(8), Adapter(40), Adapter(64)
    rows = RankRows([16, 64, 128], LAYERS)
    assert rows.plan([a, c]).bucket == 128
    assert rows.plan([a]).bucket == 128  # in the middle of traffic they stay for a while
    assert rows.plan([c], after_idle=True).bucket == 64
    kept = rows.plan([b], after_idle=True)
    assert (kept.bucket, kept.rebuild) == (64, False)
    small = rows.plan([a], after_idle=True)
    assert (small.bucket, small.rebuild, len(small.copies)) == (16, True, 1)
    assert not rows.holds(b)


def test_fresh_buffers_have_room_for_who_is_expected():
    a, b, c = Adapter(8), Adapter(40), Adapter(64)
    rows = RankRows([16, 64, 128], LAYERS)
    first = rows.plan([a], ahead=[a, b], after_idle=True)
    assert (first.bucket, [copy[0] for copy in first.copies]) == (64, [a])  # room alone: nothing of b is copied yet
    assert not rows.plan([a, b]).rebuild
    assert not rows.plan([a], ahead=[c], after_idle=True).rebuild  # too small for c, which is not in the step
    assert rows.plan([b], ahead=[a, c], after_idle=True).bucket == 64
    assert rows.plan([b, c], ahead=[a], after_idle=True).bucket == 128
    kept = rows.plan([a], ahead=[b, c], after_idle=True)
    assert (kept.bucket, kept.rebuild) == (128, False)  # too large for a alone, but not for long


def test_rows_stay_where_they_are_from_step_to_step():
    a, b, c = Adapter(8), Adapter(3), Adapter(16)
    buffers = Buffers(RankRows([16, 64], LAYERS))
    first = buffers.step([a, b])
    assert (first.bucket, first.rebuild, len(first.copies)) == (16, True, 2)
    for adapters in ([a, b], [b], [a], [], [b, a]):
        tables = buffers.tables
        plan = buffers.step(adapters)
        assert (plan.rebuild, plan.copies) == (False, [])
        assert buffers.tables is tables
    grown = buffers.step([a, b, c])
    assert (grown.bucket, grown.rebuild, len(grown.copies)) == (64, True, 4)
    joined = buffers.step([c, Adapter(1)])
    assert (joined.rebuild, len(joined.copies)) == (False, 1)
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


def test_buffers_should_grow_at_once_and_shrink_with_patience():
    a, b = Adapter(8), Adapter(16)
    rows = RankRows([16, 64], LAYERS)
    assert rows.target([a]) == 16
    rows.plan([a])
    assert rows.target([a, b]) == 64
    assert rows.bucket == 16
    rows.plan([a, b])
    for _ in range(SHRINK_PATIENCE):
        assert rows.target([a]) == 64
    assert rows.target([a, b]) == 64  # needs the rows: patience starts anew
    for _ in range(SHRINK_PATIENCE):
        assert rows.target([a]) == 64
    assert rows.target([a]) == 16
    assert rows.plan([a]).bucket == 64  # a step takes the buffers as they are


def test_rows_are_placed_and_copied_ahead_of_their_step():
    a, large, b = Adapter(8), Adapter(30), Adapter(8)
    rows = RankRows([64], LAYERS)
    rows.plan([a])
    rows.place([a, large], [a, large])
    assert rows.changed
    assert (rows.holds(a), rows.holds(large), rows.holds(b)) == (True, False, False)
    taken = rows.take_copies(large, 1) + rows.take_copies(large, 2)
    assert [first for _, first, _ in taken] == [0, 8, 16]
    assert not rows.holds(large)
    (last,) = rows.plan([a, large]).copies  # what is still missing when its step comes
    assert last[:2] == (large, 24)
    assert len({start for _, _, start in [*taken, last]}) == 4
    assert rows.holds(large)
    rows.place([b], [a, large, b])
    assert [adapter for adapter, _, _ in rows.take_copies(b)] == [b]
    assert rows.take_copies(b) == []


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


def test_special_rows_count_and_their_tables_follow():
    buffers = Buffers(RankRows([16, 64], LAYERS))
    biased = Adapter(8, bias=True)
    plan = buffers.step([biased])
    assert (plan.bucket, plan.reach, len(plan.copies)) == (16, Reach.PROJECTIONS, 2)
    assert buffers.tables.const_LMR.sum() == LAYERS * 7


def test_extended_adapters_run_with_the_most_rows():
    a, dora, norms = Adapter(8), Adapter(8, gain=True), Adapter(3, norm=True, bias=True)
    buffers = Buffers(RankRows([16, 64], LAYERS))
    assert buffers.step([a]).bucket == 16
    plan = buffers.step([a, dora])
    assert (plan.bucket, plan.reach, plan.rebuild) == (64, Reach.EXTENDED, True)
    plan = buffers.step([a])
    assert (plan.bucket, plan.reach) == (64, Reach.PROJECTIONS)
    assert buffers.step([norms, dora]).reach is Reach.EXTENDED
    for _ in range(2 * SHRINK_PATIENCE):
        assert buffers.rows.target([dora]) == 64
    assert num_slots(64) == 8


def test_too_many_rows_are_an_error():
    with pytest.raises(ValueError, match="24 rank rows in one step exceed the largest bucket 16"):
        RankRows([16], LAYERS).plan([Adapter(8), Adapter(9)])


@settings(max_examples=100)
@given(
    ranks=st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.booleans()), min_size=1, max_size=8),
    steps=st.lists(st.tuples(st.sets(st.integers(0, 7), max_size=5), st.booleans(), st.integers(1, 70)), max_size=25),
)
def test_any_sequence_of_steps(ranks, steps):
    adapters = [Adapter(rank, scale=1.0 + i, bias=bias, norm=norm) for i, (rank, bias, norm) in enumerate(ranks)]
    rows = RankRows(row_buckets(72), LAYERS)
    buffers = Buffers(rows)
    for chosen, forget, repeat in steps:
        step, need = [], 0
        for i in sorted(chosen):
            if i < len(adapters) and need + -(-adapters[i].num_rows // 8) * 8 <= 72:
                step.append(adapters[i])
                need += -(-adapters[i].num_rows // 8) * 8
        for _ in range(repeat if repeat > 60 else 1):
            buffers.step(step)
        if forget and step:
            rows.forget(step[0])
