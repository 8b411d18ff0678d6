"""Policies in simulated time: fairness, starvation, early abort, steps of a given length."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from multilora_jax.engine.policies import Policy, PolicyConfig
from multilora_jax.engine.policies.fair import Fair
from multilora_jax.engine.step_plan import ScheduledStep, prompt_sizes
from multilora_jax.errors import RateLimitError
from tests.engine.scheduler_bench import Bench
from tests.engine.simulated import Arrival, Simulation, gamma, poisson, step_seconds

EVERY_POLICY = ("fcfs", "lcfs", "cluster", "fair", "abort", "deadline")


def policy(name: str, **changes: object) -> PolicyConfig:
    return PolicyConfig(scheduling_policy=name, first_token_objective_s=6.0, **changes)  # type: ignore[arg-type]


def test_a_flood_does_not_reach_the_tricklers_under_fair_shares():
    trickle = [a for i in range(1, 10) for a in poisson(0.5, 20, i, seed=1)]
    both = trickle + poisson(60, 20, 0, seed=1)  # twice what there is room for
    quiet, fair, fcfs = (
        sorted(Simulation(policy(name), arrivals, until=25).to_first(*range(1, 10)))[int(0.95 * len(trickle))]
        for name, arrivals in (("fair", trickle), ("fair", both), ("fcfs", both))
    )
    # Steps of a full batch alone take 1.3 times as long as those of an empty one.
    assert fair < 1.8 * quiet
    assert fcfs > 100 * quiet


def test_without_spare_seats_the_next_to_come_waits_for_one():
    both = [a for i in range(1, 10) for a in poisson(0.5, 20, i, seed=1)] + poisson(60, 20, 0, seed=1)
    spare, none = (
        np.mean(Simulation(policy("fair", fair_spare_seats=n), both, until=20.5).to_first(*range(1, 10)))
        for n in (2, 0)
    )
    assert none > 1.3 * spare


def test_prompts_of_a_flood_come_evenly_beside_others(monkeypatch):
    """Steps that hold many new prompts at once are what the others would wait for."""
    flood = poisson(60, 20, 0, seed=1)
    both = [a for i in range(1, 10) for a in poisson(0.5, 20, i, seed=1)] + flood

    def run(arrivals: list[Arrival]) -> tuple[float, int]:
        """Share of the steps that are longer than one of the smallest size, and the flood's tokens."""
        sizes: list[int] = []

        def seconds(step: ScheduledStep) -> float:
            sizes.append(step.num_prompt_tokens)
            return step_seconds(step)

        simulation = Simulation(policy("fair"), arrivals, seconds=seconds, until=20, prompt_sizes=(64, 256))
        return float(np.mean(np.array(sizes[20:]) > 64)), simulation.served[0]

    (even, slower), (alone, _) = run(both), run(flood)
    monkeypatch.setattr(Fair, "crowd", Policy.crowd)
    uneven, faster = run(both)
    assert even < 0.05 < 0.1 < uneven
    assert alone > 0.1  # there is nobody to make room for
    assert slower > 0.95 * faster


def test_a_flood_leaves_others_places_in_a_bounded_queue():
    """Who is refused waits for ever: under fair shares the flood alone is, under fcfs everybody is."""
    trickle = [a for i in range(1, 10) for a in poisson(0.5, 20, i, seed=1)]
    both = trickle + poisson(60, 20, 0, seed=1)
    refused = {
        name: Simulation(policy(name), both, until=25, max_queued_requests=32).refused for name in ("fair", "fcfs")
    }
    assert refused["fair"][0] > 100
    assert sum(refused["fair"][i] for i in range(1, 10)) == 0
    assert sum(refused["fcfs"][i] for i in range(1, 10)) > 0.2 * len(trickle)


def test_a_request_for_many_continuations_takes_one_place_in_the_queue():
    bench = Bench(max_num_seqs=1, max_queued_requests=2)
    bench.add_all("many", [1] * 8, n=20)
    bench.step()
    for name in "ab":
        bench.add(name)
    with pytest.raises(RateLimitError, match="2 requests wait and 2 may"):
        bench.add("c")
    bench.drain()


@pytest.mark.parametrize("by_tenant", [False, True])
def test_weights_are_met_within_a_tenth(by_tenant):
    rng = np.random.default_rng(3)
    names = ["a0", "a1", "a2"] if not by_tenant else ["x", "y", "z"]
    arrivals = [
        Arrival(0.0, i, *map(int, rng.integers(8, 64, 2)), tenant=names[i] if by_tenant else "")
        for i, _ in itertools.product(range(3), range(600))
    ]
    weights = dict(zip(names, (1.0, 2.0, 4.0), strict=True))
    config = policy("fair", fair_weights=weights, fair_output_cost=1.0, max_num_seqs=14, fair_spare_seats=0)
    served = Simulation(config, arrivals, until=25).served
    one, two, four = (served[name] for name in (names if by_tenant else range(3)))
    assert two / one == pytest.approx(2, rel=0.1)
    assert four / one == pytest.approx(4, rel=0.1)


