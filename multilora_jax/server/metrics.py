"""Prometheus figures of one server, in a registry of its own; vLLM's names where vLLM has the figure."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from multilora_jax.engine.metrics import PHASES, REFUSALS, STEP_TOKENS, EngineStats
from multilora_jax.request import RequestMetrics, RequestOutput
from multilora_jax.server.adapter_figures import FIRST_TOKEN_BUCKETS, AdapterFigures
from multilora_jax.server.call import Call
from multilora_jax.server.replica_metrics import replica_families
from multilora_jax.server.tenants import Caller

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

OTHER = "other"
"""Name of the series that the rest is added up in."""

ABORTS = ("client", "shutdown", "engine", "overload", "adapter", "other")
"""Causes for which requests end before their answer is complete: the client left; the server was shut down; the engine
failed; the request was given up because of the load (`abort`, `deadline`); its adapter could not be read."""

_CAUSES = {
    "shutting_down": "shutdown", "engine_dead": "engine", "engine_failed": "engine", "step_failed": "engine",
    "internal_error": "engine", "out_of_memory": "engine", "first_token_objective": "overload",
    "adapter_unreadable": "adapter", "adapter_changed": "adapter", "adapter_file_not_found": "adapter",
}  # fmt: skip
"""Reason of an error to its cause."""

Row = tuple[dict[str, str], float]
"""The labels of one sample, and its value."""

HistogramRow = tuple[dict[str, str], Sequence[float], Sequence[int], float]
"""The labels of one histogram, the upper bounds of its buckets, their counts (one more: beyond), and the sum."""


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
        self._last_seen: dict[str, tuple[list[int], float]] = {}
        self._by_adapter = AdapterFigures(MAX_ADAPTER_SERIES, OTHER)
        self._aborts: dict[str, int] = dict.fromkeys(ABORTS, 0)
        self._by_tenant: dict[str, list[int]] = {}

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
        num_tokens = [len(completion.token_ids) for completion in output.outputs]
        before, then = self._last_seen.get(output.request_id, ([0] * len(num_tokens), now))
        for old, new in zip(before, num_tokens, strict=False):
            for _ in range(new - old if old else 0):
                self._per_token.observe((now - then) / (new - old))
        if not output.finished:
            self._last_seen[output.request_id] = (num_tokens, now)
            return
        self._last_seen.pop(output.request_id, None)
        for completion in output.outputs:
            self._finished.labels(self.model_name, str(completion.finish_reason)).inc()
        self._prompt_tokens.observe(len(output.prompt_token_ids))
        self._new_tokens.observe(sum(num_tokens))
        if output.metrics is not None:
            self._observe_times(output.metrics, now)

    def observe_call(self, call: Call) -> None:
        """Take a request to the server that has ended; called on the event loop."""
        if not call.submissions:
            return
        now = time.monotonic()
        tenant = self._by_tenant.setdefault(call.caller.tenant, [0, 0, 0])
        tenant[0] += 1
        for submission in call.submissions:
            prompt, _, generated = submission.num_tokens
            tenant[1] += prompt
            tenant[2] += generated
            times = submission.times
            first = None if times is None or times.first_token_time is None else times.first_token_time
            to_first = None if first is None or times is None else first - times.arrival_time
            for name in submission.adapters:
                self._by_adapter.add(name, prompt, generated, to_first, now)
        cause = "client" if call.gone else _CAUSES.get(call.error, "other") if call.error else None
        if cause is not None:
            self._aborts[cause] += 1

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

    def render(self, stats: EngineStats, engine: LLMEngine, callers: Iterable[Caller] = ()) -> bytes:
        """The text of /metrics; `callers` are the keys whose refusals it tells."""
        self._by_adapter.keep(lambda name: engine.adapters.registry.find(name) is not None)
        registry = CollectorRegistry()
        registry.register(_Snapshot([*self._families(stats, engine), *self._use(), *self._tenants(callers)]))
        return generate_latest(registry) + generate_latest(self._registry)

    def _families(self, stats: EngineStats, engine: LLMEngine) -> Iterator[Metric]:
        gauge, counter = self._gauge, self._counter
        yield gauge("vllm:num_requests_running", "Requests in the batch.", ({}, stats.num_running))
        yield gauge("vllm:num_requests_waiting", "Requests in the queue.", ({}, stats.num_waiting))
        share = stats.pages_kv / stats.pages_total if stats.pages_total else 0.0
        yield gauge("vllm:kv_cache_usage_perc", "Share (0 to 1) of the pool's pages that hold KV in use.", ({}, share))
        yield counter("vllm:num_preemptions", "Sequences preempted for want of pages.", ({}, stats.num_preemptions))
        refused = [({"reason": reason}, stats.refused.get(reason, 0)) for reason in REFUSALS]
        yield counter("multilora:requests_refused", "Requests answered with 429 or given up, by reason.", *refused)
        yield counter("vllm:prompt_tokens", "Prompt tokens prefilled.", ({}, stats.prompt_tokens))
        yield counter("vllm:generation_tokens", "Tokens generated.", ({}, stats.generation_tokens))
        guessed, kept = "Tokens guessed by prompt lookup.", "Those of them that the model chose."
        yield counter("vllm:spec_decode_num_draft_tokens", guessed, ({}, stats.proposed_tokens))
        yield counter("vllm:spec_decode_num_accepted_tokens", kept, ({}, stats.accepted_tokens))
        blocks = {"block_size": str(engine.config.page_tokens), "num_gpu_blocks": str(stats.pages_total)}
        yield gauge("vllm:cache_config_info", "The pool: tokens to a page, and pages.", (blocks, 1))
        kernels = {"attention": stats.attention_backend, "lora": stats.lora_backend}
        what = "What computes attention and the adapters' products: xla, or a kernel's backend."
        yield gauge("multilora:kernel_info", what, (kernels, 1))
        looked_up = "Prompt tokens looked up in the prefix cache."
        yield counter("vllm:prefix_cache_queries", looked_up, ({}, stats.prefix_queries))
        yield counter("vllm:prefix_cache_hits", "Those of them that were found there.", ({}, stats.prefix_hits))
        kinds = {
            "free": stats.pages_free, "kv": stats.pages_kv, "adapter": stats.pages_adapter,
            "cached": stats.pages_cached,
        }  # fmt: skip
        yield gauge("multilora:pages", "Pages of the pool, by kind.", *(({"kind": k}, n) for k, n in kinds.items()))
        yield counter("multilora:recompiles", "Programs compiled after warm-up.", ({}, stats.compilations))
        yield counter("multilora:steps", "Device steps.", ({}, stats.steps))
        yield counter("multilora:failed_steps", "Steps that failed and were run again.", ({}, stats.failed_steps))
        yield counter("multilora:step_seconds", "Seconds spent in steps.", ({}, stats.step_seconds))
        phases = [({"phase": phase}, seconds) for phase, seconds in zip(PHASES, stats.phase_seconds, strict=True)]
        yield counter("multilora:step_phase_seconds", "Seconds of the engine's thread, by what they went to.", *phases)
        yield self._histogram(
            "vllm:iteration_tokens_total", "Tokens run in a step.",
            ({}, STEP_TOKENS, stats.steps_by_tokens, stats.step_tokens),
        )  # fmt: skip
        yield from self._adapters_in_use(stats, engine)
        yield from self._adapter_tiers(stats)
        yield from replica_families(stats, self._gauge, self._counter)

    def _adapters_in_use(self, stats: EngineStats, engine: LLMEngine) -> Iterator[Metric]:
        lists = {
            "max_lora": str(self._max_loras or engine.config.max_rank_rows // ROW_BLOCK),
            "running_lora_adapters": _listed(stats.running_by_adapter),
            "waiting_lora_adapters": _listed(stats.waiting_by_adapter),
        }
        yield self._gauge(
            "vllm:lora_requests_info", "Unix time; the labels list the adapters in use.", (lists, time.time())
        )
        rows = [
            ({"adapter_name": name, "state": state}, count)
            for state, counts in (("running", stats.running_by_adapter), ("waiting", stats.waiting_by_adapter))
            for name, count in _largest(counts).items()
        ]
        text = f"Requests now, by adapter; beyond {MAX_ADAPTER_SERIES} adapters the rest is {OTHER}."
        yield self._gauge("multilora:adapter_requests", text, *rows, labels=("adapter_name", "state"))
        most = int(lists["max_lora"])
        yield self._gauge("vllm:max_gpu_lora_adapters", "Most adapters in one step.", ({}, most))

    def _adapter_tiers(self, stats: EngineStats) -> Iterator[Metric]:
        gauge, counter = self._gauge, self._counter
        levels = {"resident": "gpu", "loading": "cpu", "host": "cpu"}
        order = list(levels)
        tiers = sorted(stats.tiers, key=lambda adapter: order.index(adapter[2]))
        rows = [
            ({"adapter_name": name, "level": levels[tier], "pinned": str(pinned).lower(), "rank": str(rank)}, 1.0)
            for name, rank, tier, pinned in tiers[:MAX_ADAPTER_SERIES]
        ]
        text = f"1 for an adapter in the pool (gpu) or only in host memory (cpu); at most {MAX_ADAPTER_SERIES} of them."
        labels = ("adapter_name", "level", "pinned", "rank")
        yield gauge("vllm:lora_adapter_loaded", text, *rows, labels=labels)
        yield gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters in the pool.", ({}, len(stats.resident)))
        yield gauge("vllm:num_cpu_loaded_lora_adapters", "Adapters in host memory.", ({}, stats.host_adapters))
        registered = "Adapters that a request may name; what is not in memory is read when it is asked for."
        yield gauge("multilora:registered_adapters", registered, ({}, stats.registered_adapters))
        yield gauge("multilora:host_adapters", "Adapters in host memory.", ({}, stats.host_adapters))
        yield gauge("multilora:host_adapter_bytes", "Bytes of their pages there.", ({}, stats.host_adapter_bytes))
        yield counter("multilora:adapter_hits", "Requests that found their adapter resident.", ({}, stats.adapter_hits))
        yield counter("multilora:adapter_misses", "Requests that had to wait for it.", ({}, stats.adapter_misses))
        yield counter("multilora:adapter_loads", "Adapters copied into the pool.", ({}, stats.adapter_loads))
        yield counter("multilora:adapter_load_bytes", "Bytes copied there for them.", ({}, stats.adapter_load_bytes))
        evictions = {"device": stats.adapter_evictions, "host": stats.host_evictions}
        yield counter(
            "multilora:adapter_evictions", "Adapters removed from the pool or from host memory to make room.",
            *(({"tier": tier}, count) for tier, count in evictions.items()),
        )  # fmt: skip

    def _use(self) -> Iterator[Metric]:
        """What adapters were used for, and why requests ended early."""
        text = f"; the {MAX_ADAPTER_SERIES} most used lately, and the rest as {OTHER}."
        series = self._by_adapter.series()
        labels = ("adapter_name",)
        for name, what in (
            ("finished_requests", "Requests by adapter"), ("prompt_tokens", "Prompt tokens by adapter"),
            ("generation_tokens", "Generated tokens by adapter"),
        ):  # fmt: skip
            rows = [({"adapter_name": adapter}, getattr(s, name)) for adapter, s in series.items()]
            yield self._counter(f"multilora:adapter_{name}", what + text, *rows, labels=labels)
        rows = [
            ({"adapter_name": adapter}, FIRST_TOKEN_BUCKETS, s.first_tokens, s.first_token_s)
            for adapter, s in series.items()
        ]
        name = "multilora:adapter_time_to_first_token_seconds"
        yield self._histogram(name, "From arrival to first token by adapter" + text, *rows, labels=labels)
        causes = [({"cause": cause}, count) for cause, count in self._aborts.items()]
        yield self._counter("multilora:requests_aborted", "Requests that ended early, by cause.", *causes)

    def _tenants(self, callers: Iterable[Caller]) -> Iterator[Metric]:
        """Tenants are those of the configuration, so that their number is bounded."""
        tenants = self._by_tenant.items()
        rows = [({"tenant": tenant}, requests) for tenant, (requests, _, _) in tenants]
        yield self._counter("multilora:tenant_requests", "Requests by tenant.", *rows, labels=("tenant",))
        kinds = ((1, "prompt"), (2, "generation"))
        rows = [({"tenant": tenant, "kind": kind}, counts[i]) for tenant, counts in tenants for i, kind in kinds]
        yield self._counter("multilora:tenant_tokens", "Tokens by tenant and kind.", *rows, labels=("tenant", "kind"))
        refused: dict[tuple[str, str], int] = {}
        for caller in callers:
            for limit, count in caller.limits.refused.items():
                refused[caller.tenant, limit] = refused.get((caller.tenant, limit), 0) + count
        rows = [({"tenant": tenant, "limit": limit}, count) for (tenant, limit), count in refused.items()]
        text = "Requests answered with 429 for a key's limit."
        yield self._counter("multilora:tenant_requests_refused", text, *rows, labels=("tenant", "limit"))

    def _gauge(self, name: str, text: str, *rows: Row, labels: Iterable[str] | None = None) -> Metric:
        """A family of gauges; `labels` names those of a family that may have no rows."""
        family = GaugeMetricFamily(name, text, labels=["model_name", *(rows[0][0] if labels is None else labels)])
        return self._filled(family, rows)

    def _counter(self, name: str, text: str, *rows: Row, labels: Iterable[str] | None = None) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", *(rows[0][0] if labels is None else labels)])
        return self._filled(family, rows)

    def _histogram(self, name: str, text: str, *rows: HistogramRow, labels: Iterable[str] = ()) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name", *labels])
        for values, bounds, counts, total in rows:
            sums = itertools.accumulate(counts)
            buckets = [(floatToGoString(bound), count) for bound, count in zip((*bounds, math.inf), sums, strict=True)]
            family.add_metric([self.model_name, *values.values()], buckets, total)
        return family

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, rows: Iterable[Row]) -> Metric:
        for labels, value in rows:
            family.add_metric([self.model_name, *labels.values()], value)
        return family


def _listed(names: Iterable[str]) -> str:
    """Names in one label, as gateways split it: at commas, so that one in a name is written %2C."""
    quoted = (name.replace("%", "%25").replace(",", "%2C") for name in names)
    return ",".join(sorted(quoted)[:MAX_ADAPTER_SERIES])


def _largest(counts: dict[str, int]) -> dict[str, int]:
    """The largest MAX_ADAPTER_SERIES counts, and the rest in one under OTHER."""
    names = sorted(counts, key=lambda name: -counts[name])
    shown = {name: counts[name] for name in names[:MAX_ADAPTER_SERIES]}
    rest = sum(counts[name] for name in names[MAX_ADAPTER_SERIES:])
    if rest:
        shown[OTHER] = shown.get(OTHER, 0) + rest
    return shown


class _Snapshot(Collector):
    """Families that are already there, for one scrape."""

    def __init__(self, families: Iterable[Metric]):
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
