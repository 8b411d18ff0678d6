"""More requests than the server can take: 429 and 503 with Retry-After, in every kind of answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from multilora_jax.errors import OverloadedError
from tests.server.harness import figures, wait_for

pytestmark = pytest.mark.anyio

PATHS = ("/v1/completions", "/v1/chat/completions")


def body(path: str, **fields: object) -> dict[str, object]:
    prompt = {"prompt": "hi"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "hi"}]}
    return {"model": "base", **prompt, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_full_queue_is_429_with_retry_after(make_server, path, stream):
    server = make_server(max_num_seqs=1, max_queued_requests=2)
    server.engine.gate.clear()
    calls = [asyncio.create_task(server.post(path, body(path, max_tokens=2)))]
    await wait_for(lambda: server.engine.held)
    # All of these are let in between two steps: two may wait.
    calls += [asyncio.create_task(server.post(path, body(path, max_tokens=2, stream=stream))) for _ in range(3)]
    await wait_for(lambda: server.async_engine._commands.qsize() == 3)
    server.engine.gate.set()
    answers = await asyncio.gather(*calls)
    [refused] = [answer for answer in answers if answer.status_code != 200]
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert (error["type"], error["reason"], error["code"]) == ("RateLimitError", "queue_full", 429)
    assert "2 requests wait and 2 may" in error["message"]
    assert (await server.post(path, body(path))).status_code == 200
    counts = (await figures(server))["multilora:requests_refused_total"]
    assert {labels[0][1]: n for labels, n in counts.items()} == {
        "queue_full": 1, "adapter_rate": 0, "first_token_objective": 0,
    }  # fmt: skip


async def test_a_request_of_several_prompts_is_refused_whole(make_server):
    server = make_server(max_num_seqs=1, max_queued_requests=1)
    server.engine.gate.clear()
    first = asyncio.create_task(server.post(PATHS[0], body(PATHS[0], max_tokens=2)))
    await wait_for(lambda: server.engine.held)
    call = asyncio.create_task(server.post(PATHS[0], {"model": "base", "prompt": ["a", "b", "c", "d"]}))
    await wait_for(lambda: server.async_engine._commands.qsize() == 4)
    server.engine.gate.set()
    assert (await call).status_code == 429
    assert (await first).status_code == 200
    await wait_for(lambda: not server.engine.requests)
    assert server.async_engine.num_live_requests == 0


async def test_an_adapter_s_rate_is_429_and_others_go_on(make_server):
    server = make_server(adapter_requests_per_s=0.01, adapter_request_burst=2)
    for _ in range(2):
        await server.complete(model="adapter-a")
    refused = await server.post(PATHS[0], body(PATHS[0], model="adapter-a"))
    assert (refused.status_code, refused.json()["error"]["reason"]) == (429, "adapter_rate")
    assert refused.headers["retry-after"] == "60"
    assert "adapter 'adapter-a'" in refused.json()["error"]["message"]
    await server.complete(model="adapter-b")
    await server.complete()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_request_that_is_given_up_is_503_with_retry_after(server, path, stream):
    reason = OverloadedError("too late", reason="first_token_objective", retry_after_s=7)
    server.engine.give_up["adapter-a"] = reason
    answer = await server.post(path, body(path, model="adapter-a", stream=stream))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (error["type"], error["reason"]) == ("ServiceUnavailableError", "first_token_objective")
    assert server.async_engine.healthy
    await server.complete(model="adapter-b")


async def test_the_user_field_is_the_tenant(server):
    await server.complete(user="team-1")
    await server.chat(user="team-2")
    await server.complete()
    assert server.engine.tenants_seen == ["team-1", "team-2", None]


async def test_grammars_that_take_long_hold_up_no_text(server):
    """A tenant may send many that take seconds each: whoever has a conversation to be read goes on meanwhile."""
    go_on, compiling = threading.Event(), server.engine.plans.prepare

    def slowly(*arguments: object) -> object:
        assert go_on.wait(60)
        return compiling(*arguments)

    server.engine.plans.prepare = slowly
    structured = [asyncio.create_task(server.complete(structured_outputs={"regex": "a+"})) for _ in range(64)]
    try:
        await wait_for(lambda: server.async_engine.num_live_requests == 64, 30)
        answer = await asyncio.wait_for(server.chat(max_tokens=2), 60)
        assert answer["usage"]["completion_tokens"] == 2
        assert not any(task.done() for task in structured)
    finally:
        go_on.set()
    await asyncio.gather(*structured)
