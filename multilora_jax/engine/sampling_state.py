"""What a request asks to change in its logits, kept up to date token by token (host only, no jax).

A plan is made once per request; every answer has a state. What is sparse (penalties, biases, bans) is kept as one entry
per token in arrays, so that a step copies them and runs no Python over the tokens of a sequence.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from multilora_jax.engine.grammars import Grammar
from multilora_jax.errors import UserError
from multilora_jax.request import SamplingParams
from multilora_jax.sampling_params import MAX_EDITED_TOKENS
from multilora_jax.tokenizer import Tokenizer

MAX_EXTRA_ENTRIES = 2 * MAX_EDITED_TOKENS + 64
"""Most entries of an answer beside one for each token of prompt and answer: each bad word may end in two tokens, with
and without a space before it, and few tokens end a sequence."""

_REPETITION_RANGE = (1e-6, 1e6)  # what float32 can divide by; beyond it penalties are as good as these


@dataclass(frozen=True)
class SamplingPlan:
    """What one request asks for, in token ids; every answer to it starts from here.

    Attributes:
        params: its parameters.
        vocab_size: token ids below it exist for it.
        stop_ids: tokens that min_tokens holds back.
        bad_words: token ids of each word.
        allowed_W: uint32[W], bit t % 32 of word t // 32 is set where token t is allowed; None allows all.
        grammar: what the answer must be.
    """

    params: SamplingParams
    vocab_size: int
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_W: np.ndarray | None = None
    grammar: Grammar | None = None

    def start(self, prompt: list[int]) -> SamplingState:
        """The state of one answer to a prompt's token ids."""
        return SamplingState(self, prompt)


class SamplingState:
    """What one answer changes in its logits now.

    Attributes:
        error: why it cannot go on, where its grammar turned out to take too much work.
    """

    def __init__(self, plan: SamplingPlan, prompt: list[int]):
        self._plan = plan
        self._output: list[int] = []
        self._walk = None if plan.grammar is None else plan.grammar.start()
        self.error: UserError | None = None
        params = plan.params
        self._repetition = float(np.clip(params.repetition_penalty, *_REPETITION_RANGE))
        self._counts_output = bool(params.presence_penalty or params.frequency_penalty)
        repeats = self._repetition != 1
        tokens: Any = np.unique(np.asarray(prompt, np.int32)) if repeats else np.zeros(0, np.int32)
        self._size = len(tokens)
        room = self._size + 64
        self._tokens = np.zeros(room, np.int32)
        self._bias = np.zeros(room, np.float32)
        self._factor = np.ones(room, np.float32)
        self._count = np.zeros(room, np.float32)
        self._tokens[: self._size] = tokens
        self._factor[: self._size] = self._repetition
        self._place = dict(zip(tokens.tolist(), range(self._size), strict=True))
        for token, bias in (params.logit_bias or {}).items():
            place = self._place_of(token)  # first: it may exchange the arrays for larger ones
            self._bias[place] = bias
        self._bad_tokens = {word[0] for word in plan.bad_words if len(word) == 1}
        # Longer words by the token before their last.
        self._bad_words: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in plan.bad_words:
            if len(word) > 1:
                self._bad_words[word[-2]].append(word)

    def observe(self, token: int) -> None:
        """Takes the token that was generated; sets `error` where the answer cannot go on."""
        self._output.append(token)
        if self._counts_output or self._repetition != 1:
            place = self._place_of(token)
            self._factor[place] = self._repetition
            self._count[place] += 1
        if self._walk is not None and self.error is None:
            try:
                self._walk.advance(token)
            except UserError as error:
                self.error = error

    def fill_mask(self, mask_W: np.ndarray) -> bool:
        """Sets the bits of the tokens that may come next.

        Args:
            mask_W: uint32[W], zero and contiguous.

        Returns:
            False, and nothing is set, where every token may.
        """
        if self._plan.allowed_W is not None:
            mask_W[: len(self._plan.allowed_W)] = self._plan.allowed_W
            return True
        if self._walk is None or self.error is not None:
            return False
        try:
            self._walk.fill(mask_W)
        except UserError as error:
            self.error = error
            mask_W[:] = 0
            return False
        return True

    def entries(self, mask_W: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What to do to the logits of single tokens, each token once.

        Args:
            mask_W: from fill_mask, None where every token may come.

        Returns:
            (token_E, bias_E, factor_E, penalty_E): int32 and float32[E]. A logit x becomes x + bias, that is divided
            by factor where it is positive and multiplied where it is not, and then penalty is taken off.
        """
        bans = [self._place_of(token) for token in self._bans(mask_W)]
        n, params = self._size, self._plan.params
        bias_E = self._bias[:n].copy() if bans else self._bias[:n]
        bias_E[bans] = -np.inf
        count_E = self._count[:n]
        if self._counts_output:
            penalty_E = params.frequency_penalty * count_E + params.presence_penalty * (count_E > 0)
        else:
            penalty_E = np.zeros(n, np.float32)
        return self._tokens[:n], bias_E, self._factor[:n], penalty_E.astype(np.float32, copy=False)

    def _bans(self, mask_W: np.ndarray | None) -> set[int]:
        """Tokens that may not come next; none where that would leave nothing of what the mask allows."""
        bans = set(self._bad_tokens)
        if len(self._output) < self._plan.params.min_tokens:
            bans |= self._plan.stop_ids
        for word in self._bad_words.get(self._output[-1], ()) if self._output else ():
            if tuple(self._output[1 - len(word) :]) == word[:-1]:
                bans.add(word[-1])
        if not bans:
            return bans
        if mask_W is None:
            left = self._plan.vocab_size - len(bans)
        else:
            left = int(np.bitwise_count(mask_W).sum()) - sum(int(mask_W[t // 32]) >> t % 32 & 1 for t in bans)
        return bans if left > 0 else set()

    def _place_of(self, token: int) -> int:
        """Where a token's entry is; a new one changes nothing yet."""
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self._size
            if place == len(self._tokens):
                for name, fill in (("_tokens", 0), ("_bias", 0), ("_factor", 1), ("_count", 0)):
                    old = getattr(self, name)
                    setattr(self, name, np.concatenate([old, np.full_like(old, fill)]))
            self._tokens[place] = token
            self._size += 1
        return place


def bitmask(token_ids: list[int], vocab_size: int) -> np.ndarray:
    """uint32[ceil(vocab_size / 32)] with the bits of these tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def bad_word_ids(words: list[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Token ids of words as they are at the start of a text and, where that spells them otherwise, after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        found[plain] = None
        # A space of its own before the word changes nothing: the word is caught without it. A word in one token with
        # its space may well be several without.
        if spaced[-len(plain) :] != plain:
            found[spaced] = None
    return [word for word in found if word]
