"""What the engine does with more requests than it can take."""

from __future__ import annotations

import time
from typing import Any

import pytest

from multilora_jax.errors import OverloadedError, RateLimitError, UserError
from tests.tiny_engine import greedy, tiny_engine


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(scheduling_policy="deadline", first_token_objective_s=5.0, max_num_seqs=16, fair_by="tenant")


def drain(engine):
    """Steps to the end; the last output of each request."""
    last = {}
    while engine.has_unfinished_requests():
        last.update((output.request_id, output) for output in engine.step())
    engine.check_integrity()
    assert engine.stats().pages_kv == 0
    return last


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_is_too_late_ends_with_an_error_and_others_go_on(engine, n):
    before = engine.stats().refused.get("first_token_objective", 0)
    engine.add_request("late", "Hello", greedy(4, n=n), arrival_time=time.monotonic() - 60)
    engine.add_request("new", "Hello", greedy(4))
    last = drain(engine)
    assert isinstance(last["late"].error, OverloadedError)
    assert last["late"].finished
    assert [c.finish_reason for c in last["late"].outputs] == ["error"] * n
    assert last["late"].metrics.arrival_time < time.monotonic() - 59
    assert last["new"].error is None
    assert len(last["new"].outputs[0].token_ids) == 4
    assert engine.stats().refused["first_token_objective"] == before + 1


def test_one_that_runs_is_not_given_up(engine):
    engine.add_request("slow", "Hello", greedy(4))
    engine.step()
    engine.scheduler._live["slow"].seq.arrival_time -= 60
    assert drain(engine)["slow"].error is None


def test_shares_are_counted_by_tenant(engine):
    for name, words in {
        "a": {"tenant": "t"},
        "b": {"cache_salt": "s"},
        "c": {},
        "d": {"tenant": "t", "cache_salt": "s"},
    }.items():
        engine.add_request(name, "Hello", greedy(1), **words)
    assert [entry.party for entry in engine.scheduler._live.values()] == ["t", "s", "", "t"]
    drain(engine)
    with pytest.raises(UserError, match="tenant must be a string, not 7"):
        engine.add_request("e", "Hello", greedy(1), tenant=7)


def test_a_full_queue_refuses_and_changes_nothing():
    engine = tiny_engine(max_queued_requests=1)
    for i in range(17):  # sixteen seats are free
        engine.add_request(str(i), "Hello", greedy(2))
    with pytest.raises(RateLimitError, match="17 requests wait and 1 may") as info:
        engine.add_request("more", "Hello", greedy(2))
    assert (info.value.retry_after_s or 0) >= 1
    assert len(drain(engine)) == 17
    engine.add_request("more", "Hello", greedy(2))
    assert drain(engine)["more"].error is None
    assert engine.stats().refused == {"queue_full": 1}


def test_a_paced_engine_uses_the_compiled_sizes():
    engine = tiny_engine(target_step_ms=1.0, narrow=False, max_num_batched_tokens=128)
    sizes = [shape.num_prompt_tokens for shape in engine.runner.shapes if shape.num_prompt_tokens]
    assert list(engine.scheduler.config.prompt_sizes) == sizes == [16, 32, 64, 128]
    assert engine.scheduler.config.target_step_s == 0.001
    assert [shape.num_prompt_tokens for shape in engine.runner.extended_shapes if shape.num_blocks] == sizes
    # The same without adapters: fewer programs.
    engine = tiny_engine(target_step_ms=1.0, narrow=False, max_num_batched_tokens=128, enable_lora=False)
    engine.warm_up()
    seen: list[int] = []
    scheduler: Any = engine.scheduler
    saw = scheduler.saw_step
    scheduler.saw_step = lambda step, seconds: (seen.append(step.num_prompt_tokens), saw(step, 1.0))
    engine.add_request("decodes", [5] * 4, greedy(40))
    while not engine.scheduler.was_idle or not engine.scheduler.num_running:
        engine.step()
    engine.step()
    engine.add_request("prompt", [5] * 100, greedy(2))
    drain(engine)
    assert seen[0] == 4
    assert max(seen[1:]) == 16
    assert sum(seen) == 104
    assert engine.stats().compilations == 0
