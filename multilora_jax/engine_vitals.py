"""Whether an engine's thread lives, moves and succeeds: what a health probe is to be told."""

from __future__ import annotations

import threading
import time

from multilora_jax.errors import UnavailableError

FAILING_AFTER = 12
"""Steps that failed one after another. Finding one bad request in a batch of 256 takes nine of them."""

FAILING_PAUSE_S = 0.1
"""Between steps of an engine that does nothing but fail, so that its log does not fill the disk too."""

TROUBLES = {
    "engine_dead": "the engine is dead: restart the server",
    "engine_stalled": "the engine hangs in a step: restart the server unless that ends by itself",
    "engine_failing": f"the last {FAILING_AFTER} steps of the engine failed: see the server's log",
}
"""Reason to what it means."""


class EngineDeadError(UnavailableError):
    """The engine thread ended with an exception; nothing can be served until the process is restarted."""

    def __init__(self, cause: BaseException):
        if isinstance(cause, UnavailableError):  # says by itself what is to be done
            super().__init__(cause.message, reason=cause.reason)
            return
        super().__init__(
            f"the engine stopped on an internal error ({type(cause).__name__}); see the log and restart the server",
            reason="engine_dead",
        )


class Vitals:
    """Noted by the engine thread, read by any other."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._busy_since: float | None = None

    def busy(self) -> None:
        """The thread begins with a step or a command."""
        self._busy_since = time.monotonic()

    def rest(self) -> None:
        """The thread has nothing to do, and waits."""
        self._busy_since = None

    def stepped(self) -> None:
        """A step succeeded."""
        self._in_a_row = 0

    def failed(self) -> None:
        """A step failed."""
        self._in_a_row += 1

    def trouble(self, stall_after_s: float) -> str | None:
        """What is wrong, a key of TROUBLES; None for nothing.

        Args:
            stall_after_s: how long a step may take.
        """
        since = self._busy_since
        if since is not None and time.monotonic() - since > stall_after_s:
            return "engine_stalled"
        return "engine_failing" if self._in_a_row >= FAILING_AFTER else None


class Health:
    """The part of AsyncEngine that says how it is.

    Attributes:
        stall_after_s: a step that takes longer than this counts as one that hangs.
    """

    _thread: threading.Thread

    def __init__(self, stall_after_s: float):
        self.stall_after_s = stall_after_s
        self._cause_of_death: BaseException | None = None
        self._vitals = Vitals()

    def check_moving(self) -> None:
        """Raises UnavailableError while a step hangs: whoever came now would wait for it too."""
        if self._vitals.trouble(self.stall_after_s) == "engine_stalled":
            raise UnavailableError(TROUBLES["engine_stalled"], reason="engine_stalled")

    @property
    def healthy(self) -> bool:
        """False while there is `trouble`."""
        return self.trouble is None

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be served, a key of TROUBLES: the engine thread has ended, hangs, or fails all steps."""
        if self._cause_of_death is not None or not self._thread.is_alive():
            return "engine_dead"
        return self._vitals.trouble(self.stall_after_s)

    @property
    def stopped(self) -> bool:
        """Whether the engine thread has ended."""
        return not self._thread.is_alive()
