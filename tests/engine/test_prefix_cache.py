"""The prefix cache on a real engine: who shares with whom, and that a hit changes nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from multilora_jax.errors import UserError
from multilora_jax.request import LoRARequest
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_adapter, make_engine, run_all, tokens_of

PAGE = 16
PROMPT = [(7 * i) % 50 + 1 for i in range(5 * PAGE + 3)]


@pytest.fixture(scope="module")
def engine(golden_tiny):
    return make_engine(golden_tiny / "bases" / "untied")


@pytest.fixture(scope="module")
def recorder(engine):
    return LogitsRecorder(engine)


@pytest.fixture(scope="module")
def loras(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    made = {name: make_adapter(folder / name, engine, 4, seed) for seed, name in enumerate("abc")}
    for lora in made.values():
        engine.add_lora(lora)
    return {name: LoRARequest(name, lora.lora_int_id) for name, lora in made.items()}


def run(engine, prompt, lora=None, salt: str | None = "t", name: str = "r", **options):
    """One request alone; its output."""
    engine.add_request(name, prompt, greedy(6, **options), lora, cache_salt=salt)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                engine.check_integrity()
                return output
    raise AssertionError


def forget(engine):
    engine.cache.order.evict([item for item in engine.cache.order if isinstance(item, int)])


def scaled(lora: LoRARequest, scale: float) -> LoRARequest:
    return dataclasses.replace(lora, scale=scale)


@pytest.mark.parametrize("count", [1, 3, 17])
def test_d09_no_hit_across_adapters_scales_and_salts_and_the_same_one_hits(engine, recorder, loras, count):
    forget(engine)
    a, b, c = loras["a"], loras["b"], loras["c"]
    mixes = [None, a, b, scaled(a, 0.5), scaled(a, 0.0), [a, b], [a, scaled(b, 2.0)], [scaled(a, 2.0), b], c]
    users = [(mix, salt) for salt in ("t", "u") for mix in mixes][:count]
    prompts = [PROMPT[: -(i % 3) or None] for i in range(count)]
    alone = []
    for (mix, _), prompt in zip(users, prompts, strict=True):
        alone.append(tokens_of([run(engine, prompt, mix, salt=f"alone {len(alone)}")])[0])
    for expected in (0, 5 * PAGE):
        for i, (mix, salt) in enumerate(users):
            engine.add_request(f"d09-{i}", prompts[i], greedy(6), mix, cache_salt=salt)
        done = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step() if output.finished}
            engine.check_integrity()
        outputs = [done[f"d09-{i}"] for i in range(count)]
        assert tokens_of(outputs) == alone
        assert [output.num_cached_tokens for output in outputs] == [expected] * count


def test_d09_no_hit_across_versions_of_one_name(engine, recorder, tmp_path):
    first, second = (make_adapter(tmp_path / str(i) / "v", engine, 4, 50 + i) for i in range(2))
    lora = LoRARequest("v", first.lora_int_id)
    engine.add_lora(first)
    old = run(engine, PROMPT, lora)
    assert run(engine, PROMPT, lora).num_cached_tokens == 5 * PAGE
    engine.add_lora(LoRARequest("v", first.lora_int_id, second.lora_path, load_inplace=True))
    new = run(engine, PROMPT, lora)
    assert new.num_cached_tokens == 0
    assert tokens_of([new]) != tokens_of([old])
    assert run(engine, PROMPT, lora).num_cached_tokens == 5 * PAGE
    engine.add_lora(LoRARequest("v", first.lora_int_id, first.lora_path, load_inplace=True))
    again = run(engine, PROMPT, lora)  # the same content as the first time
    assert (again.num_cached_tokens, tokens_of([again])) == (5 * PAGE, tokens_of([old]))


def test_d09_logits_of_a_hit_are_those_without_one(engine, recorder, loras):
    for lora in (None, loras["a"]):
        recorder.clear()
        cold = run(engine, PROMPT, lora, salt="cold", name="cold")
        run(engine, PROMPT[: 3 * PAGE + 1], lora, salt="warm", name="other")
        warm = run(engine, PROMPT, lora, salt="warm", name="warm")
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 3 * PAGE)
        assert tokens_of([cold]) == tokens_of([warm])
        cold_rows, warm_rows = recorder.take_rows("cold"), recorder.take_rows("warm")
        assert min(warm_rows) == 3 * PAGE
        for position, row in warm_rows.items():
            np.testing.assert_allclose(row, cold_rows[position], rtol=0, atol=1e-4)


def test_a_prompt_that_is_there_as_a_whole_computes_its_last_token(engine, recorder):
    prompt = PROMPT[: 2 * PAGE]
    first = run(engine, prompt, salt="whole")
    again = run(engine, prompt, salt="whole")
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, PAGE)
    longer = run(engine, [*prompt, 5], salt="whole")
    assert longer.num_cached_tokens == 2 * PAGE
    assert tokens_of([first]) == tokens_of([again])


def test_generated_tokens_are_found_by_the_next_turn(engine, recorder):
    first = run(engine, PROMPT[: 2 * PAGE - 3], salt="turns")
    text = PROMPT[: 2 * PAGE - 3] + list(first.outputs[0].token_ids)
    assert run(engine, [*text, 9, 9], salt="turns").num_cached_tokens == 2 * PAGE


def test_prompt_logprobs_are_computed_whatever_is_cached(engine, recorder):
    run(engine, PROMPT, salt="about")
    output = run(engine, PROMPT, salt="about", prompt_logprobs=1)
    assert output.num_cached_tokens == 0
    assert len(output.prompt_logprobs) == len(PROMPT)


def test_equal_prompts_of_one_step_are_both_right_and_one_is_kept(engine, recorder):
    forget(engine)
    for name in ("x", "y"):
        engine.add_request(name, PROMPT[:PAGE], greedy(2), cache_salt="twins")
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert len({tuple(output.outputs[0].token_ids) for output in done.values()}) == 1
    assert {output.num_cached_tokens for output in done.values()} == {0}
    assert engine.stats().pages_cached == 1
    engine.check_integrity()


def test_cached_pages_make_room_before_anybody_is_preempted(golden_tiny):
    engine = make_engine(golden_tiny / "bases" / "untied", pool_pages=13, max_model_len=128)
    prompts = [[i + 1] * (4 * PAGE + 1) for i in range(6)]
    for prompt in prompts:
        run_all(engine, [Request(prompt, greedy(4))])
    stats = engine.stats()
    assert (stats.num_preemptions, stats.pages_kv) == (0, 0)
    assert stats.pages_cached > 6
    assert run(engine, prompts[-1], salt=None).num_cached_tokens == 4 * PAGE
    assert run(engine, prompts[0], salt=None).num_cached_tokens == 0
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (8 * (4 * PAGE + 1), 4 * PAGE)


def test_without_the_cache_nothing_is_kept(golden_tiny):
    engine = make_engine(golden_tiny / "bases" / "untied", enable_prefix_caching=False)
    for _ in range(2):
        assert run(engine, PROMPT).num_cached_tokens == 0
    stats = engine.stats()
    assert (stats.pages_cached, stats.prefix_queries, stats.prefix_hits) == (0, 0, 0)


@pytest.mark.parametrize("salt", ["", 5, ["x"]])
def test_a_salt_is_some_text(engine, salt):
    with pytest.raises(UserError) as info:
        engine.add_request("bad", PROMPT, greedy(1), cache_salt=salt)
    assert (info.value.reason, info.value.param) == ("bad_cache_salt", "cache_salt")
    assert not engine.has_unfinished_requests()


def test_a_salt_may_stand_in_the_prompt_s_dict(engine, recorder):
    prompt = {"prompt_token_ids": PROMPT, "cache_salt": "inside"}
    engine.add_request("dict", prompt, greedy(1), cache_salt=None)
    while engine.has_unfinished_requests():
        engine.step()
    assert run(engine, PROMPT, salt="inside").num_cached_tokens == 5 * PAGE
    with pytest.raises(UserError, match="cache_salt must be one"):
        engine.add_request("both", prompt, greedy(1), cache_salt="other")
