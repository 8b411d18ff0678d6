"""How much one key may ask for: requests and tokens a minute, and requests at once."""

from __future__ import annotations

from multilora_jax.engine.policies.gate import Rate, retry_after
from multilora_jax.errors import RateLimitError


class Budget:
    """Tokens that come in at a steady rate, for work whose size is known for certain when it is over.

    What a request may use at most is taken from the budget before it starts, and what it did not use is given back.
    A request larger than the whole budget is let in when the budget is full, and leaves a debt: nothing is refused for
    ever, and nothing overdraws by more than one request.

    Args:
        per_minute: tokens that come in a minute, and the most that is kept.
    """

    def __init__(self, per_minute: int) -> None:
        self._most = per_minute
        self._left = float(per_minute)
        self._at = 0.0

    def wait(self, cost: int, now: float) -> float:
        """Seconds until `cost` can be taken; 0 for at once."""
        self._refill(now)
        return max(0.0, min(cost, self._most) - self._left) / self._most * 60

    def take(self, cost: int, now: float) -> None:
        """Takes tokens; negative ones are given back."""
        self._refill(now)
        self._left = min(float(self._most), self._left - cost)

    def _refill(self, now: float) -> None:
        self._left = min(float(self._most), self._left + max(0.0, now - self._at) / 60 * self._most)
        self._at = max(self._at, now)


class Limits:
    """The limits of one key; None for none. Called from the server's event loop alone.

    Attributes:
        refused: requests refused, by limit.
        active: requests under way.
    """

    def __init__(
        self,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        max_concurrent: int | None = None,
    ) -> None:
        self._per_minute = requests_per_minute
        self._rate = Rate(requests_per_minute / 60, requests_per_minute) if requests_per_minute else None
        self._tokens_per_minute = tokens_per_minute
        self._budget = Budget(tokens_per_minute) if tokens_per_minute else None
        self._max_concurrent = max_concurrent
        self.refused = {"requests_per_minute": 0, "tokens_per_minute": 0, "max_concurrent": 0}
        self.active = 0

    def enter(self, now: float) -> None:
        """Lets a request in; `leave` must follow. Raises RateLimitError."""
        if self._max_concurrent is not None and self.active >= self._max_concurrent:
            self._refuse(
                "max_concurrent", 1, f"{self.active} requests of this key are under way and {self._max_concurrent} may "
                "be: wait until one has ended",
            )  # fmt: skip
        if self._rate:
            seconds = self._rate.wait("", now)
            if seconds > 0:
                self._refuse(
                    "requests_per_minute", seconds, f"this key may send {self._per_minute} requests a minute: try "
                    f"again in {seconds:.1f} s",
                )  # fmt: skip
            self._rate.take("", now)
        self.active += 1

    def leave(self) -> None:
        """A request has ended."""
        self.active -= 1

    def reserve(self, tokens: int, now: float) -> None:
        """Takes what a prompt and its answers may use at most. Raises RateLimitError."""
        if self._budget:
            seconds = self._budget.wait(tokens, now)
            if seconds > 0:
                self._refuse(
                    "tokens_per_minute", seconds, f"this key may use {self._tokens_per_minute} tokens a minute and "
                    f"this prompt and its answer may take {tokens}: try again in {seconds:.1f} s, or lower max_tokens",
                )  # fmt: skip
            self._budget.take(tokens, now)

    def give_back(self, tokens: int, now: float) -> None:
        """Returns what was reserved and not used."""
        if self._budget:
            self._budget.take(-tokens, now)

    def _refuse(self, limit: str, seconds: float, message: str) -> None:
        self.refused[limit] += 1
        raise RateLimitError(message, reason=limit, retry_after_s=retry_after(seconds))
