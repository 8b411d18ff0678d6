"""The gate to the queue, the pacer of steps and the even flow of prompts, each by itself."""

from __future__ import annotations

import pytest

from multilora_jax.engine.policies import Entry, Load
from multilora_jax.engine.policies.crowd import EvenFlow
from multilora_jax.engine.policies.fair import Fair
from multilora_jax.engine.policies.gate import Gate, Rate, retry_after
from multilora_jax.engine.policies.pacer import StepPacer
from multilora_jax.errors import RateLimitError
from multilora_jax.request import SamplingParams, Sequence
from tests.lora.fake_adapter import FakeAdapter


class TestGate:
    def test_the_bound_counts_those_for_whom_there_is_no_seat(self):
        gate = Gate(2, None)
        gate.enter([], 2, 1, 0.0)
        with pytest.raises(RateLimitError, match="3 requests wait and 2 may") as info:
            gate.enter([], 3, 1, 0.0)
        assert (info.value.status, info.value.reason, info.value.retry_after_s) == (429, "queue_full", 1)

    def test_retry_after_is_the_time_that_the_queue_takes_to_drain(self):
        gate = Gate(10, None)
        for i in range(200):
            gate.started(1, 10, 0.5 * i)
        with pytest.raises(RateLimitError) as info:
            gate.enter([], 10, 0, 99.5)
        assert info.value.retry_after_s == pytest.approx(5, abs=1)
        assert (retry_after(0.0), retry_after(7.2), retry_after(1e9)) == (1, 8, 60)

    def retry(self, gate: Gate, num_waiting: int, now: float) -> int | None:
        with pytest.raises(RateLimitError) as info:
            gate.enter([], num_waiting, 0, now)
        return info.value.retry_after_s

    def test_an_idle_time_does_not_make_retry_after_longer(self):
        gate = Gate(10, None)
        for i in range(10):
            gate.started(1, 9 - i, 0.5 * i)
        assert self.retry(gate, 10, 4.5) == 5
        gate.enter([], 0, 4, 1000.0)  # nobody waited for a quarter of an hour
        gate.started(1, 0, 1000.0)
        for i in range(10):
            gate.enter([], i, 0, 1000.1)
        assert self.retry(gate, 10, 1000.2) == 5
        gate.started(4, 6, 1000.3)  # into empty seats: no sign of how fast full ones come free
        assert self.retry(gate, 10, 1000.4) == 6
        gate.started(1, 9, 1002.3)  # 2 s after the one before it
        assert self.retry(gate, 10, 1002.3) == 7

    def test_neither_does_one_after_which_everybody_hung_up(self):
        gate = Gate(10, None)
        gate.started(1, 5, 0.0)
        gate.started(1, 4, 0.5)  # and then those four left
        gate.enter([], 0, 0, 1000.0)
        assert self.retry(gate, 10, 1000.1) == 5

    def test_requests_that_never_had_to_wait_say_nothing_about_a_full_server(self):
        gate = Gate(10, None)
        for i in range(100):
            gate.enter([], 0, 4, 10.0 * i)
            gate.started(1, 0, 10.0 * i)
        assert self.retry(gate, 10, 1000.0) == 1

    def test_a_server_that_starts_nobody_says_so(self):
        gate = Gate(10, None)
        gate.started(4, 6, 0.0)
        assert self.retry(gate, 10, 3.0) == 30

    def test_rates_are_counted_by_adapter(self):
        gate = Gate(None, Rate(2.0, burst=3))
        for _ in range(3):
            gate.enter(["a"], 0, 0, 10.0)
        with pytest.raises(RateLimitError, match=r"'a' gets more .* again in 0.50 s"):
            gate.enter(["b", "a"], 0, 0, 10.0)
        for _ in range(3):  # that one took nothing from b
            gate.enter(["b"], 0, 0, 10.0)
        gate.enter([], 0, 0, 10.0)
        with pytest.raises(RateLimitError):
            gate.enter(["a"], 0, 0, 10.49)
        gate.enter(["a"], 0, 0, 10.5)
        for _ in range(3):
            gate.enter(["a"], 0, 0, 100.0)
        assert gate.refused == {"adapter_rate": 2}

    def test_full_buckets_are_not_kept(self):
        rate = Rate(1.0, burst=1)
        for i in range(5000):
            rate.take(str(i), float(i))
        assert len(rate._full_at) < 2100


