"""Where the time of a step goes, seen from outside: nothing in the engine measures for it, and so it costs nothing."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from multilora_jax.engine.llm_engine import LLMEngine

PHASES = ("plan", "launch", "device", "output")
"""plan: the schedule and transfers of adapters; launch: building the inputs and starting the program; device: waiting
for its end; output: tokens, texts and the requests' books."""


class StepPhases:
    """Seconds of each phase of the steps that ran within `watch`.

    While it watches, every step waits for the device right after its launch: what would overlap does not, so that
    these steps are for their shares and not for the speed.
    """

    def __init__(self) -> None:
        self._kind = ""
        self._launched = self._started = self._done = 0.0
        self.seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: {phase: [] for phase in PHASES})
        """"prefill" or "decode" (whether any prompt was among the step's tokens) to the phases of its steps."""

    @contextmanager
    def watch(self, engine: LLMEngine) -> Iterator[None]:
        """Measures the engine's steps until it is left; they must be run with `step`."""
        runner: Any = engine.runner
        execute = runner.execute

        def timed(step: Any, *args: Any) -> Any:
            self._launched = time.perf_counter()
            result = execute(step, *args)
            self._started = time.perf_counter()
            jax.block_until_ready(result)
            self._done = time.perf_counter()
            self._kind = "prefill" if step.prefills else "decode"
            return result

        runner.execute = timed
        try:
            yield
        finally:
            runner.execute = execute

    def step(self, engine: LLMEngine) -> Any:
        """One step of the engine; its outputs."""
        self._kind = ""
        start = time.perf_counter()
        outputs = engine.step()
        end = time.perf_counter()
        if self._kind:
            marks = (start, self._launched, self._started, self._done, end)
            for phase, begin, until in zip(PHASES, marks[:-1], marks[1:], strict=True):
                self.seconds[self._kind][phase].append(until - begin)
        return outputs

    def medians_ms(self) -> dict[str, dict[str, float]]:
        """For "prefill" and "decode" as far as there were any: the median milliseconds of each phase."""
        return {
            kind: {phase: statistics.median(values) * 1000 for phase, values in self.seconds[kind].items()}
            for kind in ("prefill", "decode")
            if kind in self.seconds
        }
