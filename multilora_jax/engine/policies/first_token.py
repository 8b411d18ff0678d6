"""How long after its start a request's first token comes (host only, no jax)."""

from __future__ import annotations

from multilora_jax.engine.policies.base import Load
from multilora_jax.engine.step_plan import ScheduledStep

_STEP = 0.05
"""Weight of the newest value in the moving averages."""


class FirstTokenTime:
    """A moving average of the seconds from start to first token, and of how far they lie around it."""

    def __init__(self) -> None:
        self._mean = self._spread = 0.0

    def planned(self, step: ScheduledStep, load: Load) -> None:
        """A step was planned: those of its decodes that have just one token got it in the step before."""
        for seq in step.decodes:
            if seq.num_tokens + seq.num_in_flight == seq.num_prompt_tokens + 1 and seq.first_scheduled_time is not None:
                seconds = load.now - seq.first_scheduled_time
                self._mean += _STEP * (seconds - self._mean)
                self._spread += _STEP * (abs(seconds - self._mean) - self._spread)

    def at_most(self, objective_s: float) -> float:
        """Seconds that suffice for nearly all, but never more than half of the objective."""
        return min(objective_s / 2, self._mean + 2 * self._spread)
