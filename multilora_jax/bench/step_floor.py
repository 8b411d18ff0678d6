"""What a decode step of the base cannot do without: its products, and one reading of its weights."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.models.layers import LlamaSpec, linear

FLOORS = ("bare products", "weights read once")
REPEATS = 3  # of each floor at a time; the best counts, as of anything that others can only slow down


class StepFloors:
    """Times the floors of a step of some sequences, between runs of the engine, so that the machine is as it was then.

    Args:
        engine: on one device.
        num_rows: B, the sequences of the step.

    Attributes:
        seconds: of each floor, one figure for each `sample`.
    """

    def __init__(self, engine: LLMEngine, num_rows: int):
        spec, params = engine.runner.spec, engine.runner.params
        size = engine.runner.programs.group
        groups = [params["layers"][first : first + size] for first in range(0, len(params["layers"]), size)]
        head = params["top"].get("lm_head", params["top"]["embed"])
        shape = (spec.config.hidden_size, num_rows)
        x = jnp.ones(shape if spec.features_first else shape[::-1], spec.dtype)
        products = jax.jit(functools.partial(_products, spec=spec))
        last = jax.jit(functools.partial(linear, spec))
        total = jax.jit(_total)

        def run_products() -> Any:
            y = x
            for group in groups:
                y = products(group, y)
            return last(head, y)

        runs: tuple[Callable[[], Any], ...] = (run_products, lambda: [total(group) for group in (*groups, head)])
        self._runs = dict(zip(FLOORS, runs, strict=True))
        self.seconds: dict[str, list[float]] = {name: [] for name in FLOORS}
        for run in self._runs.values():
            jax.block_until_ready(run())  # compiles

    def sample(self) -> None:
        """Times each floor once more."""
        for name, run in self._runs.items():
            self.seconds[name].append(min(self._timed(run) for _ in range(REPEATS)))

    def rows(self, step_ms: float) -> list[dict[str, Any]]:
        """Rows for a table: each floor in milliseconds, and how many times it the step takes."""
        found = {name: statistics.median(seconds) * 1000 for name, seconds in self.seconds.items() if seconds}
        return [
            {"floor": name, "floor_ms": ms, "step_ms": step_ms, "ratio": step_ms / ms} for name, ms in found.items()
        ]

    @staticmethod
    def _timed(run: Callable[[], Any]) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - start


def _products(layers: list[dict[str, Any]], x: jax.Array, *, spec: LlamaSpec) -> jax.Array:
    """The products of some layers, each on (a part of) what the one before gave, as in the model."""

    def first(y: jax.Array, weight: Any) -> jax.Array:
        """As much of y as a weight takes."""
        width = weight.shape[1]
        return (y[:width] if spec.features_first else y[:, :width]).astype(spec.dtype)

    for weights in layers:
        y = linear(spec, weights["qkv"], x)
        y = linear(spec, weights["o"], first(y, weights["o"]))
        y = linear(spec, weights["gate_up"], first(y, weights["gate_up"]))
        y = linear(spec, weights["down"], first(y, weights["down"]))
        x = first(y * 1e-3, weights["qkv"])
    return x


def _total(tree: Any) -> jax.Array:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim == 2]
    return sum((jnp.sum(leaf, dtype=jnp.float32) for leaf in leaves), jnp.float32(0))
