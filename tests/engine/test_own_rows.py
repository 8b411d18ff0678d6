"""Which size of sums over devices a step takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_jax.engine.batch import BatchShape
from multilora_jax.engine.own_rows import OwnRows, count_own_rows
from multilora_jax.engine.rank_rows import RankRows, RowPlan
from multilora_jax.lora.layout import Reach


def test_sizes_are_the_largest_rank_and_by_four_times_less():
    assert OwnRows(64).sizes(512) == [16, 64]
    assert OwnRows(64).sizes(64) == [16]
    assert OwnRows(128).sizes(1024) == [8, 32, 128]
    assert OwnRows(4).sizes(64) == OwnRows(8).sizes(64) == [8]
    assert OwnRows(60).sizes(1024) == [16, 64]
    assert OwnRows(64).sizes(16) == OwnRows(64).sizes(0) == OwnRows(0).sizes(512) == []


@given(st.data())
def test_counts_are_those_of_the_factors(data):
    decodes, blocks, slots = (data.draw(st.integers(1, 5)) for _ in range(3))
    factors = st.lists(st.sampled_from([0, 1, -0.5]), min_size=slots, max_size=slots)
    mix_SX = np.array(data.draw(st.lists(factors, min_size=decodes + blocks, max_size=decodes + blocks)))
    num_rows_X = np.array(data.draw(st.lists(st.integers(0, 9), min_size=slots, max_size=slots)))
    row_P = np.array(data.draw(st.lists(st.integers(decodes, decodes + blocks - 1), max_size=20)), int)
    mix_TX = mix_SX[[*range(decodes), *row_P.tolist()]]
    wanted = sum(int(num_rows_X[mix_X != 0].sum()) for mix_X in mix_TX)
    assert count_own_rows(mix_SX, row_P, decodes, num_rows_X) == wanted


class Adapter:
    """What RankRows reads of an adapter."""

    def __init__(self, num_rows):
        self.num_rows, self.layout = num_rows, SimpleNamespace(reach=Reach.ATTENTION)


@pytest.mark.parametrize(
    ("ranks", "mixes", "size"),
    [
        ([16, 16, 16, 16], [[0], [1], [2], [3]], 16),
        ([3, 9, 16, 16], [[0], [1], [2], [3]], 16),  # 8 + 16 + 16 + 16 in whole blocks
        ([64, 8], [[0], [1], [1], [1]], 64),  # 88 of 4 x 16
        ([64, 8], [[0], [], [], []], 16),
        ([16, 16, 16, 16], [[0, 1], [2], [], []], 16),
        ([64, 64, 64, 64], [[0, 1, 2, 3]] * 4, 0),  # 256 each
    ],
)
def test_a_step_takes_the_smallest_size_that_its_tokens_need(ranks, mixes, size):
    rank_rows, adapters = RankRows([256], 1), [Adapter(rank) for rank in ranks]
    plan = rank_rows.plan(adapters)
    mix_SX = np.zeros((4, 32), np.float32)
    for row, members in enumerate(mixes):
        for adapter in members:
            mix_SX[row, rank_rows.index_of(adapters[adapter])] = 0.5
    batch = SimpleNamespace(mix_SX=mix_SX, row_P=np.zeros(0, int), plan=None)
    built: Any = SimpleNamespace(batch=batch, shape=BatchShape(0, 0, 4))
    rows: Any = SimpleNamespace(rank_rows=rank_rows)
    assert OwnRows(64).of(built, plan, rows) == size
    assert OwnRows(0).of(built, plan, rows) == OwnRows(64).of(built, RowPlan(256, Reach.EXTENDED), rows) == 0
