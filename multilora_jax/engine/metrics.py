"""What the engine counts, as plain figures: any exporter can read them, none is needed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from multilora_jax.engine.scheduler import Scheduler
from multilora_jax.memory.allocator import PageAllocator, PageKind
from multilora_jax.memory.prefix_cache import PrefixCache
from multilora_jax.request import Sequence, SequenceStatus

REFUSALS = ("queue_full", "adapter_rate", "first_token_objective")
"""Reasons of the errors that a request gets when more is asked for than can be served."""

STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Upper bounds of the counts of steps by their tokens; one more count is of larger ones."""

PHASES = ("launch", "wait", "output")
"""What a step's host time goes to: planning it and putting it on its way, waiting for the device, taking results."""


@dataclass
class EngineStats:
    """A snapshot of the engine between two steps. Counts are since start unless they say "now".

    Attributes:
        num_running, num_waiting: sequences now, one for each continuation that a request asks for.
        running_by_adapter, waiting_by_adapter: the same by adapter name; base requests are not in them.
        pages_total: pages of the pool that can be allocated (page 0 is not among them).
        pages_free, pages_kv, pages_adapter, pages_cached: pages now, by kind; they add up to pages_total. Those of
            running sequences are kv, those kept for later ones cached.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and those found there.
        adapter_hits, adapter_misses: requests that found their adapter resident, and that did not.
        adapter_loads, adapter_evictions: copies of an adapter into the pool, and removals to make room.
        adapter_load_bytes: bytes copied from host memory into the pool for adapters.
        registered_adapters: names that a request may give now; most may be on disk only.
        host_adapters, host_adapter_bytes: adapters kept in host memory now, and the bytes of their pages.
        host_evictions: adapters removed from host memory to make room.
        num_preemptions: sequences put back in the queue because pages ran out.
        refused: requests refused or given up because of the load, by reason (REFUSALS).
        prompt_tokens, generation_tokens: tokens prefilled and tokens generated.
        proposed_tokens, accepted_tokens: tokens guessed by prompt lookup, and those of them that the model chose.
        compilations: programs compiled after warm-up (0 in a healthy server).
        tiers: (name, rank, tier, pinned) of each registered adapter that is in memory now; the tier is "resident" (in
            the pool), "loading" (on its way there) or "host". A name is there once, in the version that new requests
            get; neither is one there that is only on disk, nor a version that was unloaded or replaced.
        failed_steps: steps that raised; what was in them was run again.
        steps: device steps run; step_seconds: seconds spent in them.
        steps_by_tokens: steps by how many tokens they ran, see STEP_TOKENS; step_tokens: tokens run in all of them.
        phase_seconds: seconds of the engine's thread in steps, by PHASES.
        attention_backend, lora_backend: what computes attention and the adapters' products, see LlamaSpec.
        replicas: the parts that these figures are the sums of, where there are several engines.
    """

    num_running: int = 0
    num_waiting: int = 0
    running_by_adapter: dict[str, int] = field(default_factory=dict)
    waiting_by_adapter: dict[str, int] = field(default_factory=dict)
    pages_total: int = 0
    pages_free: int = 0
    pages_kv: int = 0
    pages_adapter: int = 0
    pages_cached: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    adapter_hits: int = 0
    adapter_misses: int = 0
    adapter_loads: int = 0
    adapter_evictions: int = 0
    adapter_load_bytes: int = 0
    registered_adapters: int = 0
    host_adapters: int = 0
    host_adapter_bytes: int = 0
    host_evictions: int = 0
    num_preemptions: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    compilations: int = 0
    tiers: list[tuple[str, int, str, bool]] = field(default_factory=list)
    failed_steps: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    steps_by_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    step_tokens: int = 0
    phase_seconds: tuple[float, ...] = (0.0,) * len(PHASES)
    attention_backend: str = "xla"
    lora_backend: str = "xla"
    replicas: list[EngineStats] = field(default_factory=list)

    def add_step(self, seconds: float, num_tokens: int = 0, phases: Iterable[float] = ()) -> None:
        """Counts a step of so many tokens; `phases` are the seconds of each of PHASES."""
        self.steps += 1
        self.step_seconds += seconds
        self.step_tokens += num_tokens
        counts = list(self.steps_by_tokens)
        counts[bisect_left(STEP_TOKENS, num_tokens)] += 1
        # New tuples, so that a snapshot keeps its own.
        self.steps_by_tokens = tuple(counts)
        self.phase_seconds = tuple(old + new for old, new in zip(self.phase_seconds, phases, strict=False)) or (
            self.phase_seconds
        )

    def add_tokens(self, seq: Sequence, proposed: int, accepted: int) -> None:
        """Counts what a step generated for a sequence: a token, and the accepted ones of its proposals."""
        self.generation_tokens += 1 + accepted
        if proposed:
            seq.lookup.verified(proposed, accepted)
            self.proposed_tokens += proposed
            self.accepted_tokens += accepted

    def read(
        self, scheduler: Scheduler, allocator: PageAllocator, prefix: PrefixCache, sequences: Iterable[Sequence]
    ) -> None:
        """Writes the figures about live sequences and pages."""
        self.num_running, self.num_waiting = scheduler.num_running, scheduler.num_waiting
        running, waiting = Counter[str](), Counter[str]()
        for seq in sequences:
            where = running if seq.status is SequenceStatus.RUNNING else waiting
            where.update(adapter.name for adapter in seq.adapters)
        self.running_by_adapter, self.waiting_by_adapter = dict(running), dict(waiting)
        self.pages_total, self.pages_free = allocator.num_total, allocator.num_free
        kinds = (PageKind.KV, PageKind.ADAPTER, PageKind.CACHED)
        self.pages_kv, self.pages_adapter, self.pages_cached = map(allocator.count, kinds)
        self.prefix_queries, self.prefix_hits = prefix.queries, prefix.hits
        self.num_preemptions, self.refused = scheduler.num_preemptions, dict(scheduler.refused)

    @property
    def resident(self) -> list[tuple[str, int, bool]]:
        """(name, rank, pinned) of each adapter that is in the pool now."""
        return [(name, rank, pinned) for name, rank, tier, pinned in self.tiers if tier == "resident"]
