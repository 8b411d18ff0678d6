"""Percentiles and Jain's index."""

from __future__ import annotations

import pytest

from multilora_jax.bench.summary import jain, summary


def test_statistics_of_a_hundred_values():
    found = summary([float(n) for n in range(100, -1, -1)])
    assert found == {"mean": 50, "median": 50, "p95": 95, "p99": 99, "max": 100}
    assert summary([]) == dict.fromkeys(found)
    assert set(summary([7.0]).values()) == {7.0}


@pytest.mark.parametrize(
    ("shares", "index"), [([3, 3, 3], 1.0), ([5, 0, 0, 0], 0.25), ([1, 2, 3], 36 / 42), ([], None), ([0, 0], None)]
)
def test_jain(shares, index):
    assert jain(shares) == (None if index is None else pytest.approx(index))
