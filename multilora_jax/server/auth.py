"""Who may call what: inference keys for `/v1`, admin keys for the routes that change what is served.

Everything is closed to strangers once keys are set, save the probes in OPEN_PATHS: a new route is protected without
anybody thinking of it. Management routes share one router with one dependency for the same reason.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from multilora_jax.errors import PermissionDeniedError
from multilora_jax.server.errors import AuthenticationError, error_response
from multilora_jax.server.page_files import PAGE_PATHS

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"}) | PAGE_PATHS
"""Probes and scrapers carry no key; the page for browsers, which is the same for all, asks for one."""


class Keys:
    """The keys of a server.

    Args:
        api_keys: bearer tokens for inference; none leaves inference open.
        admin_keys: bearer tokens for everything; none leaves management to callers of a loopback-only server.
        host: the address that the server listens on.
    """

    def __init__(self, api_keys: Iterable[str], admin_keys: Iterable[str], host: str):
        self._api = [key.encode() for key in api_keys]
        self._admin = [key.encode() for key in admin_keys]
        self._loopback = is_loopback(host)

    def check_inference(self, authorization: bytes | None) -> None:
        """Raises AuthenticationError unless inference is open or the header carries a key of either kind."""
        if self._api and not _known(authorization, self._api + self._admin):
            raise _unauthenticated(authorization)

    def check_management(self, authorization: bytes | None) -> None:
        """As check_inference, and raises PermissionDeniedError (403) for a caller who is no administrator."""
        if self._admin:
            if _known(authorization, self._admin):
                return
            if not _known(authorization, self._api):
                raise _unauthenticated(authorization)
            raise PermissionDeniedError("this route needs an admin key", reason="admin_key_required")
        self.check_inference(authorization)
        if not self._loopback:
            raise PermissionDeniedError(
                "adapters cannot be managed over the network without a key: set admin_keys, or listen on 127.0.0.1",
                reason="management_closed",
            )


class AuthMiddleware:
    """Refuses a request without a key before its body is read."""

    def __init__(self, app: ASGIApp, keys: Keys):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                self._keys.check_inference(dict(scope["headers"]).get(b"authorization"))
            except AuthenticationError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def require_admin(request: Request) -> None:
    """The dependency of every management route."""
    keys: Keys = request.app.state.keys
    keys.check_management(dict(request.scope["headers"]).get(b"authorization"))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _known(authorization: bytes | None, keys: list[bytes]) -> bool:
    scheme, _, token = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        return False
    # All keys are compared, each in full, so that the time taken tells nothing of any of them.
    matches = [hmac.compare_digest(token.strip(), key) for key in keys]
    return any(matches)


def _unauthenticated(authorization: bytes | None) -> AuthenticationError:
    if not authorization:
        return AuthenticationError("send a key in the header Authorization: Bearer KEY", reason="missing_key")
    return AuthenticationError("the key in the Authorization header is not known here", reason="wrong_key")
