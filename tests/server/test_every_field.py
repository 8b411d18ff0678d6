"""Every field of the two bodies: what it does, or that it is refused by its name. A new field must be added here."""

from __future__ import annotations

from typing import Any

import pytest

from multilora_jax.server.chat_protocol import ChatBody
from multilora_jax.server.protocol import CompletionBody
from tests.server.harness import step_with_readers

pytestmark = pytest.mark.anyio

PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
REQUIRED = {"completion": {"model": "base", "prompt": "hi"},
            "chat": {"model": "base", "messages": [{"role": "user", "content": "hi"}]}}  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}<tool_call>{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ extra }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Case:
    """A value of a field, and what shows that it took effect.

    Args:
        value: sent.
        expect: a predicate of (answer or events, engine), or None where the engine's parameter of that name is the
            value.
        others: further fields that it goes with.
    """

    def __init__(self, value: Any, expect: Any = None, **others: Any):
        self.value, self.expect, self.others = value, expect, others


def text(answer):
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def ended(events):
    """Whether the last event, and no other, says that the answer is at its end."""
    return [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "length"]


def prompt(answer):
    ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    return bytes(i for i in ids if i < 256).decode()


IDS: Any = {"return_token_ids": True}
TOOL = [{"type": "function", "function": {"name": "f"}}]
SCHEMA = {"type": "object"}

SHARED: dict[str, Case] = {
    "model": Case("adapter-a", lambda a, e: (a["model"], text(a)) == ("adapter-a", "adapter-")),
    "lora": Case([{"name": "adapter-b", "scale": 0.5}], lambda a, e: a["adapters"][0]["scale"] == 0.5),
    "temperature": Case(0.5), "top_p": Case(0.5), "top_k": Case(5), "min_p": Case(0.1), "presence_penalty": Case(0.5),
    "frequency_penalty": Case(-0.5), "repetition_penalty": Case(1.5), "min_tokens": Case(2), "seed": Case(7),
    "logit_bias": Case({"5": 2.0}, lambda a, e: e.params_seen[-1].logit_bias == {5: 2.0}),
    "allowed_token_ids": Case([97, 98]), "bad_words": Case(["x"]), "prompt_lookup_tokens": Case(3),
    "structured_outputs": Case({"regex": "a+"}, lambda a, e: e.params_seen[-1].structured_outputs.regex == "a+"),
    "response_format": Case(
        {"type": "json_object"}, lambda a, e: e.params_seen[-1].structured_outputs.json_object is True
    ),
    "guided_json": Case(SCHEMA, lambda a, e: e.params_seen[-1].structured_outputs.json == SCHEMA),
    "guided_regex": Case("b+", lambda a, e: e.params_seen[-1].structured_outputs.regex == "b+"),
    "guided_choice": Case(["a"], lambda a, e: e.params_seen[-1].structured_outputs.choice == ["a"]),
    "guided_grammar": Case('start: "a"', lambda a, e: e.params_seen[-1].structured_outputs.grammar == 'start: "a"'),
    "stop": Case(["se"], lambda a, e: (text(a), a["choices"][0]["stop_reason"]) == ("ba", "se")),
    "stop_token_ids": Case([ord("e")], lambda a, e: a["choices"][0]["stop_reason"] == ord("e")),
    "ignore_eos": Case(True),
    "include_stop_str_in_output": Case(True, lambda a, e: text(a) == "base", stop="se"),
    "skip_special_tokens": Case(False),
    "prompt_logprobs": Case(1, lambda a, e: "prompt_logprobs" in (a if "prompt_logprobs" in a else a["choices"][0])),
    "truncate_prompt_tokens": Case(2, lambda a, e: a["usage"]["prompt_tokens"] == 2),
    "stream": Case(True, lambda events, e: len(events) >= 8 and ended(events)),
    "stream_options": Case({"include_usage": True}, lambda events, e: events[-1]["usage"], stream=True),
    "return_token_ids": Case(True, lambda a, e: a["choices"][0]["token_ids"] == [*b"base:abc"]),
    "priority": Case(3, lambda a, e: e.priorities_seen[-1] == 3),
    "cache_salt": Case("s", lambda a, e: e.salts_seen[-1] == "s"),
    "n": Case(3, lambda a, e: len(a["choices"]) == 3),
    "request_id": Case("mine", lambda a, e: a["id"].endswith("cmpl-mine")),
    "user": Case("me", lambda a, e: e.tenants_seen[-1] == "me"),
}  # fmt: skip
OWN: dict[str, dict[str, Case]] = {
    "completion": {
        "prompt": Case([[104, 105], [104]], lambda a, e: len(a["choices"]) == 2),
        "max_tokens": Case(3, lambda a, e: text(a) == "bas"),
        "logprobs": Case(2, lambda a, e: len(a["choices"][0]["logprobs"]["tokens"]) == 8),
        "echo": Case(True, lambda a, e: text(a).startswith("hibase")),
        "add_special_tokens": Case(False, lambda a, e: a["usage"]["prompt_tokens"] == 2),
    },
    "chat": {
        "messages": Case(
            [{"role": "user", "content": [{"type": "text", "text": "yo"}]}],
            lambda a, e: prompt(a) == "<user>yo<assistant>", **IDS,
        ),
        "max_tokens": Case(3, lambda a, e: text(a) == "bas"),
        "max_completion_tokens": Case(3, lambda a, e: text(a) == "bas", max_tokens=None),
        "logprobs": Case(True, lambda a, e: len(a["choices"][0]["logprobs"]["content"]) == 8),
        "top_logprobs": Case(
            2, lambda a, e: len(a["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2, logprobs=True
        ),
        "tools": Case(TOOL, lambda a, e: prompt(a).startswith("<tool_call>f"), **IDS),
        "tool_choice": Case("none", lambda a, e: prompt(a).startswith("<user>"), tools=TOOL, **IDS),
        "parallel_tool_calls": Case(False, lambda a, e: text(a) == "base:abc", tools=TOOL),
        "chat_template_kwargs": Case({"extra": "!"}, lambda a, e: "hi!" in prompt(a), **IDS),
        "add_generation_prompt": Case(False, lambda a, e: prompt(a) == "<user>hi", **IDS),
        "continue_final_message": Case(
            True, lambda a, e: prompt(a) == "<assistant>well", **IDS,
            messages=[{"role": "assistant", "content": "well"}],
        ),
    },
}  # fmt: skip


@pytest.fixture
def server(make_server):
    made = make_server(chat_template=TEMPLATE)
    made.engine.priorities_seen = []
    add = made.engine.add_request

    def add_request(request_id, prompt, params, lora_request=None, priority=0, *rest, **named):
        made.engine.priorities_seen.append(priority)
        return add(request_id, prompt, params, lora_request, priority, *rest, **named)

    made.engine.add_request = add_request
    return made


@pytest.mark.parametrize(("kind", "body"), [("completion", CompletionBody), ("chat", ChatBody)])
def test_the_table_has_every_field(kind, body):
    assert set(SHARED) | set(OWN[kind]) == set(body.model_fields)


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind in PATHS for field in [*SHARED, *OWN[kind]]]
)  # fmt: skip
async def test_every_field_takes_effect(server, kind, field):
    case = {**SHARED, **OWN[kind]}[field]
    body = {**REQUIRED[kind], "max_tokens": 8, **case.others, field: case.value}
    if body.get("stream"):
        step_with_readers(server.engine)
        answer: Any = await server.events(PATHS[kind], body)
    else:
        response = await server.post(PATHS[kind], body)
        assert response.status_code == 200, response.text
        answer = response.json()
    if case.expect is None:
        assert getattr(server.engine.params_seen[-1], field) == case.value
    else:
        assert case.expect(answer, server.engine), answer


