"""Forecast and transfers: who is brought in, when, in whose place, and how much per step."""

from __future__ import annotations

from multilora_jax.engine.transfers import STAGE_AHEAD
from multilora_jax.request import FinishReason
from tests.engine.scheduler_bench import Bench, FakeAdapter, ran, started
from tests.lora.fake_adapter import fakes


def residents(bench: Bench) -> set[str]:
    return {adapter.name for adapter in bench.cache.residents()}


def test_d17_slow_load_lets_the_running_sequence_and_the_others_go_on():
    bench = Bench(delay=20)
    a, b, cold = fakes("abc", 1)
    bench.add("a", output=60, adapter=a)
    bench.add("b", output=1, adapter=b)
    while "b" not in bench.finished:
        bench.step()
    bench.add("cold", adapter=cold)
    gaps = 0
    for i in range(19):
        bench.add(f"b{i}", prompt=1, output=1, adapter=b)
        gaps += "a" not in ran(bench.step())
    assert gaps == 0
    assert len(bench.finished) == 20  # those that came later did not wait behind the load
    assert bench.queue() == ["cold"]
    bench.step()
    bench.step()
    assert "cold" not in bench.queue()
    assert bench.source.requests == [a, b, cold]
    bench.drain()


def test_adapters_of_the_queue_are_brought_in_before_their_turn():
    bench = Bench(max_num_seqs=1)
    a, b, c = fakes("abc", 1)
    for name, adapter in [("0", a), ("1", b), ("2", c)]:
        bench.add(name, output=5, adapter=adapter)
    bench.step()
    assert residents(bench) == {"a", "b", "c"}
    assert started(bench) == ["0", "1", "2"]
    assert (bench.cache.loads, bench.cache.misses, bench.cache.hits) == (3, 3, 0)


def test_without_prefetch_only_those_that_could_run_are_brought_in():
    bench = Bench(max_num_seqs=3, prefetch=False, max_loras=2)
    a, b, c, d = fakes("abcd", 1)
    for name, adapter in [("0", a), ("1", b), ("2", c), ("base", None), ("3", d)]:
        bench.add(name, output=5, adapter=adapter)
    bench.plan()
    assert residents(bench) == {"a", "b", "c"}  # three seats
    assert bench.scheduler.schedule() is not None
    bench.plan()
    assert residents(bench) == {"a", "b", "c"}
    bench.drain()


def test_without_prefetch_nothing_is_asked_for_while_no_seat_is_free():
    bench = Bench(max_num_seqs=1, prefetch=False, delay=2)
    a, b = fakes("ab", 1)
    bench.add("0", output=6)
    bench.step()
    bench.add("1", output=5, adapter=a)
    bench.add("2", output=5, adapter=b)
    for _ in range(5):
        bench.step()
        assert bench.source.requests == []
    bench.step()
    bench.step()
    assert bench.source.requests == [a]
    bench.drain()


def test_rows_are_staged_for_as_many_as_will_find_a_seat_soon():
    bench = Bench(max_num_seqs=2, max_rank_rows=4 * 8)
    a, b, c, d = fakes("abcd", 1)
    for name, adapter, output in [("0", a, 100), ("1", b, 100), ("2", c, 5), ("3", d, 5)]:
        bench.add(name, output=output, adapter=adapter)
    bench.step()
    assert bench.transfers.to_stage() == ([a, b], [c])  # one, though no seat is in sight
    while bench.scheduler.seats_within(STAGE_AHEAD) < 2:
        bench.step()
    assert bench.transfers.to_stage() == ([a, b], [c, d])
    assert bench.queue() == ["2", "3"]
    bench.drain()


def test_seats_count_as_empty_while_somebody_waits():
    bench = Bench(max_num_seqs=4, max_rank_rows=2 * 8)
    a, b, c = fakes("abc", 1)
    assert bench.transfers.empty_seats == 0
    for name, adapter in [("0", a), ("1", b), ("2", c)]:
        bench.add(name, output=5, adapter=adapter)
    bench.step()
    assert (bench.queue(), bench.transfers.empty_seats) == (["2"], 2 / 4)  # though only one waits
    bench.add("3", output=5, adapter=c)
    bench.add("4", output=5, adapter=c)
    assert bench.transfers.empty_seats == 2 / 4
    bench.drain()


def test_lookahead_bounds_what_is_brought_in():
    bench = Bench(max_num_seqs=1, lookahead=3)
    for i in range(6):
        bench.add(str(i), output=9, adapter=FakeAdapter(f"a{i}", 1))
    bench.step()
    assert residents(bench) == {"a0", "a1", "a2"}
    bench.step()
    assert residents(bench) == {"a0", "a1", "a2", "a3"}
    bench.drain()


def test_slices_are_bounded_while_something_runs_and_not_otherwise():
    bench = Bench(pages_per_step=2, max_num_seqs=2)
    a, b = FakeAdapter("a", 7), FakeAdapter("b", 7)
    bench.add("a", output=20, adapter=a)
    assert bench.plan() == 7
    step = bench.scheduler.schedule()
    assert step is not None
    bench.run(step)
    bench.add("b", adapter=b)
    copied = []
    for _ in range(4):
        copied.append(bench.plan())
        step = bench.scheduler.schedule()
        assert step is not None
        bench.run(step)
        assert ("b" in ran(step)) == (len(copied) == 4)
    assert copied == [2, 2, 2, 1]
    bench.drain()


