"""Several continuations of one prompt: each like a request of its own, over shared pages, ended together."""

from __future__ import annotations

import pytest

from multilora_jax.errors import UserError
from multilora_jax.request import SamplingParams
from tests.tiny_engine import Request, make_adapter, run_all, tiny_engine, tokens_of

PAGE = 16
PROMPT = [(11 * i) % 200 + 1 for i in range(4 * PAGE + 5)]


@pytest.fixture(scope="module", params=[True, False], ids=["caching", "plain"])
def engine(request):
    return tiny_engine(enable_prefix_caching=request.param)


def sampled(n: int, **options) -> SamplingParams:
    return SamplingParams(n=n, **{"max_tokens": 8, "ignore_eos": True, "seed": 40, **options})


def continuations(output) -> list[list[int]]:
    assert [completion.index for completion in output.outputs] == list(range(len(output.outputs)))
    return [list(completion.token_ids) for completion in output.outputs]


@pytest.mark.parametrize("n", [1, 3, 17])
def test_continuation_i_is_a_request_with_the_seed_plus_i(engine, tmp_path, n):
    lora = make_adapter(tmp_path / f"fan{n}", engine, 4, 100 + n)
    engine.add_lora(lora)
    for adapter in (None, lora):
        singles = run_all(engine, [Request(PROMPT, sampled(1, seed=40 + i), adapter) for i in range(n)])
        output, again = (run_all(engine, [Request(PROMPT, sampled(n), adapter)])[0] for _ in range(2))
        assert continuations(output) == tokens_of(singles)
        assert continuations(again) == continuations(output)
        assert len(set(map(tuple, continuations(output)))) == n
        assert output.finished
    engine.remove_lora(lora.name)


def test_the_prompt_is_computed_once_and_its_full_pages_are_shared(engine):
    engine.cache.order.evict(list(engine.cache.order))
    before = engine.stats()
    engine.add_request("shared", PROMPT, sampled(5, max_tokens=6))
    ran = most_pages = 0
    execute = engine.runner.execute

    def counted(step, pages_of):
        nonlocal ran
        ran += len(step.decodes) + sum(n for _, n in step.prefills)
        return execute(step, pages_of)

    engine.runner.execute = counted
    while engine.has_unfinished_requests():
        engine.step()
        most_pages = max(most_pages, engine.stats().pages_kv)
    engine.runner.execute = execute
    # The others compute the 5 tokens behind the four full pages, then 5 of 6 new tokens have to be run each.
    assert ran == len(PROMPT) + 4 * 5 + 5 * 5
    assert most_pages == 4 + 5
    after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == len(PROMPT)
    assert after.generation_tokens - before.generation_tokens == 30
    engine.check_integrity()
    assert (after.pages_cached > 0) == engine.config.enable_prefix_caching


def test_each_ends_for_its_own_reason_and_the_request_with_the_last(engine):
    texts = continuations(run_all(engine, [Request(PROMPT, sampled(3))])[0])
    stop = next(token for token in texts[1][1:-1] if token not in texts[0] + texts[2])
    engine.add_request("ends", PROMPT, sampled(3, stop_token_ids=[stop]))
    outputs = []
    while engine.has_unfinished_requests():
        step = engine.step()
        assert len(step) <= 1
        outputs += step
    assert {output.request_id for output in outputs} == {"ends"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    ended = outputs[-1].outputs
    assert [c.finish_reason for c in ended] == ["length", "stop", "length"]
    assert [c.stop_reason for c in ended] == [None, stop, None]
    assert [len(c.token_ids) for c in ended] == [8, texts[1].index(stop) + 1, 8]


def test_a_leader_that_ends_with_its_first_token_leaves_the_prompt_to_the_others(engine):
    [output] = run_all(engine, [Request(PROMPT, sampled(4, max_tokens=1))])
    assert [len(tokens) for tokens in continuations(output)] == [1] * 4
    assert [c.finish_reason for c in output.outputs] == ["length"] * 4


def test_prompt_logprobs_come_once_and_logprobs_with_each(engine):
    [output] = run_all(engine, [Request(PROMPT, sampled(3, prompt_logprobs=1, logprobs=2))])
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert [len(c.logprobs) for c in output.outputs] == [8] * 3


@pytest.mark.parametrize("steps", [0, 1, 4, 6])
def test_an_abort_ends_all_of_them(engine, steps):
    free = engine.stats().pages_free + engine.stats().pages_cached
    engine.add_request("gone", PROMPT, sampled(3, max_tokens=20))
    for _ in range(steps):
        engine.step()
    assert engine.abort_request("gone")
    assert not engine.abort_request("gone")
    assert not engine.has_unfinished_requests()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_kv) == (0, 0, 0)
    assert stats.pages_free + stats.pages_cached == free
    engine.check_integrity()
    assert engine.step() == []


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_first_that_fails_ends_all_of_them_with_its_error(engine, which):
    """Also where others of the same step come after it."""
    engine.add_request("fails", PROMPT, sampled(3, presence_penalty=1.0))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        if outputs and all(len(c.token_ids) == 2 for c in outputs[-1].outputs[1:]):
            state = engine._requests[f"fails ({which + 1} of 3)"].seq.sampling_state
            state.error = error = UserError("too much work", reason="grammar_too_complex")
    last = outputs[-1]
    assert last.finished
    assert last.error is error
    assert [c.finish_reason for c in last.outputs] == ["error"] * 3
    engine.check_integrity()
    assert engine.stats().pages_kv == 0


def test_an_id_is_taken_as_long_as_one_of_them_lives(engine):
    engine.add_request("one", PROMPT, sampled(2))
    for name, n in (("one", 1), ("one", 3), ("one (2 of 2)", 1)):
        with pytest.raises(UserError) as info:
            engine.add_request(name, PROMPT, sampled(n))
        assert info.value.reason == "duplicate_request_id"
    engine.add_request("two", PROMPT, sampled(1))
    with pytest.raises(UserError, match="'two' is in use"):
        engine.add_request("two", PROMPT, sampled(2))
    assert engine.abort_request("one")
    assert engine.abort_request("two")
    engine.check_integrity()


@pytest.mark.parametrize("n", [0, 129, 1.0, True, None])
def test_n_is_a_small_number(n):
    with pytest.raises(UserError) as info:
        SamplingParams(n=n)
    assert info.value.param == "n"


def test_continuations_survive_preemption():
    engine = tiny_engine(pool_pages=14, max_model_len=128, enable_prefix_caching=False)
    roomy = tiny_engine()
    request = Request(PROMPT, sampled(6, max_tokens=40))
    [squeezed], [free] = run_all(engine, [request]), run_all(roomy, [request])
    assert squeezed.metrics.num_preemptions > 0
    assert continuations(squeezed) == continuations(free)
    assert engine.stats().pages_free == engine.stats().pages_total
