"""Who is let into the queue at all: its bound, and the rate of each adapter (host only, no jax, no clock)."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable

from multilora_jax.errors import RateLimitError

_STARTS_KEPT = 64
_MOST_S = 60
"""Longest Retry-After: what holds now says little about later."""


def retry_after(seconds: float) -> int:
    """Whole seconds for Retry-After: 1 to 60."""
    return max(1, min(_MOST_S, math.ceil(seconds)))


class Rate:
    """A token bucket for each name.

    Args:
        per_s: tokens that come in a second.
        burst: most that a bucket holds.
    """

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._full_at: dict[str, float] = {}  # when the bucket of a name will be full again; without one it is

    def wait(self, name: str, now: float) -> float:
        """Seconds until a token is there; 0 if one is."""
        missing = max(0.0, self._full_at.get(name, now) - now) * self._per_s
        return max(0.0, missing - (self._burst - 1)) / self._per_s

    def take(self, name: str, now: float) -> None:
        """Takes a token."""
        self._full_at[name] = max(now, self._full_at.get(name, now)) + 1 / self._per_s
        if len(self._full_at) > 1024 and len(self._full_at) & (len(self._full_at) - 1) == 0:
            self._full_at = {name: time for name, time in self._full_at.items() if time > now}


class Gate:
    """Refuses requests beyond the queue's bound or their adapters' rate, and says when to come again.

    Args:
        max_queued: requests that may wait for a seat; None for any number.
        rate: of the requests of each adapter; None for any.

    Attributes:
        refused: requests, by reason.
    """

    def __init__(self, max_queued: int | None, rate: Rate | None) -> None:
        self._max_queued = max_queued
        self._rate = rate
        self.refused: Counter[str] = Counter()
        self._gaps: deque[float] = deque(maxlen=_STARTS_KEPT)  # seconds from start to start
        self._last_start: float | None = None  # None where nobody has waited since

    def started(self, num: int, num_waiting: int, now: float) -> None:
        """So many sequences left the queue to run, and so many wait still.

        Only the time from one start to the next counts in which somebody waited: what an idle server takes says
        nothing about how fast a full one goes on, and neither does how fast an empty one fills.
        """
        if num_waiting and self._last_start is not None:
            self._gaps.extend([(now - self._last_start) / num] * num)
        self._last_start = now if num_waiting else None

    def enter(self, adapters: Iterable[str], num_waiting: int, free_seats: int, now: float, kept: int = 0) -> None:
        """Lets a request in that is otherwise fine.

        Args:
            adapters: names of its adapters.
            num_waiting: requests that wait; free_seats: of which as many are about to run.
            kept: places in the queue that it may not have.

        Raises:
            RateLimitError: `queue_full` or `adapter_rate`.
        """
        if self._max_queued is not None and num_waiting >= self._max_queued - kept + free_seats:
            self.refused["queue_full"] += 1
            raise RateLimitError(
                f"the queue is full: {num_waiting} requests wait and {self._max_queued} may (max_queued_requests"
                f"{f', {kept} of them kept for others' if kept else ''}): try again later",
                reason="queue_full", param="max_queued_requests", retry_after_s=self._time_to_drain(num_waiting, now),
            )  # fmt: skip
        if self._rate is not None:
            self._take_tokens(self._rate, list(adapters), now)
        if not num_waiting:
            self._last_start = None

    def _take_tokens(self, rate: Rate, names: list[str], now: float) -> None:
        for name in names:
            seconds = rate.wait(name, now)
            if seconds > 0:
                self.refused["adapter_rate"] += 1
                raise RateLimitError(
                    f"adapter {name!r} gets more requests a second than it may (adapter_requests_per_s): try again "
                    f"in {seconds:.2f} s",
                    reason="adapter_rate", param="adapter_requests_per_s", retry_after_s=retry_after(seconds),
                )  # fmt: skip
        for name in names:
            rate.take(name, now)

    def _time_to_drain(self, num_waiting: int, now: float) -> int:
        """By when all that wait now will have started, if it goes on as it went lately."""
        since = 0.0 if self._last_start is None else now - self._last_start
        return retry_after(num_waiting * (sum(self._gaps) + since) / max(1, len(self._gaps)))
