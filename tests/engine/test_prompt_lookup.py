"""Prompt lookup: what is proposed, and that answers are exactly those without it."""

from __future__ import annotations

import numpy as np
import pytest

from multilora_jax.engine.prompt_lookup import PromptLookup, _rows_for, _shares
from multilora_jax.engine.step_plan import decode_sizes
from multilora_jax.request import SamplingParams
from tests.tiny_engine import Request, make_adapter, run_all, tiny_engine, tokens_of

REPEATING = [3, 1, 4, 1, 5, 9, 2, 6] * 6


def proposed_by_search(text, limit, longest, shortest):
    """The definition, in plain Python."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                grown = list(text)
                for i in range(limit):
                    grown.append(grown[end + i])
                return grown[len(text) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_what_followed_the_last_occurrence_is_proposed(seed):
    rng = np.random.default_rng(seed)
    shortest = int(rng.integers(1, 3))
    longest = shortest + int(rng.integers(0, 4))
    lookup, text = PromptLookup(9, longest, shortest), rng.integers(0, 3, 5).tolist()
    for _ in range(300):
        limit = int(rng.integers(0, 9))
        assert lookup.propose(text, limit) == proposed_by_search(text, limit, longest, shortest)
        text += rng.integers(0, int(rng.integers(1, 8)), int(rng.integers(1, 4))).tolist()


def test_width_follows_what_the_model_accepts():
    lookup = PromptLookup(8, 3, 1)
    widths = []
    for proposed, accepted in [(8, 2), (4, 4), (7, 1), (7, 0), (7, 0), (7, 0), (1, 1), (7, 2), (7, 7), (3, 3)]:
        lookup.verified(proposed, accepted)
        widths.append(lookup.width)
    assert widths == [4, 8, 4, 2, 1, 1, 2, 4, 8, 8]
    assert len(lookup.propose(REPEATING, 99)) == 8  # what a step has room for is the step's business


@pytest.mark.parametrize(
    ("wishes", "total", "shares"),
    [([3, 3], 9, [3, 3]), ([7, 1, 7], 9, [4, 1, 4]), ([7, 7, 7], 8, [2, 3, 3]), ([], 5, []), ([4, 2], 0, [0, 0])],
)
def test_shares_are_as_equal_as_wishes_allow(wishes, total, shares):
    assert _shares(wishes, total) == shares


@pytest.mark.parametrize(
    ("least", "wanted", "rows"),
    [(1, 2, 2), (1, 3, 8), (1, 9, 8), (1, 11, 8), (1, 12, 32), (9, 10, 32), (8, 9, 8), (1, 90, 40), (33, 40, 40)],
)
def test_steps_are_not_made_larger_for_little(least, wanted, rows):
    assert _rows_for(least, wanted, decode_sizes(40)) == rows


def test_rows_that_a_step_leaves_empty_are_filled(monkeypatch):
    """One sequence of eight seats: where it wants a guess more than the smallest step holds, it gets seven."""
    engine = tiny_engine(max_num_seqs=8, pool_pages=100, enable_lora=False, prompt_lookup_tokens=8, narrow=False)
    seen, execute = [], engine.runner.execute
    monkeypatch.setattr(
        engine.runner, "execute", lambda step, *rest: seen.append(step.num_decode_rows) or execute(step, *rest)
    )
    [out] = run_all(engine, [Request(REPEATING, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))])
    assert len(out.outputs[0].token_ids) == 60
    assert 8 in seen
    assert all(rows in (0, 1, 2, 8) for rows in seen[:-6])  # towards the answer's end fewer are left to guess


@pytest.fixture(scope="module")
def engine():
    engine = tiny_engine(max_num_seqs=20, pool_pages=400, max_model_len=256, prompt_lookup_min=1)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def loras(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [None, *(make_adapter(folder / f"a{i}", engine, 4, i) for i in (1, 2))]


def requests(loras, count, lookup, **options):
    prompts = [REPEATING[i % 5 :] + [i + 10] * (i % 3) for i in range(count)]
    return [
        Request(
            prompt,
            SamplingParams(max_tokens=40, ignore_eos=True, prompt_lookup_tokens=lookup, seed=i, **options),
            loras[i % 3],
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 3, 17])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_those_without_it(engine, loras, count, temperature):
    plain = run_all(engine, requests(loras, count, 0, temperature=temperature, logprobs=2))
    before, steps = engine.stats(), engine.stats().steps
    guessed = run_all(engine, requests(loras, count, 6, temperature=temperature, logprobs=2))
    after = engine.stats()
    assert tokens_of(guessed) == tokens_of(plain)
    assert after.proposed_tokens > before.proposed_tokens
    assert after.generation_tokens - before.generation_tokens == 40 * count
    if not temperature:
        assert after.accepted_tokens > before.accepted_tokens
        if count == 1:
            assert after.steps - steps < 40
    for one, other in zip(guessed, plain, strict=True):
        pairs = zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
        for (mine, theirs), token in zip(pairs, one.outputs[0].token_ids, strict=True):
            assert mine.keys() == theirs.keys()
            assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
    assert after.compilations == 0
    engine.check_integrity()


def test_an_answer_ends_where_it_would_have(engine, loras):
    """A stop token and max_tokens hold within a step's accepted tokens too."""
    [free] = run_all(engine, requests(loras, 1, 0, temperature=0))
    tokens = free.outputs[0].token_ids
    for stop in set(tokens):
        params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop], ignore_eos=True)
        params.prompt_lookup_tokens = 12
        [out] = run_all(engine, [Request(REPEATING, params)])
        assert out.outputs[0].token_ids == tokens[: tokens.index(stop) + 1]
        assert out.outputs[0].stop_reason == stop
    for most in range(1, 12):
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, prompt_lookup_tokens=12)
        assert run_all(engine, [Request(REPEATING, params)])[0].outputs[0].token_ids == tokens[:most]


def test_the_engines_setting_is_the_default_and_a_request_may_refuse():
    engine = tiny_engine(max_num_seqs=8, pool_pages=100, max_model_len=256, enable_lora=False, prompt_lookup_tokens=5)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    run_all(engine, [Request(REPEATING, params)])
    proposed = engine.stats().proposed_tokens
    assert proposed > 0
    params.prompt_lookup_tokens = 0
    run_all(engine, [Request(REPEATING, params)])
    params.prompt_lookup_tokens, params.presence_penalty = 5, 1.0  # its logits depend on its last token
    run_all(engine, [Request(REPEATING, params)])
    assert engine.stats().proposed_tokens == proposed


def test_proposals_take_no_pages_from_running_sequences():
    engine = tiny_engine(max_num_seqs=8, pool_pages=9, max_model_len=128, enable_lora=False, prompt_lookup_tokens=7)
    params = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    together = run_all(engine, [Request(REPEATING[:17], params), Request(REPEATING[3:20], params)])
    assert engine.stats().num_preemptions == 0
    params.prompt_lookup_tokens = 0
    alone = [run_all(engine, [Request(text, params)])[0] for text in (REPEATING[:17], REPEATING[3:20])]
    assert tokens_of(together) == tokens_of(alone)
    engine.check_integrity()
