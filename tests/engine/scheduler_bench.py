"""What the scheduler's tests share: fake adapters and a scheduler with an engine that computes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.scheduler import ScheduledStep, Scheduler, SchedulerConfig
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.request import FinishReason, SamplingParams, Sequence
from tests.lora.fake_adapter import FakeAdapter

PAGE_TOKENS = 4
CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, prefill_block=8, max_rank_rows=64)
PARAMS = SamplingParams()


class Bench:
    """A scheduler and an engine that computes nothing."""

    def __init__(self, num_pages: int = 101, max_adapter_pages: int | None = None, pins: int = 0, **changes: Any):
        geometry = PoolGeometry(
            num_layers=1, num_pages=num_pages, page_tokens=PAGE_TOKENS, hidden=8, q_dim=8, kv_dim=8, ffn=8,
            num_kv_heads=1, head_dim=8,
        )  # fmt: skip
        self.allocator = PageAllocator(num_pages)
        self.cache: AdapterCache[FakeAdapter] = AdapterCache(self.allocator, max_adapter_pages, max_pinned_pages=pins)
        self.kv = KVManager(self.allocator, geometry, self.cache)
        self.scheduler = Scheduler(replace(CONFIG, **changes), self.allocator, self.kv, self.cache)
        self.finished: list[str] = []

    def add(
        self, request_id: str, prompt: int = 4, output: int = 4, adapter: FakeAdapter | None = None, priority: int = 0
    ) -> Sequence:
        seq = Sequence(request_id, [1] * prompt, prompt, PARAMS, adapter, max_total_tokens=prompt + output)
        seq.priority = priority
        self.scheduler.add(seq)
        return seq

    def step(self) -> ScheduledStep:
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.check_integrity()
        self.cache.take_pending_writes()
        for seq, n in [(seq, 1) for seq in step.decodes] + step.prefills:
            seq.num_computed_tokens += n
            if seq.num_pending_tokens == 0:
                seq.token_ids.append(2)
            if seq.num_tokens >= seq.max_total_tokens:
                self.scheduler.finish(seq, FinishReason.LENGTH)
                self.finished.append(seq.request_id)
        self.scheduler.check_integrity()
        return step

    def drain(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished():
                break
            self.step()
        assert not self.scheduler.has_unfinished()
        assert self.scheduler.schedule() is None
        self.cache.evict_idle(self.allocator.num_total)
        assert self.allocator.num_free == self.allocator.num_total


def ids(sequences: Iterable[Sequence]) -> list[str]:
    return [seq.request_id for seq in sequences]


def ran(step: ScheduledStep) -> list[str]:
    return ids(step.decodes) + ids(seq for seq, _ in step.prefills)
