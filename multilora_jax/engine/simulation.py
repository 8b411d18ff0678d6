"""An engine that computes nothing, in a time of its own: the scheduler and the pool's books under a given step time.

What decides who runs when is the engine's own code (Scheduler, KVManager, PageAllocator, AdapterCache,
AdapterTransfers); only the device is replaced, by a formula. So policies can be studied in seconds, on workloads and
machines that are not at hand (host only, no jax).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.policies import Policy
from multilora_jax.engine.scheduler import Scheduler
from multilora_jax.engine.step_plan import ScheduledStep, SchedulerConfig
from multilora_jax.engine.transfers import AdapterTransfers
from multilora_jax.errors import UserError
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.request import FinishReason, SamplingParams, Sequence

_PARAMS = SamplingParams(temperature=0, ignore_eos=True, detokenize=False)


@dataclass(frozen=True)
class StepCost:
    """The time of a step in seconds, as a sum.

    Attributes:
        base_s: of any step.
        token_s: for each token that it computes, of a prompt or of an answer.
        page_s: for each page of an adapter copied before it.
        row_s: for each rank row of its distinct adapters.
    """

    base_s: float = 0.04
    token_s: float = 0.0004
    page_s: float = 0.0007
    row_s: float = 0.0

    def seconds(self, step: ScheduledStep, num_pages: int) -> float:
        """Of this step, before which `num_pages` pages were copied."""
        tokens = step.num_decode_rows + sum(count for _, count in step.prefills)
        rows = sum(adapter.num_rows for adapter in step.adapters) if self.row_s else 0
        return self.base_s + tokens * self.token_s + num_pages * self.page_s + rows * self.row_s


@dataclass(eq=False)
class SimulatedAdapter:
    """What the host's books read of an adapter. Identified by its object, as a real one is."""

    name: str
    rank: int
    num_pages: int

    @property
    def num_rows(self) -> int:
        return self.rank


@dataclass(frozen=True)
class SimulatedPool:
    """The pool.

    Attributes:
        num_pages: that can be had (page 0 comes beside them).
        page_tokens: tokens of a page.
        max_adapter_pages: most pages of adapters; None for no cap.
        split: whether those pages are set apart: no key or value is ever in them, nor an adapter elsewhere.
    """

    num_pages: int
    page_tokens: int = 16
    max_adapter_pages: int | None = None
    split: bool = False


class _HostCopies:
    """All adapters are in host memory."""

    def get(self, adapter: Any) -> np.ndarray:
        return np.empty((adapter.num_pages, 0))

    def request(self, adapter: Any) -> None:
        raise AssertionError(f"adapter {adapter.name!r} is in host memory")


@dataclass
class Progress:
    """What a step did for a sequence: a token, or its end, or both.

    Attributes:
        request_id: whose.
        num_tokens: new tokens.
        finish_reason: None while it goes on.
        error: why it ended before its time; None where it did not.
    """

    request_id: str
    num_tokens: int
    finish_reason: FinishReason | None = None
    error: str | None = None


