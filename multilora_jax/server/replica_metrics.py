"""Figures of each replica, labelled `replica`, beside the sums of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import Metric

from multilora_jax.engine.metrics import EngineStats

Family = Callable[..., Metric]


def replica_families(stats: EngineStats, gauge: Family, counter: Family) -> Iterator[Metric]:
    """Nothing where there is one engine.

    Args:
        gauge, counter: make a family of a name, a text and (labels, value) pairs.
    """
    if not stats.replicas:
        return

    def each(value: Callable[[EngineStats], float]) -> list[tuple[dict[str, str], float]]:
        return [({"replica": str(number)}, value(part)) for number, part in enumerate(stats.replicas)]

    yield gauge("multilora:replica_requests_running", "Requests in a replica's batch.", *each(lambda s: s.num_running))
    yield gauge("multilora:replica_requests_waiting", "Requests in its queue.", *each(lambda s: s.num_waiting))
    yield gauge("multilora:replica_resident_adapters", "Adapters in its pool.", *each(lambda s: len(s.resident)))
    yield gauge("multilora:replica_pages_free", "Free pages of its pool.", *each(lambda s: s.pages_free))
    yield counter("multilora:replica_adapter_loads", "Adapters copied into its pool.", *each(lambda s: s.adapter_loads))
    tokens = "Tokens that it generated."
    yield counter("multilora:replica_generation_tokens", tokens, *each(lambda s: s.generation_tokens))
    yield counter("multilora:replica_steps", "Its device steps.", *each(lambda s: s.steps))
    yield counter("multilora:replica_step_seconds", "Seconds spent in them.", *each(lambda s: s.step_seconds))
