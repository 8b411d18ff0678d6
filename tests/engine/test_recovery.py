"""Steps that fail: what was in them is run again, who makes them fail is ended alone, the pool is sound afterwards."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError, UnavailableError
from multilora_jax.memory.allocator import PageKind
from tests.tiny_engine import Request, greedy, make_adapter, tiny_engine, tokens_of

PROMPTS = [[5, 17, 200], [6] * 20, [7, 8], [9] * 40, [10, 11, 12, 13], [14]]
OUT_OF_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory while trying to allocate 1 bytes")
PLACES = ("write_page", "rows", "insert", "begin", "layers", "finish")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder, engine = tmp_path_factory.mktemp("adapters"), tiny_engine()
    return [make_adapter(folder / f"a{i}", engine, 4 + 4 * i, seed=i) for i in range(2)]


def make(**options: Any) -> LLMEngine:
    return tiny_engine(max_num_seqs=4, **options)


def run(engine: LLMEngine, requests: list[Request], most: int = 200) -> tuple[list[Any], int]:
    """The last outputs in order, and how many steps failed; the engine is left empty and sound."""
    for number, request in enumerate(requests):
        engine.add_request(str(number), *request)
    done, failures = {}, 0
    for _ in range(most):
        if not engine.has_unfinished_requests():
            break
        try:
            outputs = engine.step()
        except Exception:
            failures += 1
            outputs = engine.recover()
            engine.check_integrity()
        done |= {output.request_id: output for output in outputs if output.finished}
    assert not engine.has_unfinished_requests()
    engine.check_integrity()
    assert engine.stats().pages_kv == 0
    return [done[str(number)] for number in range(len(requests))], failures


def mixed(adapters, max_tokens: int = 6) -> list[Request]:
    """Requests of two adapters and of the base, more than there are seats."""
    loras = [adapters[0], None, adapters[1], None, adapters[0], adapters[1]]
    return [Request(prompt, greedy(max_tokens), lora) for prompt, lora in zip(PROMPTS, loras, strict=True)]


@pytest.fixture(scope="module")
def expected(adapters) -> list[list[int]]:
    return tokens_of(run(make(), mixed(adapters))[0])


def errors_of(outputs) -> list[str | None]:
    return [getattr(output.error, "reason", None) for output in outputs]


def fails(engine: LLMEngine, when, error: BaseException) -> list[Any]:
    """Makes `execute` raise whenever `when(step)`; the steps that did are noted."""
    execute, failed = engine.runner.execute, []

    def failing(step, pages_of):
        if when(step):
            failed.append(step)
            raise error
        return execute(step, pages_of)

    engine.runner.execute = failing  # type: ignore[method-assign]
    return failed


@pytest.mark.parametrize(("place", "call"), [*zip(PLACES, (0, 0, 0, 5, 7, 6), strict=True)])
def test_one_failure_at_any_place_costs_nobody_an_answer(adapters, expected, place, call):
    """The program runs and its results are lost, so that whatever was given to it is gone."""
    engine = make()
    get, calls = engine.runner.programs.get, []

    def failing(*key):
        program = get(*key)

        def run_and_fail(*args):
            result = program(*args)
            calls.append(key)
            if len(calls) == call + 1:
                raise RuntimeError("device lost")
            return result

        return run_and_fail if key[0] == place else program

    engine.runner.programs.get = failing  # type: ignore[method-assign]
    outputs, failures = run(engine, mixed(adapters))
    assert (failures, errors_of(outputs)) == (1, [None] * 6)
    assert tokens_of(outputs) == expected


def test_a_pool_that_went_with_the_step_is_made_again(adapters, expected):
    engine = make()
    engine.pin_lora(engine.add_lora(adapters[0]).name)
    failed: list[Any] = []

    def lose(step):
        if engine._stats.steps != 3 or failed:
            return False
        engine.runner.pool.delete()
        return True

    failed = fails(engine, lose, OUT_OF_MEMORY)
    outputs, failures = run(engine, mixed(adapters))
    assert failures == len(failed) == 1
    assert (errors_of(outputs), tokens_of(outputs)) == ([None] * 6, expected)
    assert engine.adapter_states()["a0"] == "resident"  # the pin outlived the pool


@pytest.mark.parametrize("ahead", [False, True])
def test_a_poisoned_request_fails_alone(adapters, expected, ahead):
    engine = make(async_scheduling=ahead)
    failed = fails(engine, lambda step: any(9 in seq.token_ids[:1] for seq in step.sequences), ValueError("poison"))
    outputs, failures = run(engine, mixed(adapters))
    assert errors_of(outputs) == [None, None, None, "step_failed", None, None]
    assert "ValueError" in outputs[3].error.message
    assert outputs[3].error.status == 500
    assert "poison" not in outputs[3].error.message  # what an exception says may be another tenant's
    expected = [*expected[:3], [], *expected[4:]]
    assert tokens_of(outputs) == expected
    assert failures == len(failed) <= 5  # four in the batch: 4, 2, 1, once more for its half


def test_a_request_that_turns_bad_in_the_middle_keeps_what_it_had(adapters, expected):
    engine = make()
    fails(
        engine, lambda step: any(s.token_ids[0] == 9 and len(s.token_ids) > 42 for s in step.sequences), OUT_OF_MEMORY
    )
    outputs, _ = run(engine, mixed(adapters))
    assert errors_of(outputs) == [None, None, None, "out_of_memory", None, None]
    assert (outputs[3].error.status, outputs[3].error.retry_after_s) == (503, 1)
    assert tokens_of(outputs) == [*expected[:3], expected[3][:3], *expected[4:]]


def test_memory_that_is_short_for_a_whole_batch_costs_nobody_an_answer(adapters, expected):
    engine = make()
    failed = fails(engine, lambda step: len(step.sequences) > 2 and len(failed) < 5, OUT_OF_MEMORY)
    outputs, failures = run(engine, mixed(adapters))
    assert failures == 5
    assert (errors_of(outputs), tokens_of(outputs)) == ([None] * 6, expected)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failure_that_shows_when_results_are_read(adapters, expected, ahead):
    """As devices do it: the launch succeeds, and the pool is an array that cannot be read."""
    engine = make(async_scheduling=ahead)
    read, calls = engine._results.read, []

    def failing(step):
        calls.append(step)
        if len(calls) in (3, 4):
            engine.runner.pool.delete()
            raise OUT_OF_MEMORY
        return read(step)

    engine._results.read = failing  # type: ignore[method-assign]
    outputs, failures = run(engine, mixed(adapters))
    assert (failures, errors_of(outputs)) == (2, [None] * 6)
    assert tokens_of(outputs) == expected


def test_prefixes_of_a_failed_step_are_not_shared(adapters, expected):
    """What a failed step wrote, or did not, must not be found by the next request with the same prompt."""
    engine = make(enable_prefix_caching=True)
    read = engine._results.read

    def zeroed(step):
        engine._results.read = read  # type: ignore[method-assign]
        engine.runner.pool.delete()
        raise OUT_OF_MEMORY

    long = [Request([5] * 70, greedy(8))]
    wanted = tokens_of(run(make(), long)[0])
    engine._results.read = zeroed  # type: ignore[method-assign]
    assert tokens_of(run(engine, long)[0]) == wanted
    assert tokens_of(run(engine, long)[0]) == wanted


def test_books_that_contradict_themselves_are_begun_anew(adapters, expected):
    engine = make()

    def lose_pages(step):
        if engine._stats.steps != 3 or failed:
            return False
        engine.allocator.allocate(20, PageKind.KV)  # which nobody has
        engine.scheduler.running()[0].page_ids.pop()
        return True

    failed: list[Any] = []
    failed = fails(engine, lose_pages, RuntimeError("half done"))
    outputs, failures = run(engine, mixed(adapters))
    assert failures == 1
    assert tokens_of(outputs) == expected


def test_one_request_s_text_is_no_other_s_business(adapters, expected):
    """A bug in taking a token of one request: it fails alone, and no step fails."""
    engine = make()
    for number, request in enumerate(mixed(adapters)):
        engine.add_request(str(number), *request)
    engine._requests["3"]._detokenizer.append = lambda _: 1 / 0  # type: ignore[method-assign]
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    outputs = [done[str(number)] for number in range(6)]
    assert errors_of(outputs) == [None, None, None, "step_failed", None, None]
    assert tokens_of(outputs)[:3] == expected[:3]
    engine.check_integrity()


def test_of_several_continuations_a_bad_one_ends_the_request_and_no_other(adapters, expected):
    engine = make()
    fails(engine, lambda step: any(seq.index == 1 for seq in step.sequences), ValueError("poison"))
    requests = mixed(adapters)
    requests[3] = Request(PROMPTS[3], greedy(6, n=3))
    outputs, _ = run(engine, requests)
    assert errors_of(outputs) == [None, None, None, "step_failed", None, None]
    assert [o.finish_reason for o in outputs[3].outputs][1] == "error"
    assert tokens_of(outputs)[:3] + tokens_of(outputs)[4:] == expected[:3] + expected[4:]


def test_an_adapter_that_cannot_be_copied_fails_who_wants_it(adapters, expected):
    engine = make()
    write = engine.runner.write_pages

    def failing(writes):
        if any(item.adapter.name == "a1" for item, _ in writes):
            raise OUT_OF_MEMORY
        write(writes)

    engine.runner.write_pages = failing  # type: ignore[method-assign]
    outputs, _ = run(engine, mixed(adapters))
    assert errors_of(outputs) == [None, None, "out_of_memory", None, None, "out_of_memory"]
    assert tokens_of(outputs)[:2] == expected[:2]


def test_without_room_for_a_pool_it_says_so_and_serves_no_more(adapters, monkeypatch):
    engine = make()
    fails(engine, lambda step: engine.runner.pool.delete() or True, OUT_OF_MEMORY)

    def no_room(*_):
        raise ConfigError("no room", reason="pool_too_large")

    monkeypatch.setattr("multilora_jax.engine.model_runner.make_pool", no_room)
    engine.add_request("0", *mixed(adapters)[1])
    with pytest.raises(jax.errors.JaxRuntimeError):
        engine.step()
    with pytest.raises(ConfigError, match="no room"):
        engine.recover()
    with pytest.raises(UnavailableError, match="RESOURCE_EXHAUSTED"):
        engine.step()
