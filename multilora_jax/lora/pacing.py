"""A bounded share of a core for work beside the model's, where both run on the same cores (host only, no jax)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.25
"""Of one core, for all threads of a Pacer together."""

SLICE_S = 0.002
"""CPU time that a thread takes at a time, as far as its pause points allow."""

_local = threading.local()


class Pacer:
    """Holds threads to SHARE of one core, all together, while something else wants the cores. Safe from any thread.

    A low priority is not enough: the products of a step run on all cores and wait for the last of them, so whatever
    takes a core for some milliseconds, as the scheduler of an operating system lets any thread do, holds up the step.

    Args:
        is_busy: whether something else wants the cores now.
        sleep: called with seconds.
    """

    def __init__(self, is_busy: Callable[[], bool], sleep: Callable[[float], object] = time.sleep):
        self._is_busy = is_busy
        self._sleep = sleep
        self._lock = threading.Lock()

    @contextmanager
    def paced(self) -> Iterator[None]:
        """Makes `pause_point` on this thread pause where it has to."""
        _local.pacer, _local.since_s = self, time.thread_time()
        try:
            yield
        finally:
            del _local.pacer

    def _pause(self) -> None:
        used = time.thread_time() - _local.since_s
        if used < SLICE_S:
            return
        if self._is_busy():
            with self._lock:  # the pauses of several threads come one after another, so that their shares add up to one
                self._sleep(used * (1 / SHARE - 1))
        _local.since_s = time.thread_time()


def pause_point() -> None:
    """A place where the work of a thread may pause; nothing happens on threads that are not `paced`."""
    pacer = getattr(_local, "pacer", None)
    if pacer is not None:
        pacer._pause()
