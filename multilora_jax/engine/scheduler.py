"""Which sequences run in the next step: continuous batching with chunked prefill (host only, no jax).

The rules, in the order in which they are applied:

1. Running sequences, in the order of their admission, each get one decode row or a prefill chunk. One that cannot get
   its pages preempts the newest running sequence, which may be itself but is never an older one; a preempted sequence
   gives up its pages and its adapter and is computed again later.
2. Waiting sequences are then admitted by priority (lower first), preempted ones before fresh ones, then by arrival.
   One that cannot have its adapter (rank rows, max_loras or adapter pages) is passed over, so that others run
   meanwhile, but at most `max_overtakes` times; then nothing behind it is admitted until it is.
   One that lacks only KV pages lets nobody pass, else small requests would starve large ones.

Admission checks the adapters of *all* running sequences against the budgets, so no step can exceed them. It
allocates pages for the first chunk only, but asks that the whole prompt would fit with one page per running sequence
to spare: without that, admission and preemption chase each other when the pool is nearly full. (Running prompts have
their pages by then: while one still lacks some, it has used up the step's prefill blocks and nothing is admitted.)

Nobody gets stuck: `add` refuses a request that would not fit alone, and the oldest running sequence can preempt all
others and evict their adapters, so it always advances.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass
from typing import Any

from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.step_plan import ScheduledStep, SchedulerConfig
from multilora_jax.errors import AdapterError, UserError
from multilora_jax.lora.cache import AdapterCache, CacheableAdapter
from multilora_jax.memory.allocator import PageAllocator, PageKind, PoolIntegrityError
from multilora_jax.request import FinishReason, Sequence, SequenceStatus

_SPARE_PAGES_PER_SEQUENCE = 1  # kept free at an admission for each sequence that runs already


@dataclass(eq=False, slots=True)
class _Entry:
    """The scheduler's own notes on a live sequence."""

    seq: Sequence
    order: int
    running: bool = False
    overtakes: int = 0
    key: tuple[int, bool, int] = (0, False, 0)


