"""The words in which AdapterCache and its users speak of adapters in device memory (host only, no jax)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

EXPECTED, LOADING, NEXT = 1.0, 2.0, 3.0
"""How the rank of an idle adapter begins (see EvictionOrder) that a waiting request in sight wants, whose pages are
being filled, or that the first of these requests wants. Others have the lowest rank."""


class CacheableAdapter(Protocol):
    """What the host's bookkeeping reads of an Adapter; hashed by identity."""

    @property
    def name(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_pages(self) -> int: ...


AdapterT = TypeVar("AdapterT", bound=CacheableAdapter)


class PageWrite(NamedTuple, Generic[AdapterT]):
    """One page to copy to the device: page `index` of the adapter's own, to page `page_id` of the pool."""

    adapter: AdapterT
    index: int
    page_id: int


@dataclass(eq=False, slots=True)
class Residency:
    """What the cache notes about an adapter that holds pages.

    Attributes:
        page_ids: in the order of the adapter's own pages.
        num_written: how many of them were handed out to be copied.
        references: running sequences that use it.
        counts_as_miss: until the acquisition that the load was made for.
        unused: until it is first acquired.
    """

    page_ids: list[int]
    num_written: int = 0
    references: int = 0
    counts_as_miss: bool = True
    unused: bool = True


class UseTally:
    """How often each adapter was found in the pool when a sequence wanted it, and how often it had to be brought in.

    Adapters are held weakly: the counts of one go with its registration.
    """

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

    def of(self, adapter: Any) -> tuple[int, int]:
        """(hits, misses) of one adapter."""
        hits, misses = self._counts.get(adapter, (0, 0))
        return hits, misses

    def hit(self, adapter: Any, counts: bool) -> bool:
        """Counts a hit where it `counts` as one; `counts` again."""
        self._entry(adapter)[0] += counts
        return counts

    def miss(self, adapter: Any, counts: bool) -> bool:
        """As `hit`, for a miss."""
        self._entry(adapter)[1] += counts
        return counts

    def _entry(self, adapter: Any) -> list[int]:
        return self._counts.setdefault(adapter, [0, 0])
