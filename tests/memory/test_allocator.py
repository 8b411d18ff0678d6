"""The free list: exactness, refusals that change nothing, and a state machine against a plain model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from multilora_jax.errors import ConfigError, UserError
from multilora_jax.memory.allocator import PageAllocator, PageKind, PoolIntegrityError


def test_hands_out_lowest_pages_first_and_never_page_zero():
    allocator = PageAllocator(6)
    assert allocator.num_total == allocator.num_free == 5
    assert allocator.allocate(2, PageKind.KV) == [1, 2]
    assert allocator.allocate(3, PageKind.ADAPTER) == [3, 4, 5]
    assert allocator.allocate(1, PageKind.KV) is None


def test_last_freed_is_first_reused_in_the_same_order():
    allocator = PageAllocator(10)
    first = allocator.allocate(3, PageKind.KV)
    allocator.allocate(2, PageKind.KV)
    assert first is not None
    allocator.free(first, PageKind.KV)
    assert allocator.allocate(3, PageKind.ADAPTER) == first


def test_allocation_is_all_or_nothing():
    allocator = PageAllocator(4)
    assert allocator.allocate(4, PageKind.KV) is None
    assert allocator.num_free == 3
    assert allocator.allocate(0, PageKind.KV) == []
    assert allocator.num_free == 3
    allocator.check_integrity()


def test_counts_by_kind():
    allocator = PageAllocator(10)
    kv, adapter = allocator.allocate(2, PageKind.KV), allocator.allocate(3, PageKind.ADAPTER)
    assert kv is not None
    assert adapter is not None
    allocator.allocate(1, PageKind.CACHED)
    assert [allocator.count(kind) for kind in PageKind] == [3, 2, 3, 1]
    allocator.free(adapter, PageKind.ADAPTER)
    assert [allocator.count(kind) for kind in PageKind] == [6, 2, 0, 1]


@pytest.mark.parametrize(
    ("pages", "kind"),
    [
        ([1, 2, 2], PageKind.KV),  # named twice
        ([1, 4], PageKind.KV),  # free already
        ([1, 3], PageKind.KV),  # an adapter's
        ([1, 0], PageKind.KV),  # reserved
        ([1, 5], PageKind.KV),  # out of range
        ([1, -1], PageKind.KV),
        ([4], PageKind.FREE),
    ],
)
def test_wrong_free_raises_an_internal_error_and_changes_nothing(pages: list[int], kind: PageKind):
    allocator = PageAllocator(5)
    allocator.allocate(2, PageKind.KV)
    allocator.allocate(1, PageKind.ADAPTER)
    with pytest.raises(PoolIntegrityError) as caught:
        allocator.free(pages, kind)
    assert isinstance(caught.value, RuntimeError)
    assert not isinstance(caught.value, UserError)
    assert [allocator.count(kind) for kind in PageKind] == [1, 2, 1, 0]
    allocator.check_integrity()
    allocator.free([2, 1], PageKind.KV)
    allocator.check_integrity()


@pytest.mark.parametrize(("num_pages", "kind"), [(-1, PageKind.KV), (1, PageKind.FREE)])
def test_senseless_allocation_raises(num_pages: int, kind: PageKind):
    allocator = PageAllocator(5)
    with pytest.raises(PoolIntegrityError):
        allocator.allocate(num_pages, kind)
    allocator.check_integrity()


def test_pool_without_a_usable_page_is_refused():
    with pytest.raises(ConfigError, match="at least 2 pages"):
        PageAllocator(1)


def _lose_a_page(allocator: Any) -> None:
    allocator._free.pop()


def _list_a_page_twice(allocator: Any) -> None:
    allocator._free[0] = allocator._free[1]


def _list_a_page_in_use(allocator: Any) -> None:
    allocator._free[0] = 1


def _miscount(allocator: Any) -> None:
    allocator._counts[PageKind.KV] += 1


def _unreserve_page_zero(allocator: Any) -> None:
    allocator._kinds[0] = PageKind.FREE


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose_a_page, "the free list names 4 pages but the page table says free 5"),
        (_list_a_page_twice, "the free list names 1 pages twice"),
        (_list_a_page_in_use, "the free list names 5 pages but"),
        (_miscount, r"free 5 \+ kv 2 \+ adapter 0 \+ cached 0 = total 7 does not hold"),
        (_unreserve_page_zero, r"free 6 \+ kv 2 .* does not hold"),
    ],
)
def test_check_integrity_finds_damage(damage, message: str):
    allocator = PageAllocator(8)
    allocator.allocate(2, PageKind.KV)
    allocator.check_integrity()
    damage(allocator)
    with pytest.raises(PoolIntegrityError, match=message):
        allocator.check_integrity()


KINDS = st.sampled_from([PageKind.KV, PageKind.ADAPTER, PageKind.CACHED])


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(12)
        self.held: dict[int, PageKind] = {}

    @rule(num_pages=st.integers(0, 6), kind=KINDS)
    def allocate(self, num_pages: int, kind: PageKind) -> None:
        free = 11 - len(self.held)
        pages = self.allocator.allocate(num_pages, kind)
        assert (pages is None) == (num_pages > free)
        if pages is not None:
            assert len(pages) == num_pages
            assert not set(pages) & set(self.held)
            self.held.update(dict.fromkeys(pages, kind))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), kind=KINDS)
    def free(self, data: st.DataObject, kind: PageKind) -> None:
        mine = [page for page, held in self.held.items() if held == kind]
        pages = data.draw(st.lists(st.sampled_from(mine), unique=True)) if mine else []
        self.allocator.free(pages, kind)
        for page in pages:
            del self.held[page]

    @rule(page=st.integers(-2, 13), kind=KINDS)
    def free_what_is_not_ours(self, page: int, kind: PageKind) -> None:
        if self.held.get(page) != kind:
            with pytest.raises(PoolIntegrityError):
                self.allocator.free([page], kind)

    @invariant()
    def books_agree(self) -> None:
        self.allocator.check_integrity()
        assert self.allocator.num_free == self.allocator.count(PageKind.FREE) == 11 - len(self.held)
        for kind in (PageKind.KV, PageKind.ADAPTER, PageKind.CACHED):
            assert self.allocator.count(kind) == sum(held == kind for held in self.held.values())


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
