"""`n`, `cache_salt` and cached tokens over HTTP."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.server.harness import figures, joined, listening, parse_events, wait_for
from tests.server.real_server import COMPLETIONS

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
FIELDS = {"seed": 7, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}


async def test_choices_of_several_prompts_are_in_order_and_each_its_own(real):
    prompts = [[5] * 20, [9] * 35]
    answer = await real.complete("base", prompts, n=3, **FIELDS)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for index, choice in enumerate(answer["choices"]):
        single = await real.complete("base", prompts[index // 3], **{**FIELDS, "seed": 7 + index % 3})
        assert choice["token_ids"] == single["choices"][0]["token_ids"]
        assert choice["text"] == single["choices"][0]["text"]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (55, 6 * 12)
    await wait_for(real.free_of_requests)


async def test_streamed_continuations_are_the_whole_ones(real):
    body = {"model": "base", "prompt": ["hello", "naive"], "n": 3, **FIELDS}
    whole = await real.complete(**body)
    stop = whole["choices"][4]["token_ids"][3]
    for extra in ({}, {"stop_token_ids": [stop]}, {"echo": True, "logprobs": 1}):
        whole = await real.complete(**body, **extra)
        usage = {"stream_options": {"include_usage": True}}
        async with real.client as client:
            events = parse_events(await client.post(COMPLETIONS, json={**body, **extra, **usage, "stream": True}))
        assert joined(events) == [{**choice} for choice in whole["choices"]]
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert events[-1]["usage"][key] == whole["usage"][key]
        assert events[-1]["choices"] == []


async def test_chat_gives_and_streams_n_answers(server):
    server.engine.script["<user>hi\n<assistant>"] = b"abc"
    whole = await server.chat(n=3, logprobs=True)
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in whole["choices"]] == [
        (i, "abc", "stop") for i in range(3)
    ]
    assert whole["usage"]["completion_tokens"] == 3 * 4
    events = await server.events(CHAT, {"model": "base", "messages": MESSAGES, "n": 3})
    pieces = [event["choices"][0] for event in events]
    for index in range(3):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["delta"].get("content", "") for piece in mine) == "abc"
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + ["stop"]


async def test_an_echo_alone_has_n_choices(server):
    answer = await server.complete(max_tokens=0, echo=True, n=2)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "hi"), (1, "hi")]
    answer = await server.complete(max_tokens=0, echo=True, n=2, logprobs=1)
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [3, 3]


async def test_a_client_that_leaves_ends_all_continuations(real):
    with listening(real.app) as address:
        async with httpx.AsyncClient(base_url=address) as client:
            body = {"model": "base", "prompt": [3] * 40, "n": 4, "max_tokens": 200, "ignore_eos": True}
            call = asyncio.create_task(client.post(COMPLETIONS, json=body))
            await wait_for(lambda: real.engine.stats().num_running > 2, 5)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await wait_for(real.free_of_requests)
    real.engine.check_integrity()


@pytest.mark.parametrize("n", [0, 129])
async def test_n_out_of_range_is_400(server, n):
    for path, fields in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": MESSAGES})):
        response = await server.post(path, {"model": "base", "n": n, **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "n"


async def test_d09_salts_separate_tenants_and_cached_tokens_are_told(real):
    async def cached(salt, model="base"):
        fields = {} if salt is None else {"cache_salt": salt}
        answer = await real.complete(model, [77] * 50, max_tokens=1, **fields)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    page = real.engine.geometry.page_tokens
    assert [await cached(salt) for salt in ("x", "y", None)] == [0, 0, 0]
    assert [await cached(salt) for salt in ("x", "y", None)] == [50 // page * page] * 3
    assert await cached("x", "attn") == 0
    async with real.client as client:
        text = (await client.get("/metrics")).text
    assert "vllm:prefix_cache_hits_total" in text
    assert 'multilora:pages{kind="cached",model_name="base"}' in text


async def test_the_salt_reaches_the_engine(server):
    await server.complete(cache_salt="tenant")
    await server.chat(cache_salt="other")
    assert server.engine.salts_seen == ["tenant", "other"]
    for path, fields in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": MESSAGES})):
        for salt in ("", 5):
            response = await server.post(path, {"model": "base", "cache_salt": salt, **fields})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "cache_salt"


async def test_metrics_count_each_continuation(server):
    await server.complete(n=3, max_tokens=4)
    got = await figures(server)
    assert got["vllm:request_success_total"] == {(("finished_reason", "length"),): 3}
    assert got["vllm:request_generation_tokens_sum"] == {(): 12}
    assert got["vllm:inter_token_latency_seconds_count"] == {(): 9}
