"""Prometheus figures of one server, in a registry of its own; vLLM's names where vLLM has the figure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from multilora_jax.engine.metrics import EngineStats
from multilora_jax.request import RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from multilora_jax.engine.llm_engine import LLMEngine

SECONDS_TO_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)
SECONDS_PER_TOKEN = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
SECONDS_PER_REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)
TOKENS_PER_REQUEST = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
MAX_ADAPTER_SERIES = 200
"""Most adapters that get a time series of their own."""

ROW_BLOCK = 8
"""An adapter takes a multiple of this many of a step's max_rank_rows, so this bounds the adapters in a step."""

MetricSource = tuple[EngineStats, "LLMEngine"]


class ServerMetrics:
    """Histograms fed by the engine's outputs, and gauges and counters read off `EngineStats` at each scrape.

    Args:
        model_name: label of every figure.
        max_loras: the configured most adapters in one step, None where it is unbounded.
    """

    def __init__(self, model_name: str, max_loras: int | None):
        self.model_name = model_name
        self._max_loras = max_loras
        self._registry = CollectorRegistry()
        self._last_seen: dict[str, tuple[int, float]] = {}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
            return family.labels(model_name)

        self._finished = Counter(
            "vllm:request_success", "Requests ended, by reason.", ["model_name", "finished_reason"],
            registry=self._registry,
        )  # fmt: skip
        self._to_first = histogram("vllm:time_to_first_token_seconds", "From arrival to first token.", SECONDS_TO_FIRST)
        self._per_token = histogram("vllm:inter_token_latency_seconds", "Between two tokens.", SECONDS_PER_TOKEN)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to end.", SECONDS_PER_REQUEST)
        self._queued = histogram("vllm:request_queue_time_seconds", "From arrival to first step.", SECONDS_PER_REQUEST)
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From first step to first token.", SECONDS_PER_REQUEST
        )
        self._decode = histogram("vllm:request_decode_time_seconds", "From first token to end.", SECONDS_PER_REQUEST)
        self._prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens.", TOKENS_PER_REQUEST)
        self._new_tokens = histogram("vllm:request_generation_tokens", "Generated tokens.", TOKENS_PER_REQUEST)
        self.adapter_load_seconds = histogram(
            "vllm:lora_adapter_load_seconds", "Checking and packing an adapter's files.", SECONDS_TO_FIRST
        )

    def observe(self, output: RequestOutput) -> None:
        """Take one output of the engine; called on the engine thread."""
        now = time.monotonic()
        num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
        before, then = self._last_seen.get(output.request_id, (0, now))
        if before and num_tokens > before:
            for _ in range(num_tokens - before):
                self._per_token.observe((now - then) / (num_tokens - before))
        if not output.finished:
            self._last_seen[output.request_id] = (num_tokens, now)
            return
        self._last_seen.pop(output.request_id, None)
        for completion in output.outputs:
            self._finished.labels(self.model_name, str(completion.finish_reason)).inc()
        self._prompt_tokens.observe(len(output.prompt_token_ids))
        self._new_tokens.observe(num_tokens)
        if output.metrics is not None:
            self._observe_times(output.metrics, now)

    def _observe_times(self, times: RequestMetrics, now: float) -> None:
        end = now if times.finished_time is None else times.finished_time
        self._whole.observe(end - times.arrival_time)
        if times.first_scheduled_time is not None:
            self._queued.observe(times.first_scheduled_time - times.arrival_time)
        if times.first_token_time is not None:
            self._to_first.observe(times.first_token_time - times.arrival_time)
            self._decode.observe(end - times.first_token_time)
            if times.first_scheduled_time is not None:
                self._prefill.observe(times.first_token_time - times.first_scheduled_time)

    def render(self, stats: EngineStats, engine: LLMEngine) -> bytes:
        """The text of /metrics."""
        registry = CollectorRegistry()
        registry.register(_Snapshot(self._families(stats, engine)))
        return generate_latest(registry) + generate_latest(self._registry)

    def _families(self, stats: EngineStats, engine: LLMEngine) -> Iterator[Metric]:
        def gauge(name: str, text: str, *rows: tuple[dict[str, str], float]) -> Metric:
            labels = list(rows[0][0]) if rows else []
            family = GaugeMetricFamily(name, text, labels=["model_name", *labels])
            for values, value in rows:
                family.add_metric([self.model_name, *values.values()], value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self.model_name], value)
            return family

        yield gauge("vllm:num_requests_running", "Requests in the batch.", ({}, stats.num_running))
        yield gauge("vllm:num_requests_waiting", "Requests in the queue.", ({}, stats.num_waiting))
        share = stats.pages_kv / stats.pages_total if stats.pages_total else 0.0
        yield gauge("vllm:kv_cache_usage_perc", "Share (0 to 1) of the pool's pages that hold KV.", ({}, share))
        yield counter("vllm:num_preemptions", "Sequences preempted for want of pages.", stats.num_preemptions)
        yield counter("vllm:prompt_tokens", "Prompt tokens prefilled.", stats.prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens)
        blocks = {"block_size": str(engine.config.page_tokens), "num_gpu_blocks": str(stats.pages_total)}
        yield gauge("vllm:cache_config_info", "The pool: tokens to a page, and pages.", (blocks, 1))
        yield from self._adapter_families(stats, engine, gauge)
        kinds = {"free": stats.pages_free, "kv": stats.pages_kv, "adapter": stats.pages_adapter}
        yield gauge("multilora:pages", "Pages of the pool, by kind.", *(({"kind": k}, n) for k, n in kinds.items()))
        yield counter("multilora:adapter_hits", "Requests that found their adapter resident.", stats.adapter_hits)
        yield counter("multilora:adapter_misses", "Requests that had to wait for it.", stats.adapter_misses)
        yield counter("multilora:adapter_loads", "Adapters copied into the pool.", stats.adapter_loads)
        yield counter("multilora:adapter_evictions", "Adapters removed to make room.", stats.adapter_evictions)
        yield counter("multilora:adapter_load_bytes", "Bytes of those copies.", stats.adapter_load_bytes)
        yield counter("multilora:recompiles", "Programs compiled after warm-up.", stats.compilations)
        yield counter("multilora:steps", "Device steps.", stats.steps)
        yield counter("multilora:step_seconds", "Seconds spent in steps.", stats.step_seconds)

    def _adapter_families(self, stats: EngineStats, engine: LLMEngine, gauge) -> Iterator[Metric]:
        lists = {
            "max_lora": str(self._max_loras or engine.config.max_rank_rows // ROW_BLOCK),
            "running_lora_adapters": ",".join(sorted(stats.running_by_adapter)[:MAX_ADAPTER_SERIES]),
            "waiting_lora_adapters": ",".join(sorted(stats.waiting_by_adapter)[:MAX_ADAPTER_SERIES]),
        }
        yield gauge("vllm:lora_requests_info", "Unix time; the labels list the adapters in use.", (lists, time.time()))
        resident = {name: (rank, pinned) for name, rank, pinned in stats.resident}
        host = {a.name: (a.rank, False) for a in engine.list_loras() if a.name not in resident}
        rows = [
            ({"adapter_name": name, "level": level, "pinned": str(pinned).lower(), "rank": str(rank)}, 1.0)
            for level, adapters in (("gpu", resident), ("cpu", host))
            for name, (rank, pinned) in adapters.items()
        ]
        yield gauge(
            "vllm:lora_adapter_loaded", "1 for an adapter in the pool (gpu) or only in host memory (cpu).",
            *rows[:MAX_ADAPTER_SERIES],
        )  # fmt: skip
        yield gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters in the pool.", ({}, len(resident)))
        yield gauge("vllm:num_cpu_loaded_lora_adapters", "Adapters in host memory.", ({}, len(engine.list_loras())))
        if self._max_loras is not None:
            yield gauge("vllm:max_gpu_lora_adapters", "Most adapters in one step.", ({}, self._max_loras))


class _Snapshot(Collector):
    """Families that are already there, for one scrape."""

    def __init__(self, families: Iterable[Metric]):
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