@pytest.mark.parametrize(("kind", "body"), [("completion", CompletionBody), ("chat", ChatBody)])
async def test_null_stands_for_the_default_of_every_field(server, kind, body):
    optional = [name for name, info in body.model_fields.items() if not info.is_required()]
    plain = (await server.post(PATHS[kind], {**REQUIRED[kind], "max_tokens": 8})).json()
    nulls = dict.fromkeys([*optional, *body.not_served])
    response = await server.post(PATHS[kind], {**REQUIRED[kind], **nulls, "max_tokens": 8})
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("kind", "field"),
    [("completion", f) for f in CompletionBody.not_served] + [("chat", f) for f in ChatBody.not_served],
)  # fmt: skip
async def test_what_is_not_served_is_refused_by_name(server, kind, field):
    response = await server.post(PATHS[kind], {**REQUIRED[kind], field: {"x": 1}})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["reason"]) == (400, field, "unsupported_parameter")
    assert error["message"].startswith(field)


def fields_of(kind):
    body = {"completion": CompletionBody, "chat": ChatBody}[kind]
    return [(kind, field) for field in body.model_fields]


@pytest.mark.parametrize(("kind", "field"), fields_of("completion") + fields_of("chat"))
async def test_a_value_of_a_wrong_type_names_its_field(server, kind, field):
    """Also the unit of a list or a mapping that is none."""
    for wrong in ([[{"x": 5.5}]], -1.5):
        response = await server.post(PATHS[kind], {**REQUIRED[kind], "max_tokens": 8, field: wrong})
        if field in ("presence_penalty", "frequency_penalty") and wrong == -1.5:
            assert response.status_code == 200
            continue
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field), error
        assert field in error["message"], error
