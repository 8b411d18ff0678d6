"""Continuous batching: chunks, budgets of a step, order of the queue, passing over."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.scheduler_bench import CONFIG, Bench, FakeAdapter, ids, ran


def test_nothing_to_do_is_none():
    bench = Bench()
    assert bench.scheduler.schedule() is None
    assert not bench.scheduler._live


def test_prompt_runs_in_chunks_of_whole_blocks_then_decodes():
    bench = Bench()
    bench.add("a", prompt=75, output=3)
    chunks = [[n for _, n in bench.step().prefills] for _ in range(3)]
    assert chunks == [[32], [32], [11]]
    assert ids(bench.step().decodes) == ["a"]
    assert ids(bench.step().decodes) == ["a"]
    assert bench.finished == ["a"]


def test_last_token_left_by_a_chunk_is_a_decode_row():
    bench = Bench()
    bench.add("a", prompt=33)
    assert bench.step().prefills[0][1] == 32
    assert bench.step().decodes


def test_prompt_of_one_token_is_a_decode_row_at_once():
    bench = Bench()
    seq = bench.add("a", prompt=1)
    assert seq.first_scheduled_time is None
    assert bench.step().decodes == [seq]
    assert seq.first_scheduled_time is not None


def test_prompts_are_packed_token_by_token():
    bench = Bench()
    for name in "abcde":
        bench.add(name, prompt=9)  # 32 tokens a step
    step = bench.step()
    assert [(seq.request_id, n) for seq, n in step.prefills] == [("a", 9), ("b", 9), ("c", 9), ("d", 5)]
    step = bench.step()
    assert ids(step.decodes) == ["a", "b", "c"]
    assert [(seq.request_id, n) for seq, n in step.prefills] == [("d", 4), ("e", 9)]


def test_many_short_prompts_use_up_the_blocks():
    bench = Bench(max_num_seqs=12)
    for i in range(10):
        bench.add(str(i), prompt=2)  # a block of eight each, of which a step has eight
    assert [n for _, n in bench.step().prefills] == [2] * 8
    assert [n for _, n in bench.step().prefills] == [2] * 2


def test_running_prefill_goes_before_new_admissions_and_the_rest_of_the_budget_is_used():
    bench = Bench()
    bench.add("a", prompt=48)
    bench.add("b", prompt=40)
    assert [n for _, n in bench.step().prefills] == [32]
    assert [(seq.request_id, n) for seq, n in bench.step().prefills] == [("a", 16), ("b", 16)]


def test_running_prefill_without_blocks_waits_its_turn():
    bench = Bench(num_pages=300)
    bench.add("a", prompt=40)
    assert ran(bench.step()) == ["a"]
    bench.add("b", prompt=200)
    step = bench.step()
    assert [(seq.request_id, n) for seq, n in step.prefills] == [("a", 8), ("b", 24)]
    bench.add("c", prompt=8)
    for _ in range(5):
        assert ran(bench.step())[-1] == "b"
    bench.drain()


def test_max_num_seqs_bounds_the_running_set():
    bench = Bench(max_num_seqs=3)
    for i in range(7):
        bench.add(str(i), prompt=1, output=4)
    assert len(bench.step().decodes) == 3
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (3, 4)
    bench.drain()
    assert bench.finished == [str(i) for i in range(7)]


def test_queue_is_ordered_by_priority_then_arrival():
    bench = Bench(max_num_seqs=1)
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0)]:
        bench.add(name, priority=priority)
    bench.drain()
    assert bench.finished == ["d", "b", "e", "a", "c"]


def test_adapters_of_a_step_are_the_distinct_ones_in_use():
    bench = Bench()
    a, b = FakeAdapter("a"), FakeAdapter("b")
    for name, adapter in [("0", b), ("1", None), ("2", a), ("3", b)]:
        bench.add(name, output=2 + int(name), adapter=adapter)
    step = bench.step()
    assert step.adapters == [b, a]
    assert [bench.cache.references(x) for x in (a, b)] == [1, 2]
    assert bench.step().adapters == [b, a]
    assert bench.finished == ["0"]
    assert bench.step().adapters == [b, a]  # the order outlives the first user of b
    bench.step()
    assert bench.step().adapters == [b]
    bench.drain()


def test_adapters_of_a_step_leave_out_those_of_sequences_without_blocks():
    bench = Bench(num_pages=301)
    a, b = FakeAdapter("a"), FakeAdapter("b")
    old = bench.add("old", prompt=8, output=100)
    bench.add("new", prompt=40, adapter=a)
    bench.step()  # old 8, new 24 of 40
    old.token_ids += [1] * 100  # the older one has much to compute again
    old.max_total_tokens += 100
    bench.add("waiting", adapter=b)
    step = bench.step()
    assert ran(step) == ["old"]
    assert step.adapters == []
    assert len(bench.scheduler.active.users) == 1


def test_d12_any_rank_takes_whole_row_blocks():
    assert [CONFIG.rank_rows(rank) for rank in (1, 3, 4, 8, 9, 32, 64)] == [8, 8, 8, 8, 16, 32, 64]
    bench = Bench(max_rank_rows=24)
    for name, rank in [("a", 1), ("b", 9), ("c", 3)]:
        bench.add(name, adapter=FakeAdapter(name, rank=rank))
    assert ran(bench.step()) == ["a", "b"]
    assert bench.scheduler.active.num_rows == 24
    bench.drain()
    assert bench.scheduler.active.num_rows == 0


@pytest.mark.parametrize("changes", [{"max_loras": 2}, {"max_rank_rows": 16}, {"max_loras": 1}])
def test_d15_more_adapters_than_slots_all_finish_within_the_cap(changes: dict[str, Any]):
    bench = Bench(**changes)
    cap = changes.get("max_loras", 2)
    adapters = [FakeAdapter(f"adapter-{i}") for i in range(6)]
    for i in range(28):
        bench.add(str(i), prompt=1 + i % 11, output=1 + i % 5, adapter=[*adapters, None][i % 7])
    used: set[str] = set()
    while bench.scheduler._live:
        step = bench.step()
        assert len(step.adapters) <= cap
        assert len(bench.scheduler.active.users) <= cap
        used.update(adapter.name for adapter in step.adapters)
    assert len(used) == 6
    assert sorted(map(int, bench.finished)) == list(range(28))


def test_d08_d15_base_sequences_need_no_adapter_slot():
    bench = Bench(max_loras=1, max_rank_rows=8)
    bench.add("a", adapter=FakeAdapter("a"), output=10)
    for i in range(3):
        bench.add(str(i))
    assert ran(bench.step()) == ["a", "0", "1", "2"]


def test_d16_requests_behind_one_that_lacks_a_slot_run_first():
    bench = Bench(max_loras=2)
    a, b, c = (FakeAdapter(name) for name in "abc")
    bench.add("a1", output=20, adapter=a)
    bench.add("b1", output=20, adapter=b)
    bench.step()
    bench.add("c1", adapter=c)
    bench.add("base")
    bench.add("a2", adapter=a)
    assert ids(seq for seq, _ in bench.step().prefills) == ["base", "a2"]
    assert bench.scheduler.num_waiting == 1
    bench.drain()


def test_d16_requests_behind_one_that_lacks_adapter_pages_run_first():
    bench = Bench(num_pages=12)
    small = FakeAdapter("small", num_pages=3)
    bench.add("a", prompt=4, output=12, adapter=small)
    bench.step()
    bench.add("big", adapter=FakeAdapter("big", num_pages=8))
    bench.add("base")
    bench.add("a2", adapter=small)
    assert ids(seq for seq, _ in bench.step().prefills) == ["base", "a2"]
    bench.drain()
    assert bench.finished[-1] == "big"


@pytest.mark.parametrize("max_overtakes", [0, 1, 3, 5])
def test_d16_overtaking_is_bounded(max_overtakes: int):
    bench = Bench(max_loras=1, max_num_seqs=2, max_overtakes=max_overtakes)
    a = FakeAdapter("a")
    bench.add("first", output=6, adapter=a)
    bench.step()
    bench.add("blocked", adapter=FakeAdapter("b"))
    for i in range(20):
        bench.add(f"later-{i}", output=2, adapter=a)
    started: list[str] = []
    while bench.scheduler._live:
        started += ids(seq for seq, _ in bench.step().prefills)
    assert started.index("blocked") == max_overtakes
    assert len(started) == 21


def test_d16_bound_holds_within_one_step_and_for_each_blocked_request():
    bench = Bench(max_loras=1, max_num_seqs=100, max_overtakes=3, max_num_batched_tokens=800)
    a = FakeAdapter("a")
    bench.add("first", output=30, adapter=a)
    bench.step()
    bench.add("b", adapter=FakeAdapter("b"))
    bench.add("a0", adapter=a)
    bench.add("c", adapter=FakeAdapter("c"))
    for i in range(1, 10):
        bench.add(f"a{i}", adapter=a)
    assert ids(seq for seq, _ in bench.step().prefills) == ["a0", "a1", "a2"]
    assert bench.step().prefills == []
    bench.drain()


def test_d16_only_admissions_behind_the_blocked_request_count():
    bench = Bench(max_loras=1, max_num_seqs=100, max_overtakes=3, max_num_batched_tokens=800)
    a = FakeAdapter("a")
    bench.add("first", output=30, adapter=a)
    bench.step()
    bench.add("ahead")
    bench.add("blocked", adapter=FakeAdapter("b"))
    bench.add("a0", adapter=a)
    assert ids(seq for seq, _ in bench.step().prefills) == ["ahead", "a0"]
    bench.add("ahead again", priority=-1)
    for i in range(1, 5):
        bench.add(f"a{i}", adapter=a)
    assert ids(seq for seq, _ in bench.step().prefills) == ["ahead again", "a1", "a2"]
    bench.drain()


def test_waiting_requests_are_counted_through_a_new_beginning():
    """A request for three continuations counts once, until its first starts, and again when all begin anew."""
    bench = Bench(max_num_seqs=2)
    bench.add_all("many", [1] * 40, 4, n=3)
    for name in "ab":
        bench.add(name)
    waiting = bench.scheduler._waiting
    assert (waiting.num_requests, len(waiting)) == (3, 5)
    bench.step()
    assert (waiting.num_requests, len(waiting)) == (2, 4)
    bench.scheduler.restart()
    bench.transfers.restart()
    bench.scheduler.check_integrity()
    assert (waiting.num_requests, len(waiting)) == (3, 5)
    bench.scheduler.abort("a")
    assert waiting.num_requests == 2
    bench.drain()
    assert waiting.num_requests == 0
