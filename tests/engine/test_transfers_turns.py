"""Whose adapter takes whose place: grouping, bounded overtaking, and nobody stuck."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.scheduler_bench import Bench, FakeAdapter, ran, started
from tests.lora.fake_adapter import fakes


def most_overtaken(order: list[str]) -> int:
    """Most requests with a later (numeric) id that started before one."""
    numbers = list(map(int, order))
    return max(sum(other > number for other in numbers[:place]) for place, number in enumerate(numbers))


ROUND_ROBIN: list[dict[str, Any]] = [
    {"max_adapter_pages": 8},
    # 8 pages for adapters beside the KV of the running sequences, four of which start in a step
    {"num_pages": 8 + 8 * 2 + 1, "max_num_batched_tokens": 16},
    {"max_adapter_pages": 8, "max_loras": 8},
    {"max_adapter_pages": 8, "max_loras": 4},
    {"max_adapter_pages": 8, "prefetch": False},
    {"max_adapter_pages": 8, "policy": "fifo"},
    {"max_adapter_pages": 8, "lookahead": 16},
    {"max_adapter_pages": 8, "pages_per_step": 1, "delay": 5},
    {"max_adapter_pages": 8, "max_num_seqs": 4},
]


@pytest.mark.parametrize("options", ROUND_ROBIN, ids=str)
def test_d17_round_robin_over_twice_the_slots_groups_the_requests_of_an_adapter(options: dict[str, Any]):
    options = {"num_pages": 200} | options
    bench = Bench(**options)
    adapters = [FakeAdapter(f"adapter-{i}", num_pages=1, rank=1) for i in range(16)]
    for i in range(200):
        bench.add(str(i), prompt=4, output=4, adapter=adapters[i % 16])
    order = started(bench)
    assert bench.cache.loads / 200 < 0.5
    if not options.get("delay"):  # those that pass one whose load is in flight would have to be left out
        assert most_overtaken(order) <= bench.scheduler.config.max_overtakes


def test_d17_requests_that_trickle_in_are_grouped_too():
    bench = Bench(max_adapter_pages=8, num_pages=200)
    adapters = [FakeAdapter(f"adapter-{i}", num_pages=1, rank=1) for i in range(16)]
    arrived = 0
    while arrived < 400 or bench.scheduler._live:
        while arrived < 400 and bench.scheduler.num_waiting < 48:
            bench.add(str(arrived), prompt=4, output=4, adapter=adapters[arrived % 16])
            arrived += 1
        bench.step()
    assert bench.cache.loads / 400 < 0.5
    assert len(bench.finished) == 400


def test_d16_passing_one_that_waits_for_a_load_in_flight_does_not_count():
    bench = Bench(delay=30, max_overtakes=2)
    a, cold = fakes("ac", 1)
    bench.source.here[a] = np.arange(1)
    bench.add("a", output=2, adapter=a)
    bench.step()
    bench.add("cold", adapter=cold)
    for i in range(20):
        bench.add(str(i), output=1, adapter=a)
        bench.step()
    assert bench.finished.count("a") == 1
    assert len(bench.finished) >= 20
    bench.drain()


def test_prefetch_never_evicts_what_a_sequence_in_sight_wants():
    bench = Bench(max_adapter_pages=2, max_num_seqs=1)
    a, b, c = fakes("abc", 1)
    for i, adapter in enumerate([a, b, c, a, b, a]):
        bench.add(str(i), output=1, adapter=adapter)
    # b goes for c once nobody in sight wants it, and a stays to the end.
    assert started(bench) == ["0", "1", "3", "4", "2", "5"]
    assert bench.cache.loads == 3


@pytest.mark.parametrize("max_overtakes", [0, 1, 3])
def test_d16_d17_one_that_was_overtaken_often_enough_takes_the_place_of_a_wanted_one(max_overtakes: int):
    bench = Bench(max_adapter_pages=1, max_num_seqs=1, max_overtakes=max_overtakes)
    a, b = fakes("ab", 1)
    bench.add("first", output=1, adapter=a)
    bench.step()
    bench.add("b", output=1, adapter=b)
    for i in range(9):
        bench.add(str(i), output=1, adapter=a)
    order = [ran(bench.step()) for _ in range(10)]  # and no step is lost
    assert order.index(["b"]) == max_overtakes
    assert bench.cache.loads == 3


def test_more_urgent_request_takes_the_place_of_what_less_urgent_ones_want():
    bench = Bench(max_adapter_pages=1, max_num_seqs=1)
    a, b = fakes("ab", 1)
    bench.add("first", output=1, adapter=a)
    bench.step()
    for i in range(5):
        bench.add(str(i), output=1, adapter=a)
    bench.add("urgent", output=1, adapter=b, priority=-1)
    assert started(bench)[0] == "urgent"


def test_mixes_that_hold_half_of_each_other_do_not_block_for_ever():
    bench = Bench(max_adapter_pages=2)
    a, b, c, d = fakes("abcd", 1)
    bench.add("warm", output=1, adapter=(a, b))
    bench.step()
    bench.add("0", output=1, adapter=(a, c))
    bench.add("1", output=1, adapter=(b, d))
    assert bench.schedule() is None  # neither can have its other half but for a wanted one
    assert not bench.scheduler.waits_for_loads  # so that there is nothing to wait for
    assert ran(bench.step()) == ["0"]
    assert ran(bench.step()) == ["1"]
    bench.drain()


def test_half_present_mixes_need_not_wait_for_the_end_of_a_long_request():
    bench = Bench(max_adapter_pages=2)
    a, b, c, d = fakes("abcd", 1)
    bench.add("long", output=50)
    bench.add("warm", output=1, adapter=(a, b))
    bench.step()
    bench.add("0", output=1, adapter=(a, c))
    bench.add("1", output=1, adapter=(b, d))
    bench.step()
    assert ran(bench.step()) == ["long", "0"]
    assert ran(bench.step()) == ["long", "1"]
    bench.drain()


def test_younger_request_cannot_take_the_pages_that_load_for_an_older_one():
    bench = Bench(num_pages=11, pages_per_step=1)
    bench.add("runner", prompt=4, output=36)
    bench.step()
    x = FakeAdapter("x", 4)
    bench.add("x", prompt=1, output=1, adapter=x)
    bench.step()
    assert bench.cache.is_loading(x)
    bench.add("fits", prompt=1, output=1)
    bench.add("younger", prompt=16, output=1)  # 4 pages and one to spare; of those 4 are free and 4 load
    bench.add("youngest", prompt=1, output=1)
    while "x" not in bench.finished:
        assert "younger" not in ran(bench.step())
    assert bench.finished == ["fits", "x"]
    assert bench.cache.evictions == 0
    bench.drain()


@pytest.mark.parametrize("lost", [False, True])
def test_d16_one_whose_load_was_lost_is_passed_a_bounded_number_of_times(lost: bool):
    bench = Bench(delay=1, pages_per_step=1, max_overtakes=2)
    x = FakeAdapter("x", 60)
    bench.add("runner", prompt=1, output=100)
    bench.step()
    bench.add("x", adapter=x)
    while not bench.cache.is_loading(x):
        bench.step()
    if lost:
        bench.cache.order.evict([x])
    for i in range(5):
        bench.add(str(i), prompt=1, output=1)
        bench.step()
    assert len(bench.finished) == (2 if lost else 5)
    bench.drain()
    assert bench.cache.loads == 1 + lost


def test_growth_of_a_running_sequence_takes_a_loading_adapter_only_when_nothing_else_is_left():
    bench = Bench(num_pages=11, pages_per_step=1)
    old, x = FakeAdapter("old", 3), FakeAdapter("x", 4)
    bench.add("old", prompt=1, output=1, adapter=old)
    bench.step()
    runner = bench.add("runner", prompt=4, output=36)
    bench.step()
    bench.add("x", prompt=1, output=1, adapter=x)
    bench.step()
    assert bench.cache.is_loading(x)
    bench.source.get = lambda adapter: None  # what is lost does not come back in this test
    runner.token_ids += [1] * 12
    assert "runner" in ran(bench.step())
    assert (bench.cache.is_resident(old), bench.cache.is_loading(x)) == (False, True)
    runner.token_ids += [1] * 8
    assert "runner" in ran(bench.step())
    assert bench.cache.was_lost(x)
    assert runner.num_preemptions == 0


def test_prefetch_leaves_running_sequences_the_pages_that_they_will_soon_need():
    bench = Bench(num_pages=11, max_num_seqs=1)
    bench.add("runner", prompt=16, output=20)  # 4 pages of 10, and 9 at the end
    bench.step()
    bench.add("x", adapter=FakeAdapter("x", 4))
    while not bench.finished:
        bench.step()
    assert bench.cache.loads == 0
    bench.drain()
    assert (bench.cache.loads, bench.scheduler.num_preemptions) == (1, 0)


def test_half_present_mix_does_not_wait_for_a_request_that_waits_for_its_pages():
    bench = Bench(num_pages=11)
    a, b, c = FakeAdapter("a", 4), FakeAdapter("b", 3), FakeAdapter("c", 3)
    bench.add("warm-a", prompt=1, output=1, adapter=a)
    bench.add("warm-c", prompt=1, output=1, adapter=c)
    bench.step()
    bench.add("mix", prompt=4, output=1, adapter=(a, b))  # 3 pages are free, and a page of KV must be left
    bench.add("kv", prompt=16, output=1, adapter=c)  # 4 pages: it would have to evict a
    order = [name for _ in range(4) if (step := bench.schedule()) for name in ran(step) if bench.run(step) is None]
    assert order == ["mix", "kv"]
    bench.drain()


def test_growth_evicts_what_is_wanted_latest_first():
    bench = Bench(num_pages=11, max_num_seqs=1)
    early, late, plain = fakes("elp", 1)
    for adapter in (early, late, plain):
        bench.add(f"warm-{adapter.name}", prompt=1, output=1, adapter=adapter)
        bench.step()
    bench.add("runner", prompt=4, output=28)
    bench.step()
    for i, adapter in enumerate([FakeAdapter("absent", 9), early, late, early]):
        bench.add(str(i), prompt=1, output=1, adapter=adapter)
    bench.add("urgent", prompt=1, output=1, adapter=plain, priority=-1)
    bench.plan()
    assert list(bench.cache.order) == [late, early, plain]
    bench.scheduler.abort("urgent")
    bench.plan()
    assert list(bench.cache.order) == [plain, late, early]
    bench.drain()
