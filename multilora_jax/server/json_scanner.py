"""One JSON object of a tool call, read as its text arrives."""

from __future__ import annotations

import json
from collections.abc import Collection


class CallScanner:
    """Finds the name and the arguments of a call in the text of its JSON object, character by character.

    The arguments are given out as the model writes them, so that what a stream's pieces add up to is what a whole
    answer says; what is inside them is not checked.

    Args:
        argument_keys: names under which the arguments may stand.
        known: keys that the object may have; None for any.

    Attributes:
        name: the call's, once it is complete.
        done: the object is closed.
        bad: it is no such object; where, does not matter then.
    """

    def __init__(self, argument_keys: Collection[str], known: Collection[str] | None = None):
        self._argument_keys = argument_keys
        self._known = known
        self._raw = ""
        self._pos = 0
        self._part = "start"  # what is expected at depth 1
        self._depth = 0
        self._in_string = self._escaped = False
        self._begin = 0
        self._key = ""
        self._arguments: tuple[int, int | None] | None = None
        self._is_first = True
        self.name: str | None = None
        self.done = self.bad = False

    def feed(self, text: str) -> str:
        """Takes text up to the end of the object, or up to what is wrong; returns the rest."""
        self._raw += text
        while self._pos < len(self._raw) and not (self.done or self.bad):
            self._take(self._raw[self._pos])
            self._pos += 1
        rest = self._raw[self._pos :]
        self._raw = self._raw[: self._pos]
        return rest

    @property
    def raw(self) -> str:
        """All that was taken."""
        return self._raw

    @property
    def has_arguments(self) -> bool:
        """Whether their text has begun."""
        return self._arguments is not None

    @property
    def arguments(self) -> str:
        """Their text so far: of an object as it is written, of anything else once it is whole.

        Models that write the object as a string mean the object; null means one without fields.
        """
        if self._arguments is None:
            return "{}" if self.done else ""
        begin, end = self._arguments
        text = self._raw[begin:end]
        if text.startswith("{"):
            return text
        if end is None:
            return ""
        if text.startswith('"'):
            inner = _parsed(text)
            return inner if isinstance(inner, str) else text
        return "{}" if text == "null" else text

    def _take(self, char: str) -> None:
        if self._in_string:
            self._take_in_string(char)
        elif char == '"':
            self._open_string()
        elif self._part == "inside":
            self._take_inside(char)
        elif not char.isspace():
            self._take_between(char)

    def _take_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth > 1:
                return
            if self._part == "key":
                key = _parsed(self._raw[self._begin : self._pos + 1])
                self._key = key if isinstance(key, str) else ""
                self.bad = not isinstance(key, str) or (self._known is not None and key not in self._known)
                self._part = "colon"
            else:
                self._end_value(self._pos + 1)

    def _open_string(self) -> None:
        if self._part not in ("key", "value", "inside") or (self._part == "inside" and self._depth == 1):
            self.bad = True
            return
        self._in_string = True
        if self._part == "key":
            self._begin = self._pos
        elif self._part == "value":
            self._begin_value()

    def _take_inside(self, char: str) -> None:
        if self._depth > 1:
            if char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 1:
                    self._end_value(self._pos + 1)
        elif char in ",}" or char.isspace():
            self._end_value(self._pos)
            if not char.isspace():
                self._take_between(char)

    def _take_between(self, char: str) -> None:
        part = self._part
        if part == "start" and char == "{":
            self._depth, self._part = 1, "key"
        elif part == "colon" and char == ":":
            self._part = "value"
        elif part == "value" and char in "{[":
            self._begin_value()
            self._depth = 2
        elif part == "value" and char in "-0123456789tfn":
            self._begin_value()
        elif part == "comma" and char == ",":
            self._part, self._is_first = "key", False
        elif char == "}" and (part == "comma" or (part == "key" and self._is_first)):
            self.done = True
        else:
            self.bad = True

    def _begin_value(self) -> None:
        self._begin, self._part = self._pos, "inside"
        if self._key in self._argument_keys and self._arguments is None:
            self._arguments = (self._begin, None)

    def _end_value(self, end: int) -> None:
        self._part = "comma"
        if self._arguments == (self._begin, None):
            self._arguments = (self._begin, end)
        elif self._key == "name":
            name = _parsed(self._raw[self._begin : end])
            self.name = name if isinstance(name, str) else None
            self.bad = not self.name


def _parsed(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return None
