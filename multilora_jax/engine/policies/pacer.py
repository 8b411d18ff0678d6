"""Prompt tokens of a step, so that it takes no longer than the decodes in it may wait (host only, no jax)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger(__name__)

_LOOK_AGAIN = 400
"""Steps after which a size that just misses the target is tried again; one that takes twice as long, after twice."""

_ENOUGH = 20
"""Steps of decodes alone before it is said that they miss the target."""


class StepPacer:
    """Picks the largest size of a step's prompts whose steps take no longer than the target.

    A step is padded to one of a few compiled sizes, so that these are all there is to choose from, and each is judged
    by its own past steps. One that never ran is judged by the next smaller one, as if each further token took as long
    as those there: the first step of a size must not be what keeps the decodes waiting. The times drift with the
    length of the texts and with the adapters: an estimate falls faster than it rises (the first steps of a size may
    have been compiled), and one that has become old is not trusted.

    Decodes are never held back, so that a target below what they take by themselves is missed; that is said, once.

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
        self._decode_s = 0.0  # estimate of a step of decodes alone
        self._by_decodes: dict[int, tuple[int, float]] = {}  # steps and estimate, by a power of two of decodes
        self._warned = False

    def size(self) -> int:
        """Prompt tokens that the next step may hold; the smallest size where none keeps the target."""
        best = self._sizes[0]
        seconds = self._seconds.get(best)
        for size in self._sizes[1:]:
            seconds = self._seconds.get(size, self._foreseen(best, size, seconds))
            if self._is_too_slow(size, seconds):
                break
            best = size
        return best

    def saw(self, size: int, seconds: float) -> None:
        """A step with prompts that was padded to this size took so long."""
        self._steps += 1
        before = self._seconds.get(size, seconds)
        weight = 1.0 if 4 * seconds < before else 0.5 if seconds < before else 0.2
        self._seconds[size] = before + weight * (min(seconds, 2 * before) - before)
        self._last_seen[size] = self._steps

    def saw_decodes(self, num: int, seconds: float) -> None:
        """A step of so many decodes alone took so long."""
        self._decode_s += 0.2 * (seconds - self._decode_s) if self._decode_s else seconds
        group = 1 << (num - 1).bit_length()
        count, before = self._by_decodes.get(group, (0, seconds))
        mean = before + max(0.05, 1 / (count + 1)) * (seconds - before)
        self._by_decodes[group] = count + 1, mean
        if mean > self._target_s and count + 1 >= _ENOUGH and not self._warned:
            self._warned = True
            log.warning("%s", self._what_misses(group, mean))

    def _what_misses(self, group: int, mean: float) -> str:
        kept = [(n, s) for n, (_, s) in self._by_decodes.items() if n < group and s <= self._target_s]
        hint = "lower max_num_seqs"
        if kept:
            num, seconds = max(kept)
            hint += f" to {num}, whose steps take {1000 * seconds:.0f} ms"
        return (
            f"steps of up to {group} sequences take {1000 * mean:.0f} ms without any prompt, more than target_step_ms "
            f"{1000 * self._target_s:g}: beside them prompts are cut to {self._sizes[0]} tokens, but no token comes "
            f"sooner than that; raise target_step_ms, or {hint}"
        )

    def _foreseen(self, known: int, size: int, seconds: float | None) -> float | None:
        """Of a size that never ran: what a smaller one takes, and each token beyond as much as those there did."""
        if seconds is None:
            return None
        return seconds + max(0.0, seconds - self._decode_s) * (size - known) / known

    def _is_too_slow(self, size: int, seconds: float | None) -> bool:
        if seconds is None:
            return True  # a smaller one comes first
        if seconds <= self._target_s:
            return False
        return self._steps - self._last_seen.get(size, 0) < _LOOK_AGAIN * seconds / self._target_s
