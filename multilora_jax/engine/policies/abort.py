"""S-LoRA's early abort (host only, no jax)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import ClassVar

from multilora_jax.engine.policies.base import Entry, Load, Policy
from multilora_jax.engine.policies.first_token import FirstTokenTime
from multilora_jax.engine.policies.gate import retry_after
from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.errors import OverloadedError, UserError

_STEPS_PER_ROUND = 10
"""Steps between two looks at the queue, in which its growth shows; S-LoRA's router takes as many."""


class Abort(Policy):
    """Early abort as S-LoRA's code has it (`abort_req_queue.py`; section 4.3 of the paper).

    Round by round the requests that came since the last admission are weighed against those admitted, both as moving
    averages of whole numbers: while more come than are served the newest are served first, else the oldest. A request
    that has waited for all of the objective but a twelfth (0.5 s of 6) is given up. There that time suffices for its
    first token; where a start is seen to take longer than a twelfth, requests are given up by as much earlier, since
    one that starts too late holds its seat for nothing.

    Args:
        objective_s: seconds within which the first token is wanted.
    """

    is_static: ClassVar[bool] = False
    gives_up: ClassVar[bool] = True

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self._to_first = FirstTokenTime()
        self._rate, self._served = 1, 1
        self._steps = 0
        self._arrived = self._admitted = 0

    def order(self, entries: SequenceABC[Entry], load: Load) -> SequenceABC[Entry]:
        return entries[::-1] if self._rate >= self._served else entries

    def give_up(self, entries: SequenceABC[Entry], load: Load) -> SequenceABC[tuple[Entry, UserError]]:
        latest = load.now - self._objective_s + max(self._objective_s / 12, self._to_first.at_most(self._objective_s))
        late = [entry for entry in entries if entry.seq.arrival_time <= latest]
        return [(entry, gave_up(entry, self._objective_s, load)) for entry in late]

    def joined(self, entry: Entry, load: Load) -> None:
        self._arrived += 1

    def admitted(self, entry: Entry, load: Load) -> None:
        self._admitted += entry.seq.first_scheduled_time is None  # not one that was preempted

    def planned(self, step: ScheduledStep, load: Load) -> None:
        self._to_first.planned(step, load)
        self._steps += 1
        if self._steps < _STEPS_PER_ROUND and load.running:
            return
        self._steps = 0
        self._rate = int(0.7 * self._arrived + 0.3 * self._rate)
        if self._admitted:
            self._served = max(int(0.7 * self._admitted + 0.3 * self._served), 1)
            self._arrived = self._admitted = 0


def gave_up(entry: Entry, objective_s: float, load: Load) -> OverloadedError:
    """What the caller of a request is told that will not get its first token in time."""
    waited = load.now - entry.seq.arrival_time
    return OverloadedError(
        f"the server is overloaded: the request waited {waited:.2f} s and could not have got its first token within "
        f"{objective_s:g} s: try again later",
        reason="first_token_objective", param="first_token_objective_s", retry_after_s=retry_after(objective_s),
    )  # fmt: skip
