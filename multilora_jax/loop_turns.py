"""Taking turns with event loops: the engine thread hands outputs to them, and gives them the time to send these.

An interpreter runs one thread at a time, and where the device is the host's own cores, a step waits for each moment
that one of its threads does not run. What a loop has to do is done fastest while no step is under way.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from multilora_jax.request_stream import RequestStream

STEP_SHARE = 1 / 16
"""Of a step's time: what loops that are slow may delay the next one by."""

ARRIVAL_S = 0.02
"""Longest wait for requests that come together: loops that are slow delay their first step by no more."""

ARRIVAL_TURNS = 4
"""Turns of a loop between the bytes of a request and its being submitted."""


def post(loop: asyncio.AbstractEventLoop, callback: Callable[[], Any]) -> bool:
    """Run a callback on an event loop of any thread; False if that loop is closed."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        return False
    return True


def wake_all(streams: Iterable[RequestStream]) -> list[RequestStream]:
    """Wake the readers of changed streams, with one call per event loop; returns those whose loop is closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[RequestStream]] = {}
    for stream in streams:
        by_loop.setdefault(stream.loop, []).append(stream)
    lost = []
    for loop, group in by_loop.items():
        if not post(loop, lambda group=group: [stream.wake() for stream in group]):
            lost += group
    return lost


def let_send(streams: Iterable[RequestStream], step_s: float) -> None:
    """Waits until the readers of these streams have run since `wake_all`, for a share of a step's seconds at most."""
    _settle(streams, step_s * STEP_SHARE, turns=1)


def let_arrive(streams: Callable[[], Iterable[RequestStream]], take_in: Callable[[], None]) -> None:
    """Takes in the requests of one burst before its first step, whose price hardly depends on how many it is of.

    Args:
        streams: those there are; none is not waited for.
        take_in: called while there are more each time.
    """
    deadline, num_known = time.monotonic() + ARRIVAL_S, 0
    while len(known := list(streams())) > num_known and (left_s := deadline - time.monotonic()) > 0:
        num_known = len(known)
        _settle(known, left_s, ARRIVAL_TURNS)
        take_in()


def _settle(streams: Iterable[RequestStream], timeout_s: float, turns: int) -> None:
    """Waits until the loops of these streams have done what lay before them, and so many turns more."""
    deadline = time.monotonic() + timeout_s
    for loop in {stream.loop for stream in streams}:
        done = threading.Event()
        if post(loop, functools.partial(_after_turns, loop, turns, done.set)):
            done.wait(max(0.0, deadline - time.monotonic()))


def _after_turns(loop: asyncio.AbstractEventLoop, turns: int, callback: Callable[[], None]) -> None:
    if turns:
        loop.call_soon(_after_turns, loop, turns - 1, callback)
    else:
        callback()
