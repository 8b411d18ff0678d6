"""Every failure as an OpenAI error object: `{"error": {message, type, param, code, reason}}`, HTTP status = code."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from multilora_jax.errors import UserError
from multilora_jax.server.call import current_call
from multilora_jax.server.unserved import hint_for


class AuthenticationError(UserError):
    """No key, or one that this server does not know."""

    status = 401
    type = "AuthenticationError"


def error_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of an error. What is not a UserError is this server's fault and tells nothing of itself."""
    note_error(error.reason if isinstance(error, UserError) else "internal_error")
    if isinstance(error, UserError):
        return error.status, _body(error.message, error.type, error.param, error.status, error.reason)
    message = "internal error: see the server's log"
    return 500, _body(message, "InternalServerError", None, 500, "internal_error")


def note_error(reason: str) -> None:
    """Notes why the request that is being served fails, for its line in the log."""
    call = current_call()
    if call is not None:
        call.error = reason


def error_response(error: BaseException) -> JSONResponse:
    """The error as an HTTP answer."""
    status, body = error_body(error)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if isinstance(error, UserError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return JSONResponse(body, status_code=status, headers=headers)


def install_handlers(app: FastAPI) -> None:
    """Give every kind of failure of the app the same shape."""

    async def on_user_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_from_validation(request, error))

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        kind = {404: "NotFoundError", 401: "AuthenticationError", 403: "PermissionDeniedError"}
        status = error.status_code
        message = f"{request.method} {request.url.path}: {error.detail}"
        reason = str(error.detail).lower().replace(" ", "_")
        hint = hint_for(request.url.path) if status == 404 else None
        if hint is not None:
            message, reason = f"{request.url.path} is not served here: {hint}", "not_served"
        note_error(reason)
        body = _body(message, kind.get(status, "BadRequestError"), None, status, reason)
        return JSONResponse(body, status_code=status, headers=error.headers)

    async def on_unexpected(request: Request, error: Exception) -> JSONResponse:
        answer = error_response(error)
        request_id = getattr(request.state, "request_id", None)
        if request_id is not None:  # this handler answers outside the middleware that does so for the others
            answer.headers["X-Request-Id"] = request_id
        return answer

    app.add_exception_handler(UserError, on_user_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_unexpected)


def _body(message: str, kind: str, param: str | None, status: int, reason: str) -> dict[str, Any]:
    # A message may quote the client's own text, lone surrogates included, which no JSON answer can carry.
    fields = {"message": message, "type": kind, "param": param, "code": status, "reason": reason}
    clean = {k: v.encode("utf-8", "backslashreplace").decode() if isinstance(v, str) else v for k, v in fields.items()}
    return {"error": clean}


def _from_validation(request: Request, error: RequestValidationError) -> UserError:
    """The first of pydantic's complaints, in this API's words."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return cause
    location = [str(part) for part in first["loc"][first["loc"][0] in ("body", "query", "path") :]]
    if not location:
        content_type = request.headers.get("content-type", "")
        if "json" not in content_type:
            return UserError(
                f"send the body as JSON with the header Content-Type: application/json, not {content_type!r}",
                reason="bad_content_type",
            )
        return UserError("the body must be a JSON object", reason="bad_json")
    param = location[0]
    if first["type"] == "missing":
        return UserError(f"the field {param} is missing", reason="missing_field", param=param)
    return UserError(f"{'.'.join(location)}: {first['msg']}", reason="bad_value", param=param)
