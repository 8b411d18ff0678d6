"""How the routes read their bodies: what is short where the request is, what is long on a thread.

The event loop serves everybody, and a body may have megabytes: to parse and check one there would hold up every other
client, and the engine with them, for a second and more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from email.message import Message
from functools import partial
from json import JSONDecodeError
from typing import Any, get_type_hints

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from multilora_jax.errors import UserError
from multilora_jax.server.json_reader import read_text
from multilora_jax.server.streaming import CLIENT_CLOSED_REQUEST

SHORT_BODY = 2**14
"""Bytes. Reading and checking so many takes less than to hand them to a thread would under load, and 5 ms at worst."""


def body_router(**kwargs: Any) -> APIRouter:
    """A router whose routes read their bodies as this module says."""
    return APIRouter(route_class=BodyRoute, **kwargs)


class BodyRoute(APIRoute):
    """A route with a JSON body in the parameter `body`, or with none."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        model: type[BaseModel] | None = get_type_hints(self.endpoint).get("body")
        if model is None:
            return handler
        # Where a dependency says who may call, it comes before what is said of the body.
        read_long: Callable[[bytes], Any] = parse if self.dependencies else partial(parse_and_check, model=model)

        async def read_and_handle(request: Request) -> Response:
            try:
                content = await request.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            read = _ReadRequest(request.scope, request.receive)
            read.content = content
            if content and _is_json(request.headers.get("content-type")):
                if len(content) <= SHORT_BODY:
                    read.value = parse(content)
                else:
                    read.value = await asyncio.to_thread(read_long, content)
            return await handler(read)

        return read_and_handle


class _ReadRequest(Request):
    """A request whose body was read and parsed."""

    content: bytes
    value: Any

    async def body(self) -> bytes:
        return self.content

    async def json(self) -> Any:
        return self.value


def parse(content: bytes) -> Any:
    """The value of a JSON body, in UTF-8, UTF-16 or UTF-32. Raises UserError (`bad_json`) saying where it is none."""
    try:
        return read_text(content.decode(json.detect_encoding(content), "surrogatepass"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"the body cannot be read as JSON: byte {error.start} is no text in {error.encoding}", reason="bad_json"
        ) from None
    except JSONDecodeError as error:
        raise UserError(
            f"the body cannot be read as JSON at line {error.lineno}, column {error.colno}: {error.msg}",
            reason="bad_json",
        ) from None


def parse_and_check(content: bytes, model: type[BaseModel]) -> BaseModel:
    """A body as the route takes it, which FastAPI then leaves as it is.

    Raises:
        UserError: as `parse`, and what the model's own checks raise.
        RequestValidationError: as FastAPI's.
    """
    try:
        return model.model_validate(parse(content))
    except ValidationError as error:
        raise RequestValidationError(
            [{**found, "loc": ("body", *found["loc"])} for found in error.errors(include_input=False)]
        ) from None


def _is_json(content_type: str | None) -> bool:
    """Whether a body of this type is JSON, as FastAPI sees it."""
    message = Message()
    message["content-type"] = content_type or ""
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
