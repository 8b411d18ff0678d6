"""/health, /version, /metrics, and a server that is starting or dead."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from multilora_jax.config import EngineConfig
from multilora_jax.server.app import create_app
from tests.server.fake_engine import GOLDEN
from tests.server.harness import figures, wait_for

pytestmark = pytest.mark.anyio


async def test_health_and_version(server):
    assert (await server.client.get("/health")).status_code == 200
    assert set((await server.client.get("/version")).json()) == {"version"}


async def test_d27_a_starting_server_is_not_healthy_and_refuses_work():
    app = create_app(None, EngineConfig(model="fake"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        body = {"model": "base", "prompt": "hi"}
        for response in (
            await client.get("/health"), await client.get("/v1/models"), await client.get("/metrics"),
            await client.post("/v1/completions", json=body),
            await client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/x"}),
            await client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}),
        ):  # fmt: skip
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "ServiceUnavailableError"
            assert response.json()["error"]["reason"] == "starting"
        assert (await client.get("/version")).status_code == 200


async def test_d27_a_dead_engine_is_not_healthy_and_fails_what_waits(make_server):
    server = make_server(step_seconds=0.005)
    call = asyncio.create_task(server.post("/v1/completions", {"model": "base", "prompt": "hi", "max_tokens": 100}))
    await wait_for(lambda: server.engine.counts.steps > 2)
    assert (await server.client.get("/health")).status_code == 200
    server.engine.fail_step = RuntimeError("device lost")
    response = await asyncio.wait_for(call, 5)
    assert (response.status_code, response.json()["error"]["reason"]) == (503, "engine_dead")
    health = await server.client.get("/health")
    assert (health.status_code, health.json()["error"]["reason"]) == (503, "engine_dead")
    response = await server.post(
        "/v1/chat/completions", {"model": "base", "messages": [{"role": "user", "content": "x"}]}
    )
    assert response.status_code == 503
    assert (await server.client.get("/metrics")).status_code == 200


async def test_d27_a_hanging_step_is_not_healthy(make_server):
    server = make_server()
    server.async_engine.stall_after_s = 0.05
    server.engine.gate.clear()
    call = asyncio.create_task(server.complete(max_tokens=2))
    await wait_for(lambda: not server.async_engine.healthy)
    assert (await server.client.get("/health")).status_code == 503
    server.engine.gate.set()
    await call
    assert (await server.client.get("/health")).status_code == 200


async def test_metrics_count_what_happened(server):
    await server.complete(max_tokens=5)
    await server.complete(model="adapter-a", stop="a")
    got = await figures(server)
    assert got["vllm:prompt_tokens_total"] == {(): 6}
    assert got["vllm:generation_tokens_total"] == {(): 6}
    assert got["vllm:request_success_total"] == {
        (("finished_reason", "length"),): 1, (("finished_reason", "stop"),): 1,
    }  # fmt: skip
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens",
    ):  # fmt: skip
        assert got[f"vllm:{name}_count"] == {(): 2}, name
    assert got["vllm:request_generation_tokens_sum"] == {(): 6}
    assert got["vllm:inter_token_latency_seconds_count"] == {(): 4}
    assert got["vllm:num_requests_running"] == {(): 0}
    assert got["vllm:cache_config_info"] == {(("block_size", "16"), ("num_gpu_blocks", "1000")): 1}
    assert got["multilora:kernel_info"] == {(("attention", "xla"), ("lora", "xla")): 1}
    pages = {"free": 1000, "kv": 0, "adapter": 0, "cached": 0}
    assert got["multilora:pages"] == {(("kind", kind),): number for kind, number in pages.items()}
    assert got["vllm:prefix_cache_queries_total"] == got["vllm:prefix_cache_hits_total"] == {(): 0}
    assert got["multilora:recompiles_total"] == {(): 0}
    assert got["multilora:steps_total"] == {(): 6}
    for name in ("adapter_hits", "adapter_misses", "adapter_loads", "adapter_load_bytes"):
        assert got[f"multilora:{name}_total"] == {(): 0}
    assert got["multilora:adapter_evictions_total"] == {(("tier", "device"),): 0, (("tier", "host"),): 0}


async def test_the_most_adapters_in_a_step_do_not_depend_on_what_is_loaded(make_server):
    for rows, most in ((64, "8"), (129, "16")):
        for lora_modules in ({}, {"a": str(GOLDEN / "cases" / "all_linear")}):
            server = make_server(lora_modules=lora_modules, max_rank_rows=rows)
            [labels] = (await figures(server))["vllm:lora_requests_info"]
            assert dict(labels)["max_lora"] == most


async def test_metrics_count_loads_and_aborts(server, adapter_paths):
    body = {"lora_name": "new", "lora_path": adapter_paths["adapter-a"]}
    assert (await server.post("/v1/load_lora_adapter", body)).status_code == 200
    server.engine.gate.clear()
    call = asyncio.create_task(server.complete())
    await wait_for(lambda: bool(server.engine.requests))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    server.engine.gate.set()
    await wait_for(lambda: not server.engine.requests)
    got = await figures(server)
    assert got["vllm:lora_adapter_load_seconds_count"] == {(): 1}
    assert got["vllm:request_success_total"] == {(("finished_reason", "abort"),): 1}
