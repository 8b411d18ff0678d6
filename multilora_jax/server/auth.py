"""Who may call what: inference keys for `/v1`, admin keys for the routes that change what is served.

Everything is closed to strangers once keys are set, save the probes in OPEN_PATHS: a new route is protected without
anybody thinking of it. Management routes share one router with one dependency for the same reason.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from multilora_jax.config import EngineConfig
from multilora_jax.errors import PermissionDeniedError, UserError
from multilora_jax.key_file import hash_key, read_keys
from multilora_jax.server.call import current_call
from multilora_jax.server.errors import AuthenticationError, error_response
from multilora_jax.server.page_files import PAGE_PATHS
from multilora_jax.server.tenants import ADMIN, ANONYMOUS, DEFAULT, Caller

OPEN_PATHS = frozenset({"/health", "/ready", "/version"}) | PAGE_PATHS
"""Probes carry no key; the page for browsers, which is the same for all, asks for one."""

METRICS_PATH = "/metrics"

UNCHANGING = ("GET", "HEAD", "OPTIONS")
"""Methods that ask for no work."""


class Keys:
    """The keys of a server; of each only its SHA-256 is kept.

    Args:
        api_keys: bearer tokens of one tenant that may use everything.
        admin_keys: bearer tokens for everything; none leaves management to callers of a loopback-only server.
        host: the address that the server listens on.
        callers: SHA-256 of further keys (see key_file) to whom they belong. With any, inference needs a key and
            management an admin key.
        metrics_public: whether /metrics is open to all.
        origins: web pages of these origins may call without a key where no key is needed; "*" for any.
    """

    def __init__(
        self,
        api_keys: Iterable[str],
        admin_keys: Iterable[str],
        host: str,
        callers: Mapping[str, Caller] | None = None,
        *,
        metrics_public: bool = False,
        origins: Iterable[str] = (),
    ):
        api_keys, admin_keys, callers = list(api_keys), list(admin_keys), dict(callers or {})
        self._has_admins = bool(admin_keys) or any(caller.admin for caller in callers.values())
        one_tenant = not callers and not admin_keys
        self._anonymous = Caller(ANONYMOUS, salted=not one_tenant, reads_metrics=one_tenant)
        default = Caller(DEFAULT, salted=not one_tenant, reads_metrics=one_tenant)
        admin = Caller(ADMIN, admin=True, reads_metrics=True)
        known = {hash_key(key): default for key in api_keys} | callers | {hash_key(key): admin for key in admin_keys}
        self._callers = [(digest.encode(), caller) for digest, caller in known.items()]
        self._is_open = not api_keys and not callers
        self._closed_to_others = bool(callers)
        self._loopback = is_loopback(host)
        self._origins = frozenset(origins)
        self.open_paths = OPEN_PATHS | ({METRICS_PATH} if metrics_public else set())
        self.metrics_public = metrics_public

    @classmethod
    def of_config(cls, config: EngineConfig) -> Keys:
        """The keys that a configuration names. Raises ConfigError for a bad file of keys."""
        entries = read_keys(config.keys_file) if config.keys_file else ()
        callers = {entry.sha256: Caller.of_entry(entry) for entry in entries}
        return cls(
            config.api_keys, config.admin_keys, config.host, callers,
            metrics_public=config.metrics_public, origins=config.cors_origins,
        )  # fmt: skip

    def callers(self) -> list[Caller]:
        """Everybody who may come."""
        return list(dict.fromkeys([self._anonymous, *(caller for _, caller in self._callers)]))

    def identify(self, authorization: bytes | None) -> Caller:
        """Whose key the header carries. Raises AuthenticationError unless inference is open or the key is known."""
        caller = self._find(authorization)
        if caller is not None:
            return caller
        if not self._is_open:
            raise _unauthenticated(authorization)
        return self._anonymous

    def check_management(self, caller: Caller, authorization: bytes | None) -> None:
        """Raises PermissionDeniedError (403) for a caller who may not manage adapters, 401 for one without a key."""
        if caller.admin:
            return
        if self._has_admins:
            if caller is self._anonymous:
                raise _unauthenticated(authorization)
            raise PermissionDeniedError("this route needs an admin key", reason="admin_key_required")
        if self._closed_to_others:
            raise PermissionDeniedError(
                "adapters cannot be managed without an admin key where several tenants have keys: set admin_keys",
                reason="management_closed",
            )  # fmt: skip
        if not self._loopback:
            raise PermissionDeniedError(
                "adapters cannot be managed over the network without a key: set admin_keys, or listen on 127.0.0.1",
                reason="management_closed",
            )

    def check_metrics(self, caller: Caller, authorization: bytes | None) -> None:
        """Raises PermissionDeniedError (403) for a caller who may not read /metrics, 401 for one without a key."""
        if caller.reads_metrics or self.metrics_public:
            return
        if caller is self._anonymous:
            raise _unauthenticated(authorization)
        raise PermissionDeniedError(
            "/metrics tells of every tenant: it needs an admin key, or one with `metrics: true` (metrics_public opens "
            "it to all)",
            reason="metrics_key_required",
        )  # fmt: skip

    def check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuses a web page of another site that uses a browser behind the server's walls to act without a key.

        Browsers name the page's site in every request that may change something. A page of another site is not of this
        host; one that got the browser to take its own name for this machine's (DNS rebinding) is, but a server that
        listens on loopback only is called by a name of loopback.

        Raises:
            PermissionDeniedError: `foreign_origin`.
        """
        origin = headers.get(b"origin")
        if origin is None or "*" in self._origins or origin.decode("latin-1") in self._origins:
            return
        host = headers.get(b"host", b"").decode("latin-1")
        try:
            site, name = urlsplit(origin.decode("latin-1")).netloc, urlsplit(f"//{host}").hostname or ""
        except ValueError:  # brackets that do not close, and the like: no browser sends such a name
            site, name = "", None
        if name is None or site != host or (self._loopback and not is_loopback(name)):
            raise PermissionDeniedError(
                "a web page of another site may not call this server: add its origin to cors_origins",
                reason="foreign_origin",
            )

    def _find(self, authorization: bytes | None) -> Caller | None:
        scheme, _, token = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = hash_key(token.strip().decode("utf-8", "surrogateescape")).encode()
        # All are compared, each in full, so that the time taken tells nothing of any of them.
        matches = [caller for known, caller in self._callers if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None


class AuthMiddleware:
    """Finds out who calls, and refuses a request without a key before its body is read."""

    def __init__(self, app: ASGIApp, keys: Keys):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none here, and none that keys would guard
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] == "http":
            headers, call = dict(scope["headers"]), current_call()
            authorization, is_open = headers.get(b"authorization"), scope["path"] in self._keys.open_paths
            try:
                caller = self._keys.identify(authorization)
            except AuthenticationError as error:
                if not is_open:
                    return await error_response(error)(scope, receive, send)
            else:
                if call is not None:
                    call.caller = caller
                if caller.tenant == ANONYMOUS and scope["method"] not in UNCHANGING:
                    try:
                        self._keys.check_origin(headers)
                    except UserError as error:
                        return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)


def _caller(request: Request) -> tuple[Keys, Caller, bytes | None]:
    keys: Keys = request.app.state.keys
    authorization = dict(request.scope["headers"]).get(b"authorization")
    return keys, keys.identify(authorization), authorization


async def require_admin(request: Request) -> None:
    """The dependency of every management route."""
    keys, caller, authorization = _caller(request)
    keys.check_management(caller, authorization)


async def require_metrics(request: Request) -> None:
    """The dependency of /metrics."""
    keys: Keys = request.app.state.keys
    if not keys.metrics_public:
        keys.check_metrics(*_caller(request)[1:])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _unauthenticated(authorization: bytes | None) -> AuthenticationError:
    if not authorization:
        return AuthenticationError("send a key in the header Authorization: Bearer KEY", reason="missing_key")
    return AuthenticationError("the key in the Authorization header is not known here", reason="wrong_key")
