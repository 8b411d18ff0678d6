"""The order in which live sequences wait (host only, no jax)."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceABC
from itertools import islice

from multilora_jax.engine.policies.base import Entry, Load, Policy
from multilora_jax.errors import UserError
from multilora_jax.memory.allocator import PoolIntegrityError
from multilora_jax.request import Sequence, SequenceStatus

_LAST = 1 << 62  # behind every place


class WaitingQueue:
    """Waiting sequences by priority (lower first), preempted ones before fresh ones, then as the policy has it.

    Beside them stand those that are held until a leader has computed the prompt that they share with it: they count,
    but nobody can start them and they hold up nobody.

    Args:
        max_per_adapter: most running sequences of one adapter, None for no cap: those beyond it may not start.
        policy: orders the fresh ones of a priority; preempted ones are in the order of their arrival.
        load: what the policy is told.

    Attributes:
        num_requests: requests whose first continuation waits: one that wants many takes no more room than another.
        only: while it is not empty, nobody else may start.
    """

    def __init__(self, policy: Policy, load: Load, max_per_adapter: int | None = None) -> None:
        self._max_per_adapter = max_per_adapter
        self._policy = policy
        self._load = load
        self._keys: list[tuple[int, bool, int]] = []  # unique
        self._entries: list[Entry] = []  # in the order of their keys
        self.num_requests = 0
        self._held: dict[Entry, Sequence] = {}
        self._ordered: list[Entry] | None = None
        self.only: frozenset[Sequence] = frozenset()

    def __len__(self) -> int:
        return len(self._entries) + len(self._held)

    def push(self, entry: Entry, *, preempted: bool) -> None:
        """Add an entry; its sequence waits from now on."""
        place = entry.order if preempted else self._policy.place(entry)
        entry.key = (entry.seq.priority, not preempted, place)
        entry.seq.status = SequenceStatus.WAITING
        at = bisect.bisect_left(self._keys, entry.key)
        self._keys.insert(at, entry.key)
        self._entries.insert(at, entry)
        self.num_requests += not entry.seq.index
        self._ordered = None

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
        at = bisect.bisect_left(self._keys, entry.key)
        del self._keys[at], self._entries[at]
        self.num_requests -= not entry.seq.index
        self._ordered = None

    def changed(self) -> None:
        """The load has changed, so that the policy is asked for the order again."""
        self._ordered = None

    def restart(self, live: Collection[Entry]) -> None:
        """Begin anew with the live entries, those that ran among them; those held for a leader stay so."""
        self._keys, self._entries, self.num_requests = [], [], 0
        self._held = {entry: leader for entry, leader in self._held.items() if entry in live}
        for entry in live:
            if entry not in self._held:
                self.push(entry, preempted=entry.seq.first_scheduled_time is not None)

    def in_order(self) -> SequenceABC[Entry]:
        """The entries that may start, first first; valid until the queue changes."""
        if self.only:
            return [entry for entry in self._entries if entry.seq in self.only]
        if self._policy.is_static and self._max_per_adapter is None:
            return self._entries
        if self._ordered is None:
            ordered = self._entries
            if not self._policy.is_static:
                ordered = []
                for entries in self._groups():
                    ordered += self._policy.order(entries, self._load) if entries[0].key[1] else entries
            self._ordered = self._within_cap(ordered)
        return self._ordered

    def _within_cap(self, entries: list[Entry]) -> list[Entry]:
        """Those that could start one after the other without an adapter getting more than its sequences.

        At none of its adapters is a sequence passed by a later one: a mix that waits for one of them would never find
        all of them free else.
        """
        cap = self._max_per_adapter
        if cap is None:
            return entries
        counts, within = dict(self._load.users), []
        for entry in entries:
            adapters = entry.seq.adapters
            if all(counts.get(adapter, 0) < cap for adapter in adapters):
                within.append(entry)
            counts.update((adapter, counts.get(adapter, 0) + 1) for adapter in adapters)
        return within

    def given_up(self) -> list[tuple[Sequence, UserError]]:
        """The fresh ones that the policy gives up, and why; they stay until they are removed."""
        errors: dict[Sequence, UserError] = {}
        for entries in self._groups():
            firsts = [entry for entry in entries if not entry.seq.index]
            if firsts and firsts[0].key[1]:
                errors.update((entry.seq, error) for entry, error in self._policy.give_up(firsts, self._load))
        # The later continuations of a request end with its first, and never without it.
        held = [(entry.seq, errors[leader]) for entry, leader in self._held.items() if leader in errors]
        return [*errors.items(), *held]

    def sequences(self, limit: int | None = None) -> Iterator[Sequence]:
        """The first `limit` sequences that may start, in order; by default all but the held ones.

        The queue must not change meanwhile.
        """
        return (entry.seq for entry in (self._entries if limit is None else islice(self.in_order(), limit)))

    def check_integrity(self) -> None:
        """Prove that the entries are sorted and counted; PoolIntegrityError if they are not. O(queue)."""
        found = sum(not entry.seq.index for entry in self._entries)
        if found != self.num_requests or self._keys != sorted(entry.key for entry in self._entries):
            raise PoolIntegrityError(f"{found} requests wait but {self.num_requests} are counted, or out of order")

    def _groups(self) -> Iterator[list[Entry]]:
        """The entries of each priority, the preempted and the fresh ones apart."""
        start = 0
        while start < len(self._keys):
            priority, fresh, _ = self._keys[start]
            end = bisect.bisect_left(self._keys, (priority, fresh, _LAST), start)
            yield self._entries[start:end]
            start = end
