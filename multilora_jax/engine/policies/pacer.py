"""Prompt tokens of a step, so that it takes no longer than the decodes in it may wait (host only, no jax)."""

from __future__ import annotations

from collections.abc import Sequence

_LOOK_AGAIN = 400
"""Steps after which a size that just misses the target is tried again; one that takes twice as long, after twice."""


class StepPacer:
    """Picks the largest size of a step's prompts whose steps take no longer than the target.

    A step is padded to one of a few compiled sizes, so that these are all there is to choose from, and each is judged
    by its own past steps. The times drift with the length of the texts and with the adapters: an estimate falls faster
    than it rises (the first steps of a size may have been compiled), and one that has become old is not trusted.

    Args:
        sizes: prompt tokens of a step with prompts, ascending.
        target_s: seconds that a step should take at most.
    """

    def __init__(self, sizes: Sequence[int], target_s: float) -> None:
        self._sizes = list(sizes)
        self._target_s = target_s
        self._seconds: dict[int, float] = {}  # estimate by size
        self._last_seen: dict[int, int] = {}  # step by size
        self._steps = 0

    def size(self) -> int:
        """Prompt tokens that the next step may hold; the smallest size where none keeps the target."""
        best = self._sizes[0]
        for size in self._sizes[1:]:
            if self._is_too_slow(size):
                break
            best = size
        return best

    def saw(self, num_tokens: int, seconds: float) -> None:
        """A step with so many prompt tokens took so long."""
        self._steps += 1
        size = next((size for size in self._sizes if size >= num_tokens), self._sizes[-1])
        before = self._seconds.get(size, seconds)
        weight = 1.0 if 4 * seconds < before else 0.5 if seconds < before else 0.2
        self._seconds[size] = before + weight * (min(seconds, 2 * before) - before)
        self._last_seen[size] = self._steps

    def _is_too_slow(self, size: int) -> bool:
        seconds = self._seconds.get(size)
        if seconds is None or seconds <= self._target_s:
            return False
        return self._steps - self._last_seen[size] < _LOOK_AGAIN * seconds / self._target_s
