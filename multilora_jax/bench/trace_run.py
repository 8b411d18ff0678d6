"""A trace sent to an engine, real or simulated, and what came of each request (host only, no jax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from multilora_jax.bench.trace_load import TraceRequest
from multilora_jax.engine.simulation import SimulatedAdapter, SimulatedEngine
from multilora_jax.errors import UserError


class Event(NamedTuple):
    """What a step did for a request.

    Attributes:
        number: of the request in its trace.
        num_tokens: new tokens, 0 for a mere end.
        ended: whether it ended.
        error: why it ended without its whole answer; None where it did not.
    """

    number: int
    num_tokens: int
    ended: bool = False
    error: str | None = None


class Counts(NamedTuple):
    """What an engine counts, since its start.

    Attributes:
        page_ins: adapters copied into the pool; evictions: that had to make room.
        preemptions: sequences put back in the queue.
        steps: that were run.
    """

    page_ins: int
    evictions: int
    preemptions: int
    steps: int

    def since(self, before: Counts) -> Counts:
        """What was counted after `before`."""
        return Counts(*(mine - its for mine, its in zip(self, before, strict=True)))


class Server(Protocol):
    """What a trace is sent to. Times are in seconds on its own clock, which `start` sets to 0."""

    def start(self) -> None: ...
    def now(self) -> float: ...
    def wait_until(self, seconds: float) -> None: ...
    def is_busy(self) -> bool: ...
    def add(self, number: int, request: TraceRequest) -> None: ...
    def step(self) -> list[Event]: ...
    def counts(self) -> Counts: ...


@dataclass
class Outcome:
    """What became of a request.

    Attributes:
        request: which.
        token_s: when its tokens came: an entry for each step that gave some.
        num_tokens: how many came.
        ended_s: when it ended.
        error: why it did not get its whole answer; None where it did.
    """

    request: TraceRequest
    token_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    ended_s: float = 0.0
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """From the arrival to the first token; None without one."""
        return self.token_s[0] - self.request.arrival_s if self.token_s else None


@dataclass
class TraceRun:
    """One trace through one server.

    Attributes:
        outcomes: of the requests, in the order of the trace.
        seconds: from the start to the end of the last request.
        counts: of the engine, in that time.
    """

    outcomes: list[Outcome]
    seconds: float
    counts: Counts


def replay(server: Server, trace: Sequence[TraceRequest], *, watch: Callable[[float], None] | None = None) -> TraceRun:
    """Sends every request when it is due, whatever became of those before it, and waits for the last end.

    A request that is due while a step runs is handed over after that step; its times count from when it was due.

    Args:
        server: idle.
        trace: in order of arrival.
        watch: called after each step with the time.
    """
    before = server.counts()
    outcomes = [Outcome(request) for request in trace]
    sent = 0
    server.start()
    while sent < len(trace) or server.is_busy():
        now = server.now()
        while sent < len(trace) and trace[sent].arrival_s <= now:
            try:
                server.add(sent, trace[sent])
            except UserError as error:
                outcomes[sent].error, outcomes[sent].ended_s = error.reason, now
            sent += 1
        if not server.is_busy():
            if sent < len(trace):
                server.wait_until(trace[sent].arrival_s)
            continue
        events = server.step()
        now = server.now()
        for event in events:
            outcome = outcomes[event.number]
            if event.num_tokens:
                outcome.token_s.append(now)
                outcome.num_tokens += event.num_tokens
            if event.ended:
                outcome.ended_s, outcome.error = now, event.error
        if watch is not None:
            watch(now)
    return TraceRun(outcomes, max(outcome.ended_s for outcome in outcomes), server.counts().since(before))


class SimulatedServer:
    """A SimulatedEngine as a Server.

    Args:
        engine: fresh.
        adapters: of the trace's numbers.
        max_tokens: that requests allow, whatever their answers take; None for just these.
    """

    def __init__(self, engine: SimulatedEngine, adapters: Sequence[SimulatedAdapter], max_tokens: int | None = None):
        self.engine = engine
        self._adapters = adapters
        self._max_tokens = max_tokens

    def start(self) -> None:
        """Its time begins with it."""

    def now(self) -> float:
        return self.engine.now

    def wait_until(self, seconds: float) -> None:
        self.engine.now = max(self.engine.now, seconds)

    def is_busy(self) -> bool:
        return self.engine.has_unfinished_requests

    def add(self, number: int, request: TraceRequest) -> None:
        adapter = self._adapters[request.adapter]
        self.engine.add_request(
            str(number), request.prompt_tokens, request.new_tokens, adapter, max_tokens=self._max_tokens,
            arrival_s=request.arrival_s,
        )  # fmt: skip

    def step(self) -> list[Event]:
        return [
            Event(int(done.request_id), done.num_tokens, done.finish_reason is not None, done.error)
            for done in self.engine.step()
        ]

    def counts(self) -> Counts:
        engine = self.engine
        cache = engine.cache
        return Counts(cache.loads, cache.evictions, engine.scheduler.num_preemptions, engine.num_steps)
