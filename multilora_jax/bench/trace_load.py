"""S-LoRA's synthetic workloads, drawn from a seed: adapters by a power law, arrivals in gaps of a gamma distribution.

The distributions are those of S-LoRA's generator (arXiv 2311.03285 section 7.1 and its released traces); the random
numbers are not. Gaps, adapters and lengths come from streams of their own, so that traces which differ in one setting
alone (in `rate`, say) have everything else in common, and what a sweep shows is not the luck of another draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from multilora_jax.errors import ConfigError

SETTINGS: dict[str, tuple[int, ...]] = {"S1": (8,), "S2": (64, 32, 16, 8), "S4": (64, 32, 16)}
"""Ranks of the adapters, in turn, of S-LoRA's settings of that name (its table 1; the base is whatever is served)."""


class TraceRequest(NamedTuple):
    """One request of a trace.

    Attributes:
        arrival_s: seconds after the start.
        adapter: its number, from 0.
        prompt_tokens, new_tokens: lengths of the prompt and of the answer.
    """

    arrival_s: float
    adapter: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class TraceSpec:
    """What a trace is drawn from; the defaults are those of S-LoRA's synthetic workloads.

    Attributes:
        num_adapters: n.
        alpha: of the power law: the first k adapters get (k/n)**alpha of the requests, so that 1 is uniform and less
            is more skewed.
        rate: R, requests per second on average.
        cv: coefficient of variation of the gaps between arrivals: 1 is a Poisson process, more comes in bursts.
        duration_s: for which requests come: int(rate * duration_s) of them, whenever the last one is due.
        input_range, output_range: lengths are uniform in [low, high).
        flood: requests per second, of a Poisson process, of one adapter more; 0 for none.
        flood_range: lengths of their prompts; None for input_range.
        seed: of everything.

    Raises:
        ConfigError: `param` names the value that no trace can have.
    """

    num_adapters: int = 200
    alpha: float = 1.0
    rate: float = 2.0
    cv: float = 1.0
    duration_s: float = 300.0
    input_range: tuple[int, int] = (8, 512)
    output_range: tuple[int, int] = (8, 512)
    flood: float = 0.0
    flood_range: tuple[int, int] | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("num_adapters", "alpha", "rate", "cv", "duration_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0 and finite, got {value}", reason="bad_value", param=name)
        if not 0.01 <= self.cv <= 100:
            raise ConfigError(f"cv must be from 0.01 to 100, got {self.cv}", reason="bad_value", param="cv")
        if not 0 <= self.flood < math.inf:
            raise ConfigError(
                f"flood must be 0 or more and finite, got {self.flood}", reason="bad_value", param="flood"
            )
        for name in ("input_range", "output_range", "flood_range"):
            low, high = getattr(self, name) or self.input_range
            if not 1 <= low < high:
                raise ConfigError(
                    f"{name} must be two lengths LOW,HIGH with 1 <= LOW < HIGH, got {low},{high}",
                    reason="bad_value", param=name,
                )  # fmt: skip
        if self.num_requests < 1:
            raise ConfigError(
                f"a trace of {self.duration_s:g} s at {self.rate:g} requests per second has no request: raise "
                "duration_s or rate",
                reason="bad_value", param="duration_s",
            )  # fmt: skip

    @property
    def num_requests(self) -> int:
        """Requests of the trace, without the flood's."""
        return int(self.rate * self.duration_s)

    @property
    def all_adapters(self) -> int:
        """Adapters of the trace, with the flood's, which is the last."""
        return self.num_adapters + (self.flood > 0)


def make_trace(spec: TraceSpec) -> list[TraceRequest]:
    """The requests of a trace in the order of their arrival; the same spec gives the same trace.

    Args:
        spec: what it is drawn from.
    """
    num = spec.num_requests
    gaps_rng, adapters_rng, inputs_rng, outputs_rng = (np.random.default_rng([spec.seed, n]) for n in range(4))
    # Drawn at a mean of one second: traces of other rates are this one, faster or slower.
    arrivals = np.cumsum(gaps_rng.gamma(spec.cv**-2, spec.cv**2, num)) / spec.rate
    adapters = np.minimum(adapters_rng.power(spec.alpha, num) * spec.num_adapters, spec.num_adapters - 1).astype(int)
    inputs = inputs_rng.integers(*spec.input_range, num)
    outputs = outputs_rng.integers(*spec.output_range, num)
    columns = arrivals.tolist(), adapters.tolist(), inputs.tolist(), outputs.tolist()
    requests = [TraceRequest(*row) for row in zip(*columns, strict=True)]
    return sorted(requests + _flood(spec), key=lambda request: request.arrival_s)


def _flood(spec: TraceSpec) -> list[TraceRequest]:
    """The requests of the flood; those of the others are the same with it and without."""
    num = int(spec.flood * spec.duration_s)
    gaps_rng, inputs_rng, outputs_rng = (np.random.default_rng([spec.seed, n]) for n in (4, 5, 6))
    arrivals = np.cumsum(gaps_rng.exponential(1.0, num)) / (spec.flood or 1.0)
    inputs = inputs_rng.integers(*(spec.flood_range or spec.input_range), num)
    outputs = outputs_rng.integers(*spec.output_range, num)
    columns = arrivals.tolist(), [spec.num_adapters] * num, inputs.tolist(), outputs.tolist()
    return [TraceRequest(*row) for row in zip(*columns, strict=True)]
