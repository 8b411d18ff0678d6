"""/metrics: every name that dashboards and gateways read, with its type and labels; series by adapter are bounded."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from multilora_jax.engine.metrics import PHASES, STEP_TOKENS, EngineStats
from multilora_jax.errors import OverloadedError
from multilora_jax.server.adapter_figures import AdapterFigures
from multilora_jax.server.metrics import ABORTS, MAX_ADAPTER_SERIES
from tests.server.fake_engine import GOLDEN
from tests.server.harness import Server, figures, wait_for
from tests.server.keyed import bearer, keyed_server

pytestmark = pytest.mark.anyio

CONFIGS = Path(__file__).parent.parent.parent / "configs" / "monitoring"
ADAPTER = ("adapter_name",)

NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm:num_requests_running": ("gauge", ()),
    "vllm:num_requests_waiting": ("gauge", ()),
    "vllm:kv_cache_usage_perc": ("gauge", ()),
    "vllm:prefix_cache_queries": ("counter", ()),
    "vllm:prefix_cache_hits": ("counter", ()),
    "vllm:num_preemptions": ("counter", ()),
    "vllm:prompt_tokens": ("counter", ()),
    "vllm:generation_tokens": ("counter", ()),
    "vllm:request_success": ("counter", ("finished_reason",)),
    "vllm:iteration_tokens_total": ("histogram", ()),
    "vllm:time_to_first_token_seconds": ("histogram", ()),
    "vllm:inter_token_latency_seconds": ("histogram", ()),
    "vllm:e2e_request_latency_seconds": ("histogram", ()),
    "vllm:request_queue_time_seconds": ("histogram", ()),
    "vllm:request_prefill_time_seconds": ("histogram", ()),
    "vllm:request_decode_time_seconds": ("histogram", ()),
    "vllm:request_prompt_tokens": ("histogram", ()),
    "vllm:request_generation_tokens": ("histogram", ()),
    "vllm:cache_config_info": ("gauge", ("block_size", "num_gpu_blocks")),
    "vllm:lora_requests_info": ("gauge", ("max_lora", "running_lora_adapters", "waiting_lora_adapters")),
    "vllm:lora_adapter_loaded": ("gauge", ("adapter_name", "level", "pinned", "rank")),
    "vllm:num_gpu_loaded_lora_adapters": ("gauge", ()),
    "vllm:max_gpu_lora_adapters": ("gauge", ()),
    "vllm:lora_adapter_load_seconds": ("histogram", ()),
    "multilora:pages": ("gauge", ("kind",)),
    "multilora:adapter_hits": ("counter", ()),
    "multilora:adapter_misses": ("counter", ()),
    "multilora:adapter_loads": ("counter", ()),
    "multilora:adapter_evictions": ("counter", ("tier",)),
    "multilora:adapter_load_bytes": ("counter", ()),
    "multilora:recompiles": ("counter", ()),
    "multilora:adapter_requests": ("gauge", ("adapter_name", "state")),
    "multilora:adapter_finished_requests": ("counter", ADAPTER),
    "multilora:adapter_prompt_tokens": ("counter", ADAPTER),
    "multilora:adapter_generation_tokens": ("counter", ADAPTER),
    "multilora:adapter_time_to_first_token_seconds": ("histogram", ADAPTER),
    "multilora:requests_refused": ("counter", ("reason",)),
    "multilora:requests_aborted": ("counter", ("cause",)),
    "multilora:step_seconds": ("counter", ()),
    "multilora:step_phase_seconds": ("counter", ("phase",)),
    "multilora:tenant_requests": ("counter", ("tenant",)),
    "multilora:tenant_tokens": ("counter", ("kind", "tenant")),
    "multilora:tenant_requests_refused": ("counter", ("limit", "tenant")),
}
"""Family (a counter without _total) to its type and its labels beside model_name."""


async def families(server: Server):
    response = await server.client.get("/metrics")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


async def busy(server: Server) -> list[asyncio.Task]:
    """Requests that run, so that every family has a sample."""
    await server.complete(model="adapter-a", max_tokens=3)
    server.engine.gate.clear()
    calls = [asyncio.create_task(server.complete(model="adapter-b"))]
    await wait_for(lambda: server.engine.held)
    return calls


@pytest.fixture
async def scraped(server, monkeypatch):
    calls = await busy(server)
    monkeypatch.setattr(server.async_engine, "_last_stats", server.engine.stats())  # the engine is held in a step
    found = await families(server)
    server.engine.gate.set()
    await asyncio.gather(*calls)
    return found


async def test_every_name_is_there_with_its_type_and_labels(scraped):
    assert set(NAMES) <= set(scraped)
    for name, (kind, labels) in NAMES.items():
        family = scraped[name]
        assert (family.type, bool(family.documentation), bool(family.samples)) == (kind, True, True), name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"model_name", *labels}, sample
            assert sample.labels["model_name"] == "base"


async def test_no_family_is_exported_twice_and_every_own_one_is_listed(server):
    text = (await server.client.get("/metrics")).text
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(types) == len(set(types))
    told = {name.removesuffix("_total").removesuffix("_created") for name in types}
    unlisted = {name for name in told if name.startswith("multilora:")} - {n.removesuffix("_total") for n in NAMES}
    assert unlisted == {
        "multilora:failed_steps", "multilora:host_adapter_bytes", "multilora:host_adapters", "multilora:kernel_info",
        "multilora:registered_adapters", "multilora:steps",
    }  # fmt: skip


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"(?:vllm|multilora):\w+", expression))


async def test_the_dashboard_asks_for_nothing_that_is_not_exported(scraped):
    dashboard = json.loads((CONFIGS / "grafana.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = set().union(*map(names_in, targets))
    assert len(asked) > 15
    samples = {sample.name for family in scraped.values() for sample in family.samples}
    assert asked <= samples
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_scrape_example_is_one():
    config = yaml.safe_load((CONFIGS / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["authorization"]["type"] == "Bearer"
    assert "credentials" not in job["authorization"]  # in a file of its own, not here


async def test_counts_by_adapter_and_tenant(make_server, tmp_path):
    server = keyed_server(make_server, tmp_path)
    for _ in range(2):
        body = {"model": "adapter-a", "prompt": "hi", "max_tokens": 4}
        assert (await server.post("/v1/completions", body, headers=bearer("a"))).status_code == 200
    server.client.headers.update(bearer("ops"))
    got = await figures(server)
    adapter = (("adapter_name", "adapter-a"),)
    assert got["multilora:adapter_finished_requests_total"] == {adapter: 2}
    assert got["multilora:adapter_prompt_tokens_total"] == {adapter: 6}
    assert got["multilora:adapter_generation_tokens_total"] == {adapter: 8}
    assert got["multilora:adapter_time_to_first_token_seconds_count"] == {adapter: 2}
    assert got["multilora:adapter_time_to_first_token_seconds_bucket"][(*adapter, ("le", "+Inf"))] == 2
    assert got["multilora:tenant_requests_total"] == {(("tenant", "a"),): 2}
    assert got["multilora:tenant_tokens_total"] == {
        (("kind", "prompt"), ("tenant", "a")): 6, (("kind", "generation"), ("tenant", "a")): 8,
    }  # fmt: skip
    await server.post("/v1/unload_lora_adapter", {"lora_name": "adapter-a"})
    assert "multilora:adapter_finished_requests_total" not in await figures(server)


async def test_requests_that_end_early_are_counted_by_cause(server):
    server.engine.give_up["adapter-a"] = OverloadedError("too late", reason="first_token_objective")
    await server.post("/v1/completions", {"model": "adapter-a", "prompt": "hi"})
    server.engine.gate.clear()
    call = asyncio.create_task(server.complete())
    await wait_for(lambda: bool(server.engine.requests))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    server.engine.gate.set()
    await server.complete()
    got = (await figures(server))["multilora:requests_aborted_total"]
    counts = {labels[0][1]: count for labels, count in got.items()}
    assert counts == {**dict.fromkeys(ABORTS, 0), "overload": 1, "client": 1}


async def test_names_cannot_break_out_of_their_labels(make_server):
    path = str(GOLDEN / "cases" / "all_linear")
    odd = ['a"} 1', "back\\slash", "a,b", "100%", "ü"]
    server = make_server(lora_modules=dict.fromkeys(odd, path))
    for name in odd:
        await server.complete(model=name)
    found = await families(server)
    loaded = found["vllm:lora_adapter_loaded"].samples
    assert {sample.labels["adapter_name"] for sample in loaded} == set(odd)
    stats = EngineStats(running_by_adapter=dict.fromkeys(odd, 1))
    text = server.app.state.context.metrics.render(stats, server.engine).decode()
    [info] = [f for f in text_string_to_metric_families(text) if f.name == "vllm:lora_requests_info"]
    # Gateways split at commas.
    assert set(info.samples[0].labels["running_lora_adapters"].split(",")) == {
        'a"} 1', "back\\slash", "a%2Cb", "100%25", "ü",
    }  # fmt: skip


async def test_d28_thousands_of_names_leave_a_bounded_number_of_series(make_server):
    server = make_server()
    figures_by_adapter = server.app.state.context.metrics._by_adapter
    for i in range(3000):
        figures_by_adapter.add(f"name-{i}", 1, 1, 0.1, float(i))
    assert len(figures_by_adapter.series()) == MAX_ADAPTER_SERIES + 1
    assert len(figures_by_adapter._candidates) <= MAX_ADAPTER_SERIES


def test_the_most_used_adapters_get_the_series_however_late_they_come():
    by_adapter = AdapterFigures(3, "other")
    for i in range(6):
        by_adapter.add(f"early-{i}", 1, 1, None, 0.0)
    for _ in range(5):
        by_adapter.add("heavy", 10, 10, 0.2, 1.0)
    series = by_adapter.series()
    assert "heavy" in series
    assert (series["heavy"].generation_tokens, series["other"].finished_requests) == (50, 3)
    by_adapter.add("other", 1, 1, None, 1.0)
    assert by_adapter.series()["other"].finished_requests == 4
    by_adapter.keep(lambda name: name != "heavy")
    assert "heavy" not in by_adapter.series()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 50), st.floats(0, 500)), max_size=200))
def test_a_series_only_grows_while_it_is_there(requests):
    by_adapter, now = AdapterFigures(3, "other"), 0.0
    before: dict[str, int] = {}
    for name, tokens, seconds in requests:
        now += seconds
        by_adapter.add(str(name), 0, tokens, None, now)
        after = {name: series.generation_tokens for name, series in by_adapter.series().items()}
        assert all(after[name] >= count for name, count in before.items() if name in after)
        assert sum(after.values()) - sum(before.get(name, 0) for name in after) == tokens
        assert len(after) <= 4
        before = after


def test_steps_are_counted_by_tokens_and_phase():
    stats = EngineStats()
    snapshot = EngineStats(**vars(stats))
    for num_tokens in (1, 2, 3, 4, 100_000):
        stats.add_step(0.5, num_tokens, (0.1, 0.3, 0.05))
    assert stats.steps_by_tokens[:4] == (1, 1, 2, 0)
    assert stats.steps_by_tokens[-1] == 1
    assert (sum(stats.steps_by_tokens), stats.step_tokens, len(stats.steps_by_tokens)) == (
        5,
        100_010,
        len(STEP_TOKENS) + 1,
    )
    assert dict(zip(PHASES, stats.phase_seconds, strict=True)) == pytest.approx(
        {"launch": 0.5, "wait": 1.5, "output": 0.25}
    )
    stats.add_step(0.5)
    assert sum(stats.phase_seconds) == pytest.approx(2.25)
    assert sum(snapshot.steps_by_tokens) == 0