def test_nobody_saves_up_a_share_while_away():
    """One that comes back after a long pause shares from then on; it does not shut out those who were there."""
    before = [Arrival(0.0, 0, 16, 32) for _ in range(500)]
    after = [Arrival(8.0, 1, 16, 32) for _ in range(500)]
    simulation = Simulation(policy("fair", fair_spare_seats=0, max_num_seqs=8), before + after, until=30)
    late = [seq for seq in simulation.sequences if seq.first_token_time is not None and seq.first_token_time > 8.5]
    shares = [sum(seq.adapters[0] is simulation.adapters[i] for seq in late) for i in range(2)]
    assert shares[0] == pytest.approx(shares[1], rel=0.1)


@pytest.mark.parametrize("name", ["fcfs", "cluster", "fair"])
def test_a_steady_stream_cannot_starve_another_adapter_of_the_one_slot(name):
    stream = [Arrival(0.05 * i, 0, 8, 20) for i in range(1000)]
    other = Arrival(1.0, 1, 8, 4)
    config = policy(name, cluster_adapters=1, max_overtakes=16, max_num_seqs=8)
    simulation = Simulation(config, [*stream, other], max_loras=1, max_overtakes=16, until=45)
    assert simulation.to_first(1)[0] < 10
    assert len(simulation.sequences) > 800  # the stream went on


def test_overtaking_is_bounded_in_seconds_too():
    stream = [Arrival(0.05 * i, 0, 8, 20) for i in range(400)]
    other = Arrival(1.0, 1, 8, 4)
    took = [
        Simulation(policy("fcfs", max_num_seqs=8), [*stream, other], max_loras=1, max_overtakes=10**6, until=20,
                   max_overtake_s=seconds).to_first(1)[0]
        for seconds in (0.5, 3.0, None)
    ]  # fmt: skip
    assert 0.5 < took[0] < 2 < 3 < took[1] < 5 < took[2]


def test_clustering_is_bounded_in_seconds_too():
    stream = [Arrival(0.04 * i, i % 2, 8, 20) for i in range(600)]
    other = Arrival(1.0, 2, 8, 4)
    took = []
    for seconds in (0.5, 4.0, None):
        config = policy("cluster", cluster_adapters=1, max_overtakes=10**6, max_overtake_s=seconds, max_num_seqs=6)
        took.append(Simulation(config, [*stream, other], until=20).to_first(2)[0])
    assert 0.5 < took[0] < 2.5 < 4 < took[1] < 7 < took[2]


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_long_prompt_does_not_starve_a_short_one(name):
    """Long prompts keep coming; each short one starts after at most the prompt under way."""
    long = [Arrival(2.0 * i, 0, 2500, 4) for i in range(10)]
    short = [Arrival(1.7 * i + 0.1, 1, 8, 4) for i in range(10)]
    simulation = Simulation(policy(name), long + short)
    one_prompt = 10 * (0.02 + 0.0002 * 256) + 0.1
    assert simulation.to_first(1).max() < one_prompt
    assert simulation.to_first(0).max() < 3


def test_a_threshold_lets_short_prompts_run_beside_a_long_one():
    long = [Arrival(2.0 * i, 0, 2500, 4) for i in range(10)]
    short = [Arrival(2.0 * i + 0.05, 1, 8, 4) for i in range(10)]
    whole, part = (
        Simulation(policy("fcfs"), long + short, long_prefill_token_threshold=n).to_first(1).max() for n in (None, 128)
    )
    assert part < 0.15 < 0.5 < whole


@pytest.mark.parametrize("cv", [1, 4, 8])
def test_early_abort_keeps_the_order_of_the_paper_and_least_work_first_is_better(cv):
    """S-LoRA's figure 10: abort >= LCFS > FCFS."""
    arrivals = gamma(28, 30, cv, 200)
    found = {
        name: Simulation(policy(name), arrivals, until=36).attainment(6.0)
        for name in ("fcfs", "lcfs", "abort", "deadline")
    }
    assert found["fcfs"] < found["lcfs"] <= found["abort"]
    assert 1 - found["deadline"] < 0.75 * (1 - found["abort"])
    assert cv > 1 or found["abort"] > 2 * found["fcfs"]


