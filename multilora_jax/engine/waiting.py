"""The scheduler's notes on live sequences, and the order in which they wait (host only, no jax)."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from multilora_jax.request import Sequence, SequenceStatus


@dataclass(eq=False, slots=True)
class Entry:
    """The scheduler's own notes on a live sequence.

    Attributes:
        order: of arrival.
        running: whether it runs; else it waits.
        overtakes: how many later ones passed it while it waited.
        key: its place among the waiting.
    """

    seq: Sequence
    order: int
    running: bool = False
    overtakes: int = 0
    key: tuple[int, bool, int] = (0, False, 0)


class WaitingQueue:
    """Waiting sequences by priority (lower first), preempted ones before fresh ones, then by arrival.

    Beside them stand those that are held until a leader has computed the prompt that they share with it: they count,
    but nobody can start them and they hold up nobody.

    Attributes:
        items: (key, entry), sorted; keys are unique.
    """

    def __init__(self) -> None:
        self.items: list[tuple[tuple[int, bool, int], Entry]] = []
        self._held: dict[Entry, Sequence] = {}

    def __len__(self) -> int:
        return len(self.items) + len(self._held)

    def push(self, entry: Entry, *, preempted: bool) -> None:
        """Add an entry; its sequence waits from now on."""
        entry.key = (entry.seq.priority, not preempted, entry.order)
        entry.seq.status = SequenceStatus.WAITING
        bisect.insort(self.items, (entry.key, entry))

    def add(self, entry: Entry, leader: Sequence | None) -> None:
        """Take a new entry; one with a leader is held until `release` finds that the leader's prompt is computed."""
        if leader is None:
            self.push(entry, preempted=False)
        else:
            self._held[entry] = leader

    def release(self) -> None:
        """Let those into the queue whose leader has computed its prompt, or has ended."""
        for entry, leader in list(self._held.items()):
            if leader.finished or leader.num_computed_tokens >= leader.num_prompt_tokens:
                del self._held[entry]
                self.push(entry, preempted=False)

    def remove(self, entry: Entry) -> None:
        """Take out an entry, wherever it is."""
        if self._held.pop(entry, None) is not None:
            return
        del self.items[bisect.bisect_left(self.items, (entry.key,))]

    def sequences(self, limit: int | None = None) -> Iterator[Sequence]:
        """The first `limit` sequences, all by default, in order; the queue must not change meanwhile."""
        return (entry.seq for _, entry in islice(self.items, limit))