class Scheduler:
    """Queue and running set. Not thread-safe: one thread calls it, between steps.

    After each step the engine adds n to `num_computed_tokens` of every sequence that ran and appends the sampled
    token to each whose pending tokens all ran; it calls `finish` for those that are done.

    Args:
        config: the budgets.
        allocator, kv, cache: the pool's books, shared with nobody else.
    """

    def __init__(
        self, config: SchedulerConfig, allocator: PageAllocator, kv: KVManager, cache: AdapterCache[Any]
    ) -> None:
        self.config = config
        self.num_preemptions = 0
        self._allocator = allocator
        self._kv = kv
        self._cache = cache
        self._live: dict[str, _Entry] = {}
        self._waiting: list[tuple[tuple[int, bool, int], _Entry]] = []  # sorted; keys are unique
        self._running: dict[str, _Entry] = {}  # in order of admission
        self._active: dict[Any, int] = {}  # adapter -> running sequences that use it
        self._active_rows = 0
        self._next_order = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_active_adapters(self) -> int:
        """Distinct adapters of the running sequences."""
        return len(self._active)

    @property
    def num_active_rank_rows(self) -> int:
        """Rank rows that those adapters take of max_rank_rows."""
        return self._active_rows

    def has_unfinished(self) -> bool:
        return bool(self._live)

    def check_adapter(self, adapter: CacheableAdapter) -> None:
        """Raise AdapterError if no step could ever hold the adapter."""
        rows, pages = self.config.rank_rows(adapter.rank), adapter.num_pages
        most_pages = self._cache.max_adapter_pages - self._cache.max_pinned_pages
        if rows > self.config.max_rank_rows:
            raise AdapterError(
                f"adapter {adapter.name!r} of rank {adapter.rank} takes {rows} rank rows but a step holds "
                f"{self.config.max_rank_rows}: raise max_rank_rows",
                reason="rank_too_large", param="max_rank_rows",
            )  # fmt: skip
        if pages > most_pages:
            raise AdapterError(
                f"adapter {adapter.name!r} takes {pages} pages but adapters may hold {most_pages}: "
                f"raise pool_pages or max_adapter_pages",
                reason="adapter_too_large", param="pool_pages",
            )  # fmt: skip

    def check_fits(self, seq: Sequence) -> None:
        """Raise UserError, with the numbers, if the sequence could not run to its end even alone in the pool."""
        adapter_pages = 0
        if seq.adapter is not None:
            self.check_adapter(seq.adapter)
            adapter_pages = seq.adapter.num_pages
        num_tokens = max(seq.num_tokens, seq.max_total_tokens)
        kv_pages = self._kv.pages_for_tokens(num_tokens)
        most = self._allocator.num_total - self._cache.max_pinned_pages
        if kv_pages + adapter_pages > most:
            raise UserError(
                f"the request may reach {num_tokens} tokens ({seq.num_prompt_tokens} of them its prompt), which take "
                f"{kv_pages} pages and its adapter {adapter_pages}, but only {most} pages can be had: "
                f"shorten the prompt, lower max_tokens or raise pool_pages",
                reason="request_too_large", param="max_tokens",
            )  # fmt: skip

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            UserError: it can never fit (see check_fits), or a live request has its id; nothing was changed.
        """
        if seq.request_id in self._live:
            raise UserError(
                f"request id {seq.request_id!r} is in use by a live request: choose another",
                reason="duplicate_request_id", param="request_id",
            )  # fmt: skip
        self.check_fits(seq)
        entry = _Entry(seq, self._next_order)
        self._next_order += 1
        self._live[seq.request_id] = entry
        self._enqueue(entry, preempted=False)

    def abort(self, request_id: str) -> Sequence | None:
        """End a waiting or running sequence with reason ABORT; None for an id that is not live."""
        entry = self._live.get(request_id)
        if entry is None:
            return None
        self.finish(entry.seq, FinishReason.ABORT)
        return entry.seq

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a live sequence: its pages come free and its adapter loses one reference.

        Raises:
            PoolIntegrityError: the sequence is not live (finished twice, or never added).
        """
        entry = self._live.get(seq.request_id)
        if entry is None or entry.seq is not seq:
            raise PoolIntegrityError(f"request {seq.request_id!r} was finished but is not live")
        if entry.running:
            self._stop_running(entry)
        else:
            del self._waiting[bisect.bisect_left(self._waiting, (entry.key,))]
        del self._live[seq.request_id]
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or None when no sequence is live.

        Every sequence in the step has pages for the tokens that it runs, and its adapter is resident and referenced;
        the caller performs `cache.take_pending_writes()` before it runs the step.
        """
        step = ScheduledStep()
        blocks_left = self._schedule_running(step)
        # A preemption says that pages are short: whoever were admitted now would be the next to lose them.
        if self._waiting and not step.preempted:
            self._admit(step, blocks_left)
        if not step.decodes and not step.prefills:
            if self._live:
                raise PoolIntegrityError(
                    f"{len(self._waiting)} waiting sequences and nothing to run; {self._allocator.num_free} free and "
                    f"{self._cache.evictable_pages} evictable of {self._allocator.num_total} pages"
                )
            return None
        used = {seq.adapter for seq in step.decodes}
        used.update(seq.adapter for seq, _ in step.prefills)
        step.adapters = [adapter for adapter in self._active if adapter in used]
        return step

    def check_integrity(self) -> None:
        """Prove the allocator's equation and that every page belongs to one running sequence or resident adapter.

        Raises:
            PoolIntegrityError: the books disagree.
        """
        self._allocator.check_integrity()
        self._cache.check_integrity()
        pages = [page for entry in self._running.values() for page in entry.seq.page_ids]
        held = self._allocator.count(PageKind.KV)
        if not len(pages) == len(set(pages)) == held:
            raise PoolIntegrityError(f"running sequences list {len(pages)} KV pages, the allocator {held}")
        if any(entry.seq.page_ids for _, entry in self._waiting):
            raise PoolIntegrityError("a waiting sequence holds pages")
        if len(self._waiting) + len(self._running) != len(self._live):
            raise PoolIntegrityError(f"{len(self._live)} sequences are live but not each waits or runs")
        if any(self._cache.references(adapter) != n for adapter, n in self._active.items()):
            raise PoolIntegrityError("an adapter's references differ from the running sequences that use it")

    def _enqueue(self, entry: _Entry, *, preempted: bool) -> None:
        seq = entry.seq
        entry.key = (seq.priority, not preempted, entry.order)
        seq.status = SequenceStatus.WAITING
        bisect.insort(self._waiting, (entry.key, entry))

    def _schedule_running(self, step: ScheduledStep) -> int:
        """Rule 1; returns the prefill blocks left over."""
        block = self.config.prefill_block
        blocks_left = self.config.max_prefill_blocks
        for entry in list(self._running.values()):
            if not entry.running:
                break  # preempted by an older one just now, and so were all behind it
            seq = entry.seq
            pending = len(seq.token_ids) - seq.num_computed_tokens
            if pending < 1:
                raise PoolIntegrityError(f"request {seq.request_id!r} runs but has no token to compute")
            num_tokens = 1 if pending == 1 else min(pending, blocks_left * block)
            if num_tokens and self._grow(entry, num_tokens, step):
                if pending == 1:
                    step.decodes.append(seq)
                else:
                    step.prefills.append((seq, num_tokens))
                    blocks_left -= -(-num_tokens // block)
        return blocks_left

    def _grow(self, entry: _Entry, num_tokens: int, step: ScheduledStep) -> bool:
        """Get pages, preempting the newest while there are none; False if that was the sequence itself."""
        while not self._kv.allocate_for(entry.seq, num_tokens):
            victim = self._running[next(reversed(self._running))]
            self._stop_running(victim)
            victim.seq.num_computed_tokens = 0
            victim.seq.num_preemptions += 1
            self.num_preemptions += 1
            self._enqueue(victim, preempted=True)
            step.preempted.append(victim.seq)
            if victim is entry:
                return False
        return True

    def _admit(self, step: ScheduledStep, blocks_left: int) -> None:
        """Rule 2."""
        config, waiting = self.config, self._waiting
        blocked: set[Any] = set()  # adapters found not to fit; admissions only take room, so they stay so
        passed: list[tuple[_Entry, int]] = []  # with the admissions made before it was passed over
        admitted = 0
        admit_limit = config.max_num_seqs - len(self._running)
        while len(passed) < len(waiting) and len(passed) < config.max_scan and blocks_left and admitted < admit_limit:
            entry = waiting[len(passed)][1]
            adapter = entry.seq.adapter
            if adapter in blocked or not self._has_slot(adapter):
                blocked.add(adapter)
                passed.append((entry, admitted))
                admit_limit = min(admit_limit, admitted + config.max_overtakes - entry.overtakes)
                continue
            needed = self._kv.pages_outstanding(entry.seq)
            if adapter is not None:
                needed += self._cache.pages_missing(adapter)
            needed += _SPARE_PAGES_PER_SEQUENCE * len(self._running)
            if needed > self._cache.pages_available(beside=adapter):
                break
            del waiting[len(passed)]
            admitted += 1
            pending = entry.seq.num_tokens
            num_tokens = min(pending, blocks_left * config.prefill_block)
            self._start_running(entry, num_tokens)
            if pending == 1:
                step.decodes.append(entry.seq)
            else:
                step.prefills.append((entry.seq, num_tokens))
                blocks_left -= -(-num_tokens // config.prefill_block)
        for entry, before in passed:
            entry.overtakes += admitted - before

    def _has_slot(self, adapter: Any) -> bool:
        """Whether a step could hold the adapter beside those of the running sequences."""
        if adapter is None or adapter in self._active:
            return True
        max_loras = self.config.max_loras
        return (
            (max_loras is None or len(self._active) < max_loras)
            and self._active_rows + self.config.rank_rows(adapter.rank) <= self.config.max_rank_rows
            and self._cache.can_acquire(adapter)
        )

    def _start_running(self, entry: _Entry, num_tokens: int) -> None:
        seq, adapter = entry.seq, entry.seq.adapter
        if not (adapter is None or self._cache.acquire(adapter)) or not self._kv.allocate_for(seq, num_tokens):
            raise PoolIntegrityError(f"request {seq.request_id!r} was found to fit but did not")
        if adapter is not None:
            if adapter not in self._active:
                self._active_rows += self.config.rank_rows(adapter.rank)
            self._active[adapter] = self._active.get(adapter, 0) + 1
        self._running[seq.request_id] = entry
        entry.running = True
        seq.status = SequenceStatus.RUNNING
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = time.monotonic()

    def _stop_running(self, entry: _Entry) -> None:
        seq, adapter = entry.seq, entry.seq.adapter
        self._kv.free(seq)
        del self._running[seq.request_id]
        entry.running = False
        if adapter is not None:
            self._cache.release(adapter)
            self._active[adapter] -= 1
            if not self._active[adapter]:
                del self._active[adapter]
                self._active_rows -= self.config.rank_rows(adapter.rank)
