"""Where the time of a step goes, seen from outside: nothing in the engine measures for it, and so it costs nothing."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from multilora_jax.engine.llm_engine import LLMEngine

PHASES = ("plan", "inputs", "device", "output")
"""plan: the schedule, and what adapters need; inputs: the arrays of the step, built and sent; device: the programs,
from their calls to the end of the last one; output: tokens, texts and the requests' books."""


class StepPhases:
    """Seconds of each phase of the steps that ran within `watch`.

    While it watches, every step waits for the device right after its launch: what would overlap does not, so that
    these steps are for their shares and not for the speed.
    """

    def __init__(self) -> None:
        self._kind = ""
        self._launched = self._built = self._done = 0.0
        self._called = self._called_before = 0.0
        self.seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: {phase: [] for phase in PHASES})
        """"prefill" or "decode" (whether any prompt was among the step's tokens) to the phases of its steps."""

    @contextmanager
    def watch(self, engine: LLMEngine) -> Iterator[None]:
        """Measures the engine's steps until it is left; they must be run with `step`."""
        runner: Any = engine.runner
        programs: Any = runner.programs
        execute, get = runner.execute, programs.get

        def timed_execute(step: Any, *args: Any) -> Any:
            self._launched, self._called_before = time.perf_counter(), self._called
            result = execute(step, *args)
            self._built = time.perf_counter()
            jax.block_until_ready(result)
            self._done = time.perf_counter()
            self._kind = "prefill" if step.prefills else "decode"
            return result

        def timed_get(*key: Any) -> Callable[..., Any]:
            return self._timed(get(*key))

        runner.execute, programs.get = timed_execute, timed_get
        try:
            yield
        finally:
            runner.execute, programs.get = execute, get

    def step(self, engine: LLMEngine) -> Any:
        """One step of the engine; its outputs."""
        self._kind, self._called = "", 0.0
        start = time.perf_counter()
        outputs = engine.step()
        end = time.perf_counter()
        if self._kind:
            # The CPU runs a small program within its call, others after it: either way that is the device's time.
            device = self._called + self._done - self._built
            plan, output = self._launched - start - self._called_before, end - self._done
            found = (plan, end - start - plan - device - output, device, output)
            for phase, seconds in zip(PHASES, found, strict=True):
                self.seconds[self._kind][phase].append(seconds)
        return outputs

    def medians_ms(self) -> dict[str, dict[str, float]]:
        """For "prefill" and "decode" as far as there were any: the median milliseconds of each phase."""
        return {
            kind: {phase: statistics.median(values) * 1000 for phase, values in self.seconds[kind].items()}
            for kind in ("prefill", "decode")
            if kind in self.seconds
        }

    def _timed(self, program: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = program(*args)
            self._called += time.perf_counter() - start
            return result

        return call
