"""/v1/chat/completions: shapes, templates, log probabilities, streams."""

from __future__ import annotations

import math

import pytest

from tests.server.fake_engine import BOS, byte_tokenizer

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
HALF = -math.log(2)


def user(text):
    return [{"role": "user", "content": text}]


async def test_the_shape_of_an_answer(server):
    answer = await server.chat(max_tokens=6)
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "base")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "base:a", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["total_tokens"] == 6 + answer["usage"]["prompt_tokens"]


async def test_the_rest_of_the_context_by_default(server):
    answer = await server.chat()
    assert answer["usage"]["total_tokens"] == 128
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_max_completion_tokens_and_max_tokens(server):
    assert (await server.chat(max_completion_tokens=3))["usage"]["completion_tokens"] == 3
    assert (await server.chat(max_completion_tokens=3, max_tokens=3))["usage"]["completion_tokens"] == 3
    body = {"model": "base", "messages": user("x"), "max_completion_tokens": 3, "max_tokens": 4}
    response = await server.post(PATH, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_completion_tokens")


async def test_d10_a_rendered_conversation_has_one_bos(server):
    answer = await server.chat(messages=user("hi"), max_tokens=1, return_token_ids=True)
    ids = answer["prompt_token_ids"]
    assert bytes(i for i in ids if i < 256) == b"<user>hi\n<assistant>"
    assert [i for i in ids if i >= 256] == [BOS]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["choices"][0]["token_ids"] == [ord("b")]


async def test_text_parts_system_and_developer_messages(server):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": "c", "refusal": None, "audio": None, "tool_calls": []},
        {"role": "user", "content": "e"},
    ]
    answer = await server.chat(messages=messages, max_tokens=1, return_token_ids=True)
    text = bytes(answer["prompt_token_ids"][1:]).decode()
    assert text == "<system>s\n<developer>d\n<user>a\nb\n<assistant>c\n<user>e\n<assistant>"


@pytest.mark.parametrize("role", ["system", "user", "tool"])
async def test_only_an_assistant_may_say_nothing(server, role):
    for message in ({"role": role}, {"role": role, "content": None}):
        response = await server.post(PATH, {"model": "base", "messages": [*user("a"), message]})
        error = response.json()["error"]
        assert (response.status_code, error["reason"]) == (400, "bad_messages")
        assert f"messages[1].content is missing: a message of the role {role}" in error["message"]
    await server.chat(messages=[*user("a"), {"role": "assistant"}, {"role": role, "content": ""}], max_tokens=1)


async def test_generation_prompt_and_continuation(server):
    async def prompt(**fields):
        answer = await server.chat(max_tokens=1, return_token_ids=True, **fields)
        return bytes(answer["prompt_token_ids"][1:]).decode()

    assert await prompt(messages=user("x"), add_generation_prompt=False) == "<user>x\n"
    messages = [*user("x"), {"role": "assistant", "content": "The answer is"}]
    assert (await prompt(messages=messages, continue_final_message=True)).endswith("<assistant>The answer is")


async def test_template_variables_and_the_configured_template(make_server):
    server = make_server(chat_template="{{ greeting }} {{ messages[0].content }}{{ bos_token }}")
    answer = await server.chat(max_tokens=1, return_token_ids=True, chat_template_kwargs={"greeting": "hello"})
    assert answer["prompt_token_ids"] == [*b"hello hi", BOS]


async def test_a_model_without_a_template_says_so(make_server):
    server = make_server(tokenizer=byte_tokenizer(chat_template=None))
    response = await server.post(PATH, {"model": "base", "messages": user("x")})
    assert (response.status_code, response.json()["error"]["reason"]) == (400, "no_chat_template")


async def test_a_template_that_fails_is_the_caller_s_error(make_server):
    server = make_server(chat_template="{{ raise_exception('roles must alternate') }}")
    response = await server.post(PATH, {"model": "base", "messages": user("x")})
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]


async def test_logprobs(server):
    answer = await server.chat(max_tokens=1, logprobs=True, top_logprobs=2)
    entry = {"token": "b", "logprob": HALF, "bytes": [98]}
    second = {"token": "c", "logprob": -9999.0, "bytes": [99]}
    assert answer["choices"][0]["logprobs"] == {"content": [{**entry, "top_logprobs": [entry, second]}]}
    answer = await server.chat(max_tokens=1, logprobs=True)
    assert answer["choices"][0]["logprobs"] == {"content": [{**entry, "top_logprobs": []}]}
    assert (await server.chat(max_tokens=1))["choices"][0]["logprobs"] is None


async def test_logprobs_give_the_bytes_of_parts_of_characters(server):
    text = "<user>hi\n<assistant>"
    server.engine.script[text] = "é".encode()
    answer = await server.chat(logprobs=True, max_tokens=2)
    assert [entry["bytes"] for entry in answer["choices"][0]["logprobs"]["content"]] == [[0xC3], [0xA9]]
    assert answer["choices"][0]["message"]["content"] == "é"


async def test_a_stream_begins_with_the_role_and_says_what_the_whole_answer_says(server):
    server.engine.script["<user>hi\n<assistant>"] = "e\u0301 😀 fin now".encode()
    body = {"model": "base", "messages": user("hi"), "stop": ["now"], "logprobs": True, "return_token_ids": True}
    whole = await server.chat(**body)
    events = await server.events(PATH, {**body, "request_id": "r"})
    assert {event["id"] for event in events} == {"chatcmpl-r"}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert "".join(c["delta"].get("content", "") for c in choices) == whole["choices"][0]["message"]["content"]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["stop_reason"] == "now"
    content = [entry for c in choices[1:] for entry in (c["logprobs"] or {"content": []})["content"]]
    assert content == whole["choices"][0]["logprobs"]["content"]
    assert [i for c in choices[1:] for i in c["token_ids"]] == whole["choices"][0]["token_ids"]


async def test_stream_usage(server):
    body = {"model": "base", "messages": user("hi"), "max_tokens": 5}
    assert all("usage" not in event for event in await server.events(PATH, body))
    events = await server.events(PATH, {**body, "stream_options": {"include_usage": True}})
    assert all(event["usage"] is None for event in events[:-1])
    assert (events[-1]["choices"], events[-1]["usage"]["completion_tokens"]) == ([], 5)
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await server.events(PATH, {**body, "stream_options": options})
    assert all(event["usage"]["completion_tokens"] >= 1 for event in events)


async def test_prompt_logprobs(server):
    answer = await server.chat(max_tokens=1, prompt_logprobs=1)
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
