"""Keeping Ctrl-C out of the middle of a step (host only, no jax)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delivers a SIGINT that comes inside the block when the block ends.

    A step hands the pool to the device and takes it back; an exception between the two would lose it. Signals reach
    the main thread only, so the block is run as it is on any other.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
