"""Connections as a server must bound them: how many there are, and how long one may take or not read.

uvicorn accepts whatever comes and waits for ever for a client that has opened a connection, or has stopped to read its
answer. Each of them holds a descriptor, a buffer and, while its answer is under way, a place in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from multilora_jax.errors import OverloadedError
from multilora_jax.server.auth import METRICS_PATH, OPEN_PATHS
from multilora_jax.server.errors import error_response

log = logging.getLogger(__name__)

SPARE_CONNECTIONS = 64
"""Connections beyond the bound that are told so, and probes among them answered; further ones are cut."""

OWN_DESCRIPTORS = 256
"""Descriptors that the process needs beside its connections: files, adapters being read, the compiler's."""

CHECKS = 4
"""How often within the time that a client may take it is looked at."""

MAX_DRAINED_BYTES = 1 << 20
"""Of a request that is refused: what is read of its body, since a reset would keep the answer from its client."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of one server.

    Attributes:
        max_connections: connections that are served at once.
        client_timeout_s: seconds that a client may take to go on sending a request, or to go on reading its answer.
    """

    max_connections: int
    client_timeout_s: float


def fit_descriptors(limits: ConnectionLimits) -> ConnectionLimits:
    """Raises this process's limit of descriptors as far as the connections need and it may; else lowers their bound."""
    needed = limits.max_connections + SPARE_CONNECTIONS + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return limits
    bound = max(1, allowed - SPARE_CONNECTIONS - OWN_DESCRIPTORS)
    log.warning(
        "this process may open %d files: %d connections are served at once and not %d (raise `ulimit -n`)",
        allowed, bound, limits.max_connections,
    )  # fmt: skip
    return ConnectionLimits(bound, limits.client_timeout_s)


def make_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol within bounds; what `uvicorn.Config(http=...)` takes."""

    class BoundedProtocol(_Bounded):
        bounds = limits

    return BoundedProtocol


class _Bounded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    bounds: ConnectionLimits
    connections: set[Any]
    transport: Any
    cycle: Any
    timeout_keep_alive_task: Any
    loop: asyncio.AbstractEventLoop

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        excess = len(self.connections) - self.bounds.max_connections
        if excess > SPARE_CONNECTIONS:
            transport.abort()
            return
        if excess > 0:
            self.app = _Refusal(self.app, lambda: len(self.connections) > self.bounds.max_connections)
        self._num_silent = 0
        self._received = self._unsent = self._seen = 0
        self._timer: asyncio.TimerHandle | None = None
        self._check()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        timer = getattr(self, "_timer", None)
        if timer is not None:
            timer.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        """Cuts a client off that has neither sent nor read anything for too long while that is its turn."""
        unsent = self.transport.get_write_buffer_size()
        cycle = self.cycle
        if cycle is None or cycle.response_complete:  # uvicorn itself waits for a next request, until it begins
            sends = self.timeout_keep_alive_task is None
        else:
            sends = cycle.more_body
        still = (unsent > 0 and unsent == self._unsent) or (sends and self._received == self._seen)
        self._num_silent = self._num_silent + 1 if still else 0
        self._unsent, self._seen = unsent, self._received
        if self._num_silent > CHECKS:
            self.transport.abort()  # to close would wait for what is not read
            return
        self._timer = self.loop.call_later(self.bounds.client_timeout_s / CHECKS, self._check)


class _Refusal:
    """Answers for connections beyond the bound: probes as ever, all else with 503."""

    def __init__(self, app: ASGIApp, is_full: Any):
        self._app = app
        self._is_full = is_full

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS | {METRICS_PATH} or not self._is_full():
            await self._app(scope, receive, send)
            return
        size, more = 0, True
        while more and size <= MAX_DRAINED_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        response = error_response(
            OverloadedError("too many connections are open: try again, or use fewer", reason="too_many_connections")
        )
        response.headers["Connection"] = "close"
        await response(scope, receive, send)
