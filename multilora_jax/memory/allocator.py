"""Free list of the unified pool: which page id holds what (host only, no jax).

One free list serves KV cache and adapters alike (S-LoRA section 5.1, unified paging); page 0 is never handed out.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from multilora_jax.errors import ConfigError


class PoolIntegrityError(RuntimeError):
    """The host's books of the pool contradict themselves: a bug in this package, never the caller's input."""


class PageKind(enum.IntEnum):
    """What a page holds. CACHED is for prefixes that outlive their sequence."""

    FREE = 0
    KV = 1
    ADAPTER = 2
    CACHED = 3


_RESERVED = 255  # page 0's kind, equal to no PageKind, so that no call can hand it out or take it back


class PageAllocator:
    """Hands out page ids 1..num_pages-1, last freed first, lowest first at the start. Not thread-safe.

    Every operation costs O(pages asked for), and the same calls always give the same pages.

    Args:
        num_pages: P of the pool, page 0 included.

    Raises:
        ConfigError: fewer than two pages.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ConfigError(
                f"the pool needs at least 2 pages (page 0 is reserved), got {num_pages}: raise pool_pages",
                reason="pool_pages", param="pool_pages",
            )  # fmt: skip
        self.num_pages = num_pages
        self.clear()

    def clear(self) -> None:
        """Take all pages back, whoever has them."""
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._kinds = bytearray(self.num_pages)
        self._kinds[0] = _RESERVED
        self._counts = [self.num_pages - 1, 0, 0, 0]

    @property
    def num_total(self) -> int:
        """Pages that can be handed out: all but page 0."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, kind: PageKind) -> int:
        """Pages that hold `kind` now."""
        return self._counts[kind]

    def kind_bytes(self) -> bytes:
        """PageKind of each page of 1..num_pages-1 as a byte, in order of page id; a copy. O(P), at memory's speed."""
        return bytes(memoryview(self._kinds)[1:])

    def kinds(self) -> list[PageKind]:
        """What each page of 1..num_pages-1 holds now, in order of page id. O(P)."""
        return [PageKind(kind) for kind in self._kinds[1:]]

    def allocate(self, num_pages: int, kind: PageKind) -> list[int] | None:
        """Take `num_pages` pages for `kind`, or None, and nothing taken, when fewer are free.

        Raises:
            PoolIntegrityError: a negative count, or kind FREE.
        """
        if num_pages < 0 or kind == PageKind.FREE:
            raise PoolIntegrityError(f"allocate({num_pages}, {kind!r}): a count of 0 or more of a kind that holds data")
        free = self._free
        if num_pages > len(free):
            return None
        start = len(free) - num_pages
        pages = free[start:]
        pages.reverse()
        del free[start:]
        kinds = self._kinds
        for page in pages:
            kinds[page] = kind
        self._counts[PageKind.FREE] -= num_pages
        self._counts[kind] += num_pages
        return pages

    def free(self, page_ids: Sequence[int], kind: PageKind) -> None:
        """Give back pages that were allocated as `kind`.

        Raises:
            PoolIntegrityError: a page out of range, free already, named twice, or held as another kind; the call
                then changes nothing.
        """
        if kind == PageKind.FREE:
            raise PoolIntegrityError("free() needs the kind that the pages were allocated as, got FREE")
        kinds = self._kinds
        for i, page in enumerate(page_ids):
            if not 0 < page < self.num_pages or kinds[page] != kind:
                found = PageKind(kinds[page]).name if 0 < page < self.num_pages else "reserved or out of range"
                for done in page_ids[:i]:
                    kinds[done] = kind
                raise PoolIntegrityError(f"page {page} was freed as {kind.name} but is {found}")
            kinds[page] = PageKind.FREE
        self._free.extend(reversed(page_ids))
        self._counts[PageKind.FREE] += len(page_ids)
        self._counts[kind] -= len(page_ids)

    def convert(self, page_ids: Sequence[int], kind: PageKind, to: PageKind) -> None:
        """Note that pages which hold `kind` hold `to` from now on, without giving them back.

        Raises:
            PoolIntegrityError: `to` is FREE, or a page is not held as `kind`; the call then changes nothing.
        """
        kinds = self._kinds
        if to == PageKind.FREE or not all(0 < page < self.num_pages and kinds[page] == kind for page in page_ids):
            raise PoolIntegrityError(f"pages {list(page_ids)} cannot go from {kind.name} to {to.name}")
        for page in page_ids:
            kinds[page] = to
        self._counts[kind] -= len(page_ids)
        self._counts[to] += len(page_ids)

    def check_integrity(self) -> None:
        """Prove that free + kv + adapter + cached = total and that the free list is exactly the free pages. O(P).

        Raises:
            PoolIntegrityError: with the equation as found.
        """
        found = [self._kinds.count(kind) for kind in PageKind]
        equation = " + ".join(f"{kind.name.lower()} {found[kind]}" for kind in PageKind)
        if sum(found) != self.num_total or found != self._counts:
            raise PoolIntegrityError(f"{equation} = total {self.num_total} does not hold (counters: {self._counts})")
        listed = set(self._free)
        if len(listed) != len(self._free):
            raise PoolIntegrityError(f"the free list names {len(self._free) - len(listed)} pages twice")
        if len(listed) != found[PageKind.FREE] or any(self._kinds[page] != PageKind.FREE for page in listed):
            raise PoolIntegrityError(f"the free list names {len(listed)} pages but the page table says {equation}")