def test_everything_that_waits_for_loads_is_no_step_and_says_so():
    bench = Bench(delay=3)
    bench.add("a", adapter=fakes("a", 1)[0])
    rounds = 0
    while bench.schedule() is None:
        assert bench.scheduler.waits_for_loads
        rounds += 1
    assert rounds == 3
    assert not bench.scheduler.waits_for_loads


def test_max_reads_bounds_the_host_copies_asked_for():
    bench = Bench(delay=4, max_reads=2)
    adapters = fakes("abcd", 1)
    for adapter in adapters:
        bench.add(adapter.name, adapter=adapter)
    for _ in range(4):
        bench.step()
        assert bench.source.requests == adapters[:2]
        assert bench.transfers.awaited() == adapters[:2]
    bench.drain()
    assert bench.source.requests == adapters


def test_host_copy_that_was_evicted_before_it_was_used_is_asked_for_again():
    bench = Bench(delay=2)
    (a,) = fakes("a", 1)
    bench.add("a", adapter=a)
    bench.plan()
    bench.source.due.clear()  # it came, and had to make room for others
    bench.drain()
    assert bench.source.requests == [a, a]


def test_host_copy_may_go_once_the_pages_are_reserved():
    bench = Bench(delay=1, pages_per_step=1)
    a = FakeAdapter("a", 4)
    bench.add("base", output=30)
    bench.step()
    bench.add("a", adapter=a)
    while not bench.cache.is_loading(a):
        bench.step()
    bench.source.here.clear()
    bench.drain()
    assert bench.source.requests == [a]


def test_failed_load_is_forgotten_and_asked_for_once():
    bench = Bench(delay=1)
    bad, good = fakes("bg", 1)
    bench.source.failed.add(bad)
    seqs = [bench.add("0", adapter=bad), bench.add("1", adapter=(good, bad)), bench.add("2", adapter=good)]
    for _ in range(12):
        bench.step()
    assert bench.finished == ["2"]
    assert bench.source.requests == [bad, good]
    assert bench.transfers.awaited() == [bad]
    bench.transfers.forget(bad)
    assert bench.transfers.awaited() == []
    assert not bench.cache.is_coming(bad)
    assert [seq for seq in bench.scheduler.waiting() if bad in seq.adapters] == seqs[:2]
    for seq in seqs[:2]:
        bench.scheduler.finish(seq, FinishReason.ERROR)
    assert bench.schedule() is None
    assert bench.source.requests == [bad, good]
    bench.drain()


def test_pinned_adapter_is_brought_in_and_a_pin_that_fails_is_undone():
    bench = Bench(delay=1)
    a, bad = fakes("ab", 1)
    bench.source.failed.add(bad)
    bench.cache.pin(a)
    bench.cache.pin(bad)
    for _ in range(3):
        bench.source.tick()
        bench.plan()
    assert bench.cache.is_ready(a)
    assert bench.transfers.awaited() == [bad]
    bench.transfers.forget(bad)
    assert [bench.cache.is_pinned(adapter) for adapter in (a, bad)] == [True, False]
    bench.plan()
    assert bench.transfers.awaited() == []


def test_unload_while_queued_and_loading_still_serves_those_that_named_it():
    bench = Bench(pages_per_step=1)
    a = FakeAdapter("a", 3)
    bench.add("base", output=20)
    bench.step()
    bench.add("1", adapter=a)
    bench.step()
    assert bench.cache.is_loading(a)
    bench.cache.drop(a)
    assert bench.cache.is_loading(a)
    bench.add("2", adapter=a)  # named it just before the unload
    while "2" not in bench.finished:
        bench.step()
    assert not bench.cache.is_resident(a)
    bench.drain()
    assert bench.cache.loads == 1


def test_d13_abort_of_the_last_that_waits_for_an_unloaded_adapter_frees_its_pages():
    bench = Bench(pages_per_step=1)
    a = FakeAdapter("a", 3)
    bench.add("base", output=20)
    bench.step()
    bench.add("1", adapter=a)
    bench.step()
    bench.cache.drop(a)
    bench.scheduler.abort("1")
    assert not bench.cache.is_resident(a)
    bench.drain()


def test_plan_of_an_unchanged_queue_asks_for_nothing_again():
    bench = Bench(max_adapter_pages=4, max_loras=4, max_num_seqs=4, delay=1)
    for i in range(4):
        bench.add(f"run-{i}", output=50, adapter=FakeAdapter(f"r{i}", 1))
    for _ in range(4):
        bench.step()
    for i in range(100):
        bench.add(str(i), adapter=FakeAdapter(f"w{i}", 1))
    for _ in range(8):
        bench.step()
    requests, loads = len(bench.source.requests), bench.cache.loads
    gets: list[FakeAdapter] = []
    get = bench.source.get
    bench.source.get = lambda adapter: gets.append(adapter) or get(adapter)
    bench.plan()
    assert (bench.cache.loads, len(gets)) == (loads, 64)
    assert len(bench.source.requests) - requests <= 16
