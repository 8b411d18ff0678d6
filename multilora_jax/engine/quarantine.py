"""Which sequence makes steps fail: the suspects run in halves until it fails alone (host only, no jax).

A step that fails says nothing about whose fault that was. Ending all that were in it would let one bad request take
its whole batch down, again and again if its client tries again. So those that were in a failed step run again, in
halves of halves where one fails again, and only who fails alone is ended. Whatever failed once and not again, a device
that was short of memory for a moment for example, costs nobody an answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from multilora_jax.request import Sequence

MAX_FAILURES = 16
"""Failed steps that one sequence may take part in; halving a batch of 1,000 takes eleven."""


class Quarantine:
    """The groups of suspects, the first of which is on trial: nobody else may start to run meanwhile.

    A suspect is cleared once a step gives it a token, since it had failed before one, and when it ends. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._groups: list[list[Sequence]] = []
        self._failures: dict[Sequence, int] = {}

    @property
    def on_trial(self) -> list[Sequence]:
        """Those that may start to run now; empty where all may."""
        while self._groups:
            group = self._groups[0] = [seq for seq in self._groups[0] if not seq.finished]
            if group:
                return group
            self._groups.pop(0)
        self._failures.clear()
        return []

    def passed(self, seqs: Iterable[Sequence]) -> None:
        """These got a token, or ended."""
        if self._groups:
            passed = set(seqs)
            self._groups = [[seq for seq in group if seq not in passed] for group in self._groups]

    def failed(self, suspects: Iterable[Sequence]) -> list[Sequence]:
        """A step has failed with these in it; returns those that are to be ended for it."""
        suspects = [seq for seq in suspects if not seq.finished]
        group = self.on_trial or suspects
        blamed = [seq for seq in group if seq in suspects]
        if self._groups:
            self._groups[0] = [seq for seq in group if seq not in suspects]
        if not blamed:  # it were others that ran, some of those cleared before
            blamed = suspects
        for seq in blamed:
            self._failures[seq] = self._failures.get(seq, 0) + 1
        # Beside one that was cleared, a single one is not alone yet: the next time it will be.
        most = 1 if len(suspects) == 1 else MAX_FAILURES
        ended = [seq for seq in blamed if self._failures[seq] > most]
        left = [seq for seq in blamed if seq not in ended]
        middle = (len(left) + 1) // 2 if len(blamed) > 1 else len(left)
        self._groups[:0] = [left[:middle], left[middle:]]
        return ended
