"""Adapters over HTTP on the real engine: every kind exact, mixes exact, loads and unloads beside other traffic."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file

from tests.oracle import Oracle, mix, read_deltas
from tests.server.conftest import ADAPTERS
from tests.server.fake_engine import GOLDEN
from tests.server.harness import joined, listening, parse_events, wait_for
from tests.server.real_server import COMPLETIONS, LOAD, UNLOAD, RealServer

pytestmark = pytest.mark.anyio

GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
PROMPT = [5, 17, 200, 31]
KINDS = {
    "untied": (
        "lm_head_untied", "embed_untied", "embed_lm_head", "dora_qv_rslora", "modules_to_save_lm_head",
        "modules_to_save_embed", "trainable_tokens",
    ),
    "biased": ("bias_lora_only", "bias_all", "lora_bias", "dora_biased"),
}  # fmt: skip
"""Base to cases with more than LoRA on projections."""


@pytest.fixture(scope="module", params=KINDS)
def plain(request, configs):
    """(base, server): a server without adapters, not warmed up."""
    server = RealServer(request.param, configs / "tiny_model", warm_up=False, max_num_seqs=1)
    yield request.param, server
    server.close()


async def names(server):
    async with server.client as client:
        return [card["id"] for card in (await client.get("/v1/models")).json()["data"]]


async def load(server, name, path, **fields):
    async with server.client as client:
        return await client.post(LOAD, json={"lora_name": name, "lora_path": str(path), **fields})


async def unload(server, name):
    async with server.client as client:
        return await client.post(UNLOAD, json={"lora_name": name})


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


# ---- D04


async def test_d04_every_kind_of_content_is_served_exactly(plain):
    base, server = plain
    for case in KINDS[base]:
        folder = GOLDEN / "cases" / case
        response = await load(server, case, folder)
        assert response.status_code == 200, response.text
        want = load_file(folder / "expected.safetensors")
        for i in range(3):
            answer = await server.complete(case, want[f"prompt.{i}"].tolist(), max_tokens=24, **GREEDY)
            assert answer["choices"][0]["token_ids"] == want[f"greedy.{i}"].tolist(), (case, i)
        ids, logp = want["prompt.2"], log_softmax(want["logits.2"])
        answer = await server.complete(case, ids.tolist(), max_tokens=0, echo=True, logprobs=0)
        got = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
        np.testing.assert_allclose(got, logp[np.arange(len(ids) - 1), ids[1:]], atol=4e-3, err_msg=case)
    assert await names(server) == ["base", *KINDS[base]]
    plain_want = load_file(GOLDEN / "bases" / base / "expected.safetensors")
    answer = await server.complete("base", plain_want["prompt.1"].tolist(), max_tokens=24, **GREEDY)
    assert answer["choices"][0]["token_ids"] == plain_want["greedy.1"].tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_qalora", True), ("alora_invocation_tokens", [1, 2]), ("peft_type", "IA3"),
        ("layer_replication", [[0, 1]]), ("modules_to_save", ["self_attn"]),
        ("trainable_token_indices", {"q_proj": [3]}),
    ],
)  # fmt: skip
async def test_d04_what_is_not_served_is_refused_by_name(real, tmp_path, field, value):
    folder = tmp_path / "adapter"
    shutil.copytree(GOLDEN / ADAPTERS["all"], folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, field: value}))
    before = await names(real)
    response = await load(real, "bad", folder)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "BadRequestError")
    assert field in error["message"]
    assert error["reason"] in ("unsupported_adapter_feature", "contradictory_adapter")
    assert await names(real) == before


# ---- mixes


async def test_a_mix_over_http_is_the_sum_of_its_scaled_deltas(real):
    oracle = Oracle.from_folder(GOLDEN / "bases" / "tied")
    deltas = {name: read_deltas(GOLDEN / path) for name, path in ADAPTERS.items()}
    mixes = [{"all": 0.5, "attn": -1.0}, {"all": 1.0, "attn": 0.25, "ranks": 2.0}, {"ranks": 0.0}, {"attn": 1.0}]
    with listening(real.app) as address:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:

            async def ask(scales) -> Any:
                lora = [{"name": name, "scale": scale} for name, scale in scales.items()]
                extra = {"lora": lora, "ignore_eos": True, "return_token_ids": True}
                return await client.completions.create(
                    model="base", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=0, echo=True, extra_body=extra
                )

            answers = await asyncio.gather(*(ask(scales) for scales in mixes))
    for scales, answer in zip(mixes, answers, strict=True):
        total = mix((deltas[name], scale) for name, scale in scales.items())
        ids = [*PROMPT, *answer.choices[0].token_ids]
        oracle.check_greedy(PROMPT, ids[len(PROMPT) :], total)
        logp = log_softmax(oracle.logits(ids, total))
        want = logp[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(answer.choices[0].logprobs.token_logprobs[1:], want, atol=2e-3)
        assert [(entry["name"], entry["scale"]) for entry in answer.adapters] == list(scales.items())
    texts = [answer.choices[0].token_ids for answer in answers]
    assert len({tuple(ids) for ids in texts}) == len(mixes)
    alone = await real.complete("attn", PROMPT, max_tokens=12, **GREEDY)
    assert alone["choices"][0]["token_ids"] == texts[3]
    assert alone["system_fingerprint"] == answers[3].system_fingerprint


# ---- loads and unloads beside other traffic


async def test_d23_streams_on_others_do_not_notice_an_unload(real):
    body = {"prompt": PROMPT, "max_tokens": 150, "stream": True, **GREEDY}
    alone = {}
    for name in ("base", "all", "attn"):
        alone[name] = (await real.complete(name, PROMPT, max_tokens=150, **GREEDY))["choices"][0]["text"]
    assert (await load(real, "b", GOLDEN / ADAPTERS["attn"])).status_code == 200
    async with real.client as client:
        models = ("base", "all", "b")
        streams = [asyncio.create_task(client.post(COMPLETIONS, json={"model": m, **body})) for m in models]
        blend = {"model": "base", "lora": [{"name": "b"}], **body}
        streams.append(asyncio.create_task(client.post(COMPLETIONS, json=blend)))
        await wait_for(lambda: real.engine.stats().running_by_adapter.get("b") == 2, 10)
        unloading = asyncio.create_task(unload(real, "b"))
        await wait_for(lambda: "b" not in {adapter.name for adapter in real.engine.list_loras()}, 5)
        for refused in ({"model": "b"}, {"model": "base", "lora": [{"name": "b"}]}):
            response = await client.post(COMPLETIONS, json={"prompt": PROMPT, **refused})
            assert (response.status_code, response.json()["error"]["reason"]) == (404, "unknown_adapter")
        for name in ("base", "all"):
            answer = await real.complete(name, PROMPT, max_tokens=10, **GREEDY)
            assert alone[name].startswith(answer["choices"][0]["text"])
        assert (await unloading).json()["requests_draining"] == 0
        texts = [joined(parse_events(await stream))[0]["text"] for stream in streams]
    assert texts == [alone["base"], alone["all"], alone["attn"], alone["attn"]]
    await wait_for(real.free_of_requests)
    assert "b" not in {name for name, *_ in real.engine.stats().tiers}
    real.engine.check_integrity()


async def test_d22_a_hundred_loads_and_unloads_at_once_under_traffic(real):
    """Of one name and of others: one entry for each in the end, every answer some version's, nothing left behind."""
    paths = [GOLDEN / "cases" / case for case in ("rslora", "attn_only", "rank1")]
    versions = set()
    for path in paths:
        assert (await load(real, "probe", path, load_inplace=True)).status_code == 200
        answer = await real.complete("probe", PROMPT, max_tokens=6, **GREEDY)
        versions.add((answer["system_fingerprint"], tuple(answer["choices"][0]["token_ids"])))
    await unload(real, "probe")
    assert len({fingerprint for fingerprint, _ in versions}) == 3
    steady = {name: (await real.complete(name, PROMPT, max_tokens=20, **GREEDY))["choices"] for name in ("base", "all")}
    await wait_for(real.free_of_requests)
    before, host = real.engine.stats(), await names(real)
    stop = asyncio.Event()
    seen: list[int] = []

    async def ask_changing(name):
        async with real.client as client:
            while not stop.is_set():
                body = {"model": name, "prompt": PROMPT, "max_tokens": 6, **GREEDY}
                response = await client.post(COMPLETIONS, json=body)
                seen.append(response.status_code)
                if response.status_code == 200:
                    answer = response.json()
                    ids = tuple(answer["choices"][0]["token_ids"])
                    assert (answer["system_fingerprint"], ids) in versions
                await asyncio.sleep(0.005)

    async def ask_steady(name):
        while not stop.is_set():
            assert (await real.complete(name, PROMPT, max_tokens=20, **GREEDY))["choices"] == steady[name]

    async def change(i):
        name = "same" if i % 2 else f"other-{i % 10}"
        if i % 4 < 2:
            return (await load(real, name, paths[i % 3], load_inplace=i % 3 == 0)).status_code
        return (await unload(real, name)).status_code

    asking = [asyncio.create_task(ask_changing(name)) for name in ("same", "other-0")]
    asking += [asyncio.create_task(ask_steady(name)) for name in steady]
    statuses = await asyncio.wait_for(asyncio.gather(*(change(i) for i in range(100))), 60)
    stop.set()
    await asyncio.gather(*asking)
    assert set(statuses) <= {200, 400, 404}
    assert statuses.count(200) >= 10
    assert set(seen) <= {200, 404}
    left = [name for name in await names(real) if name not in host]
    assert len(set(left)) == len(left)
    for name in left:
        answer = await real.complete(name, PROMPT, max_tokens=6, **GREEDY)
        assert (answer["system_fingerprint"], tuple(answer["choices"][0]["token_ids"])) in versions
        assert (await unload(real, name)).status_code == 200
    await wait_for(real.free_of_requests)
    after = real.engine.stats()
    assert await names(real) == host
    assert (after.host_adapters, after.host_adapter_bytes) == (before.host_adapters, before.host_adapter_bytes)
    assert after.registered_adapters == before.registered_adapters
    assert {name for name, *_ in after.tiers} == {name for name, *_ in before.tiers}
    real.engine.check_integrity()


