"""Continuous batching under pressure: admission by pages, preemption, refusals, aborts, leaks."""

from __future__ import annotations

import pytest

from multilora_jax.memory.allocator import PageKind, PoolIntegrityError
from multilora_jax.request import FinishReason, Sequence, SequenceStatus
from tests.engine.scheduler_bench import Bench, FakeAdapter, ids, ran


@pytest.mark.parametrize("resident", [True, False])
def test_admission_counts_the_pages_of_the_adapter_too(resident: bool):
    bench = Bench(num_pages=11)
    x = FakeAdapter("x", num_pages=4)
    if resident:
        bench.add("warm", output=1, adapter=x)
        bench.step()
    bench.add("base", prompt=4, output=3)
    bench.step()
    bench.add("both", prompt=21, output=3, adapter=x)  # 6 pages and the adapter's 4 fill the pool alone
    assert bench.cache.is_resident(x) == resident
    assert ran(bench.step()) == ["base"]
    assert ran(bench.step()) == ["base"]
    assert ran(bench.step()) == ["both"]
    bench.drain()


def test_step_that_preempts_admits_nobody():
    bench = Bench(num_pages=9, max_num_seqs=2)
    bench.add("a", prompt=4, output=24)
    b = bench.add("b", prompt=4, output=20)
    bench.step()
    bench.add("urgent", prompt=1, output=1, priority=-1)
    step = bench.step()
    while not step.preempted:
        step = bench.step()
    assert step.preempted == [b]
    assert ran(step) == ["a"]
    assert ran(bench.step()) == ["a", "urgent"]
    bench.drain()


def test_request_that_lacks_kv_pages_lets_nobody_pass():
    bench = Bench(num_pages=11)
    bench.add("a", prompt=16, output=16)
    bench.step()
    bench.add("large", prompt=24, output=1)
    bench.add("small", prompt=1, output=1)
    for _ in range(15):
        assert ran(bench.step()) == ["a"]
    assert bench.finished == ["a"]
    assert ran(bench.step()) == ["small", "large"]


@pytest.mark.parametrize(("num_pages", "admitted"), [(13, ["a"]), (14, ["a", "b"])])
def test_admission_wants_room_for_the_whole_prompt_and_a_page_for_each_running_sequence(
    num_pages: int, admitted: list[str]
):
    bench = Bench(num_pages=num_pages, max_num_batched_tokens=24)
    bench.add("a", prompt=16, output=4)  # 4 pages
    b = bench.add("b", prompt=32, output=4)  # 8 pages, and one to spare for a
    assert ran(bench.step()) == admitted
    if "b" in admitted:
        assert len(b.page_ids) == 2  # yet only those of its first chunk are taken
    bench.drain()


def test_newest_is_preempted_and_comes_back_before_younger_requests():
    bench = Bench(num_pages=9, max_num_seqs=2)
    a = bench.add("a", prompt=4, output=24)
    b = bench.add("b", prompt=4, output=20)
    late = bench.add("late", prompt=1, output=1)
    step = bench.step()
    while not step.preempted:
        assert ran(step) in (["a", "b"], ["b", "a"])
        step = bench.step()
    assert step.preempted == [b]
    assert ran(step) == ["a"]
    assert (b.num_preemptions, b.num_computed_tokens, b.page_ids, b.status) == (1, 0, [], SequenceStatus.WAITING)
    assert bench.scheduler.num_preemptions == 1
    while late not in step.decodes:
        step = bench.step()
    assert ids(seq for seq, _ in step.prefills) == ["b"]
    bench.drain()
    assert (a.num_preemptions, b.num_tokens) == (0, 24)


def test_preempted_sequence_goes_to_the_front_of_its_priority():
    bench = Bench(num_pages=9, max_loras=1)
    x, y = FakeAdapter("x", num_pages=1), FakeAdapter("y", num_pages=1)
    bench.add("a", prompt=4, output=20, adapter=x)
    bench.add("blocked", prompt=4, output=1, adapter=y)
    b = bench.add("b", prompt=4, output=16, adapter=x)
    bench.step()
    while not b.num_preemptions:
        bench.step()
    assert bench.queue() == ["b", "blocked"]
    bench.add("urgent", priority=-1)
    assert bench.queue() == ["urgent", "b", "blocked"]
    bench.drain()


