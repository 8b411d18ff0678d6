"""What a scheduling policy is asked, and what it is told (host only, no jax, no clock).

A policy decides in which order waiting sequences are offered to admission, and which of them are given up. It decides
nothing else: priorities come first, preempted sequences before fresh ones, budgets and bounded overtaking hold under
every policy. Sequences start in the policy's order as far as their adapters and pages are there.

The scheduler asks `order` and `give_up` with the fresh waiting sequences of one priority at a time, oldest first, and
tells what happened through `joined`, `admitted`, `left` and `planned`. Times are seconds of the scheduler's clock and
stand in `Load.now`, so that a simulation may run on a clock of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any, ClassVar

from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.errors import UserError
from multilora_jax.request import Sequence


@dataclass(eq=False, slots=True)
class Entry:
    """The scheduler's own notes on a live sequence.

    Attributes:
        order: of arrival.
        running: whether it runs; else it waits.
        overtakes: how many later ones passed it while it waited.
        passed_since: when it was first passed over while others could have it their way; None if it never was.
        key: its place among the waiting.
        party: whom it is served for: its tenant, or else its adapters by name; empty for the base.
    """

    seq: Sequence
    order: int
    running: bool = False
    overtakes: int = 0
    passed_since: float | None = None
    key: tuple[int, bool, int] = (0, False, 0)
    party: str = field(init=False)

    def __post_init__(self) -> None:
        self.party = self.seq.tenant or "+".join([adapter.name for adapter in self.seq.adapters])


@dataclass
class Load:
    """How busy the scheduler is, kept up to date by it; a policy reads it.

    Attributes:
        now: seconds on the scheduler's clock.
        max_num_seqs: most running sequences.
        running: sequences that run, by id, in the order of their admission.
        free_seats: sequences that may start beside them; kept up to date while some wait.
        num_waiting: sequences that wait.
        users: of each adapter in the batch, how many running sequences use it.
    """

    max_num_seqs: int = 1
    now: float = 0.0
    running: Mapping[str, Entry] = field(default_factory=dict)
    free_seats: int = 0
    num_waiting: int = 0
    users: Mapping[Any, int] = field(default_factory=dict)


class Policy:
    """First come, first served, and the base of every other policy.

    Attributes:
        is_static: the place of a sequence is known when it arrives (`place`) and does not change; else `order` is
            asked for it before each step.
        gives_up: whether `give_up` is to be asked.
    """

    is_static: ClassVar[bool] = True
    gives_up: ClassVar[bool] = False

    def place(self, entry: Entry) -> int:
        """The rank of a fresh sequence among those of its priority, lower first, under a static policy."""
        return entry.order

    def order(self, entries: SequenceABC[Entry], load: Load) -> SequenceABC[Entry]:
        """The entries as they are to be offered to admission; asked for where the policy is not static.

        Asked several times a step, also for the forecast of adapters: it must not change the policy's state. What is
        left out cannot start now; something must be running then.

        Args:
            entries: fresh waiting sequences of one priority, in the order of `place`.
            load: see Load.
        """
        return entries

    def give_up(self, entries: SequenceABC[Entry], load: Load) -> SequenceABC[tuple[Entry, UserError]]:
        """Those of the fresh waiting sequences that are not worth serving any more, and what their callers are told.

        Asked once before each step.
        """
        return ()

    def kept_places(self, entry: Entry, load: Load, most: int) -> int:
        """How many of the queue's `most` places (`max_queued_requests`) the sequence that comes may not have."""
        return 0

    def crowd(self, load: Load) -> Collection[str]:
        """Parties that hold more than is theirs beside others that do not: of a step's prompt tokens they get what
        an even flow of them needs, so that the others' steps stay short (policies.crowd). Asked once before each step.
        """
        return ()

    def joined(self, entry: Entry, load: Load) -> None:
        """A sequence is live from now on, and waits."""

    def admitted(self, entry: Entry, load: Load) -> None:
        """A waiting sequence starts to run, perhaps again; `num_pending_tokens` says how much has to be computed."""

    def left(self, entry: Entry, load: Load) -> None:
        """A sequence ended, waiting or running."""

    def planned(self, step: ScheduledStep, load: Load) -> None:
        """A step was planned and will run."""


class Lcfs(Policy):
    """Last come, first served: under overload few wait long and the rest for ever; for comparison with the others."""

    def place(self, entry: Entry) -> int:
        return -entry.order
