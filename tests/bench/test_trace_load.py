"""S-LoRA's generator: moments of the gaps, shares of the adapters, lengths, and one trace for one seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_jax.bench.trace_load import SETTINGS, TraceRequest, TraceSpec, make_trace
from multilora_jax.errors import ConfigError

LONG = TraceSpec(num_adapters=50, rate=20.0, duration_s=5000.0)
"""100,000 requests: a mean is then within a percent or two."""


def gaps(trace: list[TraceRequest]) -> np.ndarray:
    return np.diff([0.0, *(request.arrival_s for request in trace)])


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gaps_have_the_rate_and_the_cv(cv):
    found = gaps(make_trace(replace(LONG, cv=cv)))
    assert len(found) == 100_000
    assert found.mean() == pytest.approx(1 / 20, rel=0.01 + 0.012 * cv)  # three standard errors: 3 cv / sqrt(n)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.05)


def test_cv_1_is_a_poisson_process():
    found = gaps(make_trace(LONG))
    for quantile in (0.25, 0.5, 0.9):
        assert np.quantile(found, quantile) == pytest.approx(-np.log(1 - quantile) / 20, rel=0.02)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.6, 1.0, 2.0])
def test_the_first_k_adapters_get_their_share(alpha):
    chosen = np.array([request.adapter for request in make_trace(replace(LONG, alpha=alpha))])
    assert chosen.min() >= 0
    assert chosen.max() < 50
    for k in (1, 5, 25):
        assert (chosen < k).mean() == pytest.approx((k / 50) ** alpha, abs=0.006)


def test_the_share_of_the_first_is_the_published_one():
    """S-LoRA's own figures for 200 adapters: 58.9 % at alpha 0.1, 20.4 % at 0.3, 4.2 % at 0.6."""
    for alpha, share in ((0.1, 0.589), (0.3, 0.204), (0.6, 0.042)):
        trace = make_trace(replace(LONG, num_adapters=200, alpha=alpha))
        assert np.mean([request.adapter == 0 for request in trace]) == pytest.approx(share, abs=0.005)


def test_a_flood_comes_beside_the_others_and_changes_nothing_in_them():
    quiet = replace(LONG, duration_s=200.0, input_range=(8, 12))
    flooded = replace(quiet, flood=50.0, flood_range=(100, 102))
    trace = make_trace(flooded)
    assert [request for request in trace if request.adapter < 50] == make_trace(quiet)
    flood = [request for request in trace if request.adapter == 50]
    assert len(flood) == 10_000
    assert {request.prompt_tokens for request in flood} == {100, 101}
    found = np.diff([request.arrival_s for request in flood])
    assert (found.mean(), found.std()) == pytest.approx((0.02, 0.02), rel=0.04)
    assert [request.arrival_s for request in trace] == sorted(request.arrival_s for request in trace)
    assert (quiet.all_adapters, flooded.all_adapters) == (50, 51)


def test_lengths_are_uniform_in_their_ranges():
    trace = make_trace(replace(LONG, input_range=(8, 12), output_range=(3, 4)))
    inputs, counts = np.unique([request.prompt_tokens for request in trace], return_counts=True)
    assert inputs.tolist() == [8, 9, 10, 11]
    assert counts / len(trace) == pytest.approx(0.25, abs=0.01)
    assert {request.new_tokens for request in trace} == {3}


def test_prompts_answers_adapters_and_gaps_are_independent():
    trace = make_trace(LONG)
    columns = [gaps(trace), *([getattr(r, key) for r in trace] for key in ("adapter", "prompt_tokens", "new_tokens"))]
    off_diagonal = np.corrcoef(columns)[~np.eye(4, dtype=bool)]
    assert np.abs(off_diagonal).max() < 0.015


def test_a_seed_gives_one_trace():
    spec = TraceSpec(rate=3.0, duration_s=20.0, cv=2.0)
    assert make_trace(spec) == make_trace(spec)
    assert len(make_trace(spec)) == 60
    assert make_trace(spec) != make_trace(replace(spec, seed=43))


def test_a_sweep_changes_nothing_else():
    """The same adapters and lengths at another rate or cv, and at another rate the same arrivals, faster."""
    spec = TraceSpec(rate=2.0, duration_s=30.0, cv=2.0)
    base, fast = make_trace(spec), make_trace(replace(spec, rate=4.0, duration_s=15.0))
    assert [r[1:] for r in fast] == [r[1:] for r in base]
    assert [2 * r.arrival_s for r in fast] == pytest.approx([r.arrival_s for r in base])
    assert [r[1:] for r in make_trace(replace(spec, cv=8.0))] == [r[1:] for r in base]
    longer = make_trace(replace(spec, duration_s=60.0))
    assert longer[:60] == base


def test_the_settings_are_s_lora_s():
    assert SETTINGS == {"S1": (8,), "S2": (64, 32, 16, 8), "S4": (64, 32, 16)}


@given(
    alpha=st.floats(0.01, 10), cv=st.floats(0.01, 100), rate=st.floats(0.1, 100), num_adapters=st.integers(1, 5000),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_every_trace_is_sound(alpha, cv, rate, num_adapters, seed):
    spec = TraceSpec(num_adapters, alpha, rate, cv, 50 / rate + 1, seed=seed)
    trace = make_trace(spec)
    assert len(trace) == spec.num_requests
    assert (gaps(trace) >= 0).all()
    assert all(0 <= r.adapter < num_adapters and 8 <= r.prompt_tokens < 512 > r.new_tokens >= 8 for r in trace)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rate": 0.0}, "rate must be above 0"), ({"alpha": -1.0}, "alpha must be above 0"),
        ({"duration_s": float("inf")}, "duration_s must be above 0 and finite"), ({"num_adapters": 0}, "num_adapters"),
        ({"cv": 1000.0}, "cv must be from 0.01 to 100"), ({"input_range": (0, 4)}, "input_range must be two lengths"),
        ({"output_range": (8, 8)}, "output_range must be two lengths"), ({"duration_s": 0.1}, "has no request"),
    ],
)  # fmt: skip
def test_what_no_trace_can_have_is_refused(change: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        replace(TraceSpec(), **change)
    assert caught.value.param == next(iter(change))