def test_newest_sequence_in_need_preempts_itself_never_an_older_one():
    bench = Bench(num_pages=8, max_num_batched_tokens=8)
    a = bench.add("a", prompt=3, output=13)
    b = bench.add("b", prompt=4, output=16)
    while not b.num_preemptions:
        step = bench.step()
        assert "a" in ran(step)
    assert step.preempted == [b]
    bench.drain()
    assert a.num_preemptions == 0


def test_preempted_sequence_gives_up_its_adapter():
    bench = Bench(num_pages=9)
    x = FakeAdapter("x", num_pages=2)
    a = bench.add("a", prompt=4, output=24)
    b = bench.add("b", prompt=4, output=16, adapter=x)
    while not b.num_preemptions:
        bench.step()
    assert bench.cache.references(x) == 0
    assert (len(bench.scheduler.active.users), bench.scheduler.active.num_rows) == (0, 0)
    while bench.cache.is_resident(x):  # the older sequence's growth evicts it
        assert ran(bench.step()) == ["a"]
    assert a.status is SequenceStatus.RUNNING
    bench.drain()
    assert a.num_preemptions == 0


def test_several_victims_when_one_is_not_enough():
    bench = Bench(num_pages=11, max_num_batched_tokens=64)
    a = bench.add("a", prompt=4, output=32)
    for i in range(4):
        bench.add(str(i), prompt=4, output=4)
    assert len(bench.step().prefills) == 5
    a.token_ids += [1] * 27  # seven more pages at once, and five are free
    step = bench.step()
    assert ids(step.preempted) == ["3", "2", "1"]  # the last one for sequence 0, which starts its second page
    assert ran(step) == ["0", "a"]
    bench.drain()


def test_sequence_that_exactly_fills_the_pool_runs_and_evicts_idle_adapters():
    bench = Bench(num_pages=11)
    for i in range(3):
        bench.add(str(i), output=1, adapter=FakeAdapter(f"idle-{i}", num_pages=3))
        bench.step()
    assert bench.allocator.num_free == 1
    bench.add("full", prompt=20, output=4, adapter=FakeAdapter("x", num_pages=4))
    bench.drain()
    assert bench.finished == ["0", "1", "2", "full"]


def test_abort_of_waiting_and_running_sequences_returns_all_pages():
    bench = Bench(max_num_seqs=1)
    x = FakeAdapter("x")
    running, waiting = bench.add("r", adapter=x, output=50), bench.add("w", adapter=x)
    bench.add("w2", adapter=x)
    other = bench.add("other", priority=1)
    bench.step()
    assert bench.queue() == ["w", "w2", "other"]
    assert bench.scheduler.abort("w2") is not None
    assert bench.scheduler.abort("w") is waiting
    assert (waiting.status, waiting.finish_reason) == (SequenceStatus.FINISHED, FinishReason.ABORT)
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    assert bench.scheduler.abort("r") is running
    assert running.page_ids == []
    assert bench.cache.references(x) == 0
    assert bench.scheduler.abort("r") is None
    assert bench.scheduler.abort("never seen") is None
    assert ran(bench.step()) == ["other"]
    assert other.status is SequenceStatus.RUNNING
    bench.drain()


def test_finish_sets_reason_and_a_second_finish_is_an_internal_error():
    bench = Bench()
    seq = bench.add("a")
    bench.step()
    bench.scheduler.finish(seq, FinishReason.STOP)
    assert (seq.status, seq.finish_reason) == (SequenceStatus.FINISHED, FinishReason.STOP)
    with pytest.raises(PoolIntegrityError, match="not live"):
        bench.scheduler.finish(seq, FinishReason.STOP)
    bench.add("a")
    with pytest.raises(PoolIntegrityError, match="not live"):
        bench.scheduler.finish(seq, FinishReason.STOP)


def test_engine_that_forgets_to_append_a_token_is_found_out():
    bench = Bench()
    seq = bench.add("a")
    bench.scheduler.schedule()
    seq.num_computed_tokens = seq.num_tokens
    with pytest.raises(PoolIntegrityError, match="no token to compute"):
        bench.scheduler.schedule()


