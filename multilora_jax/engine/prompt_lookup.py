"""Guessing the next tokens of a text from the text itself (host only, no jax).

Answers that quote their prompt or repeat themselves (extraction, editing, code) hold n-grams that occurred before. What
followed the last occurrence is proposed, run as further decode rows of the same step, and kept as far as the model
itself chooses the same tokens: "prompt lookup decoding", vLLM's `ngram` method. A row draws with its request's key and
its own position, so what is kept is exactly what would have come without proposals, sampled or not.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import numpy as np

from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.request import Sequence


class PromptLookup:
    """The proposals of one text.

    How many are wanted doubles with every step in which the model agreed with as many, and halves otherwise, though not
    below one more than it agreed with. Rows that a step would leave empty are filled with further ones.

    Args:
        most: proposals of one step.
        longest, shortest: tokens of the n-gram at the text's end that must have occurred before; the longest that did
            counts.

    Attributes:
        width: how many the next step should have room for.
    """

    def __init__(self, most: int, longest: int, shortest: int):
        self.width = most
        self._most = most
        self._longest = longest
        self._shortest = shortest
        self._text = np.zeros(256, np.int32)
        self._length = 0

    def propose(self, token_ids: SequenceABC[int], limit: int) -> list[int]:
        """Up to `limit` tokens to follow a text; none where its end never occurred before.

        Args:
            token_ids: the text, which may only have grown since the last call. Costs O(its length) in numpy.
        """
        limit = min(limit, self._most)
        self._take(token_ids)
        length = self._length
        if limit < 1 or length <= self._shortest:
            return []
        text = self._text[:length]
        found = np.flatnonzero(text[:-1] == text[-1])  # where an n-gram like the last one may end
        matched = 1
        while len(found) and matched < self._longest:
            longer = found[found >= matched]
            longer = longer[text[longer - matched] == text[length - 1 - matched]]
            if not len(longer):
                break
            found, matched = longer, matched + 1
        if not len(found) or matched < self._shortest:
            return []
        period = length - 1 - int(found[-1])
        # Past the text's end it goes on as it did: what followed there are the proposals themselves.
        return text[length - period + np.arange(limit) % period].tolist()

    def verified(self, proposed: int, accepted: int) -> None:
        """Tells how many of the last proposals the model agreed with."""
        if accepted >= min(proposed, self.width):
            self.width = min(self._most, 2 * max(self.width, accepted))
        else:
            self.width = max((self.width + 1) // 2, accepted + 1)

    def _take(self, token_ids: SequenceABC[int]) -> None:
        new = len(token_ids) - self._length
        if len(token_ids) > len(self._text):
            grown = np.zeros(2 * len(token_ids), np.int32)
            grown[: self._length] = self._text[: self._length]
            self._text = grown
        self._text[self._length : len(token_ids)] = token_ids[self._length :]
        self._length += new


def add_proposals(step: ScheduledStep, kv: KVManager, sizes: SequenceABC[int]) -> None:
    """Fills the decode rows that a step has left with proposals, as far as no sequence has to give up pages for them.

    Args:
        step: planned but for this.
        kv: gives the pages that proposals beyond a sequence's last page need.
        sizes: decode rows of the compiled steps, ascending; those with prompts have the largest.
    """
    found = list[tuple[Sequence, PromptLookup, list[int]]]()
    spare = sizes[-1] - len(step.decodes)
    for seq in step.decodes:
        if seq.lookup is not None and spare > 0:
            # The last token that a sequence may have is sampled in any case.
            tokens = seq.lookup.propose(seq.token_ids, min(spare, seq.max_total_tokens - seq.num_tokens - 1))
            if tokens:
                found.append((seq, seq.lookup, tokens))
    if not found:
        return
    wishes = [min(lookup.width, len(tokens)) for _, lookup, tokens in found]
    if not step.prefills:
        spare = _rows_for(len(step.decodes), len(step.decodes) + sum(wishes), sizes) - len(step.decodes)
    counts = _shares(wishes, spare)
    rest = [len(tokens) - count for (*_, tokens), count in zip(found, counts, strict=True)]
    for (seq, _, tokens), count, more in zip(found, counts, _shares(rest, spare - sum(counts)), strict=True):
        tokens = tokens[: count + more]
        if tokens and kv.allocate_for(seq, 1 + len(tokens)):
            step.proposals[seq] = tokens


def _rows_for(least: int, wanted: int, sizes: SequenceABC[int]) -> int:
    """The size for `wanted` rows. What lies little above a size that holds the `least` is cut to it: a row costs far
    less where it fills a step than where it makes it larger."""
    smaller = 0
    for size in sizes:
        if size >= wanted:
            return smaller if smaller >= least and 8 * (wanted - smaller) <= size - smaller else size
        smaller = size
    return smaller


def _shares(wishes: list[int], total: int) -> list[int]:
    """Parts of a total, none above its wish, the smallest as large as can be."""
    shares, left = [0] * len(wishes), total
    for order, i in enumerate(sorted(range(len(wishes)), key=wishes.__getitem__)):
        shares[i] = min(wishes[i], left // (len(wishes) - order))
        left -= shares[i]
    return shares
