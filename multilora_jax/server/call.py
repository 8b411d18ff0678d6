"""What is known of one HTTP request while it is served: who calls, what was asked of the engine, how it ended.

The call is in a context variable, so that whatever serves the request finds it without being handed it, and a route
that does not think of tenants still acts for the one that calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from multilora_jax.request import RequestMetrics, RequestOutput
from multilora_jax.server.tenants import ANONYMOUS, Caller

NOBODY = Caller(ANONYMOUS, salted=False)


@dataclass
class Submission:
    """One prompt handed to the engine.

    Attributes:
        adapters: names, none for the base alone.
        num_prompt: tokens of the prompt.
        reserved: tokens taken from the key's budget.
        stream: its outputs; see request_stream.RequestStream.
    """

    adapters: tuple[str, ...]
    num_prompt: int
    reserved: int
    stream: Any

    @property
    def output(self) -> RequestOutput | None:
        """The newest state."""
        return self.stream.newest

    @property
    def num_tokens(self) -> tuple[int, int, int]:
        """Tokens of the prompt, those of it that were cached, and those generated."""
        output = self.output
        if output is None:
            return self.num_prompt, 0, 0
        generated = sum(len(completion.token_ids) for completion in output.outputs)
        return self.num_prompt, output.num_cached_tokens, generated

    @property
    def times(self) -> RequestMetrics | None:
        return None if self.output is None else self.output.metrics


@dataclass
class Call:
    """One HTTP request under way.

    Attributes:
        request_id: of this request, the client's own where it sent a fit one.
        method, path: as asked for.
        traceparent: the header of that name: the trace that the request belongs to.
        started: time.monotonic() seconds.
        caller: who sent it; nobody until its key was looked at.
        num_prompts: how many it has asked the engine for, admitted or not.
        submissions: what the engine took.
        status: of the answer, None while there is none.
        error: the reason of an error that it was answered with.
        gone: whether the client left before the answer was complete.
        view: the engine as the caller sees it, made when it is first asked for.
    """

    request_id: str
    method: str
    path: str
    traceparent: str = ""
    started: float = field(default_factory=time.monotonic)
    caller: Caller = NOBODY
    num_prompts: int = 0
    submissions: list[Submission] = field(default_factory=list)
    status: int | None = None
    error: str | None = None
    gone: bool = False
    view: Any = None

    @property
    def finish_reasons(self) -> list[str]:
        """Distinct reasons why the answers ended, in words of the API; "abort" for what did not end by itself."""
        outputs: Iterable[RequestOutput] = (s.output for s in self.submissions if s.output is not None)
        return sorted({c.finish_reason or "abort" for output in outputs for c in output.outputs})


_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


def current_call() -> Call | None:
    """The request that is being served here; None outside of one."""
    return _CALL.get()


def set_call(call: Call) -> None:
    """What `current_call` returns from now on in this task and those it starts."""
    _CALL.set(call)
