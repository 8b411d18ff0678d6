"""X-Request-Id: the id that a caller or a proxy gave a request, or a new one, and in every answer."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multilora_jax.errors import UserError
from multilora_jax.server.errors import error_response

HEADER = "x-request-id"
_PRINTABLE = re.compile(rb"[\x21-\x7e]{1,256}")


class RequestIdMiddleware:
    """Puts the id in `request.state.request_id` and in the answer's header; one that cannot be an id is refused."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(HEADER.encode())
        usable = given is not None and _PRINTABLE.fullmatch(given) is not None
        state = scope.setdefault("state", {})
        state["request_id"] = given.decode() if given is not None and usable else uuid.uuid4().hex
        state["request_id_given"] = usable

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            await send(message)

        if given is not None and not usable:
            error = UserError(
                "the header X-Request-Id must be 1 to 256 printable ASCII characters without spaces",
                reason="bad_value", param="X-Request-Id",
            )  # fmt: skip
            return await error_response(error)(scope, receive, send_with_id)
        await self._app(scope, receive, send_with_id)


def request_id_of(request: Request) -> str | None:
    """The request's id; None outside the middleware."""
    return getattr(request.state, "request_id", None)


def answer_id(prefix: str, sent: str | None, request: Request) -> str:
    """The id of an answer: of the body's request_id where it has one, else of the request's own id.

    An id of the body's goes into the answer's header too, if it may stand there and no header came with the request.
    """
    own = request_id_of(request) or uuid.uuid4().hex
    given = getattr(request.state, "request_id_given", False)
    if sent is not None and not given and _PRINTABLE.fullmatch(sent.encode(errors="replace")):
        request.state.request_id = sent
    return f"{prefix}-{sent or own}"
