"""As many first tokens within the objective as can be (host only, no jax)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import ClassVar

from multilora_jax.engine.policies.abort import gave_up
from multilora_jax.engine.policies.base import Entry, Load, Policy
from multilora_jax.engine.policies.first_token import FirstTokenTime
from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.errors import UserError

_STEP = 0.05
"""Weight of the newest value in the moving average."""

_MAX_PARTIES = 4096


class Deadline(Policy):
    """Least work first, and whoever cannot make it any more is given up at that moment and not before.

    What a full server lacks is seats and the time of steps, of which a request takes about its prompt and, several
    times as much, its answer. Serving the smallest first gets most requests through while they wait, so most of them
    in time; long ones are what is given up when not all can be. How long an answer will be is guessed from how much
    of their allowance the requests of its party have used before; how long after its start a first token comes, from
    those before too.

    Args:
        objective_s: seconds within which the first token is wanted.
        output_cost: what a generated token takes, in prompt tokens.
    """

    is_static: ClassVar[bool] = False
    gives_up: ClassVar[bool] = True

    def __init__(self, objective_s: float, output_cost: float = 4.0) -> None:
        self._objective_s = objective_s
        self._output_cost = output_cost
        self._to_first = FirstTokenTime()
        self._used: dict[str, float] = {}  # share of max_tokens, by party

    def order(self, entries: SequenceABC[Entry], load: Load) -> SequenceABC[Entry]:
        return sorted(entries, key=self._work)

    def give_up(self, entries: SequenceABC[Entry], load: Load) -> SequenceABC[tuple[Entry, UserError]]:
        latest = load.now - self._objective_s + self._to_first.at_most(self._objective_s)
        late = [entry for entry in entries if entry.seq.arrival_time <= latest]
        return [(entry, gave_up(entry, self._objective_s, load)) for entry in late]

    def left(self, entry: Entry, load: Load) -> None:
        seq = entry.seq
        if seq.first_token_time is None or seq.max_total_tokens <= seq.num_prompt_tokens:
            return
        used = (seq.num_tokens - seq.num_prompt_tokens) / (seq.max_total_tokens - seq.num_prompt_tokens)
        before = self._used.pop(entry.party, used)
        self._used[entry.party] = before + _STEP * (used - before)  # behind those that were used longer ago
        if len(self._used) > _MAX_PARTIES:
            del self._used[next(iter(self._used))]

    def planned(self, step: ScheduledStep, load: Load) -> None:
        self._to_first.planned(step, load)

    def _work(self, entry: Entry) -> float:
        seq = entry.seq
        allowed = seq.max_total_tokens - seq.num_prompt_tokens
        return seq.num_prompt_tokens + self._output_cost * allowed * self._used.get(entry.party, 1.0)
