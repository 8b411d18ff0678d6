"""JSON read in small pieces, so that a body of megabytes does not hold the interpreter while it is read.

json.loads reads a text in one call, and nothing else runs meanwhile: 16 MiB of short values take it a second and more.
Here no call takes longer than some milliseconds, and on a thread of its own the reader lets the others go on between
them. It reads what json.loads reads, and refuses besides: a key that stands twice in an object (of two, a proxy may
have checked the other), what is nested deeper than MAX_DEPTH, more than MAX_VALUES values and numbers of more than
MAX_DIGITS characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from json import JSONDecodeError
from typing import Any

MAX_DEPTH = 128
"""Lists and objects within one another."""

MAX_VALUES = 2**20
"""Values of one text; a text, list, object or key counts as PART_WEIGHT, by what it takes to read and to keep."""

PART_WEIGHT = 8

MAX_DIGITS = 4300
"""Characters of a number: Python makes no longer text an integer."""

QUICK_CHARS = 2**16
"""Up to so many are read in one call, which takes 10 ms at most."""

_RUN_CHARS = 2**14
"""Of a list, how much is searched at once for plain numbers and words, which are read together."""

_MIN_RUN_CHARS = 16

_SPACE = re.compile(r"[ \t\n\r]{0,65536}")
_NOT_PLAIN = re.compile(r'["\[\]{}]')
_NUMBER = re.compile(rf"[-+.0-9eE]{{1,{MAX_DIGITS + 1}}}")
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
# Units that are read alike wherever a string is cut between them: a pair of escaped surrogates is one.
_PIECE = re.compile(
    r"""(?:[^"\\\x00-\x1f]{1,4096}+
        |\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}
        |\\u[0-9a-fA-F]{4}
        |\\["\\/bfnrt]
        ){0,256}+""",
    re.VERBOSE,
)


def read_text(text: str) -> Any:
    """The value that a JSON text stands for.

    Raises:
        JSONDecodeError: it is none, or beyond one of the bounds above.
    """
    # A text without many brackets cannot be deep.
    if len(text) <= QUICK_CHARS and text.count("[") + text.count("{") <= MAX_DEPTH:
        try:
            return json.loads(text, object_pairs_hook=_object_of)
        except JSONDecodeError:
            raise
        except ValueError:
            pass  # a key that stands twice, or digits without end: the reader says where
    return _Reader(text).read()


def _object_of(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError
    return found


class _Reader:
    """Reads one text. Methods take where they begin, and return what they read and where they stopped."""

    def __init__(self, text: str):
        self._text = text
        self._left = MAX_VALUES

    def read(self) -> Any:
        value, pos = self._value(self._space(0), 0)
        if (pos := self._space(pos)) < len(self._text):
            raise self._bad("Extra data", pos)
        return value

    def _bad(self, what: str, pos: int) -> JSONDecodeError:
        return JSONDecodeError(what, self._text, pos)

    def _space(self, pos: int) -> int:
        while self._text[pos : pos + 1] in (" ", "\t", "\n", "\r"):
            match = _SPACE.match(self._text, pos)
            assert match is not None
            pos = match.end()
        return pos

    def _count(self, number: int, pos: int) -> None:
        self._left -= number
        if self._left < 0:
            most = f"{MAX_VALUES} numbers, or {MAX_VALUES // PART_WEIGHT} texts, keys, lists and objects"
            raise self._bad(f"too much in one body, {most} are the most: send several requests", pos)

    def _value(self, pos: int, depth: int) -> tuple[Any, int]:
        first = self._text[pos : pos + 1]
        self._count(PART_WEIGHT if first in ('"', "[", "{") else 1, pos)
        if first == '"':
            return self._string(pos)
        if first not in ("[", "{"):
            return self._plain(pos)
        if depth >= MAX_DEPTH:
            raise self._bad(f"lists and objects more than {MAX_DEPTH} deep", pos)
        return self._list(pos + 1, depth + 1) if first == "[" else self._object(pos + 1, depth + 1)

    def _plain(self, pos: int) -> tuple[Any, int]:
        for word in _WORDS:
            if self._text.startswith(word, pos):
                return json.loads(word), pos + len(word)
        match = _NUMBER.match(self._text, pos)
        if match is None:
            raise self._bad("Expecting value", pos)
        if match.end() - pos > MAX_DIGITS:
            raise self._bad(f"a number of more than {MAX_DIGITS} characters", pos)
        try:
            return json.loads(match.group()), match.end()
        except JSONDecodeError as error:
            raise self._bad(error.msg, pos + error.pos) from None

    def _list(self, pos: int, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        pos = self._space(pos)
        if self._text[pos : pos + 1] == "]":
            return items, pos + 1
        while True:
            run, pos = self._run(pos)
            items += run
            value, pos = self._value(pos, depth)
            items.append(value)
            pos = self._space(pos)
            after = self._text[pos : pos + 1]
            if after == "]":
                return items, pos + 1
            if after != ",":
                raise self._bad("Expecting ',' delimiter", pos)
            pos = self._space(pos + 1)

    def _run(self, pos: int) -> tuple[list[Any], int]:
        """The numbers and words of a list that can be read together, up to the comma after them."""
        end = min(pos + _RUN_CHARS, len(self._text))
        other = _NOT_PLAIN.search(self._text, pos, end)
        comma = self._text.rfind(",", pos, other.start() if other else end)
        if comma - pos < _MIN_RUN_CHARS:
            return [], pos
        try:
            values = json.loads(f"[{self._text[pos:comma]}]")
        except JSONDecodeError as error:
            raise self._bad(error.msg, pos + error.pos - 1) from None
        except ValueError:  # digits without end
            return [], pos
        self._count(len(values), pos)
        return values, self._space(comma + 1)

    def _object(self, pos: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        pos = self._space(pos)
        if self._text[pos : pos + 1] == "}":
            return found, pos + 1
        while True:
            if self._text[pos : pos + 1] != '"':
                raise self._bad("Expecting property name enclosed in double quotes", pos)
            self._count(PART_WEIGHT, pos)
            key, after = self._string(pos)
            if key in found:
                raise self._bad(f"the key {key[:100]!r} stands twice in an object", pos)
            pos = self._space(after)
            if self._text[pos : pos + 1] != ":":
                raise self._bad("Expecting ':' delimiter", pos)
            found[key], pos = self._value(self._space(pos + 1), depth)
            pos = self._space(pos)
            after = self._text[pos : pos + 1]
            if after == "}":
                return found, pos + 1
            if after != ",":
                raise self._bad("Expecting ',' delimiter", pos)
            pos = self._space(pos + 1)

    def _string(self, begin: int) -> tuple[str, int]:
        pieces: list[str] = []
        pos = begin + 1
        while True:
            match = _PIECE.match(self._text, pos)
            assert match is not None
            piece, end = match.group(), match.end()
            pieces.append(json.loads(f'"{piece}"') if "\\" in piece else piece)
            after = self._text[end : end + 1]
            if after == '"':
                return "".join(pieces), end + 1
            if not after:
                raise self._bad("Unterminated string starting at", begin)
            if end == pos:
                what = "Invalid \\escape" if after == "\\" else "Invalid control character at"
                raise self._bad(what, pos)
            pos = end
