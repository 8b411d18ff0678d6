"""The engine that computes nothing: its time is the sum it says, its books are the engine's, a split pool is split."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_jax.engine.simulation import Progress, SimulatedAdapter, SimulatedEngine, SimulatedPool, StepCost
from multilora_jax.engine.step_plan import SchedulerConfig
from multilora_jax.errors import ConfigError, UserError
from multilora_jax.memory.allocator import PageKind
from multilora_jax.request import FinishReason

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, prefill_block=8, max_rank_rows=64)
COST = StepCost(base_s=1.0, token_s=0.01, page_s=0.5, row_s=0.001)


def make(num_pages: int = 40, cost: StepCost = COST, transfer_pages: int = 1000, **pool: Any) -> SimulatedEngine:
    return SimulatedEngine(CONFIG, SimulatedPool(num_pages, 4, **pool), cost, transfer_pages=transfer_pages)


def test_a_step_takes_the_sum_of_its_parts():
    engine, adapter = make(), SimulatedAdapter("a", rank=8, num_pages=3)
    engine.add_request("x", prompt_tokens=40, new_tokens=3, adapter=adapter)
    assert engine.step() == []  # 32 of its 40 prompt tokens
    assert engine.now == pytest.approx(1.0 + 32 * 0.01 + 3 * 0.5 + 8 * 0.001)
    assert engine.step() == [Progress("x", 1)]
    assert engine.now == pytest.approx(3.916)  # and 1 + 8 * 0.01 + 0.008
    engine.add_request("y", prompt_tokens=2, new_tokens=1)
    assert engine.step() == [Progress("x", 1), Progress("y", 1, FinishReason.LENGTH)]
    assert engine.now == pytest.approx(3.916 + 1 + 3 * 0.01 + 0.008)
    assert engine.step() == [Progress("x", 1, FinishReason.LENGTH)]
    assert not engine.has_unfinished_requests
    assert (engine.num_steps, engine.pages_copied, engine.cache.loads) == (4, 3, 1)
    engine.check_integrity()


def test_copies_are_spread_over_the_steps_of_others():
    engine = make(transfer_pages=2)
    engine.add_request("x", 4, 10)
    engine.step()
    engine.add_request("y", 4, 1, SimulatedAdapter("a", 8, 5))
    copied, ran = [], []
    for _ in range(5):
        before = engine.pages_copied
        ran += [done.request_id for done in engine.step()]
        copied.append(engine.pages_copied - before)
    assert copied == [2, 2, 1, 0, 0]
    assert ran == ["x", "x", "x", "y", "x", "x"]


def test_what_can_never_run_is_refused():
    engine = make(num_pages=10)
    with pytest.raises(UserError, match="only 10 pages can be had"):
        engine.add_request("x", 30, 30)
    assert not engine.has_unfinished_requests


@pytest.mark.parametrize("pages", [None, 0, 40, 41])
def test_a_split_needs_two_parts(pages):
    with pytest.raises(ConfigError, match="at least 1 and below the pool's 40 pages where they are set apart"):
        make(split=True, max_adapter_pages=pages)


REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 7), st.floats(0, 9)), max_size=25)


@given(
    requests=REQUESTS, split=st.booleans(), num_pages=st.integers(16, 40), transfer_pages=st.integers(1, 4),
    max_adapter_pages=st.integers(4, 8),
)  # fmt: skip
def test_every_request_ends_and_the_parts_of_a_split_pool_stay_apart(
    requests, split, num_pages, transfer_pages, max_adapter_pages
):
    engine = make(num_pages, split=split, transfer_pages=transfer_pages, max_adapter_pages=max_adapter_pages)
    adapters = [None, *(SimulatedAdapter(str(i), 8 * (1 + i % 3), 1 + i % 4) for i in range(7))]
    wanted: dict[str, int] = {}
    for number, (prompt, new, which, gap) in enumerate(requests):
        try:
            engine.add_request(str(number), prompt, new, adapters[which])
            wanted[str(number)] = new
        except UserError:
            pass
        for _ in range(int(gap)):
            if engine.has_unfinished_requests:
                follow(engine, wanted, split, num_pages, max_adapter_pages)
    for _ in range(5000):
        if not engine.has_unfinished_requests:
            break
        follow(engine, wanted, split, num_pages, max_adapter_pages)
    assert wanted == {}
    engine.cache.order.evict(list(engine.cache.order))
    assert engine.allocator.num_free == engine.allocator.num_total


def follow(engine: SimulatedEngine, wanted: dict[str, int], split: bool, num_pages: int, cap: int) -> None:
    """A step, after which tokens are counted and pages are where they may be."""
    before = engine.now
    for done in engine.step():
        wanted[done.request_id] -= done.num_tokens
        if done.finish_reason is not None:
            assert wanted.pop(done.request_id) == 0
    assert engine.now > before
    engine.check_integrity()
    adapter_pages = sum(adapter.num_pages for adapter in engine.cache.residents())
    assert adapter_pages <= cap
    if split:
        assert engine.allocator.count(PageKind.KV) <= num_pages - cap
