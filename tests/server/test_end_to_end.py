"""The HTTP server over the real engine on a tiny reference model: what comes out is what PEFT computes."""

from __future__ import annotations

import asyncio
import time

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.server.conftest import ADAPTERS
from tests.server.fake_engine import GOLDEN
from tests.server.harness import joined, listening, parse_events, wait_for
from tests.server.real_server import COMPLETIONS

pytestmark = pytest.mark.anyio

CASES = {"base": "bases/tied", **ADAPTERS}
EXTRA = str(GOLDEN / "cases" / "rslora")


@pytest.fixture(scope="module")
def expected():
    return {name: load_file(GOLDEN / path / "expected.safetensors") for name, path in CASES.items()}


async def test_d08_greedy_tokens_of_a_mixed_batch_are_the_reference_s(real, expected):
    async def one(name, i):
        want = expected[name]
        fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = await real.complete(name, want[f"prompt.{i}"].tolist(), **fields)
        assert answer["choices"][0]["token_ids"] == want[f"greedy.{i}"].tolist(), (name, i)

    await asyncio.gather(*(one(name, i) for name in CASES for i in range(3)))
    await wait_for(real.free_of_requests)
    async with real.client as client:
        text = (await client.get("/metrics")).text
    assert 'multilora:recompiles_total{model_name="base"} 0.0' in text


