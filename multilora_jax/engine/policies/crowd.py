"""How many prompt tokens a step may hold for those who flood it (host only, no jax)."""

from __future__ import annotations

from collections.abc import Sequence

_HEADROOM = 1.1
_MEMORY = 32  # steps
_MOST_IN_A_ROW = 3


class EvenFlow:
    """The size of a step's prompts that is just enough for what comes on average.

    Sequences end and start by chance, so that some steps hold many new prompts and most hold few, and whoever comes
    during such a step waits for all of it. What starts a little later instead costs nobody much. An average that is
    reached in every step grows by the headroom, so that a flow which was held back too much finds its size. With much
    headroom, long prompts take the size above the one that would do, and with it everybody's steps.

    In a step that holds prompts of others besides, the flow gets only what the smallest size has left; but not in
    more than three steps one after the other, so that it cannot be stopped.

    Args:
        sizes: prompt tokens of a step with prompts, ascending; steps are padded to these, so sizes between save
            nothing.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._mean = 0.0
        self._gave_way = 0  # steps in a row

    def size(self, others: int = 0) -> int:
        """Prompt tokens that the flow may have in the next step.

        Args:
            others: prompt tokens of that step that are not the flow's.
        """
        if others and self._gave_way < _MOST_IN_A_ROW:
            self._gave_way += 1
            return max(0, self._sizes[0] - others)
        self._gave_way = 0
        wanted = _HEADROOM * self._mean
        return next((size for size in self._sizes if size >= wanted), self._sizes[-1])

    def saw(self, num_prompt_tokens: int) -> None:
        """A step was planned with so many."""
        self._mean += (num_prompt_tokens - self._mean) / _MEMORY
