"""Errors that a caller caused and can mend; the HTTP server maps each to its status and `reason`."""

from __future__ import annotations


class MultiLoRAError(Exception):
    """Base of every error this package raises on purpose."""


class UserError(MultiLoRAError, ValueError):
    """Bad input. Nothing was changed by the call that raised it.

    Args:
        message: says what is wrong and what to do about it.
        reason: a stable machine-readable word, for example `rank_too_large`.
        param: the field at fault, where there is one.
    """

    status = 400
    type = "BadRequestError"
    retry_after_s: int | None = None
    """Seconds after which the same request may succeed, where that is known."""

    def __init__(self, message: str, *, reason: str = "bad_request", param: str | None = None):
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.param = param


class ConfigError(UserError):
    """A model's, an adapter's or the engine's configuration asks for something that is not supported."""


class AdapterError(UserError):
    """An adapter folder that cannot be served exactly; it is refused whole."""


class NotFoundError(UserError):
    """A name or path that does not exist."""

    status = 404
    type = "NotFoundError"
    name: str | None = None
    """The unknown name, where the error is about an adapter's."""


class PermissionDeniedError(UserError):
    """A path outside the allowed roots, or a route closed to this caller."""

    status = 403
    type = "PermissionDeniedError"


class UnavailableError(UserError):
    """The engine is starting, stopping or dead."""

    status = 503
    type = "ServiceUnavailableError"


class StepFailedError(UserError):
    """A request with which steps of the engine fail; the others go on."""

    status = 500
    type = "InternalServerError"

    @classmethod
    def of(cls, cause: BaseException) -> UserError:
        """What the request is told: of its cause no more than the kind."""
        if "RESOURCE_EXHAUSTED" in str(cause) or isinstance(cause, MemoryError):
            return OverloadedError(
                "the device ran out of memory on this request, alone too: shorten it, or try again later",
                reason="out_of_memory",
            )
        return cls(
            f"the engine failed on this request ({type(cause).__name__}), and on no other: see the server's log",
            reason="step_failed",
        )


class RateLimitError(UserError):
    """More was asked for than may be: the queue is full, or an adapter's rate is exceeded."""

    status = 429
    type = "RateLimitError"

    def __init__(self, message: str, *, reason: str = "rate_limited", param: str | None = None, retry_after_s: int = 1):
        super().__init__(message, reason=reason, param=param)
        self.retry_after_s = retry_after_s


class OverloadedError(UnavailableError):
    """A request was given up while it waited, because others leave no time for it."""

    def __init__(self, message: str, *, reason: str = "overloaded", param: str | None = None, retry_after_s: int = 1):
        super().__init__(message, reason=reason, param=param)
        self.retry_after_s = retry_after_s
