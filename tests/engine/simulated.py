"""Traces through the scheduler in simulated time: a step takes what a formula says and computes nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from multilora_jax.engine.policies import PolicyConfig, make_policy
from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.errors import RateLimitError
from multilora_jax.request import FinishReason, Sequence
from tests.engine.scheduler_bench import Bench, FakeAdapter


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: seconds, number of its adapter, prompt and new tokens, its tenant, another adapter."""

    time: float
    adapter: int
    prompt: int
    output: int
    tenant: str = ""
    second: int | None = None


def step_seconds(step: ScheduledStep) -> float:
    return 0.02 + 0.0002 * step.num_prompt_tokens + 0.0002 * len(step.decodes)


def poisson(rate: float, seconds: float, adapter: int, *, seed: int, low: int = 8, high: int = 64) -> list[Arrival]:
    """Requests of one adapter with lengths from [low, high)."""
    rng, arrivals, now = np.random.default_rng([seed, adapter]), list[Arrival](), 0.0
    while (now := now + rng.exponential(1 / rate)) < seconds:
        arrivals.append(Arrival(now, adapter, int(rng.integers(low, high)), int(rng.integers(low, high))))
    return arrivals


def gamma(
    rate: float, seconds: float, cv: float, num_adapters: int, *, seed: int = 42, high: int = 128
) -> list[Arrival]:
    """S-LoRA's trace with alpha 1: gamma arrivals, each of a random adapter."""
    rng, arrivals, now = np.random.default_rng(seed), list[Arrival](), 0.0
    while (now := now + rng.gamma(1 / cv**2, cv**2 / rate)) < seconds:
        lengths = rng.integers(8, high, 2)
        arrivals.append(Arrival(now, int(rng.integers(num_adapters)), int(lengths[0]), int(lengths[1])))
    return arrivals


class Simulation:
    """Runs a trace to its end, or to `until` seconds.

    Attributes:
        sequences: in the order of the arrivals.
        gaps: seconds between two tokens of a sequence.
        served: tokens computed, by tenant or adapter's number.
        max_running: most sequences of one adapter that ran at once.
        refused: requests that were not queued, by adapter's number.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        arrivals: Iterable[Arrival],
        *,
        seconds: Callable[[ScheduledStep], float] = step_seconds,
        until: float = math.inf,
        **options: Any,
    ):
        arrivals = sorted(arrivals, key=lambda arrival: arrival.time)
        options = {"max_num_batched_tokens": 256, "prefill_block": 32, "num_pages": 4001, **options}
        self.policy = make_policy(policy)
        self.bench = Bench(scheduling=self.policy, max_num_seqs=policy.max_num_seqs, max_rank_rows=4096, **options)
        self.adapters = [FakeAdapter(f"a{i}") for i in range(1 + max(arrival.adapter for arrival in arrivals))]
        self.sequences: list[Sequence] = []
        self.gaps: list[float] = []
        self.served: dict[str | int, int] = {}
        self.max_running = 0
        self.refused: Counter[int] = Counter()
        bench, scheduler, i = self.bench, self.bench.scheduler, 0
        while (i < len(arrivals) or scheduler._live) and bench.now < until:
            if not scheduler._live:
                bench.now = max(bench.now, arrivals[i].time)
            for arrival in arrivals[i:]:
                if arrival.time > bench.now:
                    break
                i += 1
                which = [arrival.adapter] if arrival.second is None else [arrival.adapter, arrival.second]
                mix = tuple(self.adapters[number] for number in which)
                try:
                    [seq] = bench.add_all(str(i), [1] * arrival.prompt, arrival.output, mix, tenant=arrival.tenant)
                except RateLimitError:
                    self.refused[arrival.adapter] += 1
                    continue
                seq.arrival_time = arrival.time
                self.sequences.append(seq)
            self._step(seconds)

    def _step(self, seconds: Callable[[ScheduledStep], float]) -> None:
        bench, scheduler = self.bench, self.bench.scheduler
        for seq, _ in scheduler.given_up():
            scheduler.finish(seq, FinishReason.ERROR)
        bench.source.tick()
        bench.plan()
        step = scheduler.schedule()
        took = 0.02 if step is None else seconds(step)
        bench.now += took
        if step is None:
            return
        self.max_running = max(self.max_running, *scheduler.active.users.values())
        for seq, n in [(seq, 1) for seq in step.decodes] + step.prefills:
            name = seq.tenant or self.adapters.index(seq.adapters[0])
            self.served[name] = self.served.get(name, 0) + n
        scheduler.saw_step(step, took)
        bench.read(self._timed(bench.launch(step)))

    def _timed(self, sampled: list[Sequence]) -> list[Sequence]:
        for seq in sampled:
            if seq.first_token_time is None:
                seq.first_token_time = self.bench.now
            else:
                assert seq.last_token_time is not None
                self.gaps.append(self.bench.now - seq.last_token_time)
            seq.last_token_time = self.bench.now
        return sampled

    def to_first(self, *adapters: int) -> np.ndarray:
        """Seconds to the first token of the requests of these adapters, of all by default; inf where none came."""
        wanted = {self.adapters[i] for i in adapters or range(len(self.adapters))}
        return np.array([
            math.inf if seq.first_token_time is None else seq.first_token_time - seq.arrival_time
            for seq in self.sequences if seq.adapters[0] in wanted
        ])  # fmt: skip

    def attainment(self, objective_s: float) -> float:
        """Share of the requests whose first token came within the objective."""
        return float(np.mean(self.to_first() <= objective_s))
