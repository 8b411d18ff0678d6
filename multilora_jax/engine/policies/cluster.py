"""Adapter clustering: few distinct adapters in the batch (host only, no jax)."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Any, ClassVar

from multilora_jax.engine.policies.base import Entry, Load, Policy


class _Line:
    """The fresh waiting sequences of one priority in the order of their arrival.

    Attributes:
        waiting: as said.
        passed: sequences that started while the first of them waited; since: when the first of these did.
    """

    def __init__(self) -> None:
        self.waiting: dict[Entry, None] = {}
        self.passed = 0
        self.since = 0.0

    def remove(self, entry: Entry, *, started: bool, now: float) -> None:
        first = next(iter(self.waiting), None)
        if entry not in self.waiting:
            return
        del self.waiting[entry]
        if entry is first:
            self.passed = 0
        elif started:
            self.since = self.since if self.passed else now
            self.passed += 1


class Cluster(Policy):
    """S-LoRA's clustering (section 4.2): requests whose adapters are in the batch go first, then the rest by arrival.

    Unlike theirs it starves nobody: once `max_overtakes` sequences have started past the one that waits longest, or
    `max_overtake_s` have gone by since the first did, it is that one's turn.

    Args:
        num_adapters: d: distinct adapters in the batch from which on those are preferred.
        max_overtakes, max_overtake_s: see SchedulerConfig.
    """

    is_static: ClassVar[bool] = False

    def __init__(self, num_adapters: int, max_overtakes: int, max_overtake_s: float | None = None) -> None:
        self._num_adapters = num_adapters
        self._max_overtakes = max_overtakes
        self._max_overtake_s = max_overtake_s
        self._lines: dict[int, _Line] = {}  # by priority

    def order(self, entries: SequenceABC[Entry], load: Load) -> SequenceABC[Entry]:
        users = load.users
        if len(users) < self._num_adapters or self._is_overdue(self._lines[entries[0].seq.priority], load.now):
            return entries
        inside, outside = list[Entry](), list[Entry]()
        line_of: dict[tuple[Any, ...], list[Entry]] = {}
        for entry in entries:
            adapters = entry.seq.adapters
            line = line_of.get(adapters)
            if line is None:
                line = line_of[adapters] = inside if all(adapter in users for adapter in adapters) else outside
            line.append(entry)
        return inside + outside

    def _is_overdue(self, line: _Line, now: float) -> bool:
        late = self._max_overtake_s is not None and line.passed > 0 and now - line.since >= self._max_overtake_s
        return late or line.passed >= self._max_overtakes

    def joined(self, entry: Entry, load: Load) -> None:
        self._lines.setdefault(entry.seq.priority, _Line()).waiting[entry] = None

    def admitted(self, entry: Entry, load: Load) -> None:
        self._remove(entry, started=True, now=load.now)

    def left(self, entry: Entry, load: Load) -> None:
        self._remove(entry, started=False, now=load.now)

    def _remove(self, entry: Entry, *, started: bool, now: float) -> None:
        """From its line, which goes with the last of it: a client may think up any number of priorities."""
        line = self._lines.get(entry.seq.priority)
        if line is not None:
            line.remove(entry, started=started, now=now)
            if not line.waiting:
                del self._lines[entry.seq.priority]