class SimulatedEngine:
    """Takes requests, runs steps, and keeps the time.

    Args:
        config: the budgets of a step.
        pool: its pages.
        cost: the time of a step.
        policy: who is served first; first come, first served by default.
        transfer_pages: most pages of adapters copied before a step while sequences run.
        lookahead, prefetch: see AdapterTransfers.

    Attributes:
        now: seconds since the start; whoever waits for something to come adds to it.
        num_steps: that were run.
        pages_copied: of adapters, into the pool.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: SimulatedPool,
        cost: StepCost,
        policy: Policy | None = None,
        *,
        transfer_pages: int = 1_000_000,
        lookahead: int = 64,
        prefetch: bool = True,
    ):
        self.allocator = PageAllocator(pool.num_pages + 1)
        self.cache: AdapterCache[Any] = AdapterCache(self.allocator)
        self.cache.set_cap(pool.max_adapter_pages, split=pool.split)
        # Of the geometry, the page's tokens alone matter where nothing is computed.
        geometry = PoolGeometry(1, pool.num_pages + 1, pool.page_tokens, 1, 1, 1, 1, 1, 1)
        kv = KVManager(self.allocator, geometry, self.cache)
        self.scheduler = Scheduler(config, self.allocator, kv, self.cache, policy, lambda: self.now)
        self.transfers = AdapterTransfers(
            self.cache, _HostCopies(), self.scheduler, pages_per_step=transfer_pages, prefetch=prefetch,
            lookahead=lookahead,
        )  # fmt: skip
        self.cost = cost
        self.now = 0.0
        self.num_steps = self.pages_copied = 0
        self._lookahead = lookahead
        self._live: dict[str, Sequence] = {}
        self._new_tokens: dict[str, int] = {}

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work."""
        return bool(self._live)

    def add_request(
        self,
        request_id: str,
        prompt_tokens: int,
        new_tokens: int,
        adapter: SimulatedAdapter | None = None,
        *,
        max_tokens: int | None = None,
        priority: int = 0,
        arrival_s: float | None = None,
    ) -> None:
        """Queues a request whose answer will have `new_tokens` tokens.

        Args:
            request_id: unique among live requests.
            prompt_tokens, new_tokens: lengths.
            adapter: None for the base.
            max_tokens: that it allows, which is what the scheduler knows; `new_tokens` by default.
            priority: lower runs earlier.
            arrival_s: when it came, if not now.

        Raises:
            UserError: it could never run; nothing was changed.
        """
        adapters = () if adapter is None else (adapter,)
        seq = Sequence(
            request_id, [0] * prompt_tokens, prompt_tokens, _PARAMS, adapters, (1.0,) * len(adapters),
            max_total_tokens=prompt_tokens + max(new_tokens, max_tokens or 0), priority=priority,
            arrival_time=self.now if arrival_s is None else arrival_s,
        )  # fmt: skip
        self.scheduler.add(seq)
        self._live[request_id] = seq
        self._new_tokens[request_id] = new_tokens

    def step(self) -> list[Progress]:
        """Runs a step, which takes its time, and says what became of whom.

        A round in which everything waits for adapters takes the time of their copies.
        """
        done: list[Progress | None] = [self._give_up(seq, error) for seq, error in self.scheduler.given_up()]
        copies = self.transfers.plan(self.scheduler.waiting(self._lookahead), self.scheduler.num_running > 0)
        self.pages_copied += len(copies)
        plan = self.scheduler.schedule()
        if plan is None:
            self.now += len(copies) * self.cost.page_s
            return [progress for progress in done if progress is not None]
        self.num_steps += 1
        seconds = self.cost.seconds(plan, len(copies))
        self.now += seconds
        self.scheduler.saw_step(plan, seconds)
        done += [self._took(seq, 1) for seq in plan.decodes]
        done += [self._took(seq, count) for seq, count in plan.prefills]
        return [progress for progress in done if progress is not None]

    def _took(self, seq: Sequence, count: int) -> Progress | None:
        """Books what a step computed of a sequence; None where that gave no token."""
        seq.num_computed_tokens += count
        if seq.num_pending_tokens:
            return None
        seq.token_ids.append(0)
        seq.first_token_time = self.now if seq.first_token_time is None else seq.first_token_time
        seq.last_token_time = self.now
        if seq.num_tokens - seq.num_prompt_tokens < self._new_tokens[seq.request_id]:
            return Progress(seq.request_id, 1)
        reason = FinishReason.LENGTH if seq.num_tokens >= seq.max_total_tokens else FinishReason.STOP
        self._finish(seq, reason)
        return Progress(seq.request_id, 1, reason)

    def _give_up(self, seq: Sequence, error: UserError) -> Progress:
        self._finish(seq, FinishReason.ERROR)
        return Progress(seq.request_id, 0, FinishReason.ERROR, error.reason)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self.scheduler.finish(seq, reason)
        del self._live[seq.request_id], self._new_tokens[seq.request_id]

    def check_integrity(self) -> None:
        """See Scheduler.check_integrity."""
        self.scheduler.check_integrity()
