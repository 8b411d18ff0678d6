"""Bodies of requests: long ones hold nobody up, and what is refused is refused alike at every length."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from functools import partial
from typing import Any, get_type_hints

import pytest

from multilora_jax.lora.names import MAX_NAME_LENGTH
from multilora_jax.server import bodies, inputs, protocol
from multilora_jax.server.bodies import SHORT_BODY, BodyRoute
from tests.server.harness import parse_events
from tests.server.keyed import bearer, keyed_server
from tests.server.test_auth import all_routes

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
PADDING = " " * (SHORT_BODY + 1)


def test_every_route_with_a_body_reads_it_so(server):
    with_body = [route for route in all_routes(server.app.routes) if "body" in get_type_hints(route.endpoint)]
    assert len(with_body) > 8
    assert all(isinstance(route, BodyRoute) for route in with_body)


async def send(server, path, text, **kwargs):
    return await server.client.post(path, content=text.encode("utf-8", "surrogatepass"), headers=JSON, **kwargs)


async def test_a_long_body_is_read_and_checked_off_the_event_loop(server, monkeypatch):
    loop_thread, threads = threading.get_ident(), []
    read = bodies.read_text

    def noted(function):
        return lambda *args: threads.append(threading.get_ident()) or function(*args)

    monkeypatch.setattr(bodies, "read_text", noted(read))
    monkeypatch.setattr(protocol, "_is_ids", noted(protocol._is_ids))
    text = json.dumps({"model": "base", "prompt": [104, 105], "max_tokens": 1})
    answers = [await send(server, COMPLETIONS, body) for body in (text, text + PADDING)]
    assert [answer.status_code for answer in answers] == [200, 200]
    half = len(threads) // 2  # parsed once and checked, for each
    assert half > 1
    assert threads[:half] == [loop_thread] * half
    assert loop_thread not in threads[half:]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


@pytest.mark.parametrize(("text", "reason", "param"), [
    ('{"model": "base", "prompt": "hi"', "bad_json", None),
    ('{"model": "base", "model": "adapter-a", "prompt": "hi"}', "bad_json", None),
    ('{"model": "base", "prompt": "hi", "lora": [{"name": "adapter-a", "name": "adapter-b"}]}', "bad_json", None),
    ('{"model": "base", "prompt": ' + "[" * 129 + "]" * 129 + "}", "bad_json", None),
    ('{"model": "base", "prompt": "hi", "seed": ' + "9" * 5000 + "}", "bad_json", None),
    ('{"model": "base", "prompt": "hi", "seed": 1e400}', "bad_value", "seed"),
    ('{"model": "base", "prompt": "hi", "temperature": NaN}', "bad_sampling_params", "temperature"),
    ('{"model": "base", "prompt": "hi", "temperature": 1e999}', "bad_sampling_params", "temperature"),
    ('{"model": "base", "prompt": "hi", "logit_bias": {"1": NaN}}', "bad_sampling_params", "logit_bias"),
    ('{"model": "base", "prompt": "hi", "lora": [{"name": "adapter-a", "scale": NaN}]}', "bad_lora_scale", "lora"),
    ('{"model": "base", "prompt": "hi", "seed": 99999999999999999999999}', None, "seed"),
    ('{"model": "base", "prompt": "hi", "max_tokens": 99999999999999999999999}', None, "max_tokens"),
    (r'{"model": "base", "prompt": "\ud800"}', "bad_text", "prompt"),
    (r'{"model": "\ud800", "prompt": "hi"}', None, "model"),
    (r'{"model": "base", "prompt": "hi", "\ud800": 1}', "unknown_parameter", None),
    (r'{"model": "base", "prompt": "hi", "request_id": "\ud800"}', None, "request_id"),
    ('{"model": "base"}', "missing_field", "prompt"),
    ('{"model": 5, "prompt": "hi"}', "bad_value", "model"),
    ("[]", "bad_json", None),
    ("null", "bad_json", None),
])  # fmt: skip
async def test_a_bad_body_is_refused_alike_short_and_long(server, text, reason, param):
    answers = [await send(server, COMPLETIONS, body) for body in (text, text + PADDING)]
    for answer in answers:
        assert answer.status_code in ((404,) if param == "model" and reason is None else (400,)), answer.text
        error = answer.json()["error"]
        assert reason in (None, error["reason"]), error
        assert param in (None, error["param"]), error
    assert len({re.sub(r"column \d+", "", answer.text) for answer in answers}) == 1
    assert (await server.complete(max_tokens=1))["choices"]


@pytest.mark.parametrize("content", [b"\xff\xfe\xff", b'{"model": "\xff"}', b"\x00\x01"])
async def test_what_is_no_text_is_refused(server, content):
    for body in (content, content + PADDING.encode()):
        answer = await server.client.post(COMPLETIONS, content=body, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "bad_json")


async def test_who_may_not_call_hears_of_that_before_the_body(make_server, tmp_path):
    server = keyed_server(make_server, tmp_path)
    for text in ('{"lora_name": 5}', '{"lora_name": 5}' + PADDING):
        answer = await server.client.post("/v1/unload_lora_adapter", content=text, headers=JSON | bearer("a"))
        assert answer.status_code == 403


async def test_a_client_that_leaves_in_the_middle_of_a_body_is_no_error(server, caplog):
    for messages in (
        iter([{"type": "http.disconnect"}]),
        iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]),
    ):
        sent: list[dict[str, Any]] = []
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(), "root_path": "", "query_string": b"", "scheme": "http",
            "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1), "server": ("x", 80),
        }  # fmt: skip
        await server.app(scope, partial(_next, messages), partial(_append, sent))
        assert sent[0]["status"] == 499
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def _next(messages):
    return next(messages)


async def _append(messages, message):
    messages.append(message)


NAMING = [
    (COMPLETIONS, {"model": "NAME", "prompt": "hi"}), (CHAT, {"model": "base:NAME", "messages": []}),
    (COMPLETIONS, {"model": "base", "prompt": "hi", "lora": {"name": "NAME"}}),
    ("/tokenize", {"model": "NAME", "prompt": "hi"}), ("/detokenize", {"model": "NAME", "tokens": [1]}),
    ("/v1/load_lora_adapter", {"lora_name": "NAME", "lora_path": "x"}),
    ("/v1/load_lora_adapter", {"lora_name": "NAME", "lora_path": "x", "load_inplace": True}),
    ("/v1/unload_lora_adapter", {"lora_name": "NAME"}), ("/unload_lora_adapter", {"lora_name": "NAME"}),
    ("/v1/pin_lora_adapter", {"lora_name": "NAME"}), ("/v1/unpin_lora_adapter", {"lora_name": "NAME"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), NAMING)
async def test_a_name_of_megabytes_is_neither_looked_up_nor_said_again(
    make_server, caplog, monkeypatch, tmp_path, path, body
):
    server = make_server(lora_resolver_folder=str(tmp_path))
    looked_up = []
    find = server.engine.lora_request
    monkeypatch.setattr(server.engine, "lora_request", lambda name: looked_up.append(len(name)) or find(name))
    caplog.set_level(logging.DEBUG)
    text = json.dumps(body).replace("NAME", "x" * 2**20)
    answer = await send(server, path, text)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2000
    assert all(length <= MAX_NAME_LENGTH + len("base:") + 1 for length in looked_up)
    assert all(len(record.getMessage()) < 2000 for record in caplog.records)


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_a_comparison_reads_its_prompt_once(server, monkeypatch, route):
    tokenizer, texts = server.engine.tokenizer, []
    encode = type(tokenizer).encode
    monkeypatch.setattr(
        type(tokenizer), "encode", lambda self, text, **kwargs: texts.append(text) or encode(self, text, **kwargs)
    )
    request = {"prompt": "hi"} if route == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    body = {"models": ["base", "adapter-a", "adapter-b"], "route": route, "request": {**request, "max_tokens": 2}}
    answer = await server.post("/page/compare", body)
    events = parse_events(answer)
    assert sum("done" in event for event in events) == 3
    assert not [event for event in events if "error" in event]
    assert len(texts) == 1
    # What is wrong with it is told to each.
    request = (
        {"prompt": "x" * 500} if route == "completions" else {"messages": [{"role": "user", "content": "x" * 500}]}
    )
    events = parse_events(await server.post("/page/compare", {**body, "request": request}))
    assert [event["error"]["reason"] for event in events if "error" in event] == ["context_length_exceeded"] * 3


async def test_a_comparison_that_is_left_leaves_no_reader_behind(server, monkeypatch):
    started, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def read(*_):
        loop.call_soon_threadsafe(started.set)
        go_on.wait(30)
        raise AssertionError("read after all")

    monkeypatch.setattr(inputs, "SHORT_PROMPTS", 0)
    monkeypatch.setattr(inputs, "_completion_prompts", read)
    body = {"models": ["base", "adapter-a"], "route": "completions", "request": {"prompt": "hi"}}
    work = asyncio.create_task(server.post("/page/compare", body))
    await started.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    go_on.set()
    assert not server.engine.requests
