"""Figures of many values: mean, median and percentiles, and how evenly they are spread (host arithmetic, no jax)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STATISTICS = ("mean", "median", "p95", "p99", "max")


def summary(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, 95th and 99th percentile (between two values, interpolated) and the largest.

    Args:
        values: in any order; None throughout where there are none.
    """
    if not values:
        return dict.fromkeys(STATISTICS)
    array = np.asarray(values, np.float64)
    median, p95, p99 = np.percentile(array, (50, 95, 99))
    figures = (array.mean(), median, p95, p99, array.max())
    return {name: float(value) for name, value in zip(STATISTICS, figures, strict=True)}


def jain(shares: Sequence[float]) -> float | None:
    """Jain's index of fairness, (sum x)^2 / (n sum x^2): 1 where all n get the same, 1/n where one gets everything.

    None where there is nobody, or nobody got anything.
    """
    array = np.asarray(shares, np.float64)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / (len(array) * squares) if squares else None