async def test_log_probabilities_are_the_reference_s(real, expected):
    for name in CASES:
        ids = expected[name]["prompt.2"]
        logits = expected[name]["logits.2"].astype(np.float64)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        answer = await real.complete(name, ids.tolist(), max_tokens=0, echo=True, logprobs=2)
        got = answer["choices"][0]["logprobs"]
        assert got["token_logprobs"][0] is None
        want = logp[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(got["token_logprobs"][1:], want, atol=4e-3)
        best = [max(table.values()) for table in got["top_logprobs"][1:]]
        np.testing.assert_allclose(best, logp[:-1].max(-1), atol=4e-3)


async def test_streams_say_what_whole_answers_say(real):
    for name in CASES:
        fields = {"max_tokens": 30, "seed": 5, "logprobs": 1, "return_token_ids": True}
        whole = await real.complete(name, ["hello", "naïve 😀"], **fields)
        async with real.client as client:
            body = {"model": name, "prompt": ["hello", "naïve 😀"], "stream": True, **fields}
            events = parse_events(await client.post(COMPLETIONS, json=body))
        streamed = joined(events)
        for a, b in zip(streamed, whole["choices"], strict=True):
            assert (a["text"], a["token_ids"], a["finish_reason"]) == (b["text"], b["token_ids"], b["finish_reason"])
            np.testing.assert_allclose(a["logprobs"]["token_logprobs"], b["logprobs"]["token_logprobs"], atol=1e-3)


async def test_d21_edges_of_the_context(real):
    limit = real.engine.max_model_len
    answer = await real.complete("all", [7] * (limit - 1), max_tokens=1, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == limit
    async with real.client as client:
        for length, max_tokens in ((limit, 1), (8, limit - 3), (0, 1)):
            body = {"model": "all", "prompt": [[7] * length], "max_tokens": max_tokens}
            assert (await client.post(COMPLETIONS, json=body)).status_code == 400
    await wait_for(real.free_of_requests)


@pytest.mark.parametrize("stream", [True, False])
async def test_d14_a_client_that_hangs_up_gives_its_pages_back(real, stream):
    body = {"model": "attn", "prompt": ["a", "b", "c", "d", "e", "f"], "max_tokens": 250, "ignore_eos": True}
    with listening(real.app) as address:
        async with httpx.AsyncClient(base_url=address) as client:
            call = asyncio.create_task(client.post(COMPLETIONS, json={**body, "stream": stream}))
            await wait_for(lambda: real.engine.stats().pages_kv > 0, 5)
            generated = real.engine.stats().generation_tokens
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await wait_for(real.free_of_requests)
    assert real.engine.stats().generation_tokens - generated < 6 * 200
    real.engine.check_integrity()


def free_of_use(real) -> int:
    """Pages that are free or only kept for later prompts."""
    stats = real.engine.stats()
    return stats.pages_free + stats.pages_cached


async def test_adapters_come_and_go_and_leave_no_page_behind(real, expected):
    async with real.client as client:
        before = (await client.get("/v1/models")).json()["data"]
        free = free_of_use(real)
        for i in range(6):
            body = {"lora_name": f"new{i}", "lora_path": EXTRA}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
            want = load_file(EXTRA + "/expected.safetensors")
            fields = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            answer = await real.complete(f"new{i}", want["prompt.1"].tolist(), **fields)
            assert answer["choices"][0]["token_ids"] == want["greedy.1"].tolist()
            card = (await client.get("/v1/models")).json()["data"][-1]
            assert (card["id"], card["state"]) == (f"new{i}", "resident")
            response = await client.post("/v1/unload_lora_adapter", json={"lora_name": f"new{i}"})
            assert response.json()["requests_draining"] == 0
            assert (await client.post(COMPLETIONS, json={"model": f"new{i}", "prompt": "x"})).status_code == 404
            assert free_of_use(real) == free
        after = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in after] == [card["id"] for card in before]
    real.engine.check_integrity()


async def test_d23_an_adapter_unloaded_or_replaced_while_it_answers(real):
    """Requests under way end on the version that they began with; nothing else notices."""
    fields = {"prompt": [5, 17, 200], "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    async with real.client as client:

        async def ask(model):
            return (await client.post(COMPLETIONS, json={"model": model, **fields})).json()

        async def load(name, path, **more):
            body = {"lora_name": name, "lora_path": path, **more}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200

        async def running(name):
            await wait_for(lambda: name in real.engine.stats().running_by_adapter, 5)

        attn = str(GOLDEN / CASES["attn"])
        alone = {name: (await ask(name))["choices"][0]["text"] for name in ("base", "attn")}
        await load("temporary", attn)
        calls = [asyncio.create_task(ask(name)) for name in ("temporary", "base", "attn")]
        await running("temporary")
        await load("temporary", EXTRA, load_inplace=True)
        newer = asyncio.create_task(ask("temporary"))
        old, base, other = [(await call)["choices"][0]["text"] for call in calls]
        assert (old, base, other) == (alone["attn"], alone["base"], alone["attn"])
        new = await newer
        assert new["choices"][0]["text"] not in alone.values()
        again = asyncio.create_task(ask("temporary"))
        await running("temporary")
        unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": "temporary"})
        assert unloaded.json()["requests_draining"] == 0
        last = await asyncio.wait_for(again, 0.5)
        assert (last["choices"], last["system_fingerprint"]) == (new["choices"], new["system_fingerprint"])
    await wait_for(real.free_of_requests)
    assert "temporary" not in {name for name, _, _ in real.engine.stats().resident}
    real.engine.check_integrity()


async def test_many_clients_at_once(real):
    started = time.monotonic()

    async def one(i):
        name = list(CASES)[i % 4]
        return await real.complete(name, [3 + i, 9, 50], max_tokens=5 + i % 7, temperature=0, ignore_eos=True)

    answers = await asyncio.gather(*(one(i) for i in range(40)))
    assert [a["usage"]["completion_tokens"] for a in answers] == [5 + i % 7 for i in range(40)]
    assert [a["model"] for a in answers] == [list(CASES)[i % 4] for i in range(40)]
    await wait_for(real.free_of_requests)
    assert time.monotonic() - started < 60


async def test_d22_requests_loads_and_unloads_of_one_name_at_once_leave_nothing_behind(real):
    statuses = []
    async with real.client as client:

        async def ask():
            while True:
                body = {"model": "x", "prompt": [5, 6], "max_tokens": 2, "ignore_eos": True}
                statuses.append((await client.post(COMPLETIONS, json=body)).status_code)
                await asyncio.sleep(0.02)  # busier clients would starve the load of its share of the interpreter

        askers = [asyncio.create_task(ask()) for _ in range(6)]
        for _ in range(10):
            body = {"lora_name": "x", "lora_path": EXTRA}
            assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
            await asyncio.sleep(0.02)
            assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})).status_code == 200
        for asker in askers:
            asker.cancel()
        await asyncio.gather(*askers, return_exceptions=True)
    assert set(statuses) == {200, 404}
    await wait_for(real.free_of_requests)
    assert "x" not in {name for name, _, _ in real.engine.stats().resident}
    real.engine.check_integrity()
