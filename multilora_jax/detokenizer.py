"""Text of a sequence as its tokens arrive: whole characters only, stop strings found and cut (host only)."""

from __future__ import annotations

import bisect
import codecs

from multilora_jax.request import SamplingParams
from multilora_jax.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Decoder of one sequence; its cost per token does not depend on the length of the sequence.

    Whatever the grouping of tokens into calls, the text is the same: that of all tokens decoded at once, cut at the
    stop string. Where several stop strings occur, the one that is complete first ends the text; of those complete
    at the same character, the longest.

    Args:
        tokenizer: None leaves the text empty.
        params: `stop`, `min_tokens` (no stop string counts that is complete with one of the first so many tokens),
            `include_stop_str_in_output`, `skip_special_tokens` and `detokenize` are used.
        continues_text: the output goes on from a text, so that a space before its first word belongs to it;
            otherwise tokenizers that put a space before every word have it removed, as in a text of its own.

    Attributes:
        text: the text that may be sent so far. It only ever grows: a character whose bytes are not all there, and
            an ending that may be the start of a stop string, are held back until they are resolved.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, *, continues_text: bool = False):
        self.text = ""
        self._tokenizer = tokenizer if params.detokenize else None
        self._stops: list[str] = sorted(set(params.stop or []))
        self._unstoppable = params.min_tokens if self._stops else 0  # tokens still to come that no stop string ends
        self._include_stop = params.include_stop_str_in_output
        self._skipped: frozenset[int] = frozenset()
        self._strip_next = False
        if tokenizer is not None:
            self._skipped = tokenizer.special_ids if params.skip_special_tokens else frozenset()
            self._strip_next = tokenizer.strips_leading_space and not continues_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._closed = False

    def append(self, token_ids: list[int]) -> str | None:
        """Take new output tokens.

        Returns:
            The stop string that is now complete, else None; after one, further tokens are ignored.
        """
        if self._tokenizer is None or self._closed:
            return None
        if self._unstoppable:
            first, token_ids = token_ids[: self._unstoppable], token_ids[self._unstoppable :]
            self._take(self._decode(first))
            self._unstoppable -= len(first)
        return self._take(self._decode(token_ids))

    def finish(self) -> None:
        """Flush what was held back; an unfinished character becomes U+FFFD. Further calls do nothing."""
        if not self._closed:
            self._take(self._utf8.decode(b"", final=True))
            self.text += self._held
            self._held, self._closed = "", True

    def _decode(self, token_ids: list[int]) -> str:
        assert self._tokenizer is not None
        skipped, token_bytes = self._skipped, self._tokenizer.token_bytes
        return self._utf8.decode(b"".join([token_bytes(i) for i in token_ids if i not in skipped]))

    def _take(self, new: str) -> str | None:
        if not new:
            return None
        if self._strip_next:
            assert self._tokenizer is not None
            new, self._strip_next = self._tokenizer.strip_start(new), False
        if not self._stops:  # then nothing is ever held back
            self.text += new
            return None
        # A stop string that is complete now began in the part held back: no other place could begin one.
        window = self._held + new
        matched: tuple[int, int, str] | None = None
        for stop in () if self._unstoppable else self._stops:
            start = window.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (matched is None or (start + len(stop), start) < matched[:2]):
                matched = (start + len(stop), start, stop)
        if matched is not None:
            end, start, stop = matched
            self.text += window[: end if self._include_stop else start]
            self._held, self._closed = "", True
            return stop
        keep = self._possible_stop_prefix(window)
        self.text += window[: len(window) - keep]
        self._held = window[len(window) - keep :]
        return None

    def _possible_stop_prefix(self, window: str) -> int:
        """Length of the longest ending that may grow into a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(window)), 0, -1):
            ending = window[-length:]
            # In their order those that begin with it come one after another, from its own place on.
            place = bisect.bisect_left(self._stops, ending)
            if place < len(self._stops) and self._stops[place].startswith(ending):
                return length
        return 0