async def test_d13_names_that_come_and_go_leave_memory_as_it_was(real):
    await real.complete("base", PROMPT, max_tokens=1)
    before = real.engine.stats()
    for i, pinned in zip(range(20), itertools.cycle([False, True])):
        name = f"cycle-{i}"
        assert (await load(real, name, GOLDEN / "cases" / "rslora", pinned=pinned)).status_code == 200
        await real.complete(name, PROMPT, max_tokens=2)
        async with real.client as client:
            card = (await client.get(f"/v1/models/{name}")).json()
        assert (card["state"], card["pinned"]) == ("resident", pinned)
        assert (await unload(real, name)).json()["requests_draining"] == 0
        after = real.engine.stats()
        for figure in ("pages_free", "pages_adapter", "host_adapters", "host_adapter_bytes", "registered_adapters"):
            assert getattr(after, figure) == getattr(before, figure), (i, figure)
    real.engine.check_integrity()


async def test_pins_over_http(real):
    async with real.client as client:
        response = await client.post("/v1/pin_lora_adapter", json={"lora_name": "all"})
        assert (response.status_code, response.json()["pinned"]) == (200, True)

        async def resident():
            return (await client.get("/v1/models/all")).json()["state"] == "resident"

        for _ in range(200):  # nothing else runs: the engine brings it in all the same
            if await resident():
                break
            await asyncio.sleep(0.01)
        assert await resident()
        before = await names(real)
        huge = GOLDEN / "cases" / "rank64"
        statuses = [await load(real, f"huge-{i}", huge, pinned=True) for i in range(8)]
        refused = [response for response in statuses if response.status_code != 200]
        assert refused, "the pool has 119 pages"
        assert {response.json()["error"]["reason"] for response in refused} == {"pin_limit"}
        loaded = [f"huge-{i}" for i, response in enumerate(statuses) if response.status_code == 200]
        assert await names(real) == [*before, *loaded]
        assert (await real.complete("attn", PROMPT, max_tokens=4, **GREEDY))["usage"]["completion_tokens"] == 4
        for name in loaded:
            assert (await unload(real, name)).status_code == 200
        response = await client.post("/v1/unpin_lora_adapter", json={"lora_name": "all"})
        assert (response.status_code, response.json()["pinned"]) == (200, False)
    await wait_for(real.free_of_requests)
    real.engine.check_integrity()
