"""The log: a line for each request, in text and JSON, with all that operators need and nothing that is secret."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import httpx
import pytest

from multilora_jax.config import EngineConfig
from multilora_jax.errors import OverloadedError
from multilora_jax.logs import JsonFormatter, TextFormatter, log_to_stderr
from multilora_jax.server.app import create_app
from tests.server.harness import wait_for
from tests.server.keyed import KEYS, bearer, keyed_server

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
SECRET_TEXT = "attack at dawn"


@pytest.fixture
def lines(caplog):
    """The fields of the requests' lines so far."""
    caplog.set_level(logging.DEBUG, "multilora_jax")
    return lambda: [r.__dict__["fields"] | {"level": r.levelname} for r in caplog.records if hasattr(r, "fields")]


async def test_a_line_says_who_asked_what_and_how_it_ended(make_server, tmp_path, lines):
    server = keyed_server(make_server, tmp_path)
    body = {"model": "adapter-a", "prompt": "hi", "max_tokens": 4}
    await server.post(PATH, body, headers={**bearer("a"), "X-Request-Id": "r1"})
    [line] = lines()
    digest = server.engine.list_loras()[0].digest
    times = [line.pop(name) for name in ("queue_s", "ttft_s", "total_s")]
    assert 0 <= times[0] <= times[1] <= times[2] < 60
    assert line == {
        "level": "INFO", "request_id": "r1", "method": "POST", "path": PATH, "status": 200, "tenant": "a",
        "adapter": "adapter-a", "digest": (digest or "")[:12], "prompt_tokens": 3, "cached_tokens": 0,
        "completion_tokens": 4,
        "finish_reason": "length",
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_lines_of_errors_say_why(server, lines, stream):
    server.engine.give_up["adapter-a"] = OverloadedError("too late", reason="first_token_objective")
    for body in ({"model": "nobody"}, {"model": "adapter-a"}, {"model": "base", "max_tokens": -1}, {"model": "base"}):
        await server.post(PATH, {"prompt": "hi", "max_tokens": 2, "stream": stream, **body})
    got = [(line["status"], line.get("error"), line["level"], line.get("finish_reason")) for line in lines()]
    assert got == [
        (404, "unknown_adapter", "INFO", None), (503, "first_token_objective", "WARNING", "error"),
        (400, "bad_value", "INFO", None), (200, None, "INFO", "length"),
    ]  # fmt: skip


async def test_lines_of_several_prompts_add_up(server, lines):
    await server.complete(prompt=["ab", "c"], max_tokens=3, n=2)
    [line] = lines()
    assert (line["prompt_tokens"], line["completion_tokens"]) == (5, 12)


async def test_a_client_that_leaves_is_told_from_one_that_was_served(server, lines):
    server.engine.gate.clear()
    call = asyncio.create_task(server.complete())
    await wait_for(lambda: bool(server.engine.requests))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    server.engine.gate.set()
    await wait_for(lambda: len(lines()) == 1)
    assert (lines()[0]["error"], lines()[0]["status"], lines()[0]["level"]) == ("client_gone", 499, "INFO")


async def test_probes_are_told_to_those_who_debug_only(server, lines):
    for path in ("/health", "/ready", "/version", "/metrics"):
        await server.client.get(path)
    assert {line["level"] for line in lines()} == {"DEBUG"}
    await server.client.get("/v1/models")
    assert lines()[-1]["level"] == "INFO"


async def test_probes_of_a_server_that_starts_or_drains_are_no_warnings(server, lines):
    """They come every few seconds, and find out what they are for; work that is refused meanwhile is another matter."""
    app = create_app(None, EngineConfig(model="fake"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 503
        assert {(line["error"], line["level"]) for line in lines()} == {("starting", "DEBUG")}
        await client.post(PATH, json={"model": "base", "prompt": "hi"})
        assert (lines()[-1]["error"], lines()[-1]["level"]) == ("starting", "WARNING")
    server.app.state.context.calls.draining = True
    assert (await server.client.get("/ready")).status_code == 503
    assert (lines()[-1]["error"], lines()[-1]["level"]) == ("draining", "DEBUG")


async def test_lines_can_be_turned_off(make_server, lines):
    server = make_server(log_requests=False)
    await server.complete()
    assert lines() == []


async def test_no_key_and_no_text_is_ever_logged(make_server, tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "multilora_jax")
    server = keyed_server(make_server, tmp_path, {"a": {"requests_per_minute": 12}}, api_keys=("sk-plain-secret",))
    for key in (*KEYS, "sk-plain-secret", "sk-not-a-key"):
        for fields in ({}, {"stream": True}, {"prompt": [SECRET_TEXT, 1]}, {"prompt": {SECRET_TEXT: 1}},
                       {SECRET_TEXT: 1}, {"model": SECRET_TEXT}, {"request_id": "x" * 300 + SECRET_TEXT}):  # fmt: skip
            body = {"model": "base", "prompt": SECRET_TEXT, "max_tokens": 3, **fields}
            await server.post(PATH, body, headers=bearer(key))
            chat = {"model": "base", "messages": [{"role": "user", "content": SECRET_TEXT}], "max_tokens": 3}
            await server.post("/v1/chat/completions", chat, headers=bearer(key))
    server.engine.script[SECRET_TEXT] = b"the answer"
    await server.post(PATH, {"model": "base", "prompt": "BUG"}, headers=bearer("b"))
    await server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/no"}, headers=bearer("ops"))
    formatters = [TextFormatter(), JsonFormatter()]
    text = "\n".join(formatter.format(record) for record in caplog.records for formatter in formatters)
    assert text.count("tenant") > 100
    for secret in (*KEYS.values(), "sk-plain-secret", "sk-not-a-key", SECRET_TEXT, "the answer", "base:abc"):
        assert secret not in text


def record(message: str, fields=None, **kwargs) -> logging.LogRecord:
    made = logging.LogRecord("multilora_jax.x", logging.WARNING, "f.py", 1, message, (), None)
    made.__dict__.update({"fields": fields} if fields is not None else {}, **kwargs)
    return made


def test_json_lines_are_objects_on_one_line():
    fields = {"path": "/a\nb", "total_s": 0.5, "name": 'q"'}
    text = JsonFormatter().format(record("two\nlines", fields))
    assert "\n" not in text
    entry = json.loads(text)
    assert (entry["level"], entry["logger"], entry["message"]) == ("warning", "multilora_jax.x", "two\nlines")
    assert {name: entry[name] for name in fields} == fields
    assert entry["time"].endswith("+00:00")
    try:
        raise ValueError("boom")
    except ValueError:
        failed = record("failed", exc_info=sys.exc_info())
    assert "ValueError: boom" in json.loads(JsonFormatter().format(failed))["exception"]


def test_text_lines_cannot_be_forged():
    line = TextFormatter().format(
        record("request", {"path": '/a\n2026 INFO request status=200 "', "empty": "", "n": 1})
    )
    assert "\n" not in line
    assert line.endswith('WARNING request path="/a\\n2026 INFO request status=200 \\"" empty="" n=1')


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_format_is_chosen(capsys, log_format):
    logger = logging.getLogger("multilora_jax")
    before = logger.handlers, logger.level, logger.propagate
    try:
        log_to_stderr(log_format)
        logging.getLogger("multilora_jax.a").info("hello %d", 1)
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    text = capsys.readouterr().err
    assert (json.loads(text)["message"] if log_format == "json" else text.split(" INFO ")[1].strip()) == "hello 1"
