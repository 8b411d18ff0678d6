"""Tools and formats with the `openai` client, over a real engine that follows the grammars."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import openai
import pytest

from tests.server.harness import listening
from tests.server.real_server import RealServer

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{# <tool_call> #}"
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    "{% endfor %}>"
)
MESSAGES: Any = [{"role": "user", "content": "hi"}]
COLOUR = {"$defs": {"Colour": {"enum": ["red", "blue"]}}, "type": "object", "required": ["colour"],
          "properties": {"colour": {"$ref": "#/$defs/Colour"}}, "additionalProperties": False}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "paint", "description": "Paint.", "parameters": COLOUR, "strict": True}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]
NAMED: Any = {"type": "function", "function": {"name": "paint"}}


@pytest.fixture(scope="module", params=["hermes", "llama3_json"])
def base_url(request, configs):
    server = RealServer(
        "tied", configs / "tiny_model", chat_template=TEMPLATE, tool_call_parser=request.param, warm_up=False
    )
    with listening(server.app) as address:
        yield f"{address}/v1"
    server.close()


@pytest.fixture
def client(base_url):
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def checked(call):
    """The call's name and arguments, its arguments checked against the function's parameters."""
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("paint", "stop")
    if call.function.name == "paint":
        assert arguments in ({"colour": "red"}, {"colour": "blue"})
    else:
        assert arguments == {}
    return call.function.name, call.function.arguments


def test_a_named_function_is_called(client):
    for seed in range(2):
        answer = client.chat.completions.create(
            model="base", messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, max_tokens=200, seed=seed
        )
        message: Any = answer.choices[0].message
        [call] = message.tool_calls
        assert checked(call)[0] == "paint"
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", None)


def test_a_required_call_and_the_answer_to_it(client):
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    answer = client.chat.completions.create(model="base", messages=MESSAGES, seed=1, **fields)
    message: Any = answer.choices[0].message
    assert (answer.choices[0].finish_reason, len(message.tool_calls)) == ("tool_calls", 1)
    checked(message.tool_calls[0])
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
    history: Any = [*MESSAGES, message, result]  # as the client's own objects
    answer = client.chat.completions.create(model="base", messages=history, tools=TOOLS, max_tokens=4)
    assert answer.choices[0].message.role == "assistant"


def test_a_stream_of_calls_says_what_the_whole_answer_says(base_url):
    fields: Any = {"model": "base", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200,
                   "parallel_tool_calls": False, "seed": 5}  # fmt: skip

    async def run():
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            whole = await client.chat.completions.create(**fields)
            # The client's own accumulator checks every delta.
            async with client.chat.completions.stream(**fields) as stream:
                async for _ in stream:
                    pass
                return whole.choices[0], (await stream.get_final_completion()).choices[0]

    whole, streamed = cast(Any, asyncio.run(run()))
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert checked(whole.message.tool_calls[0]) == checked(streamed.message.tool_calls[0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
         "response_format"),
        ({"extra_body": {"guided_regex": "(("}}, "guided_regex"),
        ({"extra_body": {"structured_outputs": {"grammar": "x"}}}, "structured_outputs"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
          "tool_choice": "required"}, "tools"),
        ({"tools": TOOLS, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
         "response_format"),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_followed_is_named_as_it_was_sent(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="base", messages=MESSAGES, max_tokens=4, **fields)
    assert caught.value.param == param
    body: Any = caught.value.body
    assert str(body["message"]).startswith(param)
    if param != "structured_outputs":
        assert "structured_outputs" not in str(body["message"])
