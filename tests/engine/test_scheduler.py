"""Continuous batching: budgets, order, passing over, preemption, refusals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.scheduler import ScheduledStep, Scheduler, SchedulerConfig
from multilora_jax.errors import AdapterError, ConfigError, UserError
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator, PoolIntegrityError
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.request import FinishReason, SamplingParams, Sequence, SequenceStatus

PAGE_TOKENS = 4
CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, prefill_block=8, max_rank_rows=64)
PARAMS = SamplingParams()


@dataclass(eq=False)
class FakeAdapter:
    name: str
    num_pages: int = 2
    rank: int = 8
    digest: str = "0" * 64


class Bench:
    """A scheduler and an engine that computes nothing."""

    def __init__(self, num_pages: int = 101, max_adapter_pages: int | None = None, pins: int = 0, **changes: Any):
        geometry = PoolGeometry(
            num_layers=1, num_pages=num_pages, page_tokens=PAGE_TOKENS, hidden=8, q_dim=8, kv_dim=8, ffn=8,
            num_kv_heads=1, head_dim=8,
        )  # fmt: skip
        self.allocator = PageAllocator(num_pages)
        self.cache: AdapterCache[FakeAdapter] = AdapterCache(self.allocator, max_adapter_pages, max_pinned_pages=pins)
        self.kv = KVManager(self.allocator, geometry, self.cache)
        self.scheduler = Scheduler(replace(CONFIG, **changes), self.allocator, self.kv, self.cache)
        self.finished: list[str] = []

    def add(
        self, request_id: str, prompt: int = 4, output: int = 4, adapter: FakeAdapter | None = None, priority: int = 0
    ) -> Sequence:
        seq = Sequence(request_id, [1] * prompt, prompt, PARAMS, adapter, max_total_tokens=prompt + output)
        seq.priority = priority
        self.scheduler.add(seq)
        return seq

    def step(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.check_integrity()
        self.cache.take_pending_writes()
        for seq, n in [(seq, 1) for seq in step.decodes] + step.prefills:
            seq.num_computed_tokens += n
            if seq.num_pending_tokens == 0:
                seq.token_ids.append(2)
            if seq.num_tokens >= seq.max_total_tokens:
                self.scheduler.finish(seq, FinishReason.LENGTH)
                self.finished.append(seq.request_id)
        self.scheduler.check_integrity()
        return step

    def drain(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                break
            self.step()
        assert not self.scheduler.has_unfinished()
        assert self.scheduler.schedule() is None
        self.cache.evict_idle(self.allocator.num_total)
        assert self.allocator.num_free == self.allocator.num_total


def ids(sequences: Iterable[Sequence]) -> list[str]:
    return [seq.request_id for seq in sequences]


def ran(step: ScheduledStep) -> list[str]:
    return ids(step.decodes) + ids(seq for seq, _ in step.prefills)


def test_nothing_to_do_is_none():
    bench = Bench()
    assert bench.scheduler.schedule() is None
    assert not bench.scheduler.has_unfinished()


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


def test_budget_of_prefill_blocks_counts_whole_blocks():
    bench = Bench()
    for name in "abcde":
        bench.add(name, prompt=9)  # two blocks of eight
    step = bench.step()
    assert [(seq.request_id, n) for seq, n in step.prefills] == [("a", 9), ("b", 9)]
    step = bench.step()
    assert ids(step.decodes) == ["a", "b"]
    assert [(seq.request_id, n) for seq, n in step.prefills] == [("c", 9), ("d", 9)]


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
    assert bench.scheduler.num_active_adapters == 1


def test_d12_any_rank_takes_whole_row_blocks():
    assert [CONFIG.rank_rows(rank) for rank in (1, 3, 4, 8, 9, 32, 64)] == [8, 8, 8, 8, 16, 32, 64]
    bench = Bench(max_rank_rows=24)
    for name, rank in [("a", 1), ("b", 9), ("c", 3)]:
        bench.add(name, adapter=FakeAdapter(name, rank=rank))
    assert ran(bench.step()) == ["a", "b"]
    assert bench.scheduler.num_active_rank_rows == 24
    bench.drain()
    assert bench.scheduler.num_active_rank_rows == 0


@pytest.mark.parametrize("changes", [{"max_loras": 2}, {"max_rank_rows": 16}, {"max_loras": 1}])
def test_d15_more_adapters_than_slots_all_finish_within_the_cap(changes: dict[str, int]):
    bench = Bench(**changes)
    cap = changes.get("max_loras", 2)
    adapters = [FakeAdapter(f"adapter-{i}") for i in range(6)]
    for i in range(28):
        bench.add(str(i), prompt=1 + i % 11, output=1 + i % 5, adapter=[*adapters, None][i % 7])
    used: set[str] = set()
    while bench.scheduler.has_unfinished():
        step = bench.step()
        assert len(step.adapters) <= cap
        assert bench.scheduler.num_active_adapters <= cap
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
    while bench.scheduler.has_unfinished():
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
    assert ids(entry.seq for _, entry in bench.scheduler._waiting) == ["b", "blocked"]
    bench.add("urgent", priority=-1)
    assert ids(entry.seq for _, entry in bench.scheduler._waiting) == ["urgent", "b", "blocked"]
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
    assert (bench.scheduler.num_active_adapters, bench.scheduler.num_active_rank_rows) == (0, 0)
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


def test_check_fits_refuses_what_could_never_run():
    bench = Bench(num_pages=11, max_adapter_pages=6, pins=1, max_rank_rows=16)
    bench.add("fits", prompt=4, output=32)
    with pytest.raises(UserError, match=r"37 tokens \(4 of them its prompt\).*10 pages.*9 pages") as caught:
        bench.add("long", prompt=4, output=33)
    assert (caught.value.reason, caught.value.param) == ("request_too_large", "max_tokens")
    with pytest.raises(UserError, match="its adapter 5"):
        bench.add("with-adapter", prompt=4, output=13, adapter=FakeAdapter("x", num_pages=5))
    with pytest.raises(AdapterError, match="takes 24 rank rows but a step holds 16"):
        bench.add("rank", adapter=FakeAdapter("x", rank=17))
    with pytest.raises(AdapterError, match="takes 6 pages but adapters may hold 5"):
        bench.add("pages", adapter=FakeAdapter("x", num_pages=6))
    assert bench.scheduler.num_waiting == 1
    bench.drain()


def test_duplicate_request_id_is_refused_while_the_first_lives():
    bench = Bench()
    bench.add("a")
    with pytest.raises(UserError, match="'a' is in use") as caught:
        bench.add("a")
    assert caught.value.reason == "duplicate_request_id"
    bench.drain()
    bench.add("a")
    bench.drain()
    assert bench.finished == ["a", "a"]


def test_abort_of_waiting_and_running_sequences_returns_all_pages():
    bench = Bench(max_num_seqs=1)
    x = FakeAdapter("x")
    running, waiting = bench.add("r", adapter=x, output=50), bench.add("w", adapter=x)
    bench.add("w2", adapter=x)
    other = bench.add("other", priority=1)
    bench.step()
    assert ids(entry.seq for _, entry in bench.scheduler._waiting) == ["w", "w2", "other"]
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
    bench.cache.max_pinned_pages = 2
    assert bench.cache.pin(FakeAdapter("x"))
    with pytest.raises(PoolIntegrityError, match="1 waiting sequences and nothing to run; 2 free and 0 evictable of 4"):
        bench.scheduler.schedule()


def test_d13_twenty_load_use_unload_cycles_leave_two_slots_free():
    bench = Bench(num_pages=14, max_adapter_pages=4, max_loras=2)
    for i in range(20):
        adapter = FakeAdapter(f"adapter-{i}")
        bench.add(str(i), adapter=adapter, output=3)
        if i % 2:
            bench.step()
        bench.cache.drop(adapter)  # while waiting or running: the request still finishes
        while bench.scheduler.has_unfinished():
            bench.step()
        assert bench.allocator.num_free == bench.allocator.num_total
        assert (bench.scheduler.num_active_adapters, bench.scheduler.num_active_rank_rows) == (0, 0)
    assert bench.finished == [str(i) for i in range(20)]


def test_one_step_looks_at_a_bounded_part_of_a_long_queue(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(num_pages=21, max_scan=16)
    bench.add("holder", prompt=40, output=8)
    bench.step()
    for i in range(300):
        bench.add(str(i), adapter=FakeAdapter(str(i), num_pages=12))
    looks: list[FakeAdapter] = []
    can_acquire = bench.cache.can_acquire
    monkeypatch.setattr(bench.cache, "can_acquire", lambda adapter: looks.append(adapter) or can_acquire(adapter))
    bench.step()
    assert len(looks) == 16
    for seq in [entry.seq for _, entry in bench.scheduler._waiting]:
        seq.adapter = looks[0]  # one adapter, one look
    looks.clear()
    bench.step()
    assert len(looks) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_seqs", 0), ("max_num_batched_tokens", 7), ("prefill_block", 0), ("row_block", 0), ("max_loras", 0)],
)
def test_budgets_out_of_range_are_refused(name: str, value: int):
    with pytest.raises(ConfigError, match=f"{name} must be at least"):
        replace(CONFIG, **{name: value})


def _leak_kv(bench: Bench, seq: Sequence) -> None:
    seq.page_ids.pop()


def _share_a_page(bench: Bench, seq: Sequence) -> None:
    seq.page_ids[0] = seq.page_ids[1]


def _lose_a_reference(bench: Bench, seq: Sequence) -> None:
    bench.cache.release(seq.adapter)


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
