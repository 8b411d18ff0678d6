"""What /metrics tells of adapters: who is in use, and in which tier everything is (D28)."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from multilora_jax.engine.metrics import EngineStats
from multilora_jax.server.metrics import MAX_ADAPTER_SERIES
from tests.server.fake_engine import GOLDEN
from tests.server.harness import Server, figures, wait_for

pytestmark = pytest.mark.anyio

PATH = str(GOLDEN / "cases" / "all_linear")
LOADED = "vllm:lora_adapter_loaded"


async def tiers(server: Server) -> dict[str, dict[str, str]]:
    """The labels of each adapter's residency series but its name."""
    rows = [dict(labels) for labels in (await figures(server)).get(LOADED, {})]
    return {row.pop("adapter_name"): row for row in rows}


async def test_d28_running_and_waiting_adapters_are_told_apart(make_server):
    server = make_server(max_num_seqs=1, step_seconds=0.003, max_model_len=10_000, max_loras=3)
    calls = [asyncio.create_task(server.complete(model="adapter-a", max_tokens=400))]
    await wait_for(lambda: bool(server.engine.resident))
    calls += [asyncio.create_task(server.complete(model="adapter-b", max_tokens=1)) for _ in range(2)]
    await wait_for(lambda: len(server.engine.requests) == 3)
    got = await figures(server)
    assert (got["vllm:num_requests_running"], got["vllm:num_requests_waiting"]) == ({(): 1}, {(): 2})
    [(labels, value)] = got["vllm:lora_requests_info"].items()
    assert dict(labels) == {
        "max_lora": "3", "running_lora_adapters": "adapter-a", "waiting_lora_adapters": "adapter-b",
    }  # fmt: skip
    assert value > 1.7e9
    requests = {tuple(dict(labels).values()): n for labels, n in got["multilora:adapter_requests"].items()}
    assert requests == {("adapter-a", "running"): 1, ("adapter-b", "waiting"): 2}
    rows = await tiers(server)
    assert (rows["adapter-a"]["level"], rows["adapter-b"]["level"]) == ("gpu", "cpu")
    assert got["vllm:max_gpu_lora_adapters"] == {(): 3}
    assert 0 < got["vllm:kv_cache_usage_perc"][()] < 0.1
    await asyncio.gather(*calls)
    got = await figures(server)
    assert got["vllm:num_requests_running"] == {(): 0}
    assert "multilora:adapter_requests" not in got


async def test_d28_residency_survives_idleness_and_vanishes_on_unload(server):
    assert await tiers(server) == {}  # registered, and costs nothing
    got = await figures(server)
    assert (got["multilora:registered_adapters"], got["multilora:host_adapters"]) == ({(): 2}, {(): 0})
    await server.complete(model="adapter-a")
    await server.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": PATH})
    await server.post("/v1/load_lora_adapter", {"lora_name": "kept", "lora_path": PATH, "pinned": True})
    labels = {"pinned": "false", "rank": "8"}
    assert await tiers(server) == {
        "adapter-a": {"level": "gpu", **labels},
        "new": {"level": "cpu", **labels},
        "kept": {"level": "gpu", "pinned": "true", "rank": "8"},
    }
    got = await figures(server)
    assert got["vllm:num_gpu_loaded_lora_adapters"] == {(): 2}
    assert got["vllm:num_cpu_loaded_lora_adapters"] == got["multilora:host_adapters"] == {(): 3}
    assert got["multilora:host_adapter_bytes"] == {(): 3 * 64}
    assert got["multilora:registered_adapters"] == {(): 4}
    for name in ("adapter-a", "kept", "new"):
        await server.post("/v1/unload_lora_adapter", {"lora_name": name})
        assert name not in await tiers(server)
    assert "adapter-a" not in (await server.client.get("/metrics")).text
    assert (await figures(server))["multilora:host_adapters"] == {(): 0}


async def test_evictions_are_counted_by_tier(make_server):
    server = make_server(max_cpu_loras=1)
    for name in ("adapter-a", "adapter-b"):
        await server.complete(model=name)
    got = (await figures(server))["multilora:adapter_evictions_total"]
    assert got == {(("tier", "device"),): 0, (("tier", "host"),): 1}


async def test_d28_500_names_leave_a_bounded_number_of_series(make_server):
    server = make_server(lora_modules={f"name-{i}": PATH for i in range(500)})
    server.engine.prepare([server.engine.lora_request(f"name-{i}") for i in range(500)])
    await server.complete(model="name-499")
    got = await tiers(server)
    assert len(got) == MAX_ADAPTER_SERIES
    assert got["name-499"]["level"] == "gpu"  # those in the pool come first
    counts = {f"name-{i}": 1 for i in range(499)} | {"name-499": 7}
    stats = EngineStats(running_by_adapter=counts, waiting_by_adapter=counts)
    text = server.app.state.context.metrics.render(stats, server.engine).decode()
    [family] = [f for f in text_string_to_metric_families(text) if f.name == "multilora:adapter_requests"]
    assert len(family.samples) == 2 * (MAX_ADAPTER_SERIES + 1)
    values = {(s.labels["adapter_name"], s.labels["state"]): s.value for s in family.samples}
    assert values["name-499", "running"] == 7
    assert values["other", "waiting"] == 500 - MAX_ADAPTER_SERIES
    lists = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info")]
    assert len(lists) == 1
    assert lists[0].count("name-") == 2 * MAX_ADAPTER_SERIES
