"""Time series by adapter, of which there are only so many however many adapters there are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds; fewer than of the server's own histogram, as there is one of these for each adapter."""

HALF_LIFE_S = 600.0
"""In this time without use an adapter's weight halves: those in use now are shown, not those of last week."""


@dataclass
class Series:
    """What is counted of one adapter, and of all others together.

    Attributes:
        finished_requests, prompt_tokens, generation_tokens: since the series began.
        first_tokens: times to the first token by FIRST_TOKEN_BUCKETS, and those beyond; first_token_s: their sum.
        weight: tokens, older ones counting less; as of `seen` (seconds).
    """

    finished_requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    first_tokens: list[int] = field(default_factory=lambda: [0] * (len(FIRST_TOKEN_BUCKETS) + 1))
    first_token_s: float = 0.0
    weight: float = 0.0
    seen: float = 0.0

    def weigh(self, now: float, tokens: int = 0) -> float:
        """The weight now, after `tokens` more."""
        self.weight = self.weight * 0.5 ** (max(0.0, now - self.seen) / HALF_LIFE_S) + tokens
        self.seen = max(self.seen, now)
        return self.weight

    def add(self, prompt_tokens: int, generation_tokens: int, first_token_s: float | None) -> None:
        """Counts a request that has ended."""
        self.finished_requests += 1
        self.prompt_tokens += prompt_tokens
        self.generation_tokens += generation_tokens
        if first_token_s is not None:
            self.first_tokens[sum(first_token_s > bound for bound in FIRST_TOKEN_BUCKETS)] += 1
            self.first_token_s += first_token_s


class AdapterFigures:
    """Series of the adapters most used lately, and one of the others.

    A newcomer takes the place of the least used adapter once it has twice its weight. A series never takes over
    another's counts, so that each only grows as long as it is there: what an adapter did while it was among the others
    stays with them.

    Args:
        most: adapters with a series of their own.
        other: name of the others'.
    """

    def __init__(self, most: int, other: str):
        self._most = most
        self._other = other
        self._shown: dict[str, Series] = {}
        self._rest = Series()
        self._candidates: OrderedDict[str, Series] = OrderedDict()  # of which only the weights count

    def add(
        self, name: str, prompt_tokens: int, generation_tokens: int, first_token_s: float | None, now: float
    ) -> None:
        """Counts a request that has ended; `now` is in seconds."""
        tokens = prompt_tokens + generation_tokens
        series = self._shown.get(name)
        if series is None:
            series = self._enter(name, tokens, now)
        else:
            series.weigh(now, tokens)
        series.add(prompt_tokens, generation_tokens, first_token_s)

    def keep(self, exists: Callable[[str], bool]) -> None:
        """Forgets the adapters that are there no more."""
        for names in (self._shown, self._candidates):
            for name in [name for name in names if not exists(name)]:
                del names[name]

    def series(self) -> dict[str, Series]:
        """By name; the others' where there are any."""
        rest = {self._other: self._rest} if self._rest.finished_requests else {}
        return {**self._shown, **rest}

    def _enter(self, name: str, tokens: int, now: float) -> Series:
        """The series that a request on an adapter without one counts in."""
        if name == self._other:  # it cannot be told from the others
            return self._rest
        candidate = self._candidates.pop(name, None) or Series(seen=now)
        weight = candidate.weigh(now, tokens)
        if len(self._shown) >= self._most:
            least = min(self._shown, key=lambda shown: self._shown[shown].weigh(now))
            if weight < 2 * self._shown[least].weight:
                self._remember(name, candidate)
                return self._rest
            self._remember(least, Series(weight=self._shown.pop(least).weight, seen=now))
        self._shown[name] = Series(weight=weight, seen=now)
        return self._shown[name]

    def _remember(self, name: str, candidate: Series) -> None:
        """Keeps the weight of an adapter without a series; the one unused for longest is forgotten for it."""
        self._candidates[name] = candidate
        if len(self._candidates) > self._most:
            self._candidates.popitem(last=False)
