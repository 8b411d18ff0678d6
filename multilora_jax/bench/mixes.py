"""Who asks for which adapter: the popularity mixes that tests, tuning and benchmarks share (numpy only).

The definitions are those of Punica, section 7: with n requests, `distinct` has n adapters, `uniform` ceil(sqrt(n)) of
equal popularity, `skewed` adapters whose popularity falls by a factor of 1.5 from one to the next, `identical` one.
`zipf` falls by powers of the rank instead: k-th in popularity gets a share proportional to k^-1.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from multilora_jax.errors import UserError

MIXES = ("base", "identical", "distinct", "uniform", "skewed", "zipf")
BASE = -1
"""Adapter number of a request for the base model."""

SKEW = 1.5
"""Ratio between the popularity of one adapter of `skewed` and the next; exponent of `zipf`."""


def check_mixes(names: Iterable[str], known: Sequence[str] = MIXES) -> list[str]:
    """The names, each once, in their order.

    Raises:
        UserError: a name that is none of `known` (`unknown_mix`), or no name at all.
    """
    found = list(dict.fromkeys(name.strip() for name in names))
    for name in found or [""]:
        if name not in known:
            raise UserError(
                f"unknown mix {name!r}: name one or more of {', '.join(known)}, separated by commas",
                reason="unknown_mix", param="mix",
            )  # fmt: skip
    return found


def segment_lengths(mix: str, n: int) -> list[int]:
    """How many of n requests each adapter gets, the most popular first.

    Args:
        mix: one of MIXES; `base` has one segment, as `identical` has.
        n: requests, 0 or more.

    Returns:
        positive counts that add up to n.

    Raises:
        UserError: see check_mixes.
    """
    check_mixes([mix])
    if n == 0:
        return []
    if mix == "distinct":
        return [1] * n
    if mix == "uniform":
        num_adapters = math.ceil(math.sqrt(n))
        return [n // num_adapters + (i < n % num_adapters) for i in range(num_adapters)]
    if mix == "skewed":
        # From the least popular one up, and what is left is the last one's.
        lengths: list[int] = []
        while (left := n - sum(lengths)) > 0:
            lengths.append(min(math.floor(SKEW ** len(lengths)), left))
        return sorted(lengths, reverse=True)
    if mix == "zipf":
        share = np.arange(1, n + 1) ** -SKEW
        exact = n * share / share.sum()
        lengths_n = np.floor(exact).astype(int)
        short = n - lengths_n.sum()  # largest remainders: a stable sort, so that the counts never increase
        lengths_n[np.argsort(lengths_n - exact, kind="stable")[:short]] += 1
        return sorted((int(length) for length in lengths_n if length), reverse=True)
    return [n]


def segments(mix: str, n: int) -> np.ndarray:
    """int32[n]: the adapter of each of n requests (or tokens), sorted by adapter; BASE throughout for `base`."""
    lengths = segment_lengths(mix, n)
    numbers = [BASE] if mix == "base" and n else range(len(lengths))
    return np.repeat(np.asarray(numbers, np.int32), lengths)


def assign(mix: str, num_requests: int, num_adapters: int, seed: int = 0) -> np.ndarray:
    """The adapter of each request of a workload over `num_adapters` adapters.

    Every `num_adapters` requests in a row hold the mix's counts of `segment_lengths(mix, num_adapters)` exactly, so
    that the batches of a run are alike whatever its length. Their order is drawn from `seed`, except that `distinct`
    goes round: any `num_adapters` requests in a row are for different adapters.

    Returns:
        int32[num_requests]: adapter numbers below num_adapters, or BASE.
    """
    one_round = segments(mix, num_adapters)
    rng = np.random.default_rng(seed)
    rounds = [
        one_round if mix == "distinct" else rng.permutation(one_round) for _ in range(0, num_requests, num_adapters)
    ]
    return np.concatenate([*rounds, one_round[:0]])[:num_requests]
