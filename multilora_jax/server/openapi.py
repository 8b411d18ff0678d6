"""The OpenAPI document: FastAPI's own, with this server's errors in place of FastAPI's, and a stream's media type."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from multilora_jax.server.answer_schemas import ErrorAnswer

_ERRORS = {
    "400": "The request is wrong: `param` names the field.",
    "401": "No key, or one that is not known here.",
    "403": "The key may not do this.",
    "404": "There is no such model, adapter or folder.",
    "413": "The body is too large.",
    "429": "Too much is asked for: see the header Retry-After.",
    "500": "The server's own fault.",
    "503": "The server is starting, stopping, or has no time for this request.",
}
_OPEN = ("/health", "/ready", "/version")
_STREAMED = ("/v1/completions", "/v1/chat/completions")
_EVENTS = (
    "With `stream` true: server-sent events, `data: ` and a JSON object each, and a last `data: [DONE]`. An error "
    "after the first event is an event of the shape of an error."
)


def install_openapi(app: FastAPI) -> None:
    """Have the app answer /openapi.json with the document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, routes=app.routes,
        description="One base model and its LoRA adapters: OpenAI's API, with `model` choosing the adapter.",
    )  # fmt: skip
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    error = ErrorAnswer.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(error.pop("$defs"))
    schemas["ErrorAnswer"] = error
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation)
    return document


def _complete(path: str, operation: dict[str, Any]) -> None:
    answers = operation["responses"]
    answers.pop("422", None)  # this server says 400
    for status, what in _ERRORS.items():
        if path in _OPEN and status in ("400", "401", "403", "404", "413", "429"):
            continue
        answers.setdefault(status, {"description": what, "content": {"application/json": {"schema": _ERROR}}})
    if path in _OPEN:
        answers["400"] = {"description": _ERRORS["400"], "content": {"application/json": {"schema": _ERROR}}}
    else:
        operation["security"] = [{"key": []}, {}]  # without keys set, none is needed
    if path in _STREAMED:
        answers["200"]["content"]["text/event-stream"] = {"schema": {"type": "string", "description": _EVENTS}}


_ERROR = {"$ref": "#/components/schemas/ErrorAnswer"}
