"""Who of the waiting starts to run in a step: rule 2 of the scheduler (host only, no jax)."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import Any

from multilora_jax.engine.admission import ActiveAdapters, Obstacle
from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.policies.base import Entry, Load, Policy
from multilora_jax.engine.policies.crowd import EvenFlow
from multilora_jax.engine.policies.gate import Gate
from multilora_jax.engine.step_plan import PrefillBudget, ScheduledStep, SchedulerConfig
from multilora_jax.engine.waiting import WaitingQueue
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PoolIntegrityError
from multilora_jax.request import Sequence, SequenceStatus

_SPARE_PAGES_PER_SEQUENCE = 1  # kept free at an admission for each sequence that runs already


class Entrance:
    """Moves sequences from the queue to the running set, which the scheduler owns both.

    Args:
        config: budgets and the bounds of overtaking.
        policy, gate, load: who is told of admissions.
        waiting, running, active: the queue, the running set in order of admission, and its adapters.
        kv, cache: the pool's books.

    Attributes:
        flow: is told of every step.
        stalled: of the last `admit`: the sequence that could not get its adapters in while nobody behind it could run.
        waits_for_loads: whether a sequence waits for a load in flight.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        gate: Gate,
        load: Load,
        waiting: WaitingQueue,
        running: dict[str, Entry],
        active: ActiveAdapters,
        kv: KVManager,
        cache: AdapterCache[Any],
    ) -> None:
        self._config = config
        self._policy = policy
        self._gate = gate
        self._load = load
        self._waiting = waiting
        self._running = running
        self._active = active
        self._kv = kv
        self._cache = cache
        self.flow = EvenFlow(config.prompt_sizes or (config.max_num_batched_tokens,))
        self.stalled: Entry | None = None
        self.waits_for_loads = False

    def pages_to_start(self, seq: Sequence) -> int:
        """Pages that must be available to admit the sequence, its adapters' not counted."""
        needed = self._kv.pages_to_start(seq) + _SPARE_PAGES_PER_SEQUENCE * len(self._running)
        if self._config.long_prefill_token_threshold is not None:  # other prompts may be half done
            needed += sum(max(0, self._kv.pages_outstanding(entry.seq) - 1) for entry in self._running.values())
        return needed

    def restrain(self, budget: PrefillBudget) -> Collection[str]:
        """The policy's crowd, whose part of the budget is cut to what it needs."""
        crowd = self._policy.crowd(self._load)
        if crowd:
            budget.crowd = min(budget.crowd, self.flow.size(self._prompts_of_others(crowd)))
        return crowd

    def _prompts_of_others(self, crowd: Collection[str]) -> int:
        """Pending prompt tokens of running sequences that are not of the crowd, and of those next to start."""
        pending = [entry.seq.num_pending_tokens for entry in self._running.values() if entry.party not in crowd]
        total = sum(n for n in pending if n > 1)
        for entry in islice(self._waiting.in_order(), max(0, self._load.free_seats)):
            if entry.party in crowd:
                break
            if self._active.obstacle(entry.seq.adapters) is None:
                total += entry.seq.num_pending_tokens
        return total

    def admit(self, step: ScheduledStep, budget: PrefillBudget, limit: int, crowd: Collection[str] = ()) -> None:
        """Starts at most `limit` waiting sequences and puts them into the step; see PrefillBudget for the `crowd`."""
        config, waiting, cache = self._config, self._waiting.in_order(), self._cache
        obstacles: dict[tuple[Any, ...], Obstacle] = {}  # admissions only take room, so they stay
        overtaken: list[tuple[Entry, int]] = []  # with the admissions made before it was passed over
        started: list[Entry] = []
        protect: tuple[Any, ...] = ()  # adapters of the oldest sequence that was passed over
        absent: Entry | None = None
        passed = admitted = 0
        max_overtakes, coming = config.max_overtakes, Obstacle.COMING
        short_of_kv = False
        for entry in waiting:
            if passed >= config.max_scan or not budget.chunk(1) or admitted >= limit:
                break
            adapters = entry.seq.adapters
            obstacle = obstacles.get(adapters)
            if obstacle is None and adapters:
                obstacle = self._active.obstacle(adapters)
                if obstacle is not None:
                    obstacles[adapters] = obstacle
            if obstacle is not None:
                protect = protect if passed else adapters
                if absent is None and obstacle is Obstacle.ABSENT:
                    absent = entry
                if obstacle is not coming:
                    overtaken.append((entry, admitted))
                    left = admitted + max_overtakes - self._overtakes(entry)
                    limit = left if left < limit else limit
                passed += 1
                continue
            crowded = entry.party in crowd
            if crowded and not budget.chunk(1, crowded=True):
                continue  # its turn comes with the next step
            if self.pages_to_start(entry.seq) > cache.pages_available(beside=adapters + protect):
                short_of_kv = True
                break
            admitted += 1
            started.append(entry)
            self._kv.attach(entry.seq)
            pending = entry.seq.num_pending_tokens
            num_tokens = budget.chunk(pending, crowded=crowded)
            self._start(entry, num_tokens, protect)
            if pending == 1:
                step.decodes.append(entry.seq)
            else:
                step.prefills.append((entry.seq, num_tokens))
                budget.take(num_tokens, crowded=crowded)
        for entry in started:
            self._waiting.remove(entry)
        if started:
            self._gate.started(len(started), len(self._waiting), self._load.now)
        for entry, before in overtaken:
            entry.overtakes += admitted - before
        found = obstacles.values()
        self.waits_for_loads = coming in found or Obstacle.COMING_AGAIN in found
        # Whoever is short of KV gets it when a running sequence ends: as long as one runs there is no hurry.
        if not admitted and not self.waits_for_loads and not (short_of_kv and self._running):
            self.stalled = absent

    def _overtakes(self, entry: Entry) -> int:
        """How often it was overtaken: as often as it may be, where that has gone on for as long as it may."""
        now, longest = self._load.now, self._config.max_overtake_s
        if entry.passed_since is None:
            entry.passed_since = now
        elif longest is not None and now - entry.passed_since >= longest:
            entry.overtakes = max(entry.overtakes, self._config.max_overtakes)
        return entry.overtakes

    def _start(self, entry: Entry, num_tokens: int, protect: tuple[Any, ...]) -> None:
        seq = entry.seq
        acquired = [self._cache.acquire(adapter) for adapter in seq.adapters]
        if not all(acquired) or not self._kv.allocate_for(seq, num_tokens, protect):
            raise PoolIntegrityError(f"request {seq.request_id!r} was found to fit but did not")
        self._active.add(seq.adapters)
        self._running[seq.request_id] = entry
        entry.running = True
        seq.status = SequenceStatus.RUNNING
        self._policy.admitted(entry, self._load)
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = self._load.now
