"""What a request may bring."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from multilora_jax.engine.inputs import InputReader
from multilora_jax.errors import UserError
from multilora_jax.models.config import ModelConfig, RopeConfig
from multilora_jax.request import SamplingParams
from multilora_jax.server.chat_protocol import ChatBody
from multilora_jax.server.inputs import Voice, chat_prompt, completion_prompts
from multilora_jax.server.protocol import CompletionBody
from multilora_jax.tokenizer import Tokenizer
from tests.tiny_engine import TINY_MODEL


def model_config(**changes) -> ModelConfig:
    sizes = {
        "name": "tiny", "vocab_size": 260, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 16, "ffn_size": 96, "rms_norm_eps": 1e-5, "rope": RopeConfig(), "max_position_embeddings": 64,
        "eos_token_ids": (2, 3),
    }  # fmt: skip
    return ModelConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def reader():
    return InputReader(model_config(), Tokenizer.from_folder(TINY_MODEL), 260, 32)


@pytest.fixture(scope="module")
def blind():
    """A reader without a tokenizer."""
    return InputReader(model_config(), None, 260, 32)


def reason(call, *args) -> tuple[str, str | None]:
    with pytest.raises(UserError) as error:
        call(*args)
    return error.value.reason, error.value.param


def test_prompts_become_token_ids(reader):
    ids = [72, 105]
    assert reader.read_prompt("Hi") == ("Hi", ids)
    assert reader.read_prompt({"prompt": "Hi"}) == ("Hi", ids)
    for form in (ids, tuple(ids), np.array(ids), {"prompt_token_ids": ids}, [np.int64(72), np.int32(105)]):
        text, got = reader.read_prompt(form)
        assert (text, got) == (None, ids)
        assert all(type(token) is int for token in got)
    assert reader.read_prompt({"prompt": "shown", "prompt_token_ids": ids}) == ("shown", ids)


def test_the_prompt_is_a_copy(reader):
    ids = [1, 2, 3]
    reader.read_prompt(ids)[1].append(4)
    assert ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("", "empty_prompt"), ([], "empty_prompt"), ({"prompt_token_ids": []}, "empty_prompt"),
        (None, "bad_prompt"), (7, "bad_prompt"), ({}, "bad_prompt"), ({"text": "x"}, "bad_prompt"),
        ({"prompt": 5}, "bad_prompt"), ({"prompt_token_ids": "12"}, "bad_prompt"), ({1, 2}, "bad_prompt"),
        ([260], "bad_token_id"), ([-1], "bad_token_id"), ([1.0], "bad_token_id"), ([True], "bad_token_id"),
        (["a"], "bad_token_id"), ([[1]], "bad_token_id"), ([None], "bad_token_id"),
        ([1] * 32, "context_length_exceeded"), ("x" * 33, "context_length_exceeded"),
    ],
)  # fmt: skip
def test_bad_prompts_are_named(reader, prompt, expected):
    assert reason(reader.read_prompt, prompt) == (expected, "prompt")


def test_d21_the_longest_prompt_leaves_room_for_one_token(reader):
    assert len(reader.read_prompt([1] * 31)[1]) == 31
    with pytest.raises(UserError, match="32 tokens, but the context holds 32 and at least one"):
        reader.read_prompt([1] * 32)


def test_text_needs_a_tokenizer(blind):
    assert blind.read_prompt([1, 2]) == (None, [1, 2])
    assert reason(blind.read_prompt, "Hi") == ("no_tokenizer", "prompt")
    assert reason(blind.check_params, SamplingParams(stop="x")) == ("no_tokenizer", "stop")
    blind.check_params(SamplingParams(stop_token_ids=[0, 259]))


def test_stop_tokens_are_in_the_vocabulary(reader):
    assert reason(reader.check_params, SamplingParams(stop_token_ids=[5, 260])) == ("bad_token_id", "stop_token_ids")
    reader.check_params(SamplingParams(stop="x", stop_token_ids=[5]))


def test_eos_tokens_of_model_and_tokenizer_are_joined(reader, blind):
    assert blind.eos_token_ids == {2, 3}
    assert reader.eos_token_ids == {2, 3, 257}


@pytest.mark.parametrize(("name", "value"), [("temperature", "hot"), ("top_k", -5), ("n", 0), ("bad_words", "ab")])
def test_parameters_are_checked_as_they_are_now(reader, name, value):
    """They are an object that its owner may change after it was made."""
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(UserError) as error:
        reader.check_params(params)
    assert error.value.param == name


def test_parameters_that_change_later_change_no_request(reader):
    params: Any = SamplingParams(stop=["a"], logit_bias={1: 2.0}, structured_outputs={"regex": "a"})
    own = reader.check_params(params)
    params.temperature, params.structured_outputs.regex = 0.0, "b"
    params.stop.append("b")
    params.logit_bias[1] = 3.0
    assert own == SamplingParams(stop=["a"], logit_bias={1: 2.0}, structured_outputs={"regex": "a"})


def test_a_text_that_cannot_fit_is_refused_before_it_is_read(reader, monkeypatch):
    def read(*_):
        pytest.fail("was read")

    monkeypatch.setattr("multilora_jax.tokenizer.token_ids", read)
    voice = Voice(reader.tokenizer, None, None, 260, 32)
    long = "x" * 1000
    completion = CompletionBody.model_validate({"model": "m", "prompt": long})
    chat = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": long}]})
    assert reason(reader.read_prompt, long) == ("context_length_exceeded", "prompt")
    assert reason(asyncio.run, completion_prompts(completion, voice, 1)) == ("context_length_exceeded", "prompt")
    voice = replace(voice, chat_template=reader.tokenizer.chat_template)
    assert reason(asyncio.run, chat_prompt(chat, voice)) == ("context_length_exceeded", "messages")


def test_a_text_to_be_cut_is_read(reader):
    body = CompletionBody.model_validate(
        {"model": "m", "prompt": "x" * 1000, "truncate_prompt_tokens": 5, "max_tokens": 4}
    )
    [prompt] = asyncio.run(completion_prompts(body, Voice(reader.tokenizer, None, None, 260, 32), 1))
    assert prompt.token_ids == [120] * 5