def paced(step: ScheduledStep) -> float:
    """Steps with prompts take as long as the size that they are padded to."""
    size = next(n for n in (0, 64, 128, 256, 512) if n >= step.num_prompt_tokens)
    return 0.01 + 0.0002 * size


@pytest.mark.parametrize(("target_s", "expected"), [(0.03, 64), (0.04, 128), (0.065, 256), (0.2, 512)])
def test_prompts_are_cut_so_that_decodes_wait_no_longer_than_a_step_may_take(target_s, expected):
    decodes = [Arrival(0.0, 0, 8, 2000) for _ in range(4)]
    long = [Arrival(0.5 + 0.7 * i, 1, 2000, 4) for i in range(25)]
    simulation = Simulation(
        policy("fcfs"), decodes + long, seconds=paced, until=15, target_step_s=target_s,
        prompt_sizes=(64, 128, 256, 512), max_num_batched_tokens=512,
    )  # fmt: skip
    assert np.percentile(simulation.gaps, 99) <= target_s + 1e-9
    assert np.median([gap for gap in simulation.gaps if gap > 0.011]) == pytest.approx(0.01 + 0.0002 * expected)
    free = Simulation(policy("fcfs"), decodes + long, seconds=paced, until=15, max_num_batched_tokens=512)
    assert np.percentile(free.gaps, 99) > 0.1


@pytest.mark.parametrize("seed", range(8))
def test_no_token_waits_for_twice_the_target_on_any_machine(seed):
    """Machines, loads and lengths at random; the target is twice what a full batch of decodes takes."""
    rng = np.random.default_rng(seed)
    base, row, token = rng.uniform(0.005, 0.08), rng.uniform(0, 0.002), rng.uniform(0.0001, 0.003)
    sizes, seats = prompt_sizes(int(rng.choice([256, 300, 512])), 32, paced=True), int(rng.integers(4, 17))
    noise = rng.uniform(0.9, 1.1, 100_000)
    steps = itertools.count()

    def seconds(step: ScheduledStep) -> float:
        size = next((n for n in sizes if n >= step.num_prompt_tokens), 0) if step.prefills else 0
        return (base + row * step.num_decode_rows + token * size) * noise[next(steps)]

    target = 2 * (base + row * seats)
    high = int(rng.integers(200, 1000))
    rate = 0.7 / (high / 2 * token + 40 * base / seats)
    arrivals = gamma(rate, 60 / rate, 1.0, 4, seed=seed, high=high)
    arrivals = [replace(arrival, output=20 + arrival.output % 44) for arrival in arrivals]
    paced, free = (
        Simulation(policy("fcfs", max_num_seqs=seats), arrivals, seconds=seconds, target_step_s=s, prompt_sizes=sizes,
                   max_num_batched_tokens=sizes[-1]).gaps
        for s in (target, None)
    )  # fmt: skip
    # Where not even the smallest prompts keep the target, it cannot be met, but by the decodes alone.
    least = max(target, base + row * seats + token * sizes[0])
    assert np.percentile(paced, 99) <= 2 * target
    assert np.percentile(paced, 99) <= 1.25 * least
    assert np.percentile(paced, 99) <= 1.05 * np.percentile(free, 99)


def test_a_cap_on_an_adapter_s_sequences_leaves_seats_to_others():
    stream = [Arrival(0.01 * i, 0, 8, 40) for i in range(500)]
    others = [Arrival(1.0 + 0.5 * i, 1 + i % 3, 8, 8) for i in range(12)]
    config = policy("fcfs", max_num_seqs=8)
    simulation = Simulation(config, stream + others, max_seqs_per_adapter=5, max_overtakes=0)
    assert simulation.max_running == 5
    assert simulation.to_first(1, 2, 3).max() < 0.2
    assert Simulation(config, stream + others).max_running == 8


@pytest.mark.parametrize("name", ["fcfs", "cluster", "fair"])
def test_a_mix_is_not_starved_by_streams_of_its_two_adapters(name):
    """Each may have one sequence at a time, and never are both free at once."""
    one = [Arrival(0.01 * i, 0, 8, 20) for i in range(60)]
    other = [Arrival(0.2 + 0.01 * i, 1, 8, 20) for i in range(60)]
    config = policy(name, max_num_seqs=8, cluster_adapters=1, max_overtakes=4)
    mixed = Arrival(0.1, 0, 8, 4, second=1)
    simulation = Simulation(config, [*one, *other, mixed], until=40, max_seqs_per_adapter=1, max_overtakes=4)
    [seq] = [seq for seq in simulation.sequences if len(seq.adapters) == 2]
    assert seq.first_token_time is not None
    assert seq.first_token_time < 8