def test_pages_lost_to_a_stranger_raise_instead_of_idling_for_ever():
    bench = Bench(num_pages=5)
    bench.add("a", prompt=12)
    assert bench.allocator.allocate(2, PageKind.CACHED)
    with pytest.raises(PoolIntegrityError, match="1 waiting sequences and nothing to run; 2 free and 0 evictable of 4"):
        bench.scheduler.schedule()


def test_adapter_pages_lost_to_a_stranger_raise_after_one_attempt_to_displace_others():
    bench = Bench(num_pages=5)
    bench.add("a", prompt=1, output=1, adapter=FakeAdapter("x", num_pages=3))
    assert bench.allocator.allocate(2, PageKind.CACHED)
    bench.plan()
    assert bench.scheduler.schedule() is None
    bench.plan()
    with pytest.raises(PoolIntegrityError, match="1 waiting sequences and nothing to run"):
        bench.scheduler.schedule()


def test_d13_twenty_load_use_unload_cycles_leave_two_slots_free():
    bench = Bench(num_pages=14, max_adapter_pages=4, max_loras=2)
    for i in range(20):
        adapter = FakeAdapter(f"adapter-{i}")
        bench.add(str(i), adapter=adapter, output=3)
        if i % 2:
            bench.step()
        bench.cache.drop(adapter)  # while waiting or running: the request still finishes
        while bench.scheduler._live:
            bench.step()
        assert bench.allocator.num_free == bench.allocator.num_total
        assert (len(bench.scheduler.active.users), bench.scheduler.active.num_rows) == (0, 0)
    assert bench.finished == [str(i) for i in range(20)]


def test_one_step_looks_at_a_bounded_part_of_a_long_queue(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(num_pages=21, max_scan=16)
    bench.add("holder", prompt=40, output=8)
    bench.step()
    for i in range(300):
        bench.add(str(i), adapter=FakeAdapter(str(i), num_pages=12))
    looks: list[FakeAdapter] = []
    is_ready = bench.cache.is_ready
    monkeypatch.setattr(bench.cache, "is_ready", lambda adapter: looks.append(adapter) or is_ready(adapter))
    bench.scheduler.schedule()
    assert len(looks) == 16
    for seq in bench.scheduler.waiting(1000):
        seq.adapters = (looks[0],)  # one adapter, one look
    looks.clear()
    bench.scheduler.schedule()
    assert len(looks) == 1


def _leak_kv(bench: Bench, seq: Sequence) -> None:
    seq.page_ids.pop()


def _share_a_page(bench: Bench, seq: Sequence) -> None:
    seq.page_ids[0] = seq.page_ids[1]


def _lose_a_reference(bench: Bench, seq: Sequence) -> None:
    bench.cache.release(seq.adapters[0])


def _forget(bench: Bench, seq: Sequence) -> None:
    bench.scheduler._live.clear()


def _keep_stale_pages(bench: Bench, seq: Sequence) -> None:
    bench.add("waiting").page_ids.append(1)


@pytest.mark.parametrize("damage", [_leak_kv, _share_a_page, _lose_a_reference, _forget, _keep_stale_pages])
def test_check_integrity_finds_damage(damage):
    bench = Bench()
    seq = bench.add("a", prompt=10, adapter=FakeAdapter("x"))
    bench.step()
    bench.scheduler.check_integrity()
    damage(bench, seq)
    with pytest.raises(PoolIntegrityError):
        bench.scheduler.check_integrity()


@pytest.mark.parametrize("caching", [True, False])
def test_continuations_start_when_their_leader_has_computed_the_prompt(caching: bool):
    bench = Bench(max_num_batched_tokens=64, caching=caching)
    names = [seq.request_id for seq in bench.add_all("r", [1] * 9, output=4, n=3)]
    bench.add("other", prompt=5)
    assert ran(bench.step()) == [names[0], "other"]
    assert bench.scheduler.num_waiting == 2
    step = bench.step()
    assert ids(step.decodes) == [names[0], "other", *names[1:]]  # one token each: two pages are shared
    assert bench.allocator.count(PageKind.KV) == 2 + 3 + 2
    bench.drain()
