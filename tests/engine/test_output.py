"""What a live request keeps: stops in their order, log-probabilities, the text with and without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from multilora_jax.engine.output import RequestState
from multilora_jax.request import FinishReason, LoRARequest, SamplingParams, Sequence
from multilora_jax.tokenizer import Tokenizer
from tests.tiny_engine import TINY_MODEL

EOS = 257


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(TINY_MODEL)


def make_state(tokenizer, *, prompt=(72, 105), max_tokens=10, eos=True, lora=None, **params) -> RequestState:
    seq = Sequence(
        request_id="r",
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),
        eos_token_ids=frozenset([EOS]) if eos else frozenset(),
        max_total_tokens=len(prompt) + max_tokens,
    )
    return RequestState(seq, "Hi", lora, tokenizer)


def output_of(state: RequestState, now: float) -> Any:
    return state.output(now)


def feed(state, tokens, logprobs=None):
    """Appends until the request ends; the number of tokens it took."""
    for count, token in enumerate(tokens, 1):
        state.append(token, 1.0 + count, logprobs)
        if state.finish_reason is not None:
            return count
    return len(tokens)


def test_text_and_tokens_are_cumulative(tokenizer):
    state = make_state(tokenizer, lora=LoRARequest("a", 1))
    feed(state, b"ab")
    first = output_of(state, 9.0)
    feed(state, b"c")
    second = output_of(state, 9.0)
    assert (first.outputs[0].text, list(first.outputs[0].token_ids)) == ("ab", [97, 98])
    assert (second.outputs[0].text, list(second.outputs[0].token_ids)) == ("abc", [97, 98, 99])
    assert (first.finished, first.outputs[0].finish_reason, first.metrics.finished_time) == (False, None, None)
    assert (first.prompt, first.prompt_token_ids, first.request_id) == ("Hi", [72, 105], "r")
    assert first.lora_request == first.outputs[0].lora_request == LoRARequest("a", 1)
    assert (first.metrics.first_token_time, second.metrics.first_token_time) == (2.0, 2.0)


def test_max_tokens(tokenizer):
    state = make_state(tokenizer, max_tokens=3)
    assert feed(state, b"abcdef") == 3
    output = output_of(state, 9.0)
    assert (output.finished, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (True, "length", None)
    assert output.metrics.finished_time == 9.0


def test_eos_ends_a_text_and_is_not_in_it(tokenizer):
    state = make_state(tokenizer)
    assert feed(state, [97, EOS, 98]) == 2
    completion = output_of(state, 9.0).outputs[0]
    assert (completion.text, list(completion.token_ids)) == ("a", [97, EOS])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert feed(make_state(tokenizer, eos=False), [97, EOS, 98]) == 3


def test_stop_tokens(tokenizer):
    state = make_state(tokenizer, stop_token_ids=[98])
    assert feed(state, b"abc") == 2
    completion = output_of(state, 9.0).outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a", "stop", 98)
    # Named as a stop token, eos is the reason by its number; and on the last token allowed, stop wins over length.
    state = make_state(tokenizer, stop_token_ids=[EOS], max_tokens=1)
    feed(state, [EOS])
    assert output_of(state, 9.0).outputs[0].stop_reason == EOS
    assert state.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_stop_strings_over_several_tokens(tokenizer, include, text):
    state = make_state(tokenizer, stop=["cd", "zz"], include_stop_str_in_output=include)
    feed(state, b"abc")
    assert output_of(state, 9.0).outputs[0].text == "ab"  # c may begin the stop string
    feed(state, b"d")
    completion = output_of(state, 9.0).outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", "cd")
    assert list(completion.token_ids) == list(b"abcd")


def test_what_was_held_back_is_flushed_at_the_end(tokenizer):
    state = make_state(tokenizer, stop=["cd"], max_tokens=3)
    feed(state, b"abc")
    assert output_of(state, 9.0).outputs[0].text == "abc"
    cut = make_state(tokenizer, max_tokens=2)
    feed(cut, "é".encode()[:1] + b"x")
    assert output_of(cut, 9.0).outputs[0].text == "\ufffdx"


def test_a_stop_token_is_shown_when_asked_for(tokenizer):
    state = make_state(tokenizer, stop_token_ids=[98], include_stop_str_in_output=True)
    feed(state, b"ab")
    assert output_of(state, 9.0).outputs[0].text == "ab"


def values(own, rank, ids, logprobs):
    return np.float32(own), np.int32(rank), np.array(ids), np.array(logprobs, np.float32)


def test_logprobs_hold_the_token_first_then_the_best(tokenizer):
    state = make_state(tokenizer, logprobs=2)
    state.append(97, 1.0, list(values(-3.0, 7, [98, 99, 100], [-0.5, -1.5, -2.0])))
    state.append(99, 1.0, list(values(-1.0, 2, [98, 99, 100], [-0.5, -1.0, -2.0])))
    first, second = output_of(state, 2.0).outputs[0].logprobs
    assert [(t, x.logprob, x.rank, x.decoded_token) for t, x in first.items()] == [
        (97, -3.0, 7, "a"), (98, -0.5, 1, "b"), (99, -1.5, 2, "c"),
    ]  # fmt: skip
    assert [(t, x.rank) for t, x in second.items()] == [(99, 2), (98, 1)]
    assert output_of(state, 2.0).outputs[0].cumulative_logprob == -4.0


def test_no_alternatives_when_none_are_asked_for(tokenizer):
    state = make_state(tokenizer, logprobs=0)
    state.append(97, 1.0, list(values(-3.0, 7, [98, 99], [-0.5, -1.5])))
    assert list(output_of(state, 2.0).outputs[0].logprobs[0]) == [97]
    state = make_state(tokenizer)
    state.append(97, 1.0, None)
    completion = output_of(state, 2.0).outputs[0]
    assert completion.logprobs is None is completion.cumulative_logprob


def test_prompt_logprobs_come_in_parts(tokenizer):
    state = make_state(tokenizer, prompt=(72, 105, 106, 107), prompt_logprobs=1)
    assert state.wants_prompt_logprobs
    state.add_prompt_logprobs([values(-1, 1, [105], [-1])], 1)
    with pytest.raises(AssertionError):
        state.add_prompt_logprobs([values(-1, 1, [105], [-1])], 3)
    assert state.wants_prompt_logprobs
    state.add_prompt_logprobs([values(-2, 5, [1], [-0.1]), values(-3, 2, [2], [-0.2])], 2)
    assert not state.wants_prompt_logprobs
    recorded = output_of(state, 2.0).prompt_logprobs
    assert recorded[0] is None
    assert [list(entry) for entry in recorded[1:]] == [[105], [106, 1], [107, 2]]
    assert not make_state(tokenizer).wants_prompt_logprobs


def test_without_a_tokenizer_there_is_no_text():
    state = make_state(None, logprobs=1)
    state.append(97, 1.0, list(values(-3.0, 7, [98], [-0.5])))
    completion = output_of(state, 2.0).outputs[0]
    assert completion.text == ""
    assert completion.logprobs[0][97].decoded_token is None
