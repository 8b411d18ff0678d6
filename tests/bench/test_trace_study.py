"""What the policies and the unified pool reach on S-LoRA's workloads, in simulated time.

Lengths, ranks, pool and objective are a quarter of S-LoRA's setting S2 on its smallest machine, so that each run takes
a fraction of a second; everything else is the default of `bench trace --dummy`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from multilora_jax.bench.trace_cases import PoolCap
from multilora_jax.bench.trace_dummy import DummyMachine, simulate
from multilora_jax.bench.trace_load import TraceRequest, TraceSpec, make_trace
from multilora_jax.bench.trace_report import row_of
from multilora_jax.bench.trace_run import TraceRun
from multilora_jax.config import EngineConfig
from multilora_jax.engine.simulation import StepCost

OBJECTIVE_S = 1.5
RANKS = {"S2": (16, 8, 4, 2), "S4": (16, 8, 4)}
UNIFIED = PoolCap(None, split=False)
OVERLOAD = 11.0
"""Requests per second: twice what the machine can answer."""


def run(
    trace: Sequence[TraceRequest],
    policy: str = "fcfs",
    cap: PoolCap = UNIFIED,
    *,
    ranks: Sequence[int] = RANKS["S2"],
    token_s: float = StepCost.token_s,
    **keys: Any,
) -> TraceRun:
    defaults = {
        "model": "m", "max_num_seqs": 64, "max_num_batched_tokens": 512, "pool_pages": 228, "max_rank_rows": 1024,
        "first_token_objective_s": OBJECTIVE_S,
    }  # fmt: skip
    config = EngineConfig.from_dict(defaults | keys)
    num = 1 + max(request.adapter for request in trace)
    machine = DummyMachine(StepCost(token_s=token_s), 4.0, 16)
    return simulate(config, machine, [ranks[i % len(ranks)] for i in range(num)], trace, policy, cap)


def short(num_adapters: int, rate: float, cv: float = 1.0, duration_s: float = 20.0) -> list[TraceRequest]:
    return make_trace(TraceSpec(num_adapters, 1.0, rate, cv, duration_s, (8, 128), (8, 128)))


@functools.cache
def attainment(policy: str, cv: float) -> float:
    return row_of(run(short(200, OVERLOAD, cv, 40.0), policy), OBJECTIVE_S)["attainment"]


def test_the_load_is_twice_what_can_be_answered():
    """In the drain after the last arrival the machine is full to the end, nearly."""
    speed = row_of(run(short(200, OVERLOAD, duration_s=40.0)), OBJECTIVE_S)["requests_per_second"]
    assert pytest.approx(2, rel=0.05) == OVERLOAD / speed


@pytest.mark.parametrize("cv", [1, 2, 4, 6, 8])
def test_early_abort_keeps_the_published_order(cv):
    """S-LoRA's figure 10: abort >= LCFS > FCFS at each cv."""
    assert attainment("abort", cv) >= attainment("lcfs", cv) > attainment("fcfs", cv)


@pytest.mark.parametrize("cv", [1, 2, 4, 6, 8])
def test_early_abort_pays_and_least_work_first_comes_near_an_oracle(cv):
    assert attainment("abort", cv) >= 2 * attainment("fcfs", cv)
    assert attainment("deadline", cv) >= 0.85 * attainment("oracle", cv)
    assert attainment("oracle", cv) < 1  # it is an overload


def speed(setting: str, num_adapters: int, cap: PoolCap = UNIFIED) -> float:
    found = run(short(num_adapters, 8.0, duration_s=30.0), cap=cap, ranks=RANKS[setting])
    assert all(outcome.error is None for outcome in found.outcomes)
    return row_of(found, OBJECTIVE_S)["requests_per_second"]


@pytest.mark.parametrize("setting", ["S2", "S4"])
def test_a_unified_pool_is_no_slower_than_any_fixed_split(setting):
    """And faster by 1.3 with many adapters than one that suits few, or than one that has room for many."""
    unified = speed(setting, 200)
    ratios = {pages: unified / speed(setting, 200, PoolCap(pages, split=True)) for pages in (20, 50, 75, 105)}
    assert min(ratios.values()) >= 1.0
    assert ratios[20] >= 1.3
    few = speed(setting, 1)
    assert few / speed(setting, 1, PoolCap(20, split=True)) < 1.1
    assert few / speed(setting, 1, PoolCap(105, split=True)) >= 1.3


def only(adapter: int, rate: float, duration_s: float) -> list[TraceRequest]:
    spec = TraceSpec(1, 1.0, rate, 1.0, duration_s, (16, 64), (16, 48), seed=adapter)
    return [request._replace(adapter=adapter) for request in make_trace(spec)]


def p95_of_tricklers(trace: Sequence[TraceRequest], policy: str, token_s: float) -> np.ndarray:
    """The 95th percentile of the time to the first token: of each of adapters 1 to 9, and of all, which are alike."""
    ordered = sorted(trace, key=lambda request: request.arrival_s)
    outcomes = run(ordered, policy, ranks=(2,), token_s=token_s, max_num_seqs=32, pool_pages=1000).outcomes
    times = [[o.ttft_s for o in outcomes if o.request.adapter == n and o.ttft_s is not None] for n in range(1, 10)]
    return np.array([np.percentile(own, 95) for own in (*times, np.concatenate(times))])


@pytest.mark.parametrize(("token_s", "rate", "worst"), [(0.0001, 20.0, 1.5), (0.0001, 40.0, 1.5), (0.0004, 13.5, 1.6)])
def test_a_flood_hardly_reaches_the_tricklers_under_fair_shares(token_s, rate, worst):
    """Where tokens cost little of a step and where they cost as much; the flood is more than can be served."""
    trickle = [request for adapter in range(1, 10) for request in only(adapter, 0.2, 150.0)]
    flood = only(0, rate, 150.0)
    alone, fair, fcfs = (
        p95_of_tricklers(trace, policy, token_s)
        for trace, policy in ((trickle, "fair"), (trickle + flood, "fair"), (trickle + flood, "fcfs"))
    )
    assert (fair / alone)[-1] <= 1.5
    assert (fair / alone).max() <= worst
    assert (fcfs / alone).min() > 10
