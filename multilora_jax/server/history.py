"""The last minutes of a server: tokens and times to first token by the second or so, and totals by adapter."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from multilora_jax.request import LoRARequest, RequestOutput

MAX_TIMES = 256
"""Most first-token times kept of one bucket, the latest of them."""

MAX_NAMES = 4096
"""Most adapters whose totals are kept; the one that was asked for longest ago goes first."""

MAX_LIVE = 65_536
"""Most requests under way that are followed."""


@dataclass
class Bucket:
    """What happened in one stretch of time.

    Attributes:
        number: of the stretch; start = number * bucket_s on the history's clock.
        generated, prompt: tokens generated, and prompt tokens of the requests that got their first token.
        times: seconds from arrival to first token.
    """

    number: int
    generated: int = 0
    prompt: int = 0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))


@dataclass
class Totals:
    """What an adapter has been asked since the start: finished requests, and tokens of all."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0


class History:
    """An observer of the engine's outputs. `observe` runs on the engine's thread, the rest anywhere.

    Args:
        bucket_s: seconds of a bucket.
        num_buckets: how many are kept.
        clock: seconds, of the same clock as RequestMetrics.
    """

    def __init__(self, bucket_s: float = 2.0, num_buckets: int = 150, clock: Callable[[], float] = time.monotonic):
        self.bucket_s = bucket_s
        self.num_buckets = num_buckets
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: deque[Bucket] = deque(maxlen=num_buckets)
        self._live: dict[str, int] = {}
        self._totals: OrderedDict[str, Totals] = OrderedDict()

    def observe(self, output: RequestOutput) -> None:
        """Take one output of the engine."""
        count = sum(len(completion.token_ids) for completion in output.outputs)
        before = self._live.get(output.request_id)
        with self._lock:
            bucket = self._bucket()
            new = count - (before or 0)
            bucket.generated += new
            if before is None:
                self._observe_first(output, bucket)
            for name in _names(output.lora_request):
                totals = self._of(name)
                totals.tokens += new
                totals.requests += output.finished
                if before is None:
                    totals.prompt_tokens += len(output.prompt_token_ids)
                    totals.cached_tokens += output.num_cached_tokens
        if output.finished:
            self._live.pop(output.request_id, None)
        else:
            self._live[output.request_id] = count
            if len(self._live) > MAX_LIVE:
                self._live.pop(next(iter(self._live)))

    @property
    def current(self) -> int:
        """Number of the bucket that is being filled."""
        return int(self._clock() // self.bucket_s)

    def points(self, first: int = 0) -> list[tuple[int, int, int, float | None, float | None]]:
        """(number, generated tokens, prompt tokens, median and 95th percentile of the times to first token in seconds)
        of each bucket kept from number `first` on, the one that is being filled last; stretches without an output are
        listed too, and have no times."""
        with self._lock:
            found = {b.number: (b.generated, b.prompt, sorted(b.times)) for b in self._buckets if b.number >= first}
        last = self.current
        numbers = range(max(first, last - self.num_buckets + 1), last + 1)
        empty: tuple[int, int, list[float]] = (0, 0, [])
        return [
            (number, generated, prompt, _quantile(times, 0.5), _quantile(times, 0.95))
            for number in numbers
            for generated, prompt, times in [found.get(number, empty)]
        ]

    def totals(self, name: str) -> Totals:
        """Of one adapter; zeros for one that nobody has asked for."""
        return self._totals.get(name) or Totals()

    def _bucket(self) -> Bucket:
        number = self.current
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(Bucket(number))
        return self._buckets[-1]

    def _observe_first(self, output: RequestOutput, bucket: Bucket) -> None:
        bucket.prompt += len(output.prompt_token_ids)
        times = output.metrics
        if times is not None and times.first_token_time is not None:
            bucket.times.append(times.first_token_time - times.arrival_time)

    def _of(self, name: str) -> Totals:
        totals = self._totals.get(name)
        if totals is None:
            totals = self._totals[name] = Totals()
            if len(self._totals) > MAX_NAMES:
                self._totals.popitem(last=False)
        else:
            self._totals.move_to_end(name)
        return totals


def _names(lora_request: LoRARequest | Sequence[Any] | None) -> list[str]:
    if lora_request is None:
        return []
    requests = [lora_request] if isinstance(lora_request, LoRARequest) else lora_request
    return [request.lora_name for request in requests if request is not None]


def _quantile(ordered: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 5)
