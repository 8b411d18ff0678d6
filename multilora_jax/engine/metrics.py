"""What the engine counts, as plain figures: any exporter can read them, none is needed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """A snapshot of the engine between two steps. Counts are since start unless they say "now".

    Attributes:
        num_running, num_waiting: requests now.
        running_by_adapter, waiting_by_adapter: requests now, by adapter name; base requests are not in them.
        pages_total: pages of the pool that can be allocated (page 0 is not among them).
        pages_free, pages_kv, pages_adapter: pages now, by kind; they add up to pages_total.
        adapter_hits, adapter_misses: requests that found their adapter resident, and that did not.
        adapter_loads, adapter_evictions: copies of an adapter into the pool, and removals to make room.
        adapter_load_bytes: bytes copied by those loads.
        num_preemptions: sequences put back in the queue because pages ran out.
        prompt_tokens, generation_tokens: tokens prefilled and tokens generated.
        compilations: programs compiled after warm-up (0 in a healthy server).
        resident: (name, rank, pinned) of each adapter in the pool now.
        steps: device steps run; step_seconds: seconds spent in them.
    """

    num_running: int = 0
    num_waiting: int = 0
    running_by_adapter: dict[str, int] = field(default_factory=dict)
    waiting_by_adapter: dict[str, int] = field(default_factory=dict)
    pages_total: int = 0
    pages_free: int = 0
    pages_kv: int = 0
    pages_adapter: int = 0
    adapter_hits: int = 0
    adapter_misses: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    adapter_load_bytes: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    compilations: int = 0
    resident: list[tuple[str, int, bool]] = field(default_factory=list)
    steps: int = 0
    step_seconds: float = 0.0
