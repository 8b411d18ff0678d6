"""Parameters that change logits: what is accepted, what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from multilora_jax.errors import UserError
from multilora_jax.sampling_params import (
    MAX_BAD_WORD_CHARS,
    MAX_EDITED_TOKENS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    SamplingParams,
    StructuredOutputsParams,
)

SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty"), ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"), ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"), ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"), ({"min_tokens": 17}, "min_tokens"), ({"min_tokens": True}, "min_tokens"),
        ({"logit_bias": [1]}, "logit_bias"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {-1: 1}}, "logit_bias"), ({"logit_bias": {1: "2"}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),  # more digits than Python reads
        ({"logit_bias": {1: float("nan")}}, "logit_bias"), ({"logit_bias": {True: 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": [1.0]}, "allowed_token_ids"),
        ({"allowed_token_ids": 3}, "allowed_token_ids"),
        ({"bad_words": "no"}, "bad_words"), ({"bad_words": [""]}, "bad_words"), ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["no \ud83d"]}, "bad_words"),
        ({"logit_bias": dict.fromkeys(range(MAX_EDITED_TOKENS + 1), 1)}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(10**6)), "none")}, "logit_bias"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop"),
        ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop"),
        ({"bad_words": ["x" * MAX_BAD_WORD_CHARS, "y"]}, "bad_words"),
        ({"structured_outputs": "json"}, "structured_outputs"), ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"jsn": SCHEMA}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": 1}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
def test_bad_values_are_named(fields, param):
    with pytest.raises(UserError) as error:
        SamplingParams(**fields)
    assert error.value.param == param
    assert param in error.value.message


def test_what_is_accepted():
    bias: Any = {"7": 1, 8: -300}
    ids: Any = (1, 2)
    params = SamplingParams(
        presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.1, min_tokens=16, logit_bias=bias,
        allowed_token_ids=ids, bad_words=["no"], stop_token_ids=[5],
    )  # fmt: skip
    assert params.logit_bias == {7: 1.0, 8: -100.0}
    assert params.allowed_token_ids == [1, 2]
    assert SamplingParams(allowed_token_ids=[2, 1] * 10**5).allowed_token_ids == [2, 1]
    assert len(SamplingParams(stop=["x" * MAX_STOP_CHARS] * MAX_STOPS).stop or ()) == MAX_STOPS
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5
    asked = SamplingParams(structured_outputs={"json": SCHEMA}, detokenize=False).structured_outputs
    assert asked == StructuredOutputsParams(json=SCHEMA)
    assert isinstance(asked, StructuredOutputsParams)
    assert asked.kind == "json"


def test_only_what_changes_logits_asks_for_edits():
    assert not SamplingParams().edits_logits
    assert not SamplingParams(temperature=0, top_k=3, min_p=0.1, stop_token_ids=[1], logprobs=2).edits_logits
    assert not SamplingParams(logit_bias={}, bad_words=[], repetition_penalty=1, min_tokens=0).edits_logits
    every: list[dict[str, Any]] = [
        {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"repetition_penalty": 1.1}, {"min_tokens": 1},
        {"logit_bias": {1: 1}}, {"bad_words": ["a"]}, {"allowed_token_ids": [0]},
        {"structured_outputs": {"regex": "a"}},
    ]  # fmt: skip
    for fields in every:
        assert SamplingParams(**fields).edits_logits
