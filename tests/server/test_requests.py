"""Bad requests: each refused by name, in the one error shape, with the server going on."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}]}


async def refused(server, path, body, status=400):
    """The error object of a refused request; the server still answers afterwards."""
    response = await server.post(path, body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "reason"}
    assert error["code"] == status
    assert error["message"]
    assert not server.engine.requests
    assert (await server.complete(max_tokens=1))["choices"][0]["text"] == "b"
    return error


# ---- names (D18)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "hi"}), (CHAT, CHAT_BODY)])
async def test_d18_an_unknown_model_is_404_and_never_the_base(server, path, body, stream):
    for model in ("adaptr-a", "base:adaptr-a", "bas", "adapter-a:base", "BASE"):
        error = await refused(server, path, {**body, "model": model, "stream": stream}, 404)
        assert (error["type"], error["param"]) == ("NotFoundError", "model")
        assert "adapter-a" in error["message"]
        assert "base" in error["message"]
        assert f"no model or adapter '{model}'" in error["message"]
    error = await refused(server, path, {**body, "model": "base:base", "stream": stream}, 404)
    assert "'base:base'" in error["message"]
    error = await refused(server, path, {**body, "model": "adaptr-a", "stream": stream}, 404)
    assert "Did you mean 'adapter-a'?" in error["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "hi"}), (CHAT, CHAT_BODY)])
async def test_d18_no_model_or_an_empty_one_is_400(server, path, body, stream):
    assert (await refused(server, path, {**body, "stream": stream}))["param"] == "model"
    for model in ("", "  ", None, 7):
        error = await refused(server, path, {**body, "model": model, "stream": stream})
        assert error["param"] == "model"


@pytest.mark.parametrize("model", ["adapter-a", "base:adapter-a"])
async def test_d18_an_adapter_answers_under_its_own_name(server, model):
    answer = await server.complete(model=model, max_tokens=10)
    assert (answer["model"], answer["choices"][0]["text"]) == ("adapter-a", "adapter-a:")
    answer = await server.chat(model=model, max_tokens=10)
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("adapter-a", "adapter-a:")


# ---- edge values (D21)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""], [[104], []]])
async def test_d21_an_empty_prompt_is_refused(server, prompt):
    error = await refused(server, COMPLETIONS, {"model": "base", "prompt": prompt})
    assert (error["param"], error["reason"]) == ("prompt", "empty_prompt")


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, [None], [1, "a"], ["a", [1]], [[1], "a"], [[1.5]], [[True]]])
async def test_d21_a_prompt_of_another_kind_is_refused(server, prompt):
    error = await refused(server, COMPLETIONS, {"model": "base", "prompt": prompt})
    assert error["param"] == "prompt"


async def test_d21_max_tokens_zero(server):
    for stream in (False, True):
        body = {"model": "base", "prompt": "hi", "max_tokens": 0, "stream": stream}
        assert (await refused(server, COMPLETIONS, body))["param"] == "max_tokens"
    steps = server.engine.counts.steps
    answer = await server.complete(max_tokens=0, echo=True)
    assert server.engine.counts.steps == steps
    assert answer["choices"] == [
        {"index": 0, "text": "hi", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"]["completion_tokens"] == 0
    for name in ("max_tokens", "max_completion_tokens"):
        assert (await refused(server, CHAT, {"model": "base", **CHAT_BODY, name: 0}))["param"] == name


async def test_d21_max_tokens_zero_with_echo_and_logprobs_scores_the_prompt(server):
    for prompt in ("hi", ["hi", "ho"]):
        body = {"model": "base", "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}
        whole = await server.complete(**body)
        got = whole["choices"][0]
        assert got["text"] == "hi"
        assert got["logprobs"]["tokens"] == ["<s>", "h", "i"]
        assert got["logprobs"]["token_logprobs"][0] is None
        assert whole["usage"]["completion_tokens"] == 0
        events = await server.events(COMPLETIONS, body)
        assert [event["choices"][0] for event in events] == whole["choices"]


async def test_d21_prompts_at_the_edge_of_the_context(server):
    async def send(length, max_tokens):
        return await server.post(COMPLETIONS, {"model": "base", "prompt": [65] * length, "max_tokens": max_tokens})

    limit = server.engine.max_model_len
    assert (await send(limit - 1, 1)).status_code == 200
    for length in (limit, limit + 1, 10 * limit):
        error = (await send(length, 1)).json()["error"]
        assert (error["code"], error["param"], error["reason"]) == (400, "prompt", "context_length_exceeded")
        assert str(limit) in error["message"]
        assert str(length) in error["message"]
    error = (await send(8, limit - 3)).json()["error"]
    assert (error["code"], error["param"], error["reason"]) == (400, "max_tokens", "context_length_exceeded")
    for number in (8, limit - 3, limit + 5, limit, limit - 8):
        assert str(number) in error["message"]
    assert (await send(8, limit - 8)).status_code == 200


async def test_d21_a_conversation_longer_than_the_context(server):
    messages = [{"role": "user", "content": "x" * 500}]
    error = await refused(server, CHAT, {"model": "base", "messages": messages})
    assert (error["param"], error["reason"]) == ("messages", "context_length_exceeded")
    body = {"model": "base", **CHAT_BODY, "max_tokens": 128}
    assert (await refused(server, CHAT, body))["reason"] == "context_length_exceeded"


async def test_d21_text_that_is_no_text(server):
    body = json.dumps({"model": "base", "prompt": "a\ud800"})
    response = await server.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["reason"]) == (400, "bad_text")
    body = json.dumps({"model": "base", "prompt": "a", "x\ud800": 1})
    response = await server.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["reason"]) == (400, "unknown_parameter")


async def test_d21_half_of_a_surrogate_pair_anywhere_is_400(server):
    message = {"role": "user", "content": "hi"}
    for path, fields in (
        (COMPLETIONS, {"prompt": "hi", "request_id": "\ud800"}),
        (CHAT, {**CHAT_BODY, "request_id": "\ud800"}),
        (CHAT, {"messages": [{**message, "\ud800": 1}]}),
        (CHAT, {"messages": [{**message, "role": "\ud800"}]}),
        (
            CHAT,
            {"messages": [{**message, "name": "\ud800"}], "chat_template_kwargs": {"\ud800": "\ud800"}, "best_of": 2},
        ),
        (CHAT, {**CHAT_BODY, "stream_options": {"\ud800": 1}}),
        (COMPLETIONS, {"prompt": "hi", "user": "\ud800", "seed": "\ud800"}),
    ):
        body = json.dumps({"model": "base", **fields})
        response = await server.client.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, (fields, response.text)


async def test_d21_a_request_id_is_short_and_printable(server):
    for bad in ("x" * 257, "a\nb", "", "\x1b[2J"):
        error = await refused(server, COMPLETIONS, {"model": "base", "prompt": "hi", "request_id": bad})
        assert (error["param"], error["reason"]) == ("request_id", "bad_value")
    assert (await server.complete(request_id="é" * 256, max_tokens=1))["id"] == "cmpl-" + "é" * 256


# ---- fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2), ("suffix", "x"), ("use_beam_search", True), ("length_penalty", 2.0),
    ],
)  # fmt: skip
async def test_fields_that_are_not_served_are_refused_by_name(server, field, value):
    error = await refused(server, COMPLETIONS, {"model": "base", "prompt": "hi", field: value})
    assert (error["param"], error["reason"]) == (field, "unsupported_parameter")
    assert field in error["message"]
    if field != "suffix":
        error = await refused(server, CHAT, {"model": "base", **CHAT_BODY, field: value})
        assert error["param"] == field


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("best_of", 2, "best_of must be 1: "), ("best_of", 1.0, "best_of must be 1: "),
        ("best_of", True, "best_of must be 1: "), ("use_beam_search", 0, "use_beam_search must be false: "),
        ("length_penalty", False, "length_penalty must be 1.0: "),
    ],
)  # fmt: skip
async def test_fields_with_one_value_say_which_and_take_no_other_type(server, field, value, message):
    error = await refused(server, COMPLETIONS, {"model": "base", "prompt": "hi", field: value})
    assert (error["param"], error["reason"]) == (field, "unsupported_parameter")
    assert error["message"].startswith(message)


@pytest.mark.parametrize("key", ["self", "messages", "tools", "chat_template", "continue_final_message"])
async def test_template_arguments_that_the_server_sets_itself_are_refused_by_name(server, key):
    error = await refused(server, CHAT, {"model": "base", **CHAT_BODY, "chat_template_kwargs": {key: 1}})
    assert error["param"] == "chat_template_kwargs"
    assert f"chat_template_kwargs.{key}" in error["message"]


async def test_fields_of_chat_that_are_not_served(server):
    for field, value in {"functions": [{"name": "f"}], "function_call": "auto", "audio": {}, "store": True}.items():
        error = await refused(server, CHAT, {"model": "base", **CHAT_BODY, field: value})
        assert (error["param"], error["reason"]) == (field, "unsupported_parameter")


async def test_fields_that_are_not_served_may_hold_what_turns_them_off(server):
    off = {
        "best_of": 1, "suffix": None, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "response_format": {"type": "text"}, "min_tokens": 0, "user": "me",
    }  # fmt: skip
    await server.complete(**off)
    del off["best_of"], off["suffix"]
    await server.chat(**off, tools=None, tool_choice="none", modalities=["text"], store=False)


async def test_an_unknown_field_is_refused_with_the_closest(server):
    error = await refused(server, COMPLETIONS, {"model": "base", "prompt": "hi", "max_token": 5})
    assert (error["param"], error["reason"]) == ("max_token", "unknown_parameter")
    assert "'max_tokens'" in error["message"]
    error = await refused(server, CHAT, {"model": "base", **CHAT_BODY, "qwertyuiop": 5})
    assert "messages" in error["message"]
    body = {"model": "base", "prompt": "hi", "stream": True, "stream_options": {"include_usag": True}}
    assert "'include_usage'" in (await refused(server, COMPLETIONS, body))["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", "hot"), ("temperature", float("nan")), ("temperature", True),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", 2), ("seed", "x"), ("seed", 2**70),
        ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 2.0), ("logprobs", -1), ("logprobs", 21),
        ("prompt_logprobs", 21), ("stop", [""]), ("stop", 5), ("stop_token_ids", ["a"]), ("stop_token_ids", [-1]),
        ("echo", "yes"), ("stream", 1), ("truncate_prompt_tokens", 0), ("request_id", 5), ("priority", "high"),
        ("stream_options", {"include_usage": True}),
    ],
)  # fmt: skip
async def test_values_out_of_range_or_of_another_type_are_refused(server, field, value):
    body = json.dumps({"model": "base", "prompt": "hi", field: value})
    response = await server.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, "messages"),
    ],
)
async def test_chat_fields_that_make_no_sense_are_refused(server, fields, param):
    assert (await refused(server, CHAT, {"model": "base", **CHAT_BODY, **fields}))["param"] == param


# ---- the rest of HTTP


async def test_bodies_that_are_no_json_objects(server):
    for body in ("{", "[]", '"text"', "5", ""):
        response = await server.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "BadRequestError")
        assert error["reason"] == "bad_json"
    body = '{"model": "base",\n "prompt": "hi",\n "seed": x}'
    response = await server.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert "at line 3, column 10: " in response.json()["error"]["message"]
    response = await server.client.post(COMPLETIONS, data={"model": "base"})
    assert (response.status_code, response.json()["error"]["reason"]) == (400, "bad_content_type")


async def test_unknown_routes_and_methods_have_the_error_shape(server):
    response = await server.client.get("/v2/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "NotFoundError"
    response = await server.client.get(COMPLETIONS)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == 405


async def test_a_model_without_tokenizer_takes_ids_only(server):
    server.engine.tokenizer = None
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, CHAT_BODY)):
        response = await server.post(path, {"model": "base", **body})
        assert (response.status_code, response.json()["error"]["reason"]) == (400, "no_tokenizer")
