"""What a stream may send and when: whole characters, nothing of a stop string, errors as events."""

from __future__ import annotations

import asyncio

import pytest

from multilora_jax.errors import UserError
from tests.server.harness import joined, parse_events, step_with_readers, wait_for

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


@pytest.mark.parametrize("text", ["😀", "🇩🇪 flag", "e\u0301e\u0301", "naïve 日本 done"])
@pytest.mark.parametrize("cut", [None, 1])
async def test_d19_only_whole_characters_are_sent(make_server, text, cut):
    server = make_server(step_seconds=0.003)
    data = text.encode()
    server.engine.script["hi"] = data
    max_tokens = 100 if cut is None else len(data) - cut
    events = await server.events(PATH, {"model": "base", "prompt": "hi", "max_tokens": max_tokens})
    expected = data[:max_tokens].decode(errors="replace")
    [choice] = joined(events)
    assert choice["text"] == expected
    pieces = [event["choices"][0]["text"] for event in events]
    assert all("\ufffd" not in piece for piece in pieces[:-1])
    whole = await server.complete(max_tokens=max_tokens)
    assert whole["choices"][0]["text"] == expected


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        (["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["XYZ", "FGH"], "ABCDE", "FGH"),
        (["K"], "ABCDEFGHIJ", "K"),
        (["JKL"], "ABCDEFGHIJK", None),
        (["A"], "", "A"),
    ],
)
async def test_d20_nothing_of_a_stop_string_is_sent(make_server, stop, expected, reason):
    server = make_server(step_seconds=0.003)
    server.engine.script["hi"] = b"ABCDEFGHIJK"
    body = {"model": "base", "prompt": "hi", "max_tokens": 50, "stop": stop}
    sent = ""
    events = await server.events(PATH, body)
    for event in events:
        sent += event["choices"][0]["text"]
        assert expected.startswith(sent)
    [choice] = joined(events)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", reason)
    assert (await server.complete(**body))["choices"][0]["text"] == expected


async def test_d20_the_stop_string_is_kept_on_demand(server):
    server.engine.script["hi"] = b"ABCDEF"
    body = {"model": "base", "prompt": "hi", "stop": "CD", "include_stop_str_in_output": True}
    [choice] = joined(await server.events(PATH, body))
    assert choice["text"] == "ABCD"


async def test_headers_and_framing(server):
    response = await server.post(PATH, {"model": "base", "prompt": "hi", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers
    assert len(parse_events(response)) >= 1


async def test_errors_before_a_stream_are_plain_answers(server):
    for fields in ({"model": "nope"}, {"prompt": "x" * 500}, {"temperature": -1}, {"prompt": [[999]]}):
        response = await server.post(PATH, {"model": "base", "prompt": "hi", "stream": True, **fields})
        assert response.status_code in (400, 404)
        assert response.headers["content-type"] == "application/json"
        assert response.json()["error"]["code"] == response.status_code


async def test_d27_an_error_in_mid_stream_is_an_event_and_then_the_end(make_server):
    server = make_server(step_seconds=0.005)
    body = {"model": "base", "prompt": ["hi", "ho"], "max_tokens": 100, "stream": True}
    call = asyncio.create_task(server.post(PATH, body))
    await wait_for(lambda: server.engine.counts.steps > 5)
    server.engine.fail_step = RuntimeError("device lost")
    events = parse_events(await asyncio.wait_for(call, 5))
    assert events[0]["choices"][0]["text"]
    error = events[-1]["error"]
    assert (error["type"], error["code"], error["reason"]) == ("ServiceUnavailableError", 503, "engine_dead")
    assert "device lost" not in error["message"]


async def test_a_request_that_the_engine_gives_up_is_an_error(server, monkeypatch):
    advance = server.engine._advance

    def give_up(request):
        output = advance(request)
        output.outputs[0].finish_reason, output.finished = "error", True
        server.engine.requests.pop(request.request_id, None)
        return output

    monkeypatch.setattr(server.engine, "_advance", give_up)
    assert (await server.post(PATH, {"model": "base", "prompt": "hi"})).status_code == 500
    answer = await server.post(PATH, {"model": "base", "prompt": "hi", "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, 500)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "guided_json"])
async def test_a_grammar_that_breaks_in_the_middle_is_called_by_the_field_that_was_sent(
    server, monkeypatch, path, field, stream
):
    advance = server.engine._advance

    def break_off(request):
        output = advance(request)
        if len(request.output_ids) > 3:
            error = UserError("too much: simplify it", reason="grammar_too_complex", param="structured_outputs")
            return server.engine._given_up(request, error)
        return output

    monkeypatch.setattr(server.engine, "_advance", break_off)
    step_with_readers(server.engine)
    prompt = {"prompt": "hi"} if path == PATH else {"messages": [{"role": "user", "content": "hi"}]}
    schema = {"type": "object"}
    asked = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "structured_outputs": {"json": schema},
        "guided_json": schema,
    }[field]
    answer = await server.post(path, {"model": "base", **prompt, field: asked, "stream": stream})
    error = parse_events(answer)[-1]["error"] if stream else answer.json()["error"]
    assert (error["reason"], error["param"]) == ("grammar_too_complex", field)
