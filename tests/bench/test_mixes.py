"""Popularity mixes against Punica's numbers, and what holds for every size."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_jax.bench.mixes import BASE, MIXES, assign, check_mixes, segment_lengths, segments
from multilora_jax.errors import UserError

ADAPTER_MIXES = [mix for mix in MIXES if mix != "base"]


def test_counts_of_64_are_those_of_the_paper():
    assert segment_lengths("distinct", 64) == [1] * 64
    assert segment_lengths("uniform", 64) == [8] * 8
    assert segment_lengths("skewed", 64) == [17, 17, 11, 7, 5, 3, 2, 1, 1]
    assert segment_lengths("identical", 64) == [64]
    assert segment_lengths("base", 64) == [64]


def test_uneven_counts():
    assert segment_lengths("uniform", 8) == [3, 3, 2]
    assert segment_lengths("skewed", 8) == [3, 2, 1, 1, 1]
    assert segment_lengths("zipf", 8) == [4, 2, 1, 1]


@given(st.sampled_from(MIXES), st.integers(0, 300))
def test_counts_add_up_and_never_increase(mix, n):
    lengths = segment_lengths(mix, n)
    assert sum(lengths) == n
    assert all(length > 0 for length in lengths)
    assert lengths == sorted(lengths, reverse=True)


@given(st.integers(1, 300))
def test_number_of_adapters(n):
    counts = {mix: len(segment_lengths(mix, n)) for mix in ADAPTER_MIXES}
    assert counts["identical"] == 1
    assert counts["distinct"] == n
    assert counts["uniform"] == math.ceil(math.sqrt(n))
    assert counts["identical"] <= counts["skewed"] <= counts["distinct"]
    assert max(segment_lengths("uniform", n)) - min(segment_lengths("uniform", n)) <= 1


def test_skewed_falls_by_half_as_much_again():
    lengths = segment_lengths("skewed", 10_000)
    # Its largest is what was left over; between the others the ratio is 1.5 up to rounding.
    ratios = np.divide(lengths[1:8], lengths[2:9])
    np.testing.assert_allclose(ratios, 1.5, atol=0.05)


@given(st.sampled_from(MIXES), st.integers(0, 100))
def test_segments_are_sorted_and_have_the_counts(mix, n):
    numbers = segments(mix, n)
    assert numbers.dtype == np.int32
    assert (np.diff(numbers) >= 0).all()
    if mix == "base":
        assert (numbers == BASE).all()
        assert len(numbers) == n
    else:
        assert np.bincount(numbers, minlength=0).tolist() == segment_lengths(mix, n)


@given(st.sampled_from(MIXES), st.integers(0, 100), st.integers(1, 20), st.integers(0, 3))
def test_every_round_of_a_workload_has_the_counts(mix, num_requests, num_adapters, seed):
    numbers = assign(mix, num_requests, num_adapters, seed)
    assert numbers.shape == (num_requests,)
    assert numbers.dtype == np.int32
    np.testing.assert_array_equal(numbers, assign(mix, num_requests, num_adapters, seed))
    for first in range(0, num_requests - num_adapters + 1, num_adapters):
        one_round = np.sort(numbers[first : first + num_adapters])
        np.testing.assert_array_equal(one_round, segments(mix, num_adapters))


@given(st.integers(1, 60), st.integers(1, 20))
def test_distinct_repeats_no_adapter_in_any_window(num_requests, num_adapters):
    numbers = assign("distinct", num_requests, num_adapters)
    for first in range(num_requests):
        window = numbers[first : first + num_adapters]
        assert len(set(window.tolist())) == len(window)


def test_order_follows_the_seed():
    assert not np.array_equal(assign("skewed", 64, 64, 0), assign("skewed", 64, 64, 1))


def test_names_are_checked():
    assert check_mixes(["base", " skewed", "base"]) == ["base", "skewed"]
    for names in (["base", "zipff"], [""], []):
        with pytest.raises(UserError, match="base, identical, distinct, uniform, skewed, zipf") as caught:
            check_mixes(names)
        assert caught.value.reason == "unknown_mix"
    with pytest.raises(UserError, match="unknown mix 'zipff'"):
        segment_lengths("zipff", 3)


def test_mixes_need_numpy_only():
    code = "import sys, multilora_jax.bench.mixes; assert not {'jax', 'absl', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
