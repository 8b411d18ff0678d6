"""Requests that change their logits, through the engine: against numpy on recorded logits, and beside neighbours."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
import pytest

from multilora_jax.errors import UserError
from multilora_jax.request import SamplingParams
from tests.json_schemas import random_schema
from tests.tiny_engine import TINY_MODEL, LogitsRecorder, Request, greedy, make_engine, run_all, tiny_engine, tokens_of

PROMPTS = ["Hello there", "abc abc abc", "x", [7, 8, 9] * 9]


@pytest.fixture(scope="module")
def engine(golden_tiny):
    """The tied base of the reference cases, with a byte-level tokenizer."""
    return make_engine(golden_tiny / "bases" / "tied", tokenizer=TINY_MODEL, max_num_seqs=17, max_model_len=512)


@pytest.fixture(scope="module")
def recorder(engine):
    return LogitsRecorder(engine)


def by_definition(params: SamplingParams, prompt: list[int], output: list[int], logits_V: np.ndarray, ends) -> int:
    """The token that follows greedily, after vLLM's definitions."""
    x, counts = logits_V.astype(np.float32), Counter(output)
    if params.allowed_token_ids is not None:
        x[[t for t in range(len(x)) if t not in params.allowed_token_ids]] = -np.inf
    if len(output) < params.min_tokens:
        x[list(ends)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in counts.items():
        x[token] -= np.float32(params.frequency_penalty * count + params.presence_penalty)
    return int(x.argmax())


FIELDS = [
    {"repetition_penalty": 1.8}, {"frequency_penalty": 0.7}, {"presence_penalty": 1.5, "frequency_penalty": -0.1},
    {"logit_bias": {65: 4.0, 66: -100.0}}, {"allowed_token_ids": [65, 66, 67, 70]},
    {"repetition_penalty": 0.6, "presence_penalty": 0.5, "logit_bias": {100: 3.0}},
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 17])
def test_greedy_answers_equal_their_definition(engine, recorder, size):
    requests = [Request(PROMPTS[i % 4], greedy(16, logprobs=0, **FIELDS[i % len(FIELDS)])) for i in range(size)]
    outputs = run_all(engine, requests)
    for number, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        prompt, tokens, logits_NV = output.prompt_token_ids, output.outputs[0].token_ids, recorder.take(number)
        for place, token in enumerate(tokens):
            row_V = logits_NV[len(prompt) - 1 + place]
            assert token == by_definition(request.params, prompt, list(tokens[:place]), row_V, ()), (number, place)
            # Log-probabilities are of the distribution before all edits.
            logprob = row_V[token] - np.log(np.exp(row_V - row_V.max()).sum()) - row_V.max()
            assert output.outputs[0].logprobs[place][token].logprob == pytest.approx(logprob, abs=1e-4)


