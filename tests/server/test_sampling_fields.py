"""Fields that change logits, over HTTP and the real engine on a tiny reference model."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import jsonschema
import pytest

from multilora_jax.engine import grammars
from tests.server.harness import parse_events

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object", "required": ["age", "name"], "additionalProperties": False,
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "name": {"enum": ["Ann", "Bob"]}},
}  # fmt: skip
WRAPPED = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def real():
    """A server over the tiny model, whose vocabulary has the special tokens of its chat template."""
    from tests.server.real_server import RealServer  # brings jax
    from tests.tiny_engine import TINY_MODEL, narrowed

    server = RealServer("tied", Path(TINY_MODEL), model=TINY_MODEL, load_format="dummy", warm_up=False)
    narrowed(server.engine)
    yield server
    server.close()


async def post(real, path, **fields):
    body = {"model": "base", "max_tokens": 100, **fields}
    body |= {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    async with real.client as client:
        return await client.post(path, json=body)


def text_of(response) -> tuple[str, str]:
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": WRAPPED}, {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)},
    ],
)  # fmt: skip
async def test_answers_follow_a_schema(real, path, fields):
    compact = "response_format" in fields or "guided_json" in fields
    if compact:  # a random model fills every place for white space
        fields = {**fields, "logit_bias": {str(code): -100 for code in b" \t\r\n"}}
    answers = await asyncio.gather(*(post(real, path, temperature=1.5, seed=seed, **fields) for seed in range(6)))
    for answer in answers:
        text, reason = text_of(answer)
        assert reason == "stop"
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_other_forms_of_answers(real, path):
    forms = [
        ({"structured_outputs": {"choice": ["red", "green"]}}, {"red", "green"}),
        ({"guided_choice": ["red", "green"]}, {"red", "green"}),
        ({"structured_outputs": {"regex": "a{3}b"}}, {"aaab"}), ({"guided_regex": "a{3}b"}, {"aaab"}),
        ({"structured_outputs": {"grammar": 'start: "x" "y"'}}, {"xy"}),
        ({"guided_grammar": 'root ::= "x" "y"'}, {"xy"}),
    ]  # fmt: skip
    for fields, expected in forms:
        text, reason = text_of(await post(real, path, seed=1, **fields))
        assert text in expected
        assert reason == "stop"
    text, _ = text_of(await post(real, path, seed=1, max_tokens=20, response_format={"type": "json_object"}))
    assert text.startswith("{")


async def test_a_stream_of_a_structured_answer(real):
    response = await post(real, CHAT, stream=True, guided_choice=["a long answer in one piece"])
    chunks = [event["choices"][0] for event in parse_events(response)]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "a long answer in one piece"
    assert chunks[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_biases_bans_and_penalties(real, path):
    fields = {"temperature": 0, "max_tokens": 4, "logit_bias": {"65": 100, "66": 90}, "ignore_eos": True}
    assert text_of(await post(real, path, **fields))[0] == "AAAA"
    assert text_of(await post(real, path, **fields, bad_words=["A"]))[0] == "BBBB"
    assert text_of(await post(real, path, **fields, bad_words=["AA"]))[0] == "ABAB"
    assert text_of(await post(real, path, **fields, allowed_token_ids=[66]))[0] == "BBBB"
    fields |= {"logit_bias": {"65": 100, "66": 100}, "max_tokens": 12}
    for penalty in ({"frequency_penalty": 2.0}, {"repetition_penalty": 3.0}):
        assert set(text_of(await post(real, path, **fields, **penalty))[0]) == {"A", "B"}
    fields = {"temperature": 0, "max_tokens": 9, "logit_bias": {"65": 100}, "stop_token_ids": [65]}
    assert text_of(await post(real, path, **fields, min_tokens=5))[1] == "stop"
    async with real.client as client:
        body = {"model": "base", "prompt": "hi", **fields, "min_tokens": 5, "return_token_ids": True}
        answer = (await client.post(COMPLETIONS, json=body)).json()
    assert len(answer["choices"][0]["token_ids"]) == 6


async def test_a_grammar_is_never_compiled_by_the_engine_s_thread(real, monkeypatch):
    threads, compile_it = [], grammars._on_a_deep_stack

    def watched(call):
        threads.append(threading.current_thread().name)
        return compile_it(call)

    monkeypatch.setattr(grammars, "_on_a_deep_stack", watched)
    regexes = [f"a{{{n}}}" for n in range(5, 13)]
    answers = await asyncio.gather(*(post(real, COMPLETIONS, guided_regex=regex) for regex in regexes))
    assert [len(text_of(answer)[0]) for answer in answers] == list(range(5, 13))
    assert len(threads) == 8
    assert "engine" not in threads


async def test_every_field_reaches_the_engine(server):
    fields = {
        "presence_penalty": 1, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "min_tokens": 2, "min_p": 0.25,
        "bad_words": ["no"], "allowed_token_ids": [7], "stop_token_ids": [9],
    }  # fmt: skip
    for send in (server.complete, server.chat):
        await send(max_tokens=3, logit_bias={"7": 200}, **fields)
        params = vars(server.engine.params_seen[-1])
        assert {name: params[name] for name in fields} == fields
        assert params["logit_bias"] == {7: 100.0}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"presence_penalty": 3}, "presence_penalty", "outside"), ({"presence_penalty": True}, "presence_penalty", ""),
        ({"repetition_penalty": 0}, "repetition_penalty", "outside"), ({"min_tokens": 101}, "min_tokens", "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"), ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({"logit_bias": [1]}, "logit_bias", ""), ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", "99999"), ({"bad_words": [""]}, "bad_words", "empty"),
        ({"response_format": {"type": "json"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "json_schema"),
        ({"response_format": "json"}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "'schema'"),
        ({"response_format": {**WRAPPED, "json_schema": {"schema": {"type": "foo"}}}}, "response_format", "foo"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "'jsn'"),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs", "unclosed"),
        ({"guided_choice": "red"}, "guided_choice", "choice"),
        ({"guided_regex": "a", "response_format": WRAPPED}, "guided_regex", "one of them"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "contradicts"),
        ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids", "contradicts"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_is_refused_says_why(real, path, fields, param, words):
    response = await post(real, path, **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
