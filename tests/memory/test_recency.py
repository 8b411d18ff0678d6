"""The order of eviction over items of more than one kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from multilora_jax.errors import ConfigError
from multilora_jax.memory.allocator import PageAllocator, PageKind, PoolIntegrityError
from multilora_jax.memory.recency import EvictionOrder, EvictionPolicy, Rank


@dataclass(eq=False)
class Item:
    """An adapter or a cached prefix: its owner frees its pages when it is evicted."""

    name: str
    kind: PageKind
    num_pages: int
    pages: list[int] = field(default_factory=list)


class Owner:
    """What a cache does with one kind of item."""

    def __init__(self, allocator: PageAllocator, order: EvictionOrder):
        self.allocator, self.order = allocator, order
        self.evicted: list[str] = []

    def load(self, item: Item) -> Item:
        pages = self.allocator.allocate(item.num_pages, item.kind)
        assert pages is not None
        item.pages = pages
        self.order.enter(item)
        return item

    def idle(self, *items: Item, rank: Rank = ()) -> None:
        for item in items:
            self.order.set_idle(item, item.num_pages, self.evict, rank)

    def evict(self, item: Any) -> None:
        self.allocator.free(item.pages, item.kind)
        self.order.leave(item)
        self.evicted.append(item.name)


def make(policy: EvictionPolicy = "lru") -> tuple[EvictionOrder, Owner, Owner]:
    """An order, and owners of adapters and of prefixes in it."""
    allocator, order = PageAllocator(40), EvictionOrder(policy)
    return order, Owner(allocator, order), Owner(allocator, order)


def names(order: EvictionOrder) -> str:
    return "".join(item.name for item in order if isinstance(item, Item))


def load(owner: Owner, *specs: tuple[str, int], kind: PageKind) -> list[Item]:
    return [owner.load(Item(name, kind, num_pages)) for name, num_pages in specs]


def test_one_order_over_adapters_and_prefixes():
    order, adapters, prefixes = make()
    a, b = load(adapters, ("a", 3), ("b", 2), kind=PageKind.ADAPTER)
    p, q = load(prefixes, ("p", 1), ("q", 1), kind=PageKind.CACHED)
    prefixes.idle(p)
    adapters.idle(a)
    prefixes.idle(q)
    adapters.idle(b)
    assert (names(order), order.num_pages, len(order)) == ("paqb", 7, 4)
    order.set_in_use(p)
    prefixes.idle(p)
    assert names(order) == "aqbp"
    victims = order.choose(4, num_free=0)
    assert victims == [a, q]
    assert order.num_pages == 7  # choosing changes nothing
    assert order.evict([a, q]) == 4
    assert (adapters.evicted, prefixes.evicted) == (["a"], ["q"])
    assert names(order) == "bp"
    order.check_integrity()


@pytest.mark.parametrize(("policy", "expected"), [("lru", "bca"), ("fifo", "abc")])
def test_policies_differ_in_what_use_does(policy: EvictionPolicy, expected: str):
    order, adapters, prefixes = make(policy)
    (a,) = load(adapters, ("a", 1), kind=PageKind.ADAPTER)
    (b,) = load(prefixes, ("b", 1), kind=PageKind.CACHED)
    (c,) = load(adapters, ("c", 1), kind=PageKind.ADAPTER)
    adapters.idle(a)
    prefixes.idle(b)
    adapters.idle(c)
    order.set_in_use(a)
    adapters.idle(a)
    assert names(order) == expected
    order.evict([a])
    adapters.load(a)  # comes back: as a new arrival
    adapters.idle(a)
    assert names(order) == "bca"


def test_lower_ranks_go_first_and_age_decides_within_one():
    order, owner, _ = make()
    a, b, c, d = load(owner, ("a", 1), ("b", 1), ("c", 1), ("d", 1), kind=PageKind.ADAPTER)
    owner.idle(a, rank=(2, 0))
    owner.idle(b, rank=(1, -3.5))
    owner.idle(c)
    owner.idle(d, rank=(1, -3.5))
    assert names(order) == "cbda"
    order.set_rank(a, (1, -3.5))
    order.set_rank(a, (1, -3.5))
    assert names(order) == "cabd"
    order.set_rank(b, (1, -4.5))
    assert names(order) == "cbad"
    order.set_rank(d, ())
    assert names(order) == "cdba"
    order.check_integrity()


def test_choose_spares_what_is_protected_and_leaves_spare_pages():
    order, owner, _ = make()
    a, b, c = load(owner, ("a", 2), ("b", 3), ("c", 2), kind=PageKind.ADAPTER)
    owner.idle(a, b, c)
    assert order.choose(2, num_free=2) == []
    assert order.choose(3, num_free=2) == [a]
    assert order.choose(3, num_free=2, protect=[a]) == [b]
    assert order.choose(3, num_free=2, protect=[a, b]) == [c]
    assert order.choose(3, num_free=2, protect=[a, b, c]) is None
    assert order.choose(8, num_free=2) == [a, b, c]
    assert order.choose(8, num_free=0) is None
    assert order.choose(3, num_free=2, spare=4) == [a]  # b and c could still be had
    assert order.choose(3, num_free=2, spare=7) is None
    assert order.choose(3, num_free=2, spare=4, protect=[c]) == [a]
    assert order.choose(3, num_free=2, spare=5, protect=[c]) is None
    assert order.choose(3, num_free=0, chosen=[c]) == [c, a]


def test_item_in_use_cannot_go_and_leaves_without_eviction():
    order, owner, _ = make()
    (a,) = load(owner, ("a", 2), kind=PageKind.ADAPTER)
    assert (order.is_idle(a), order.pages_of(a), order.num_pages) == (False, 0, 0)
    order.set_rank(a, (1,))
    order.set_in_use(a)
    owner.idle(a)
    assert (order.is_idle(a), order.pages_of(a)) == (True, 2)
    order.leave(a)
    assert (len(order), order.num_pages, owner.evicted) == (0, 0, [])
    order.check_integrity()


def test_misuse_is_an_internal_error():
    order, owner, _ = make()
    (a,) = load(owner, ("a", 1), kind=PageKind.ADAPTER)
    with pytest.raises(PoolIntegrityError, match="enters the pool but is in it"):
        order.enter(a)
    owner.idle(a)
    with pytest.raises(PoolIntegrityError, match="is idle already"):
        owner.idle(a)
    order.leave(a)
    with pytest.raises(PoolIntegrityError, match="leaves the pool but is not in it"):
        order.leave(a)
    with pytest.raises(PoolIntegrityError, match="not in the pool"):
        owner.idle(a)


def test_unknown_policy_is_refused():
    policy: Any = "random"
    with pytest.raises(ConfigError, match="one of lru, fifo, got 'random'") as caught:
        EvictionOrder(policy)
    assert caught.value.param == "lora_eviction_policy"


@pytest.mark.parametrize("damage", ["num_pages", "_order", "_idle", "_arrival"])
def test_check_integrity_finds_damage(damage: str):
    order, owner, _ = make()
    owner.idle(*load(owner, ("a", 1), ("b", 2), kind=PageKind.ADAPTER))
    order.check_integrity()
    if damage == "num_pages":
        order.num_pages += 1
    elif damage == "_order":
        order._order.reverse()
    else:
        getattr(order, damage).popitem()
    with pytest.raises(PoolIntegrityError):
        order.check_integrity()


RANKS: st.SearchStrategy[Rank] = st.sampled_from([(), (1,), (1, 2.5)])


class OrderMachine(RuleBasedStateMachine):
    """Against a plain list that is sorted anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.order: EvictionOrder = EvictionOrder("lru")
        self.state: dict[int, tuple[Rank, int, int] | None] = {}  # item: (rank, time of last use, pages) while idle
        self.time = 0

    @rule(i=st.integers(0, 5))
    def enter(self, i: int) -> None:
        if i not in self.state:
            self.order.enter(i)
            self.state[i] = None

    @rule(i=st.integers(0, 5), rank=RANKS, pages=st.integers(0, 3))
    def idle(self, i: int, rank: Rank, pages: int) -> None:
        if i in self.state and self.state[i] is None:
            self.time += 1
            self.order.set_idle(i, pages, self.order.leave, rank)
            self.state[i] = (rank, self.time, pages)

    @rule(i=st.integers(0, 5))
    def use(self, i: int) -> None:
        self.order.set_in_use(i)
        if i in self.state:
            self.state[i] = None

    @rule(i=st.integers(0, 5), rank=RANKS)
    def change_rank(self, i: int, rank: Rank) -> None:
        self.order.set_rank(i, rank)
        idle = self.state.get(i)
        if idle is not None:
            self.state[i] = (rank, idle[1], idle[2])

    @rule(needed=st.integers(0, 6), free=st.integers(0, 3), spare=st.integers(0, 2), protect=st.sets(st.integers(0, 5)))
    def make_room(self, needed: int, free: int, spare: int, protect: set[int]) -> None:
        idle = [(key, i) for i, key in self.state.items() if key is not None and i not in protect]
        victims, room = [], free
        for key, i in sorted(idle):
            if room >= needed:
                break
            if key[2]:
                victims.append(i)
                room += key[2]
        enough = free + sum(key[2] for key, _ in idle) >= needed + spare
        assert self.order.choose(needed, free, protect=protect, spare=spare) == (victims if enough else None)
        if enough:
            assert self.order.evict(victims) == room - free
            for i in victims:
                del self.state[i]

    @invariant()
    def agree(self) -> None:
        self.order.check_integrity()
        idle = {i: key for i, key in self.state.items() if key is not None}
        assert list(self.order) == sorted(idle, key=lambda i: idle[i])
        assert self.order.num_pages == sum(key[2] for key in idle.values())


TestOrderMachine = OrderMachine.TestCase
TestOrderMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
