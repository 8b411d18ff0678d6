"""Tool calls in a model's text, in the two styles that Llama's descendants were trained on.

A reader is fed the text as it comes and says what is content and what belongs to which call. Whole answers go through
the same reader in one piece, so a stream and a whole answer cannot differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from multilora_jax.server.json_scanner import CallScanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_LLAMA_KEYS = ("name", "parameters", "arguments", "type")


@dataclass(frozen=True)
class TextPiece:
    """Content, as it goes on."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The call of this index begins; calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The text of its arguments goes on."""

    index: int
    text: str


Event = TextPiece | CallStart | CallArguments


class ToolCallReader(ABC):
    """Reads one answer.

    White space around calls is no content. What looks like a call and is none comes back as content.

    Args:
        most: calls after so many are dropped, with all that follows them; None for any number.

    Attributes:
        num_calls: calls found so far.
    """

    def __init__(self, most: int | None = None):
        self._most = most
        self._held = ""
        self._space = ""
        self._call: CallScanner | None = None
        self._announced = False
        self._num_sent = 0
        self._full = False
        self.num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """What the next piece of text says."""
        self._held += text
        events: list[Event] = []
        while not self._full and self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """What is left at the end of the text."""
        events: list[Event] = []
        if self._full:
            return events
        if self._call is not None and not self._announced:
            self._give_up(events)
        if self._call is None and self._held:
            self._text(events, self._held)
        if self._space and not self.num_calls:
            events.append(TextPiece(self._space))
        return events

    @abstractmethod
    def _advance(self, events: list[Event]) -> bool:
        """Takes what it can of the held text; False where more text is needed."""

    @abstractmethod
    def _give_up(self, events: list[Event]) -> None:
        """The call under way, of which nothing was said yet, is content after all."""

    def _text(self, events: list[Event], text: str) -> None:
        whole = self._space + text
        content = whole.rstrip()
        self._space = whole[len(content) :]
        if content:
            events.append(TextPiece(content))

    def _read_call(self, events: list[Event], *, needs_arguments: bool) -> bool:
        """Feeds the call; True once it is at its end, announced or given up."""
        call = self._call
        assert call is not None
        self._held = call.feed(self._held)
        if not self._announced and call.name and (call.has_arguments or (call.done and not needs_arguments)):
            self._announced, self._num_sent, self._space = True, 0, ""
            events.append(CallStart(self.num_calls, call.name))
            self.num_calls += 1
        if self._announced:
            new = call.arguments[self._num_sent :]
            if new:
                events.append(CallArguments(self.num_calls - 1, new))
                self._num_sent += len(new)
        if not (call.done or call.bad):
            return False
        if not self._announced:
            self._give_up(events)
        elif self.num_calls == self._most:
            self._full = True
        self._call = None
        return True


class HermesReader(ToolCallReader):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, and text around them."""

    def __init__(self, most: int | None = None):
        super().__init__(most)
        self._closing = False

    def _advance(self, events: list[Event]) -> bool:
        if self._call is not None:
            if not self._read_call(events, needs_arguments=False):
                return False
            self._closing, self._announced = self._announced, False
            return True
        if self._closing:
            return self._skip_close()
        start = self._held.find(OPEN)
        if start >= 0:
            self._text(events, self._held[:start])
            self._held = self._held[start + len(OPEN) :]
            self._call = CallScanner(("arguments", "parameters"))
            return True
        keep = _possible_start(self._held, OPEN)
        self._text(events, self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _skip_close(self) -> bool:
        """Past the closing tag; a call without one is over as well."""
        rest = self._held.lstrip()
        if rest.startswith(CLOSE):
            self._held, self._closing = rest[len(CLOSE) :], False
            return True
        if CLOSE.startswith(rest):  # it may come yet
            return False
        self._closing = False
        return True

    def finish(self) -> list[Event]:
        if self._closing and CLOSE.startswith(self._held.strip()):
            self._held = ""
        return super().finish()

    def _give_up(self, events: list[Event]) -> None:
        assert self._call is not None
        self._text(events, OPEN)
        self._held = self._call.raw + self._held
        self._call = None


class Llama3Reader(ToolCallReader):
    """`{"name": …, "parameters": {…}}`, several with a semicolon between them; an answer of anything else is content.

    JSON that is an answer is told from a call by its keys.
    """

    def __init__(self, most: int | None = None):
        super().__init__(most)
        self._is_text = False
        self._before = ""

    def _advance(self, events: list[Event]) -> bool:
        if self._is_text:
            self._text(events, self._held)
            self._held = ""
            return False
        if self._call is not None:
            if not self._read_call(events, needs_arguments=True):
                return False
            self._announced = False
            return True
        rest = self._held.lstrip()
        if self.num_calls:
            rest = rest.removeprefix(";").lstrip()
        rest = rest.removeprefix(PYTHON_TAG).lstrip() if not self.num_calls else rest
        if rest.startswith("{"):
            self._before = self._held[: len(self._held) - len(rest)]
            self._held = rest
            self._call = CallScanner(("parameters", "arguments"), _LLAMA_KEYS)
            return True
        if not rest or PYTHON_TAG.startswith(rest):
            return False
        self._is_text = True
        return True

    def finish(self) -> list[Event]:
        if self.num_calls and not self._held.strip(" \n\t;"):
            self._held = ""
        return super().finish()

    def _give_up(self, events: list[Event]) -> None:
        assert self._call is not None
        self._text(events, self._before + self._call.raw)
        self._is_text, self._call = True, None


READERS: dict[str, type[ToolCallReader]] = {"hermes": HermesReader, "llama3_json": Llama3Reader}


def _possible_start(text: str, tag: str) -> int:
    """Length of the longest ending of the text that may grow into the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
