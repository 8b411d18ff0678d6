"""Weighted fair shares by a virtual token counter (host only, no jax)."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceABC
from typing import ClassVar

from multilora_jax.engine.policies.base import Entry, Load, Policy
from multilora_jax.engine.step_plan import ScheduledStep

_MAX_OFFERED = 1024  # of those that wait: more than a step looks at
_KEPT_PART = 8  # of the queue's places, one in so many is kept
_MAX_IDLE = 1024  # parties without a waiting sequence whose counters are kept


class Fair(Policy):
    """VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), with weights.

    Each party (adapter or tenant) has a counter of the tokens that it was served, divided by its weight: prompt tokens
    when a sequence is admitted, as far as they have to be computed, and `output_cost` for each generated token. The
    party with the lowest counter is next. One that comes back after a pause starts no lower than the lowest of those
    that wait, so that nobody can save up.

    Of the last `spare_seats` none goes to a party that has its share already, counted as if one more party of weight 1
    were there: else whoever floods the batch fills it, and the next to come waits until a sequence ends. So it is with
    the last eighth of the queue's places, where those are bounded, or the next to come were refused.

    Args:
        weights: of parties by name, above 0; 1 for those not named.
        output_cost: what a generated token counts, in prompt tokens.
        spare_seats: see above; 0 for none.

    Attributes:
        counters: of the parties.
    """

    is_static: ClassVar[bool] = False

    def __init__(self, weights: Mapping[str, float], output_cost: float = 2.0, spare_seats: int = 0) -> None:
        self._weights = weights
        self._output_cost = output_cost
        self._spare_seats = spare_seats
        self.counters: dict[str, float] = {}
        self._queued: set[Entry] = set()
        self._waiting: Counter[str] = Counter()  # how many of them each party has, those with none left out
        self._last = 0.0  # counter of whoever was the last to wait

    def order(self, entries: SequenceABC[Entry], load: Load) -> SequenceABC[Entry]:
        """By counters, each charged with the prompts that stand before; those that must leave the last seats are not
        among them."""
        queues: dict[str, list[Entry]] = {}
        for entry in entries:
            queues.setdefault(entry.party, []).append(entry)
        running = Counter(entry.party for entry in load.running.values())
        most = self._shares({*queues, *running}, load.max_num_seqs) if self._spare_seats else {}
        counters, free = self.counters.copy(), load.free_seats
        heap = [(counters[party], running[party], queue[0].order, party, 0) for party, queue in queues.items()]
        heapq.heapify(heap)
        ordered: list[Entry] = []
        while heap and len(ordered) < _MAX_OFFERED:
            _, _, _, party, place = heap[0]
            if most and free <= self._spare_seats and running[party] >= most[party]:
                heapq.heappop(heap)
                continue
            queue = queues[party]
            entry = queue[place]
            ordered.append(entry)
            free -= 1
            place += 1
            if place == len(queue):
                heapq.heappop(heap)
                continue
            running[party] += 1
            counters[party] += self._cost_of_prompt(entry)
            heapq.heapreplace(heap, (counters[party], running[party], queue[place].order, party, place))
        return ordered

    def kept_places(self, entry: Entry, load: Load, most: int) -> int:
        party, kept = entry.party, -(-most // _KEPT_PART)
        if load.num_waiting < most - kept:
            return 0
        return kept if self._waiting[party] >= self._shares({*self._waiting, party}, most)[party] else 0

    def crowd(self, load: Load) -> Collection[str]:
        """Those that hold their share of the seats, while somebody is there who holds less."""
        running = Counter(entry.party for entry in load.running.values())
        parties = {*running, *self._waiting}
        if len(parties) < 2:
            return ()
        most = self._shares(parties, load.max_num_seqs)
        crowd = {party for party, seats in running.items() if seats >= most[party]}
        return crowd if len(crowd) < len(parties) else ()

    def joined(self, entry: Entry, load: Load) -> None:
        party = entry.party
        if not self._waiting[party]:
            floor = min((self.counters[other] for other in self._waiting), default=self._last)
            self.counters[party] = max(self.counters.get(party, 0.0), floor)
            if len(self.counters) > 2 * (_MAX_IDLE + len(self._queued)):
                self._forget_the_idle()
        self._waiting[party] += 1
        self._queued.add(entry)

    def admitted(self, entry: Entry, load: Load) -> None:
        if entry in self._queued:  # not one that was preempted, which would pay twice
            self.counters[entry.party] += self._cost_of_prompt(entry)
            self._dequeue(entry)

    def left(self, entry: Entry, load: Load) -> None:
        if entry in self._queued:
            self._dequeue(entry)

    def planned(self, step: ScheduledStep, load: Load) -> None:
        for seq in step.decodes:
            party = load.running[seq.request_id].party
            rows = 1 + len(step.proposals.get(seq, ()))
            self.counters[party] += rows * self._output_cost / self._weights.get(party, 1.0)

    def _cost_of_prompt(self, entry: Entry) -> float:
        """And of the first token, which a prompt's last chunk brings."""
        return (entry.seq.num_pending_tokens + self._output_cost) / self._weights.get(entry.party, 1.0)

    def _dequeue(self, entry: Entry) -> None:
        self._queued.remove(entry)
        self._waiting[entry.party] -= 1
        if not self._waiting[entry.party]:
            del self._waiting[entry.party]
        self._last = self.counters[entry.party]

    def _shares(self, parties: set[str], most: int) -> dict[str, float]:
        """How many of `most` seats or places each party may hold before it has to leave the last ones, one at least."""
        weights = {party: self._weights.get(party, 1.0) for party in parties}
        total = 1.0 + sum(weights.values())
        return {party: max(1.0, most * weight / total) for party, weight in weights.items()}

    def _forget_the_idle(self) -> None:
        """Drops the counters of parties without a waiting sequence, the highest excepted: a new one starts level."""
        idle = sorted((c, party) for party, c in self.counters.items() if party not in self._waiting)
        for _, party in idle[:-_MAX_IDLE]:
            del self.counters[party]