@pytest.mark.parametrize("size", [1, 3, 17])
def test_neighbours_that_ask_for_nothing_are_the_same_to_the_last_bit(engine, size):
    plain = [
        Request(
            PROMPTS[i % 4], SamplingParams(temperature=i % 3 / 2, seed=i, max_tokens=12, ignore_eos=True, logprobs=1)
        )
        for i in range(size)
    ]
    edited = [Request("Hi", greedy(12, **FIELDS[i % len(FIELDS)])) for i in range(size)]
    edited[-1] = Request("Hi", SamplingParams(max_tokens=12, structured_outputs={"regex": "[a-z]{12,}"}))
    quiet = [Request("Hi", greedy(12))] * size
    beside = [
        run_all(engine, [request for pair in zip(others, plain, strict=True) for request in pair])[1::2]
        for others in (edited, quiet)
    ]
    assert tokens_of(beside[0]) == tokens_of(beside[1])
    for one, other in zip(*beside, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    assert tokens_of(run_all(engine, plain)) == tokens_of(beside[0])


def test_an_answer_is_no_shorter_than_min_tokens(engine):
    [end] = engine.model_config.eos_token_ids
    wants_to_end = {"temperature": 0, "logit_bias": {end: 100.0}, "max_tokens": 20}
    outputs = run_all(engine, [Request("Hi", SamplingParams(min_tokens=n, **wants_to_end)) for n in (0, 1, 7)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 8]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    bias = {"temperature": 0, "logit_bias": {65: 100.0}, "max_tokens": 20}
    outputs = run_all(engine, [
        Request("Hi", SamplingParams(min_tokens=4, stop_token_ids=[65], **bias)),
        Request("Hi", SamplingParams(min_tokens=4, stop="AA", **bias)),
        Request("Hi", SamplingParams(min_tokens=4, stop_token_ids=[65], ignore_eos=True, **bias)),
    ])  # fmt: skip
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5, 5]
    assert outputs[1].outputs[0].text == "AAA"


def test_bad_words_are_never_spelled(engine):
    bias = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logit_bias": {65: 100.0, 66: 75.0, 67: 50.0}}
    texts = [
        output.outputs[0].text
        for output in run_all(engine, [
            Request("Hi", SamplingParams(bad_words=words, **bias))
            for words in (None, ["A"], ["AAA"], ["AA", "AB", "B"])
        ])
    ]  # fmt: skip
    assert texts == ["A" * 12, "B" * 12, "AABAABAABAAB", "ACACACACACAC"]


def test_structured_answers_end_where_the_grammar_ends(engine):
    asked = [
        ({"choice": ["yes", "no"]}, ("yes", "no")), ({"regex": "[ab]{3}"}, None), ({"choice": ["yes"]}, ("yes",)),
        ({"grammar": 'start: "x" | "xy"'}, ("x", "xy")),
    ]  # fmt: skip
    variants: list[dict[str, Any]] = [
        {"temperature": 1.0}, {"temperature": 0}, {"detokenize": False}, {"min_tokens": 10},
    ]  # fmt: skip
    for options in variants:
        outputs = run_all(engine, [
            Request("Hi", SamplingParams(seed=i, max_tokens=30, structured_outputs=fields, **options))
            for i, (fields, _) in enumerate(asked)
        ])  # fmt: skip
        for (_, texts), output in zip(asked, outputs, strict=True):
            completion = output.outputs[0]
            assert completion.finish_reason == "stop"
            assert completion.token_ids[-1] in engine.model_config.eos_token_ids
            if texts and "detokenize" not in options:
                assert completion.text in texts


def test_200_answers_parse_and_follow_their_schemas(engine):
    # A random model fills every place for white space: those answers are kept short.
    schemas = [random_schema(np.random.default_rng(seed), 2 if seed % 4 else 0) for seed in range(200)]
    outputs = run_all(engine, [
        Request("Answer: ", SamplingParams(seed=i, max_tokens=None, structured_outputs={
            "json": schema, "disable_any_whitespace": i % 4 > 0,
        }))
        for i, schema in enumerate(schemas)
    ])  # fmt: skip
    for schema, output in zip(schemas, outputs, strict=True):
        assert output.outputs[0].finish_reason == "stop", output.outputs[0].text
        jsonschema.validate(json.loads(output.outputs[0].text), schema)


def test_a_grammar_that_takes_too_much_work_ends_its_own_request_only(engine, monkeypatch):
    from multilora_jax.engine.grammars import GrammarWalk

    fill = GrammarWalk.fill

    def failing(self, mask_W):
        if self.count == 3:
            raise UserError("too much work", reason="grammar_too_complex", param="structured_outputs")
        self.count += 1
        fill(self, mask_W)

    monkeypatch.setattr(GrammarWalk, "count", 0, raising=False)
    monkeypatch.setattr(GrammarWalk, "fill", failing)
    broken, fine = run_all(engine, [
        Request("Hi", SamplingParams(max_tokens=9, structured_outputs={"regex": "a{8}"})), Request("Hi", greedy(9)),
    ])  # fmt: skip
    assert broken.outputs[0].finish_reason == "error"
    assert broken.error.reason == "grammar_too_complex"
    assert broken.outputs[0].text == "aaa"
    assert fine.outputs[0].finish_reason == "length"


def test_an_answer_that_was_preempted_goes_on_where_it_was():
    engine = tiny_engine(max_num_seqs=2, max_num_batched_tokens=16, pool_pages=33, max_model_len=512, max_rank_rows=64)
    fields = {"structured_outputs": {"regex": "([a-c]{7}-){10}"}, "repetition_penalty": 1.2}
    requests = [Request([7 + i] * 220, SamplingParams(seed=i, max_tokens=80, **fields)) for i in (0, 1)]
    together = run_all(engine, requests)
    assert engine.stats().num_preemptions > 0
    assert tokens_of(together) == [tokens_of(run_all(engine, [request]))[0] for request in requests]


@pytest.mark.parametrize(
    ("fields", "reason", "param"),
    [
        ({"logit_bias": {10**6: 1}}, "bad_token_id", "logit_bias"),
        ({"allowed_token_ids": [1, 10**6]}, "bad_token_id", "allowed_token_ids"),
        ({"structured_outputs": {"regex": "(["}}, "bad_grammar", "structured_outputs"),
    ],
)
def test_what_the_model_cannot_follow_is_refused_and_changes_nothing(engine, fields, reason, param):
    with pytest.raises(UserError) as error:
        engine.add_request("bad", "Hi", SamplingParams(**fields))
    assert (error.value.reason, error.value.param) == (reason, param)
    assert not engine.has_unfinished_requests()
