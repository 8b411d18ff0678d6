"""KV pages by what is in them: sequences that begin alike share them, and they outlive their sequences (no jax).

Only full pages are shared, and a sequence only writes behind its shared ones, so nobody ever writes to a page that
another reads. A page's key is a hash over everything that decides its content: the adapters of the request with their
scales, the tenant's salt, and all tokens from the start of the text to the end of the page. Positions need no place in
it, since a prefix always begins at position 0; neither does what is the same for all requests of an engine.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from multilora_jax.memory.allocator import PageAllocator, PageKind, PoolIntegrityError
from multilora_jax.memory.recency import EvictionOrder


def prefix_root(digests: Sequence[str], scales: Sequence[float], salt: str | None = None) -> bytes:
    """What two requests must have in common before they can share a page: 32 bytes.

    Args:
        digests: SHA-256 (hex) of the content of each adapter of the request; none for the base alone.
        scales: the request's factor on each; the order of the adapters does not matter.
        salt: of the tenant; None is a salt of its own.
    """
    parts = sorted(f"{digest}*{float(scale).hex()}" for digest, scale in zip(digests, scales, strict=True))
    adapters = "+".join(parts).encode()
    salt_bytes = b"" if salt is None else b"s" + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(struct.pack("<QQ", len(adapters), len(salt_bytes)) + adapters + salt_bytes).digest()


@dataclass(eq=False, slots=True)
class PrefixChain:
    """The keys of one sequence's full pages, found as they are asked for.

    Attributes:
        root: see `prefix_root`.
        page_tokens: tokens of a page.
        reads: whether the sequence may take pages that others computed.
        max_pages: pages beyond these are not offered to others; None for no limit.
        num_offered: pages of the sequence that were offered to others, or taken from them.
    """

    root: bytes
    page_tokens: int
    reads: bool = True
    max_pages: int | None = None
    num_offered: int = 0
    _keys: list[bytes] = field(default_factory=list)

    def keys(self, token_ids: Sequence[int], num_tokens: int) -> list[bytes]:
        """The keys of the full pages among the first `num_tokens` of `token_ids`, which only ever grow."""
        size, keys = self.page_tokens, self._keys
        count = num_tokens // size
        if self.max_pages is not None:
            count = min(count, self.max_pages)
        while len(keys) < count:
            first = len(keys) * size
            before = keys[-1] if keys else self.root
            tokens = array("q", token_ids[first : first + size]).tobytes()
            keys.append(hashlib.sha256(before + tokens).digest())
        return keys[:count]


class PrefixCache:
    """Which page holds the KV of which key, and who uses it. Not thread-safe.

    A page of a key is in use (kind KV) or cached (kind CACHED): then nobody uses it, and it stands in the eviction
    order until it is taken again or makes room. A page without a key has one user, and the cache knows nothing of it.

    Args:
        allocator: the pool's free list.
        order: of eviction, shared with the adapters. Cached pages go by the time of their last use, whatever the
            policy, among the adapters that no waiting request wants, and the last pages of a text before its first.

    Attributes:
        queries, hits: prompt tokens that were looked up, and those found.
    """

    def __init__(self, allocator: PageAllocator, order: EvictionOrder) -> None:
        self.queries = self.hits = 0
        self._allocator = allocator
        self._order = order
        self.clear()

    def clear(self) -> None:
        """Forget all pages, those in use too; allocator and order are cleared beside it."""
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._users: dict[int, int] = {}  # of each page with a key; 0 for a cached one

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest run of keys, from the first on, that are all there."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_in_use(self, page_ids: Iterable[int]) -> int:
        """How many of these pages, all with a key, are in use."""
        return sum(self._users[page] > 0 for page in page_ids)

    def share(self, page_ids: Iterable[int]) -> None:
        """Add a user to each of these pages, all with a key."""
        taken = []
        for page in page_ids:
            if not self._users[page]:
                self._order.leave(page)
                taken.append(page)
            self._users[page] += 1
        self._allocator.convert(taken, PageKind.CACHED, PageKind.KV)

    def publish(self, page: int, key: bytes) -> None:
        """Let others find a page, whose only user has computed all of it; nothing to do where the key has a page."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key
            self._users[page] = 1

    def release(self, page_ids: Sequence[int], keys: Sequence[bytes] = ()) -> None:
        """Take one user from each of a sequence's pages, in the order of the text.

        Pages without a key come free at once, those with one are cached once nobody uses them.

        Args:
            keys: of the first of these pages; a cached page of an equal text counts as used now.
        """
        for page, key in zip(page_ids, keys, strict=False):
            twin = self._page_of.get(key)
            if twin is not None and twin != page and not self._users[twin]:
                self._order.leave(twin)
                self._list(twin)
        free, cached = [], []
        # In reverse, so that the end of a text counts as older than its start, without which it is useless.
        for page in reversed(page_ids):
            if page not in self._key_of:
                free.append(page)
                continue
            self._users[page] -= 1
            if not self._users[page]:
                cached.append(page)
        free.reverse()
        self._allocator.free(free, PageKind.KV)
        self._allocator.convert(cached, PageKind.KV, PageKind.CACHED)
        for page in cached:
            self._list(page)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let nobody find the pages of these keys any more; cached ones come free."""
        for key in keys:
            page = self._page_of.get(key)
            if page is not None and not self._users[page]:
                self._order.evict([page])

    def check_integrity(self, users: Mapping[int, int]) -> None:
        """Prove that the books agree with the allocator, the eviction order and the sequences.

        Args:
            users: of each page that running sequences list, how many do.

        Raises:
            PoolIntegrityError: they do not.
        """
        cached = [page for page, count in self._users.items() if not count]
        held = self._allocator.count(PageKind.CACHED)
        if len(cached) != held or not all(map(self._order.is_idle, cached)):
            raise PoolIntegrityError(f"{len(cached)} pages are cached, the allocator says {held}, or one is not listed")
        if len(users) != self._allocator.count(PageKind.KV):
            raise PoolIntegrityError(
                f"running sequences list {len(users)} KV pages, the allocator {self._allocator.count(PageKind.KV)}"
            )
        if self._page_of != {k: page for page, k in self._key_of.items()} or self._users.keys() != self._key_of.keys():
            raise PoolIntegrityError("a page and its key disagree")
        for page in users.keys() | self._users.keys():
            if self._users.get(page, 1) != users.get(page, 0):
                raise PoolIntegrityError(
                    f"page {page} has {users.get(page, 0)} users, the prefix cache counts {self._users.get(page, 1)}"
                )

    def _list(self, page: int) -> None:
        self._order.enter(page)
        self._order.set_idle(page, 1, self._evict)

    def _evict(self, page: int) -> None:
        self._order.leave(page)
        del self._page_of[self._key_of.pop(page)], self._users[page]
        self._allocator.free([page], PageKind.CACHED)
