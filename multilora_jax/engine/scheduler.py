"""Which sequences run in the next step: continuous batching with chunked prefill (host only, no jax).

The rules, in the order in which they are applied:

1. Running sequences, in the order of their admission, each get one decode row or a prefill chunk. One that cannot get
   its pages preempts the newest running sequence, which may be itself but is never an older one; a preempted sequence
   gives up its pages and its adapters and is computed again later.
2. Waiting sequences are then admitted by priority (lower first), preempted ones before fresh ones, then as the policy
   has it (policies.base), by default by arrival. One whose adapters have no room in a step (rank rows, max_loras) or
   are not in the pool is passed over, so that others run meanwhile, but at most `max_overtakes` times or for
   `max_overtake_s`; then nothing behind it is admitted until it is. While its adapters are on their way it holds
   nobody up and passing it does not count, unless they came once already and were evicted before it ran. One that
   lacks only KV pages lets nobody pass, else small requests would starve large ones. One whose adapter has as many
   running sequences as it may (`max_seqs_per_adapter`) is not in the order until it could start.

Admission checks the adapters of *all* running sequences against the budgets, so no step can exceed them. It
allocates pages for the first chunk only, but asks that the whole prompt would fit with one page per running sequence
to spare: else admission and preemption chase each other when the pool is nearly full. (Running prompts have theirs:
while one lacks some, it uses up the step's prefill tokens and nothing is admitted, or where one prompt may not use
all of them (`long_prefill_token_threshold`) what it lacks is kept back.)

Nobody gets stuck. `add` refuses a request that would not fit alone beside the pinned adapters, and `check_pin` a pin
that would take that back; so the oldest running sequence can preempt all others, evict their adapters and advance.
With nothing running, the first waiting sequence is admitted once its adapters are ready: no younger one may take
their pages, and it may displace idle ones if it was overtaken too often or nobody else can run (`may_displace`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from multilora_jax.engine.admission import ActiveAdapters, AdmissionLimits
from multilora_jax.engine.entrance import Entrance
from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.policies.base import Entry, Load, Policy
from multilora_jax.engine.policies.gate import Gate, Rate
from multilora_jax.engine.policies.pacer import StepPacer
from multilora_jax.engine.prompt_lookup import add_proposals
from multilora_jax.engine.scheduler_books import SchedulerBooks
from multilora_jax.engine.step_plan import PrefillBudget, ScheduledStep, SchedulerConfig, decode_sizes, max_blocks
from multilora_jax.engine.waiting import WaitingQueue
from multilora_jax.errors import UserError
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.lora.residency import CacheableAdapter
from multilora_jax.memory.allocator import PageAllocator, PoolIntegrityError
from multilora_jax.request import FinishReason, Sequence, SequenceStatus


class Scheduler(SchedulerBooks):
    """Queue and running set. Not thread-safe: one thread calls it, between steps.

    Before each step the engine lets AdapterTransfers bring adapters in. After it, it adds n to `num_computed_tokens`
    of every sequence that ran and appends the sampled token to each whose pending tokens all ran; it calls `finish`
    for those that are done.

    Args:
        config: the budgets.
        allocator, kv, cache: the pool's books, shared with nobody else.
        policy: orders the waiting and gives up some; first come, first served by default.
        clock: seconds that all times count in.

    Attributes:
        num_preemptions: sequences that had to start again.
        refused: by reason, requests that were not queued or, as its caller counts them, were given up.
        waits_for_loads: after `schedule` gave None though sequences are live: whether one waits for a load in flight.
            If not, there is nothing to wait for: the next AdapterTransfers.plan makes room for one.
        was_idle: no sequence ran when `schedule` was last called, so that nobody minds a long step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: PageAllocator,
        kv: KVManager,
        cache: AdapterCache[Any],
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.num_preemptions = 0
        self._limits = AdmissionLimits(config, allocator, kv, cache)
        self._allocator = allocator
        self._kv = kv
        self._cache = cache
        self._live: dict[str, Entry] = {}
        self._running: dict[str, Entry] = {}  # in order of admission
        self.active = ActiveAdapters(config, cache)
        self._clock = clock
        self._load = Load(config.max_num_seqs, running=self._running, users=self.active.users)
        rate = config.adapter_requests_per_s
        limit = None if rate is None else Rate(rate, config.adapter_request_burst)
        self._gate = Gate(config.max_queued_requests, limit)
        target = config.target_step_s
        self._prompt_sizes = config.prompt_sizes or (config.max_num_batched_tokens,)
        self.refused = self._gate.refused
        self._pacer = None if target is None else StepPacer(self._prompt_sizes, target)
        self._next_order = 0
        self.was_idle = True
        self.use_policy(policy or Policy())

    def use_policy(self, policy: Policy) -> None:
        """Serve by another policy from now on; only while no sequence is live (else PoolIntegrityError)."""
        if self._live:
            raise PoolIntegrityError(f"{len(self._live)} sequences are live: the policy cannot change under them")
        config, load, self._policy = self.config, self._load, policy
        self._waiting = WaitingQueue(policy, load, config.max_seqs_per_adapter)
        self._entrance = Entrance(
            config, policy, self._gate, load, self._waiting, self._running, self.active, self._kv, self._cache
        )

    @property
    def waits_for_loads(self) -> bool:
        return self._entrance.waits_for_loads

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_seats(self) -> int:
        """Sequences that may start beside the running ones."""
        return self.config.max_num_seqs - len(self._running) + self._num_ending()

    def _num_ending(self) -> int:
        """Running sequences that need no further step, though the token that ends them is not read yet."""
        return sum(entry.seq.ends_in_flight for entry in self._running.values())

    def seats_within(self, num_steps: int) -> int:
        """Seats that are free or will be in so many steps at the latest, a stop before max_tokens not counted."""
        seqs = [entry.seq for entry in self._running.values()]
        soon = sum(s.max_total_tokens - s.num_tokens <= num_steps for s in seqs if not s.ends_in_flight)
        return self.num_free_seats + soon

    def waiting(self, limit: int | None = None) -> Iterator[Sequence]:
        """The first `limit` waiting sequences, or all, in order; the queue must not change meanwhile."""
        return self._waiting.sequences(limit)

    def given_up(self) -> list[tuple[Sequence, UserError]]:
        """Waiting sequences that the policy gives up, and why; ask before each step, and `finish` them."""
        if self._policy.is_static or not self._waiting:
            return []
        self._take_stock()
        self._waiting.changed()
        return self._waiting.given_up() if self._policy.gives_up else []

    def saw_step(self, step: ScheduledStep, seconds: float) -> None:
        """A step took so long, from its planning or from the end of the one before to its own."""
        if self._pacer is not None and step.prefills:
            block, tokens = self.config.prefill_block, step.num_prompt_tokens
            blocks, sizes = step.num_blocks(block), self._prompt_sizes
            size = next((n for n in sizes if n >= tokens and max_blocks(n, block) >= blocks), sizes[-1])
            self._pacer.saw(size, seconds)
        elif self._pacer is not None:
            self._pacer.saw_decodes(step.num_decode_rows, seconds)

    def could_run(self, seq: Sequence) -> bool:
        """Whether a waiting sequence could start now, beside the running ones, if its adapters were there."""
        cache = self._cache
        needed = 0 if cache.is_split else sum(a.num_pages for a in seq.adapters if not cache.is_resident(a))
        return (
            self.num_free_seats > 0
            and self.active.has_room_for(seq.adapters)
            and needed + self._entrance.pages_to_start(seq) <= cache.pages_available(beside=seq.adapters)
        )

    def pages_outstanding(self, seq: Sequence) -> int:
        """KV pages that a sequence lacks for the tokens it has now."""
        return self._kv.pages_outstanding(seq)

    def pages_of_growth(self) -> int:
        """KV pages that the running sequences may yet come to need, if each at most doubles: a guess for forecasts."""
        to_the_end = self._kv.pages_to_the_end
        return sum(min(to_the_end(entry.seq), len(entry.seq.page_ids) + 1) for entry in self._running.values())

    def may_displace(self, seq: Sequence) -> bool:
        """Whether a waiting sequence's adapters may take the place of idle ones that later sequences want."""
        entry = self._live[seq.request_id]
        return entry is self._entrance.stalled or entry.overtakes >= self.config.max_overtakes

    def check_adapter(self, adapter: CacheableAdapter) -> None:
        """Raise AdapterError if no step could ever hold the adapter."""
        self._limits.check_adapter(adapter)

    def check_pin(self, adapter: CacheableAdapter) -> None:
        """Raise UserError (`pin_limit`) if a live sequence could not run to its end beside the adapter, pinned."""
        self._limits.check_pin(adapter, (entry.seq for entry in self._live.values()))

    def add(self, seq: Sequence, leader: Sequence | None = None) -> None:
        """Queue a sequence.

        Args:
            leader: a live sequence with the same prompt: this one waits until it is computed, and takes its pages.

        Raises:
            UserError: it could not run to its end even alone in the pool, or a live request has its id; nothing was
                changed.
            RateLimitError: the queue is full, or its adapters get too many requests; nothing was changed.
        """
        if seq.request_id in self._live:
            raise UserError(
                f"request id {seq.request_id!r} is in use by a live request: choose another",
                reason="duplicate_request_id", param="request_id",
            )  # fmt: skip
        self._limits.check_fits(seq)
        load, entry = self._take_stock(), Entry(seq, self._next_order)
        if leader is None:
            names = (adapter.name for adapter in seq.adapters)
            most, num_waiting = self.config.max_queued_requests, load.num_waiting
            kept = 0 if most is None else self._policy.kept_places(entry, load, most)
            num_waiting = num_waiting if most is None else self._waiting.num_requests
            self._gate.enter(names, num_waiting, self.num_free_seats, load.now, kept)
        self._next_order += 1
        self._live[seq.request_id] = entry
        for adapter in seq.adapters:
            self._cache.claim(adapter)
        self._policy.joined(entry, load)
        self._waiting.add(entry, leader)

    def abort(self, request_id: str) -> Sequence | None:
        """End a waiting or running sequence with reason ABORT; None for an id that is not live."""
        entry = self._live.get(request_id)
        if entry is not None:
            self.finish(entry.seq, FinishReason.ABORT)
        return entry and entry.seq

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a live sequence: its pages come free and its adapters lose a reference each.

        Raises:
            PoolIntegrityError: the sequence is not live (finished twice, or never added).
        """
        entry = self._live.get(seq.request_id)
        if entry is None or entry.seq is not seq:
            raise PoolIntegrityError(f"request {seq.request_id!r} was finished but is not live")
        if entry.running:
            self._stop_running(entry)
        else:
            self._waiting.remove(entry)
        self._policy.left(entry, self._load)
        del self._live[seq.request_id]
        for adapter in seq.adapters:
            self._cache.unclaim(adapter)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step; None when no sequence is live, or when all of them wait for their adapters.

        Every sequence in the step has pages for the tokens that it runs, and its adapters are ready and referenced.

        Raises:
            PoolIntegrityError: sequences are live, none can run, and nothing is being done about it.
        """
        self.was_idle = not self._running
        step = ScheduledStep(after_idle=self.was_idle)
        entrance = self._entrance
        stalled, entrance.stalled = entrance.stalled, None
        self._waiting.release()
        entrance.waits_for_loads = False
        paced = self._pacer is not None and any(e.seq.num_pending_tokens == 1 for e in self._running.values())
        budget = PrefillBudget.of(self.config, self._pacer.size() if self._pacer and paced else None)
        crowd: Collection[str] = ()
        if not self._policy.is_static:
            self._take_stock()
            crowd = entrance.restrain(budget)
        self._schedule_running(step, budget, crowd)
        # A preemption says that pages are short: whoever were admitted now would be the next to lose them.
        load = self._take_stock()
        if self._waiting and not step.preempted:
            entrance.admit(step, budget, load.free_seats, crowd)
        if not step.decodes and not step.prefills:
            # One that stalls may displace others: unless it gets its way before the next call, pages are lost.
            done = entrance.stalled is None or entrance.stalled is stalled
            if self._live and done and not self.waits_for_loads and not self._num_ending():
                raise PoolIntegrityError(
                    f"{len(self._waiting)} waiting sequences and nothing to run; {self._allocator.num_free} free and "
                    f"{self._cache.order.num_pages} evictable of {self._allocator.num_total} pages"
                )
            return None
        entrance.flow.saw(step.num_prompt_tokens)
        add_proposals(step, self._kv, decode_sizes(self.config.max_num_seqs))
        used = {adapter for seq in step.decodes for adapter in seq.adapters}
        used.update(adapter for seq, _ in step.prefills for adapter in seq.adapters)
        step.adapters = [adapter for adapter in self.active.users if adapter in used]
        self._policy.planned(step, load)
        self._waiting.changed()
        return step

    def _take_stock(self) -> Load:
        """What the policy is to know now."""
        load = self._load
        load.now, load.num_waiting = self._clock(), len(self._waiting)
        if load.num_waiting:
            load.free_seats = self.num_free_seats
        return load

    def _schedule_running(self, step: ScheduledStep, budget: PrefillBudget, crowd: Collection[str]) -> None:
        """Rule 1."""
        for entry in list(self._running.values()):
            if not entry.running:
                break  # preempted by an older one just now, and so were all behind it
            seq = entry.seq
            pending = seq.num_pending_tokens
            if seq.ends_in_flight:
                continue
            if pending < 1:
                raise PoolIntegrityError(f"request {seq.request_id!r} runs but has no token to compute")
            # The first is never held back: else a step could be empty.
            crowded = entry.party in crowd and bool(step.decodes or step.prefills)
            num_tokens = 1 if pending == 1 else budget.chunk(pending, crowded=crowded)
            if num_tokens and self._grow(entry, num_tokens, step):
                if pending == 1:
                    step.decodes.append(seq)
                else:
                    step.prefills.append((seq, num_tokens))
                    budget.take(num_tokens, crowded=entry.party in crowd)

    def _grow(self, entry: Entry, num_tokens: int, step: ScheduledStep) -> bool:
        """Get pages, preempting the newest while there are none; False if that was the sequence itself, or if some are
        about to come free: then it sits this step out."""
        while not self._kv.allocate_for(entry.seq, num_tokens):
            if self._num_ending():
                return False
            victim = self._running[next(reversed(self._running))]
            self._stop_running(victim)
            victim.seq.num_computed_tokens = 0
            victim.seq.num_preemptions += 1
            self.num_preemptions += 1
            self._waiting.push(victim, preempted=True)
            step.preempted.append(victim.seq)
            if victim is entry:
                return False
        return True

    def _stop_running(self, entry: Entry) -> None:
        seq = entry.seq
        self._kv.free(seq)
        self._waiting.changed()
        del self._running[seq.request_id]
        entry.running = False
        self.active.remove(seq.adapters)
        for adapter in seq.adapters:
            self._cache.release(adapter)
