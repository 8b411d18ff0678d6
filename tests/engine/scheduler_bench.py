"""What the scheduler's tests share: a scheduler, transfers, and an engine that computes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from multilora_jax.engine.fanout import Fanout
from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.policies import Policy
from multilora_jax.engine.scheduler import Scheduler
from multilora_jax.engine.step_plan import ScheduledStep, SchedulerConfig
from multilora_jax.engine.transfers import AdapterTransfers
from multilora_jax.errors import UserError
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.memory.recency import EvictionPolicy
from multilora_jax.request import FinishReason, SamplingParams, Sequence
from tests.lora.fake_adapter import FakeAdapter

PAGE_TOKENS = 4
CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, prefill_block=8, max_rank_rows=64)
PARAMS = SamplingParams()


class FakeSource:
    """Host copies that take `delay` calls of `tick` to arrive; with 0 they are always there.

    Attributes:
        requests: every request, in order.
        failed: adapters whose host copies never arrive.
    """

    def __init__(self, delay: int = 0) -> None:
        self.delay = delay
        self.requests: list[FakeAdapter] = []
        self.failed: set[FakeAdapter] = set()
        self.due: dict[FakeAdapter, int] = {}
        self.here: dict[FakeAdapter, np.ndarray] = {}
        self.time = 0

    def get(self, adapter: FakeAdapter) -> np.ndarray | None:
        if not self.delay:
            self.here.setdefault(adapter, np.arange(adapter.num_pages))
        return self.here.get(adapter)

    def request(self, adapter: FakeAdapter) -> None:
        if adapter not in self.due and adapter not in self.here:
            self.requests.append(adapter)
            self.due[adapter] = self.time + self.delay

    def tick(self) -> None:
        self.time += 1
        for adapter in [a for a, time in self.due.items() if time <= self.time and a not in self.failed]:
            del self.due[adapter]
            self.here[adapter] = np.arange(adapter.num_pages)


class Bench:
    """A scheduler, its transfers and an engine that computes nothing.

    Where `caching` is on, a token's KV stands for everything that decides it, and each step checks what it reads.

    Attributes:
        memory: of each page, what was last written to each of its slots.
        finished: request ids in the order in which they ended.
        now: the scheduler's time, which only the tests move.
        given_up: (request id, error) of those that the policy gave up.
        written: of each adapter, which of its pages were last copied to which page ids.
    """

    def __init__(
        self,
        num_pages: int = 101,
        max_adapter_pages: int | None = None,
        *,
        policy: EvictionPolicy = "lru",
        pages_per_step: int = 1_000_000,
        prefetch: bool = True,
        lookahead: int = 64,
        max_reads: int = 16,
        delay: int = 0,
        caching: bool = False,
        scheduling: Policy | None = None,
        split: bool = False,
        **changes: Any,
    ):
        geometry = PoolGeometry(
            num_layers=1, num_pages=num_pages, page_tokens=PAGE_TOKENS, hidden=8, q_dim=8, kv_dim=8, ffn=8,
            num_kv_heads=1, head_dim=8,
        )  # fmt: skip
        self.allocator = PageAllocator(num_pages)
        self.cache: AdapterCache[FakeAdapter] = AdapterCache(self.allocator, max_adapter_pages, policy=policy)
        if split:
            self.cache.set_cap(max_adapter_pages, split=True)
        self.kv = KVManager(self.allocator, geometry, self.cache)
        self.now, self.num_added = 0.0, 0
        self.scheduler = Scheduler(
            replace(CONFIG, **changes), self.allocator, self.kv, self.cache, scheduling, clock=lambda: self.now
        )
        self.fanout = Fanout(self.kv, PAGE_TOKENS, caches=caching)
        self.memory: dict[int, dict[int, Any]] = {}
        self.source = FakeSource(delay)
        self.lookahead, self.pages_per_step = lookahead, pages_per_step
        self.transfers = AdapterTransfers(
            self.cache, self.source, self.scheduler, pages_per_step=pages_per_step, prefetch=prefetch,
            lookahead=lookahead, max_reads=max_reads,
        )  # fmt: skip
        self.finished: list[str] = []
        self.given_up: list[tuple[str, UserError]] = []
        self.written: dict[FakeAdapter, dict[int, int]] = {}
        self.runs_ahead = False  # whether each step is launched before the one before is read
        self.in_flight: list[Sequence] = []  # for which a token is under way

    def add(
        self,
        request_id: str,
        prompt: int = 4,
        output: int = 4,
        adapter: FakeAdapter | tuple[FakeAdapter, ...] | None = None,
        priority: int = 0,
        tokens: list[int] | None = None,
        salt: str | None = None,
    ) -> Sequence:
        return self.add_all(request_id, tokens or [1] * prompt, output, adapter, priority, salt)[0]

    def add_all(
        self,
        request_id: str,
        tokens: list[int],
        output: int = 4,
        adapter: FakeAdapter | tuple[FakeAdapter, ...] | None = None,
        priority: int = 0,
        salt: str | None = None,
        n: int = 1,
        tenant: str = "",
    ) -> list[Sequence]:
        """The same with everything that a request may ask for; the sequences of its continuations."""
        adapters = adapter if isinstance(adapter, tuple) else () if adapter is None else (adapter,)
        seq = Sequence(
            request_id, list(tokens), len(tokens), replace(PARAMS, n=n), adapters, (1.0,) * len(adapters),
            priority=priority, max_total_tokens=len(tokens) + output, tenant=tenant,
            arrival_time=self.now + 1e-9 * self.num_added,
        )  # fmt: skip
        self.num_added += 1
        sequences = self.fanout.sequences(seq, salt, self.scheduler._live)
        for one in sequences:
            self.scheduler.add(one, None if one is seq else seq)
        self.fanout.enter(request_id, sequences)
        return sequences

    def plan(self) -> int:
        """The transfers before a step; returns the number of pages copied."""
        waiting = self.scheduler.waiting(self.lookahead)
        copies = self.transfers.plan(waiting, busy=self.scheduler.num_running > 0)
        for (adapter, index, page_id), page in copies:
            assert page == index
            self.written.setdefault(adapter, {})[index] = page_id
            self.memory.pop(page_id, None)
        return len(copies)

    def schedule(self) -> ScheduledStep | None:
        """Transfers and the plan of a step, which finds all its adapters written."""
        for seq, error in self.scheduler.given_up():
            self.scheduler.finish(seq, FinishReason.ERROR)
            self.given_up.append((seq.request_id, error))
        self.source.tick()
        self.plan()
        self.scheduler.check_integrity()
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        for adapter in step.adapters if step else ():
            written = self.written[adapter]
            assert [written[i] for i in range(adapter.num_pages)] == self.cache.pages_of(adapter)
        return step

    def run(self, step: ScheduledStep) -> None:
        """What the engine does with a step, and where steps run ahead with the results of the one before."""
        before, self.in_flight = self.in_flight, self.launch(step)
        if self.runs_ahead:
            self.read(before)
        else:
            self.settle()

    def launch(self, step: ScheduledStep) -> list[Sequence]:
        """Books a step; the sequences that it samples a token for."""
        sampled = []
        users = Counter(page for entry in self.scheduler._running.values() for page in entry.seq.page_ids)
        for seq, n in [(seq, 1) for seq in step.decodes] + step.prefills:
            if seq.prefix is not None:
                self.compute(seq, n, users)
            seq.num_computed_tokens += n
            if seq.num_pending_tokens == 0:
                seq.num_in_flight += 1
                sampled.append(seq)
        return sampled

    def read(self, sampled: Iterable[Sequence]) -> None:
        """Takes the tokens of a step. Where steps run ahead, every other request ends before anybody could know."""
        for seq in sampled:
            seq.num_in_flight -= 1
            if seq.finished:
                continue
            seq.token_ids.append(next_token(seq))
            early = self.runs_ahead and len(seq.request_id) % 2 and len(seq.output_token_ids) >= 3
            if early or seq.num_tokens >= seq.max_total_tokens:
                self.scheduler.finish(seq, FinishReason.STOP if early else FinishReason.LENGTH)
                self.finished.append(seq.request_id)

    def settle(self) -> None:
        """Reads what is under way."""
        before, self.in_flight = self.in_flight, []
        self.read(before)

    def compute(self, seq: Sequence, n: int, users: Counter[int]) -> None:
        """Reads the KV of the tokens before the next n and writes theirs, to pages that nobody else lists."""
        assert seq.prefix is not None
        end = seq.num_computed_tokens + n
        state = hash((seq.prefix.root, frozenset(seq.adapters)))  # a mix has no order
        for position in range(end):
            token = seq.token_ids[position] if position < seq.num_tokens else next_token(seq)
            state = hash((state, token))
            page, slot = seq.page_ids[position // PAGE_TOKENS], position % PAGE_TOKENS
            if position < seq.num_computed_tokens:
                assert self.memory[page][slot] == state
            else:
                assert users[page] == 1
                self.memory.setdefault(page, {})[slot] = state

    def step(self) -> ScheduledStep:
        """A step that must run something; an empty one for a round in which everything waits for loads."""
        step = self.schedule()
        if step is None:
            assert self.scheduler._live
            return ScheduledStep()
        self.run(step)
        self.scheduler.check_integrity()
        return step

    def drain(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.scheduler._live:
                break
            self.step()
        assert not self.scheduler._live
        assert self.schedule() is None
        self.evict_all()
        assert self.allocator.num_free == self.allocator.num_total

    def evict_all(self) -> None:
        self.cache.order.evict(list(self.cache.order))

    def queue(self) -> list[str]:
        return ids(self.scheduler.waiting(1_000_000))


def next_token(seq: Sequence) -> int:
    return 2 + seq.index


def ids(sequences: Iterable[Sequence]) -> list[str]:
    return [seq.request_id for seq in sequences]


def ran(step: ScheduledStep) -> list[str]:
    return ids(step.decodes) + ids(seq for seq, _ in step.prefills)


def started(bench: Bench, max_rounds: int = 5000) -> list[str]:
    """Runs to the end; ids in the order in which they started."""
    order: list[str] = []
    for _ in range(max_rounds):
        if not bench.scheduler._live:
            break
        order += [name for name in ran(bench.step()) if name not in order]
    assert not bench.scheduler._live
    return order
