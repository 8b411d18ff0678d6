"""One prompt to several models at once, for the page's playground, in one answer of server-sent events.

A browser opens six connections to a server at most, so that nine streams of their own would not run side by side. Each
model's request is handed to the application itself, just as if it had come from the caller: it passes the same checks
of keys, limits and names, and is counted and logged as any other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, Literal

from pydantic import field_validator
from starlette.types import ASGIApp, Message, Scope

from multilora_jax.errors import UserError
from multilora_jax.server.protocol import Body
from multilora_jax.server.shared_prompts import SCOPE_KEY, SharedPrompts

MAX_MODELS = 9
"""The base and eight adapters."""

QUEUED_EVENTS = 64
"""Events that may wait for a slow reader before the answers do."""

OWN_FIELDS = ("model", "stream", "stream_options")
"""Fields of a request that are not the caller's to set here."""

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

PASSED_ON = (b"authorization", b"user-agent", b"origin", b"host", b"x-forwarded-for", b"forwarded")
"""Headers that each request repeats."""


class CompareBody(Body):
    """POST /page/compare.

    Attributes:
        models: names, each once.
        route: which of PATHS answers.
        request: a body for it, without OWN_FIELDS.
    """

    models: list[str]
    route: Literal["chat", "completions"]
    request: dict[str, Any]

    @field_validator("models")
    @classmethod
    def _check_models(cls, models: list[str]) -> list[str]:
        if not 1 <= len(models) <= MAX_MODELS:
            raise UserError(f"name 1 to {MAX_MODELS} models, not {len(models)}", reason="bad_value", param="models")
        if len(set(models)) < len(models):
            raise UserError("models names one more than once", reason="bad_value", param="models")
        return models

    @field_validator("request")
    @classmethod
    def _check_request(cls, request: dict[str, Any]) -> dict[str, Any]:
        for name in OWN_FIELDS:
            if name in request:
                raise UserError(f"request.{name} is set by this route: leave it out", reason="bad_value", param=name)
        return request


class Comparison:
    """The answers of one comparison.

    Args:
        app: answers the single requests.
        scope: of the request that they are made of.
        body: what is asked.
    """

    def __init__(self, app: ASGIApp, scope: Scope, body: CompareBody):
        self._app = app
        self._scope = scope
        self._body = body
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue(QUEUED_EVENTS)
        self._prompts = SharedPrompts()

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Events as they come; `index` is the model's place in `models`: {index, chunk} with a chunk of its stream,
        {index, error} with an error object and perhaps `retry_after_s`, and {index, done: true} once it has ended."""
        common = await asyncio.to_thread(_as_json, {
            **self._body.request, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        })  # fmt: skip
        tasks = [asyncio.create_task(self._answer(index, common)) for index in range(len(self._body.models))]
        left = len(tasks)
        try:
            while left:
                event = await self._events.get()
                left -= "done" in event
                yield event
        finally:  # as if the caller of each had hung up
            for task in tasks:
                task.cancel()
            self._prompts.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, index: int, common: str) -> None:
        call = _Call(self._events, index)
        content = f'{{"model": {json.dumps(self._body.models[index])}, {common[1:]}'.encode()
        try:
            await self._app(self._scope_of(content), call.receiver(content), call.send)
            await call.finish()
        except Exception:  # logged by the application; a stream cut short tells the viewer nothing
            await self._events.put({"index": index, "error": _INTERNAL})
        await self._events.put({"index": index, "done": True})

    def _scope_of(self, content: bytes) -> Scope:
        path = PATHS[self._body.route]
        scope = self._scope
        kept = [(name, value) for name, value in scope["headers"] if name in PASSED_ON]
        own = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        same = ("type", "asgi", "http_version", "scheme", "client", "server")
        return {
            **{key: scope[key] for key in same if key in scope}, "method": "POST", "path": path,
            "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": [*kept, *own],
            SCOPE_KEY: self._prompts,
        }  # fmt: skip


def _as_json(value: Any) -> str:
    """As json.dumps, which would hold the interpreter for all of a request of megabytes."""
    return "".join(json.JSONEncoder().iterencode(value))


_INTERNAL = {
    "message": "internal error: see the server's log", "type": "InternalServerError", "param": None, "code": 500,
    "reason": "internal_error",
}  # fmt: skip


class _Call:
    """One request's side of the ASGI protocol: its answer goes into the common queue, event by event."""

    def __init__(self, events: asyncio.Queue[dict[str, Any]], index: int):
        self._events = events
        self._index = index
        self._status = 0
        self._retry_after: str | None = None
        self._rest = b""

    def receiver(self, content: bytes) -> Any:
        """Gives the body, and then waits: whoever hangs up cancels the call."""
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()
            sent = True
            return {"type": "http.request", "body": content, "more_body": False}

        return receive

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = dict(message.get("headers", ()))
            self._retry_after = headers.get(b"retry-after", b"").decode() or None
            return
        self._rest += message.get("body", b"")
        if self._status == 200:
            *whole, self._rest = self._rest.split(b"\n\n")
            for event in whole:
                await self._forward(event.removeprefix(b"data: "))

    async def finish(self) -> None:
        """Forward the error of an answer that is none."""
        if self._status == 200:
            return
        try:
            error = json.loads(self._rest)["error"]
        except (ValueError, KeyError, TypeError):
            error = {**_INTERNAL, "code": self._status, "message": f"the server answered {self._status}"}
        retry = {} if self._retry_after is None else {"retry_after_s": self._retry_after}
        await self._events.put({"index": self._index, "error": error, **retry})

    async def _forward(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        found = {"error": chunk["error"]} if "error" in chunk else {"chunk": chunk}
        await self._events.put({"index": self._index, **found})
