"""Tools in chat: what the template sees, what of the answer is a call, histories with calls, refusals."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HERMES = (
    "{% for tool in tools or [] %}{{ tool.function.name }}:{{ tool.function.parameters | tojson }};{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}"
    "({{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }})"
    "{% endfor %}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LLAMA = HERMES.replace("<tool_call>", "<|python_tag|>")
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "stop"}}]
ARGUMENTS = '{"a": 1, "b": "}"}'
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def hermes(make_server):
    return make_server(chat_template=HERMES, max_model_len=2000)


def seen(server):
    """The prompt of the newest request, as text."""
    return bytes(i for i in server.prompts[-1] if i < 256).decode()


async def ask(server, answer, **fields):
    """The choice of an answer whose text is scripted."""
    server.engine.script = ScriptOfAll(answer)
    body = {"tools": TOOLS, "return_token_ids": True, **fields}
    got = await server.chat(**body)
    server.prompts = [got["prompt_token_ids"]]
    return got["choices"][0]


class ScriptOfAll(dict):
    """The same answer to every prompt."""

    def __init__(self, answer):
        self.answer = answer.encode()

    def get(self, key, default=None):
        return self.answer


async def streamed(server, answer, **fields):
    """(message, finish_reason) that a stream's deltas add up to."""
    server.engine.script = ScriptOfAll(answer)
    events = await server.events(CHAT, {"model": "base", "messages": USER, "tools": TOOLS, **fields})
    message, reason = {"content": "", "tool_calls": []}, None
    for choice in (event["choices"][0] for event in events):
        assert reason is None, "a piece after the last one"
        reason, delta = choice["finish_reason"], choice["delta"]
        assert set(delta) <= {"role", "content", "tool_calls"}
        message["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert (set(call), call["type"]) == ({"index", "id", "type", "function"}, "function")
                message["tool_calls"].append({"function": dict(call["function"])})
            else:
                assert (set(call), set(call["function"])) == ({"index", "function"}, {"arguments"})
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


async def test_a_call_in_the_hermes_style(hermes):
    text = f'Let me see.\n<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
    choice = await ask(hermes, text)
    assert seen(hermes).startswith('add:{"type": "object"')
    message = choice["message"]
    assert (message["role"], message["content"], choice["finish_reason"]) == ("assistant", "Let me see.", "tool_calls")
    [call] = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": ARGUMENTS})
    whole, reason = await streamed(hermes, text)
    assert reason == "tool_calls"
    assert (whole["content"], whole["tool_calls"]) == (message["content"], [{"function": call["function"]}])


async def test_a_call_alone_has_no_content(hermes):
    choice = await ask(hermes, '<tool_call>{"name": "stop"}</tool_call>')
    assert (choice["message"]["content"], choice["message"]["tool_calls"][0]["function"]["arguments"]) == (None, "{}")


async def test_several_calls_and_no_more_than_one(hermes):
    text = '<tool_call>{"name": "stop"}</tool_call>' * 2
    choice = await ask(hermes, text)
    calls = choice["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    choice = await ask(hermes, text, parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1
    assert len((await streamed(hermes, text, parallel_tool_calls=False))[0]["tool_calls"]) == 1


async def test_the_llama_style_is_read_off_the_template_or_configured(make_server):
    text = f'{{"name": "add", "parameters": {ARGUMENTS}}}'
    for server in (
        make_server(chat_template=LLAMA, max_model_len=2000),
        make_server(chat_template=HERMES, max_model_len=2000, tool_call_parser="llama3_json"),
    ):
        choice = await ask(server, text)
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": ARGUMENTS}
        assert (await streamed(server, text))[0]["tool_calls"] == [
            {"function": {"name": "add", "arguments": ARGUMENTS}}
        ]
        choice = await ask(server, '{"answer": 5}')
        assert (choice["message"]["content"], choice["finish_reason"]) == ('{"answer": 5}', "stop")
        assert "tool_calls" not in choice["message"]


async def test_without_a_call_the_answer_is_as_ever(hermes):
    choice = await ask(hermes, " plain <tool> \n")
    assert (choice["message"]["content"], choice["finish_reason"]) == (" plain <tool> \n", "stop")
    assert await streamed(hermes, " plain <tool> \n") == ({"content": " plain <tool> \n", "tool_calls": []}, "stop")


async def test_an_answer_that_is_cut_off_says_length(hermes):
    choice = await ask(hermes, '<tool_call>{"name": "add", "arguments": {"a": 12345}}</tool_call>', max_tokens=44)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a"'


async def test_every_continuation_and_every_token_is_told(hermes):
    text = '<tool_call>{"name": "stop"}</tool_call>'
    hermes.engine.script = ScriptOfAll(text)
    body = {"tools": TOOLS, "n": 2, "logprobs": True}
    answer = await hermes.chat(**body)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls"] * 2
    events = await hermes.events(CHAT, {"model": "base", "messages": USER, **body})
    for index in (0, 1):
        of_one = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in of_one) == len(text) + 1


async def test_tool_choice_none_hides_the_tools_and_reads_no_calls(hermes):
    text = '<tool_call>{"name": "stop"}</tool_call>'
    choice = await ask(hermes, text, tool_choice="none")
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert seen(hermes).startswith("<user>hi")


async def test_a_named_function_ends_with_stop(hermes):
    named = {"type": "function", "function": {"name": "stop"}}
    choice = await ask(hermes, '<tool_call>{"name": "stop", "arguments": {}}</tool_call>', tool_choice=named)
    assert (choice["finish_reason"], choice["message"]["tool_calls"][0]["function"]["name"]) == ("stop", "stop")
    grammar = hermes.engine.params_seen[-1].structured_outputs.grammar
    assert '"const": "stop"' in grammar
    assert '"const": "add"' not in grammar
    choice = await ask(hermes, '<tool_call>{"name": "stop", "arguments": {}}</tool_call>', tool_choice="required")
    assert choice["finish_reason"] == "tool_calls"
    assert '"const": "add"' in hermes.engine.params_seen[-1].structured_outputs.grammar


async def test_a_history_with_calls_and_their_results(hermes):
    messages = [
        *USER,
        {
            "role": "assistant", "content": None, "refusal": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": '}},
                {"type": "function", "function": {"name": "stop", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
        {"role": "tool", "tool_call_id": "c2", "content": "3", "name": "add"},
    ]  # fmt: skip
    await ask(hermes, "ok", messages=messages)
    calls = '<tool_call>add({"a": 1})<tool_call>add({"a": )<tool_call>stop({})'
    assert seen(hermes).endswith(f"<user>hi<assistant>{calls}<tool>2#c1<tool>3#c2<assistant>")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls[0] must be"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "messages[0].tool_calls[0] must be"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "tool_calls[0].function must have a name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "x": 1}}]}, "unknown field 'x'"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "y": 1}]}, "unknown field 'y'"),
        ({"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}, "[0].id must be a text"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}, "arguments must be"),
        ({"role": "assistant", "tool_calls": [{"index": {}, "function": {"name": "f"}}]}, "[0].index must be"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "the field 'tool_calls'"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "the field 'tool_call_id'"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[0].tool_call_id must be a text"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name must be a text"),
    ],
)  # fmt: skip
async def test_bad_histories_name_the_message(hermes, message, words):
    response = await hermes.post(CHAT, {"model": "base", "messages": [message]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert words in error["message"]


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": {}}, "tools", "tools must be a list"),
        ({"tools": [5]}, "tools", "tools[0] must be"),
        ({"tools": [{"type": "web_search"}]}, "tools", 'tools[0].type must be "function"'),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0].function must be an object"),
        ({"tools": [*function(), *function()]}, "tools", "tools[1].function.name: 'f' is there twice"),
        ({"tools": function(name="a b")}, "tools", "tools[0].function.name must be 1 to 64"),
        ({"tools": function(parameters=[])}, "tools", "tools[0].function.parameters must be a JSON schema"),
        ({"tools": function(description=5)}, "tools", "tools[0].function.description must be a text"),
        ({"tools": function(strict=1)}, "tools", "tools[0].function.strict must be true or false"),
        ({"tools": function(parametres={})}, "tools", "tools[0].function has an unknown field 'parametres'"),
        ({"tools": [{**function()[0], "x": 1}]}, "tools", "tools[0] has an unknown field 'x'"),
        ({"tools": [function(name=f"f{i}")[0] for i in range(129)]}, "tools", "at most 128"),
        ({"tool_choice": "required"}, "tool_choice", "send tools"),
        ({"tools": function(), "tool_choice": "any"}, "tool_choice", "tool_choice must be"),
        ({"tools": function(), "tool_choice": {"type": "function"}}, "tool_choice", "tool_choice must be"),
        (
            {"tools": function(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice", "no tool is called 'g': the tools are f",
        ),
        ({"tools": function(), "guided_regex": "a+"}, "guided_regex", "guided_regex: regex does not go together"),
        (
            {"tools": function(), "tool_choice": "required", "structured_outputs": {"json": {}}},
            "tool_choice", "structured_outputs and tool_choice both say",
        ),
        ({"tools": function(), "parallel_tool_calls": 1}, "parallel_tool_calls", "parallel_tool_calls"),
    ],
)  # fmt: skip
async def test_bad_tools_are_refused_by_name(hermes, fields, param, words):
    response = await hermes.post(CHAT, {"model": "base", "messages": USER, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


async def test_a_template_that_takes_no_tools_says_so(server, make_server):
    response = await server.post(CHAT, {"model": "base", "messages": USER, "tools": TOOLS})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["reason"]) == (400, "tools", "template_without_tools")
    assert (await server.chat(tools=TOOLS, tool_choice="none"))["choices"]
    assert (await server.chat(tools=[], tool_choice="auto"))["choices"]
    unknown = make_server(chat_template="{{ tools }}{{ messages }}")
    response = await unknown.post(CHAT, {"model": "base", "messages": USER, "tools": TOOLS})
    assert response.json()["error"]["reason"] == "unknown_tool_style"


async def test_the_shipped_template_shows_tools_calls_and_results(make_server, configs):
    template = (configs / "chat_templates" / "chatml_tools.jinja").read_text()
    server = make_server(chat_template=template, max_model_len=2000)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]  # fmt: skip
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    choice = await ask(server, text, messages=messages)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    head, *turns = seen(server).split("<|im_start|>")[1:]
    assert head.startswith("system\nBe brief.\n\n")
    assert json.dumps(TOOLS[0]["function"]["parameters"]) in head
    assert turns == [
        "user\nhi<|im_end|>\n", f"assistant\n{text}<|im_end|>\n",
        "user\n<tool_response>\n2\n</tool_response><|im_end|>\n", "assistant\n",
    ]  # fmt: skip
    await ask(server, "ok", messages=USER, tools=None)
    assert seen(server) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
