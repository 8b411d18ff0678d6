"""A policy that knows what no server can: a measure of what is left to gain (host only, no jax)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from multilora_jax.engine.policies import Entry, Load, Policy
from multilora_jax.engine.simulation import StepCost
from multilora_jax.errors import OverloadedError, UserError


class Oracle(Policy):
    """Knows every answer's length: serves whoever takes least of the pool, and gives up whom it cannot serve in time.

    Shortest first starts most requests in a given time. A request takes its pages for its whole time, so that what it
    costs is the sum of its length over its steps. It is no bound: nobody knows the best order without trying them all.

    Args:
        objective_s: for the first token.
        cost: of a step.
        new_tokens: length of the answer of each request, by id.
    """

    is_static: ClassVar[bool] = False
    gives_up: ClassVar[bool] = True

    def __init__(self, objective_s: float, cost: StepCost, new_tokens: Mapping[str, int]):
        self._objective_s = objective_s
        self._cost = cost
        self._new_tokens = new_tokens

    def order(self, entries: Sequence[Entry], load: Load) -> Sequence[Entry]:
        return sorted(entries, key=lambda entry: (self._token_steps(entry), entry.order))

    def give_up(self, entries: Sequence[Entry], load: Load) -> Sequence[tuple[Entry, UserError]]:
        error = OverloadedError("no first token can come in time")
        start, token_s = load.now - self._objective_s, self._cost.token_s
        soonest = start + self._cost.base_s + len(load.running) * token_s
        return [(e, error) for e in entries if soonest + e.seq.num_prompt_tokens * token_s >= e.seq.arrival_time]

    def _token_steps(self, entry: Entry) -> float:
        """Tokens that it holds, summed over its steps."""
        seq = entry.seq
        answer = self._new_tokens[seq.request_id]
        return answer * (seq.num_prompt_tokens + answer / 2)
