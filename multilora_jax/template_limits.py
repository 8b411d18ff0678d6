"""What a chat template may cost: a meter of its text and time, and how large results may grow before they exist."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

ITEM_SIZE = 16
"""What an item of a list or dict counts for beside its text, in characters."""
_MAX_BITS = 2**16
_STARRED = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.]*\*")
_NESTED = re.compile(r"\{[^{}]*:[^{}]*\{")
# Digits that may be a width: right before the kind of a % format, or in the braces of a field.
_PERCENT_WIDTH = re.compile(r"\d+(?=[.\d]*[hlL]?[a-zA-Z])")
_FIELD_WIDTH = re.compile(r"\d+(?=[^{}]*\})")


class TemplateLimitError(Exception):
    """A template that asks for more than its limits allow."""


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may take.

    Attributes:
        max_text: characters of any text, of everything written together, and of the text that a list or dict would
            make, each of its items counted as ITEM_SIZE more.
        max_number: largest width, count or the like that is given to a method or filter of texts.
        seconds: on `clock`, looked at in every turn of a loop and in every call.
        clock: by default the processor time of the calling thread, so that a busy machine ends no honest template.
    """

    max_text: int = 16 * 2**20
    max_number: int = 10**6
    seconds: float = 5.0
    clock: Callable[[], float] = time.thread_time


class Meter:
    """Counts for one rendering; every method raises TemplateLimitError where a limit is passed."""

    def __init__(self, limits: TemplateLimits):
        self.limits = limits
        self._deadline = limits.clock() + limits.seconds
        self._written = 0
        # Sizes by id; the value is held so that no other takes its id. Nothing in the sandbox changes a container.
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._held = 0

    def tick(self) -> None:
        """Called wherever a template could go round for ever."""
        if self.limits.clock() > self._deadline:
            raise TemplateLimitError(f"it ran for more than {self.limits.seconds:g} s")

    def write(self, characters: int) -> None:
        """Counts text that is written, into the result or into a variable."""
        self._written = self.check(self._written + characters)

    def check(self, size: int) -> int:
        """`size`, if a value may be of it."""
        if size > self.limits.max_text:
            raise TemplateLimitError(f"it makes texts or lists of more than {self.limits.max_text} characters")
        return size

    def check_numbers(self, *values: Any) -> None:
        """Refuses integers beyond max_number."""
        for value in values:
            if isinstance(value, int) and abs(value) > self.limits.max_number:
                raise TemplateLimitError(f"it uses a number beyond {self.limits.max_number} as a width or count")

    def size(self, value: Any) -> int:
        """About how many characters the text of `value` has; shared parts count wherever they occur."""
        kind = type(value)
        if kind is str:  # by far the most frequent
            return self.check(len(value))
        if kind is int or kind is bool or value is None:
            return ITEM_SIZE
        if isinstance(value, str | bytes):
            return self.check(len(value))
        if not isinstance(value, Sequence | Mapping | AbstractSet) or isinstance(value, range):
            return ITEM_SIZE
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        total = 0
        for item in value:
            total = self.check(total + ITEM_SIZE + self.size(item))
            if isinstance(value, Mapping):
                total = self.check(total + ITEM_SIZE + self.size(value[item]))
        self.hold(value, total)
        return total

    def hold(self, value: Any, size: int) -> None:
        """Remembers the size of a container."""
        self._held += size + ITEM_SIZE
        if self._held > self.limits.max_text:
            self._sizes.clear()
            self._held = 0
        self._sizes[id(value)] = (value, size)

    def items(self, values: Iterator[Any]) -> Iterator[Any]:
        """The same items, each counted as it comes."""
        total = 0
        for value in values:
            self.tick()
            total = self.check(total + ITEM_SIZE + self.size(value))
            yield value

    def before_operator(self, operator: str, left: Any, right: Any) -> int | None:
        """Looks at `left operator right` before it is computed; the size of a result that is a container."""
        if operator == "+":
            if type(left) is str and type(right) is str:
                self.check(len(left) + len(right))
            elif isinstance(left, Sequence) and isinstance(right, Sequence):
                return self.check(self.size(left) + self.size(right))
        elif operator == "%" and isinstance(left, str | bytes):
            self.before_percent(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() * abs(right))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() + right.bit_length())
        elif operator == "*" and isinstance(left, Sequence) and isinstance(right, int):
            return self.check((self.size(left) + len(left)) * max(right, 0))
        elif operator == "*" and isinstance(right, Sequence) and isinstance(left, int):
            return self.check((self.size(right) + len(right)) * max(left, 0))
        return None

    def before_percent(self, form: Any, values: Any) -> None:
        """Looks at `form % values`."""
        form = str(form)
        if _STARRED.search(form):
            raise TemplateLimitError("it uses a '*' as the width of a % format")
        self._check_fields(form, form.count("%"), _PERCENT_WIDTH, values)

    def before_format(self, form: str, args: Any, keywords: Any) -> None:
        """Looks at `form.format(*args, **keywords)`."""
        if _NESTED.search(form):
            raise TemplateLimitError("it nests the fields of a format")
        self._check_fields(form, form.count("{"), _FIELD_WIDTH, (args, keywords))

    def before_replace(self, text: str, old: str, new: str) -> None:
        """Looks at `text.replace(old, new)`."""
        self.check(len(text) + text.count(old) * len(new))

    def before_join(self, separator: str, items: Sequence[Any]) -> None:
        """Looks at `separator.join(items)`."""
        self.check(self.size(items) + len(separator) * len(items))

    def _check_fields(self, form: str, fields: int, width: re.Pattern[str], values: Any) -> None:
        widest = max((int(digits[:9]) for digits in width.findall(form)), default=0)
        self.check(len(form) + fields * (widest + self.size(values)))

    def _check_bits(self, bits: int) -> None:
        if bits > _MAX_BITS:
            raise TemplateLimitError("it computes very large numbers")


_METER: ContextVar[Meter] = ContextVar("meter")


def meter() -> Meter:
    """That of the rendering under way in this thread or task."""
    return _METER.get()


@contextmanager
def metered(limits: TemplateLimits) -> Iterator[Meter]:
    """A new meter for what is compiled or rendered inside."""
    token = _METER.set(Meter(limits))
    try:
        yield _METER.get()
    finally:
        _METER.reset(token)