class TestPacer:
    def test_the_largest_size_that_keeps_the_target(self):
        pacer = StepPacer((64, 128, 256), 0.05)
        for size, seconds in ((256, 0.09), (128, 0.04), (64, 0.02)):
            pacer.saw(size, seconds)
        assert pacer.size() == 128
        for _ in range(20):
            pacer.saw(128, 0.07)
        assert pacer.size() == 64
        for _ in range(20):
            pacer.saw(64, 0.2)
        assert pacer.size() == 64  # the smallest, whatever it takes

    def test_a_size_is_tried_when_those_below_leave_room_for_it(self):
        """With steps of 10 ms and 1 ms a token, from below: a first step of a size is no longer than the target."""
        pacer, tried = StepPacer((16, 32, 64, 128, 256), 0.08), []
        for _ in range(10):
            tried.append(pacer.size())
            pacer.saw(tried[-1], 0.01 + 0.001 * tried[-1])
            pacer.saw_decodes(4, 0.01)
        assert tried == [16, *[64] * 9]

    def test_without_steps_of_decodes_every_token_counts_in_full(self):
        pacer = StepPacer((16, 32), 0.08)
        pacer.saw(16, 0.05)
        assert pacer.size() == 16
        pacer.saw_decodes(4, 0.03)
        assert pacer.size() == 32

    def test_a_compilation_is_forgotten_fast(self):
        pacer = StepPacer((64, 256), 0.05)
        pacer.saw(64, 0.01)
        pacer.saw(256, 10.0)
        assert pacer.size() == 64
        for _ in range(8):
            pacer.saw(256, 0.04)
        assert pacer.size() == 256

    def test_an_old_estimate_is_not_trusted_for_ever(self):
        pacer = StepPacer((64, 256), 0.05)
        pacer.saw(256, 0.06)
        sizes = []
        for _ in range(1000):
            pacer.saw(64, 0.02)
            sizes.append(pacer.size())
        assert 300 < sizes.index(256) < 600

    def test_a_target_below_the_decodes_themselves_is_said_once(self, caplog):
        pacer = StepPacer((16, 256), 0.05)
        for _ in range(100):
            pacer.saw_decodes(7, 0.045)
        assert not caplog.records
        for _ in range(100):
            pacer.saw_decodes(16, 0.0612)
        [record] = caplog.records
        assert "up to 16 sequences take 61 ms" in record.message
        assert "target_step_ms 50" in record.message
        assert "cut to 16 tokens" in record.message
        assert "max_num_seqs to 8, whose steps take 45 ms" in record.message

    def test_a_few_slow_steps_are_no_news(self, caplog):
        pacer = StepPacer((16, 256), 0.05)
        for _ in range(3):
            pacer.saw_decodes(4, 0.2)
        for _ in range(100):
            pacer.saw_decodes(4, 0.02)
        assert not caplog.records


class TestKeptPlaces:
    def entry(self, name: str) -> Entry:
        return Entry(Sequence("r", [1], 1, SamplingParams(), (FakeAdapter(name),)), 0)

    def test_places_in_the_queue_are_kept_from_who_has_its_share_of_them(self):
        fair, load = Fair({"b": 4.0}), Load()
        waiting = [self.entry("a") for _ in range(20)]
        for entry in waiting:
            fair.joined(entry, load)

        def kept(name: str, num_waiting: int) -> int:
            load.num_waiting = num_waiting
            return fair.kept_places(self.entry(name), load, 24)

        assert [kept("a", n) for n in (20, 21, 24)] == [0, 3, 3]
        assert kept("b", 24) == 0
        for _ in range(2):
            fair.joined(self.entry("b"), load)
        assert [kept(name, 22) for name in "abc"] == [3, 0, 0]
        for entry in waiting[3:]:  # three are less than its share of a sixth
            fair.left(entry, load)
        assert kept("a", 24) == 0

    def test_they_count_as_taken(self):
        gate = Gate(8, None)
        gate.enter([], 6, 0, 0.0, kept=1)
        with pytest.raises(
            RateLimitError, match=r"7 requests wait and 8 may \(max_queued_requests, 1 of them kept for others"
        ):
            gate.enter([], 7, 0, 0.0, kept=1)
        gate.enter([], 7, 0, 0.0)


class TestEvenFlow:
    SIZES = (16, 64, 256)

    def test_the_size_is_that_of_the_mean_and_a_tenth(self):
        for mean, size in ((10, 16), (14, 16), (15, 64), (58, 64), (59, 256), (300, 256)):
            flow = EvenFlow(self.SIZES)
            for _ in range(400):
                flow.saw(mean)
            assert flow.size() == size, mean

    def test_a_flow_that_was_held_back_too_much_finds_its_size(self):
        flow, sizes = EvenFlow(self.SIZES), []
        for _ in range(600):  # there is always more
            sizes.append(flow.size())
            flow.saw(sizes[-1])
        assert sizes == sorted(sizes)
        assert sizes[-1] == 256
        assert sizes.index(256) < 300

    def test_it_gives_way_to_others_three_times_in_a_row_at_most(self):
        flow = EvenFlow(self.SIZES)
        assert [flow.size(n) for n in (10, 10, 40, 40, 10, 0, 99, 16, 2, 1)] == [6, 6, 0, 16, 6, 16, 0, 0, 14, 16]
