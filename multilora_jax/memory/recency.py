"""One order of eviction over everything idle in the pool, whatever its kind (host only, no jax).

Whoever owns pages that nobody needs right now (an adapter without a running sequence, a cached prefix) lists them
here; whoever needs pages takes them from the front. So adapters and KV give way to each other by one rule.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from multilora_jax.errors import ConfigError
from multilora_jax.memory.allocator import PoolIntegrityError

EvictionPolicy = Literal["lru", "fifo"]
Rank: TypeAlias = tuple[float, ...]
"""What goes before age: items of a lower rank are evicted first. () is the lowest."""


@dataclass(slots=True)
class _Idle:
    stamp: int
    num_pages: int
    evict: Callable[[Any], None]
    rank: Rank


class EvictionOrder:
    """Who leaves the pool next. Not thread-safe.

    An item of any kind `enter`s when it gets its pages and `leave`s when it gives them back; in between it is in use
    or idle. Items of a lower rank go first, whatever their age; within a rank it is the policy that decides.

    Args:
        policy: "lru": the longest idle goes first; "fifo": the longest in the pool, however often it was used since.

    Attributes:
        num_pages: pages of all idle items: what eviction could free at most.

    Raises:
        ConfigError: an unknown policy.
    """

    def __init__(self, policy: EvictionPolicy = "lru") -> None:
        if policy not in get_args(EvictionPolicy):
            raise ConfigError(
                f"the eviction policy must be one of {', '.join(get_args(EvictionPolicy))}, got {policy!r}",
                reason="bad_value", param="lora_eviction_policy",
            )  # fmt: skip
        self.policy = policy
        self._next_stamp = 0
        self.clear()

    def clear(self) -> None:
        """Forget all items; nobody is told."""
        self.num_pages = 0
        self._arrival: dict[Hashable, int] = {}
        self._idle: dict[Hashable, _Idle] = {}
        self._order: list[tuple[Rank, int, Hashable]] = []  # (rank, stamp, item); stamps are unique

    def __len__(self) -> int:
        """Idle items."""
        return len(self._idle)

    def __iter__(self) -> Iterator[Any]:
        """Idle items, the next to go first; the order must not change meanwhile."""
        return (item for _, _, item in self._order)

    def enter(self, item: Hashable) -> None:
        """Note that an item got its pages now; it is in use until `set_idle`.

        Raises:
            PoolIntegrityError: it is in the pool already.
        """
        if item in self._arrival:
            raise PoolIntegrityError(f"{item!r} enters the pool but is in it")
        self._arrival[item] = self._stamp()

    def leave(self, item: Hashable) -> None:
        """Note that an item, idle or in use, gave its pages back.

        Raises:
            PoolIntegrityError: it is not in the pool.
        """
        self.set_in_use(item)
        if self._arrival.pop(item, None) is None:
            raise PoolIntegrityError(f"{item!r} leaves the pool but is not in it")

    def set_idle(self, item: Hashable, num_pages: int, evict: Callable[[Any], None], rank: Rank = ()) -> None:
        """List an item as one that may go; its time of last use is now.

        Args:
            num_pages: what its eviction frees.
            evict: called with the item when its turn has come; it frees the pages and calls `leave`.
            rank: see the class.

        Raises:
            PoolIntegrityError: it never entered, or is idle already.
        """
        if item in self._idle or item not in self._arrival:
            raise PoolIntegrityError(f"{item!r} becomes idle but is idle already or not in the pool")
        stamp = self._arrival[item] if self.policy == "fifo" else self._stamp()
        self._idle[item] = _Idle(stamp, num_pages, evict, rank)
        bisect.insort(self._order, (rank, stamp, item))
        self.num_pages += num_pages

    def set_in_use(self, item: Hashable) -> None:
        """Take an item off the list; nothing to do for one that is not idle."""
        entry = self._idle.pop(item, None)
        if entry is not None:
            del self._order[self._place(entry)]
            self.num_pages -= entry.num_pages

    def is_idle(self, item: Hashable) -> bool:
        return item in self._idle

    def set_rank(self, item: Hashable, rank: Rank) -> None:
        """Change an idle item's rank; its age within the rank stays. Nothing to do for one that is not idle."""
        entry = self._idle.get(item)
        if entry is not None and entry.rank != rank:
            del self._order[self._place(entry)]
            entry.rank = rank
            bisect.insort(self._order, (rank, entry.stamp, item))

    def choose(
        self,
        num_pages: int,
        num_free: int,
        *,
        protect: Collection[Any] = (),
        spare: int = 0,
        chosen: Collection[Hashable] = (),
    ) -> list[Hashable] | None:
        """Whom to evict so that `num_pages` pages can be had; changes nothing.

        Args:
            num_free: pages that are free already.
            protect: items that must stay.
            spare: pages that must be free, or evictable and not protected, beside those.
            chosen: items that go in any case.

        Returns:
            the items, `chosen` first; None where even all of them together would not do.
        """
        room, wanted = num_free, num_pages + spare
        victims = dict.fromkeys(chosen)
        for item in victims:
            room += self._idle[item].num_pages
        if room + self.num_pages < wanted:
            return None
        for _, _, item in self._order:
            if room >= wanted:
                break
            if item not in victims and item not in protect:
                freed = self._idle[item].num_pages
                if room < num_pages and freed:
                    victims[item] = None
                room += freed
        return list(victims) if room >= wanted else None

    def evict(self, items: Iterable[Hashable]) -> int:
        """Evict these idle items, whatever their place; returns the pages freed."""
        freed = 0
        for item in items:
            entry = self._idle[item]
            self.set_in_use(item)
            entry.evict(item)
            freed += entry.num_pages
        return freed

    def pages_of(self, item: Hashable) -> int:
        """Pages that the eviction of an item would free: 0 for one that is not idle."""
        entry = self._idle.get(item)
        return 0 if entry is None else entry.num_pages

    def check_integrity(self) -> None:
        """Prove that the list, its index and the sum agree.

        Raises:
            PoolIntegrityError: they do not.
        """
        listed = sorted((entry.rank, entry.stamp) for entry in self._idle.values())
        if listed != [key[:2] for key in self._order] or {key[2] for key in self._order} != set(self._idle):
            raise PoolIntegrityError(f"{len(self._idle)} items are idle but {len(self._order)} are listed, or disorder")
        pages = sum(entry.num_pages for entry in self._idle.values())
        if pages != self.num_pages or not set(self._idle) <= set(self._arrival):
            raise PoolIntegrityError(f"idle items hold {pages} pages but {self.num_pages} are counted, or one left")

    def _stamp(self) -> int:
        self._next_stamp += 1
        return self._next_stamp

    def _place(self, entry: _Idle) -> int:
        return bisect.bisect_left(self._order, (entry.rank, entry.stamp))
