"""What every request passes before it reaches a route: its record, its key, its limits, the size of its body."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multilora_jax.config import EngineConfig
from multilora_jax.errors import RateLimitError, UnavailableError, UserError
from multilora_jax.server.auth import UNCHANGING, AuthMiddleware, Keys
from multilora_jax.server.call import Call, current_call, set_call
from multilora_jax.server.errors import error_response

FIT_ID = re.compile(r"[\w.:/@+=-]{1,128}", re.ASCII)
"""A client's X-Request-Id that is taken over."""

Observer = Callable[[Call], None]


class BodyTooLarge(UserError):
    """A body beyond max_body_mib."""

    status = 413
    type = "BadRequestError"


def install_guards(app: FastAPI, config: EngineConfig, keys: Keys, calls: Calls) -> None:
    """Puts the guards before the app's routes; the last one added is the first that a request meets."""
    app.add_middleware(BodyLimit, max_bytes=int(config.max_body_mib * 2**20))
    app.add_middleware(KeyLimits, calls=calls)
    app.add_middleware(AuthMiddleware, keys=keys)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.cors_origins, allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )  # fmt: skip
    app.add_middleware(CallMiddleware, calls=calls)


class Calls:
    """The requests under way.

    Attributes:
        active: how many ask for work (others than GET).
        draining: whether the server ends: no new work is let in.
    """

    def __init__(self) -> None:
        self.active = 0
        self.draining = False
        self._observers: list[Observer] = []

    def add_observer(self, observer: Observer) -> None:
        """Call `observer(call)` on the event loop for every request that has ended."""
        self._observers.append(observer)

    def ended(self, call: Call) -> None:
        """Settles the accounts of a request and tells the observers."""
        now = time.monotonic()
        for submission in call.submissions:
            prompt, _, generated = submission.num_tokens
            call.caller.limits.give_back(submission.reserved - prompt - generated, now)
        for observer in self._observers:
            observer(call)


class CallMiddleware:
    """Notes each request from its first byte to its end."""

    def __init__(self, app: ASGIApp, calls: Calls):
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        own = headers.get(b"x-request-id", b"").decode("latin-1")
        traceparent = headers.get(b"traceparent", b"").decode("latin-1")
        request_id = own if FIT_ID.fullmatch(own) else uuid.uuid4().hex
        call = Call(request_id, scope["method"], scope["path"], traceparent)
        set_call(call)
        state = scope.setdefault("state", {})
        complete = False

        async def noted_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not complete:
                call.gone = True
            return message

        async def noted_send(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                call.status = message["status"]
                call.request_id = state.get("request_id", call.request_id)  # where a route took another
                names = {name.lower() for name, _ in message.get("headers", ())}
                if b"x-request-id" not in names:
                    headers = [*message.get("headers", ()), (b"x-request-id", call.request_id.encode())]
                    message = {**message, "headers": headers}
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        works = scope["method"] not in UNCHANGING
        self._calls.active += works
        try:
            await self._app(scope, noted_receive, noted_send)
        except asyncio.CancelledError:
            if self._calls.draining and not call.status:
                # Cut off at the end of the drain: without an answer uvicorn would call it an internal error.
                error = UnavailableError("the server was shut down: try again, it may be back", reason="shutting_down")
                await error_response(error)(scope, receive, noted_send)
                return
            call.gone = True
            raise
        except BaseException:
            call.error = call.error or "internal_error"
            raise
        finally:
            self._calls.active -= works
            self._calls.ended(call)


COUNTED_WITHIN = frozenset({"/page/compare"})
"""Routes whose request is made of others, each of which comes through here by itself and counts as one."""


class KeyLimits:
    """Holds each key to its requests a minute and at once, and lets no new work in while the server ends."""

    def __init__(self, app: ASGIApp, calls: Calls):
        self._app = app
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = current_call()
        if scope["type"] != "http" or call is None or scope["method"] in UNCHANGING:
            return await self._app(scope, receive, send)
        if self._calls.draining:
            error = UnavailableError("the server is shutting down: try again, it may be back soon", reason="draining")
            error.retry_after_s = 1
            return await error_response(error)(scope, receive, send)
        if scope["path"] in COUNTED_WITHIN:
            return await self._app(scope, receive, send)
        limits = call.caller.limits
        try:
            limits.enter(time.monotonic())
        except RateLimitError as error:
            return await error_response(error)(scope, receive, send)
        try:
            await self._app(scope, receive, send)
        finally:
            limits.leave()


class BodyLimit:
    """Refuses a body beyond `max_bytes`: by its declared length before any of it is read, else as soon as it is.

    What is too long is never held: reading stops at the limit, and the connection is closed.
    """

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self._max_bytes:
            return await self._refuse(scope, receive, send)
        num_bytes, refused, started = 0, False, False

        async def counted_receive() -> Message:
            nonlocal num_bytes, refused
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    refused = True
                    raise self._error()
            return message

        async def guarded_send(message: Message) -> None:
            nonlocal started
            if not refused:  # else it is the app's own answer to half a body
                started = True
                await send(message)

        try:
            await self._app(scope, counted_receive, guarded_send)
        except BodyTooLarge:
            if started:
                raise
        if refused and not started:
            await self._refuse(scope, receive, send)

    def _error(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body is larger than {self._max_bytes / 2**20:g} MiB (max_body_mib): send less in one request",
            reason="body_too_large",
        )

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(self._error())
        response.headers["Connection"] = "close"
        await response(scope, receive, send)
