"""A state machine over scheduler, transfers, cache, KV manager and allocator with an engine that computes nothing.

After every step: budgets hold, pages belong to one owner or are shared by sequences that read in them what they would
have written, and cover what was computed, adapters of the step are
ready, written and held, the oldest running sequence advanced, and nobody was overtaken too often. At the end everybody
finishes within a number of rounds that grows with the tokens and loads, and nothing is left in the pool.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from multilora_jax.engine.step_plan import ScheduledStep, max_blocks
from multilora_jax.errors import UserError
from multilora_jax.memory.allocator import PageKind
from multilora_jax.request import FinishReason, Sequence, SequenceStatus
from tests.engine.scheduler_bench import PAGE_TOKENS, Bench, FakeAdapter

NUM_NAMES = 6
# prompt tokens, new tokens, adapters, priority, where the prompt differs from others, salt, continuations
REQUESTS = st.tuples(
    st.integers(1, 30),
    st.integers(1, 40),
    st.lists(st.integers(0, NUM_NAMES - 1), max_size=3, unique=True),
    st.sampled_from([0, 0, 1]),
    st.sampled_from([None, None, 0, 10, -1]),
    st.sampled_from([None, None, "s"]),
    st.sampled_from([1, 1, 1, 3]),
)
Wish = tuple[int, int, list[int], int, int | None, str | None, int]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(8, 24), max_num_seqs=st.integers(1, 6), blocks=st.integers(1, 5),
        prefill_block=st.sampled_from([1, 3, 4, 8]), max_loras=st.sampled_from([None, 1, 2, 3]),
        max_rank_rows=st.integers(2, 8).map(lambda n: 8 * n), max_adapter_pages=st.sampled_from([None, 5, 8]),
        max_overtakes=st.integers(0, 4), max_scan=st.integers(1, 8), policy=st.sampled_from(["lru", "fifo"]),
        pages_per_step=st.integers(1, 4), prefetch=st.booleans(), lookahead=st.integers(1, 8),
        max_reads=st.integers(1, 4), delay=st.integers(0, 3), caching=st.booleans(), runs_ahead=st.booleans(),
        split=st.booleans(),
    )  # fmt: skip
    def start(self, blocks: int, prefill_block: int, runs_ahead: bool, split: bool, **options: Any) -> None:
        self.bench = Bench(
            prefill_block=prefill_block, max_num_batched_tokens=blocks * prefill_block + prefill_block // 2,
            split=split and (options["max_adapter_pages"] or 99) < options["num_pages"] - 1, **options,
        )  # fmt: skip
        self.bench.runs_ahead = runs_ahead
        self.cache, self.scheduler = self.bench.cache, self.bench.scheduler
        self.versions = 0
        self.adapters = [self.make(i) for i in range(NUM_NAMES)]
        self.everyone = list(self.adapters)
        self.waiting: dict[str, Sequence] = {}
        self.overtaken: dict[str, int] = {}
        self.running: list[Sequence] = []  # in order of admission
        self.orders: dict[str, int] = {}
        self.families: dict[str, list[Sequence]] = {}
        self.leaders: dict[str, Sequence] = {}
        self.released: set[str] = set()

    def make(self, which: int) -> FakeAdapter:
        self.versions += 1
        return FakeAdapter(f"a{which}", 1 + which % 3, rank=1 + 7 * (which % 5), digest=str(self.versions))

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=8))
    def add(self, requests: list[Wish]) -> None:
        for prompt, output, which, priority, other, salt, n in requests:
            tokens = [1] * prompt
            if other is not None and other < prompt:
                tokens[other] = 9
            adapters = tuple(self.adapters[i] for i in which)
            name = f"r{len(self.orders)}"
            try:
                sequences = self.bench.add_all(name, tokens, output, adapters, priority, salt, n)
            except UserError:
                self.scheduler.check_integrity()
                continue
            for seq in sequences:
                self.waiting[seq.request_id] = seq
                self.overtaken[seq.request_id] = 0
                self.orders[seq.request_id] = len(self.orders)
                if seq is not sequences[0]:
                    self.leaders[seq.request_id] = sequences[0]
            self.families[name] = sequences
            self.scheduler.check_integrity()

    @rule(which=st.integers(0, 40))
    def abort(self, which: int) -> None:
        live = [*self.waiting.values(), *self.running]
        if live:
            seq = live[which % len(live)]
            assert self.scheduler.abort(seq.request_id) is seq
            self.leave(seq)
        self.scheduler.check_integrity()

    @rule(which=st.integers(0, NUM_NAMES - 1))
    def swap_adapter(self, which: int) -> None:
        """The name gets a new version; requests that are live finish on the old one."""
        old = self.adapters[which]
        self.cache.drop(old)
        self.adapters[which] = self.make(which)
        self.everyone.append(self.adapters[which])
        self.scheduler.check_integrity()
        users = [seq for seq in [*self.waiting.values(), *self.running] if old in seq.adapters]
        assert users or not self.cache.is_resident(old)

    @rule(which=st.integers(0, NUM_NAMES - 1))
    def pin(self, which: int) -> None:
        adapter = self.adapters[which]
        try:
            self.scheduler.check_pin(adapter)
        except UserError:
            return
        self.cache.pin(adapter)
        self.scheduler.check_integrity()

    @rule(which=st.integers(0, NUM_NAMES - 1))
    def unpin(self, which: int) -> None:
        self.cache.unpin(self.adapters[which])
        self.scheduler.check_integrity()

    @rule(num_items=st.integers(0, 5))
    def evict(self, num_items: int) -> None:
        self.cache.order.evict(list(self.cache.order)[:num_items])
        self.scheduler.check_integrity()

    @precondition(lambda self: self.bench.source.delay)
    @rule(which=st.integers(0, NUM_NAMES - 1))
    def lose_host_copy(self, which: int) -> None:
        self.bench.source.here.pop(self.adapters[which], None)

    @rule(which=st.integers(0, NUM_NAMES - 1))
    def fail_load(self, which: int) -> None:
        """What the engine does once it hears that a host copy cannot be had."""
        adapter = self.adapters[which]
        if adapter not in self.bench.transfers.awaited():
            return
        self.bench.source.due.pop(adapter, None)
        self.bench.transfers.forget(adapter)
        for seq in [seq for seq in self.scheduler.waiting() if adapter in seq.adapters]:
            self.scheduler.finish(seq, FinishReason.ERROR)
            self.leave(seq)
        self.scheduler.check_integrity()

    @precondition(lambda self: self.scheduler._live)
    @rule(rounds=st.integers(1, 6))
    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            if self.scheduler._live:
                self.one_round()

    def leave(self, seq: Sequence) -> None:
        self.waiting.pop(seq.request_id, None)
        if seq in self.running:
            self.running.remove(seq)
        assert seq.page_ids == []
        assert seq.status is SequenceStatus.FINISHED

    def one_round(self) -> None:
        bench, oldest = self.bench, self.running[0] if self.running else None
        bench.source.tick()
        copied = bench.plan()
        assert copied <= bench.pages_per_step or not self.running
        self.scheduler.check_integrity()
        held = {name for name in self.waiting if self.is_held(name)}
        only_loading = held | {name for name, seq in self.waiting.items() if self.waits_for_first_load(seq)}
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is None:
            assert not self.running or any(seq.ends_in_flight for seq in self.running)
            bench.settle()
        else:
            self.follow(step, only_loading)
            assert held <= self.waiting.keys()
            oldest_runs = oldest in step.decodes or oldest in [seq for seq, _ in step.prefills]
            ending = any(seq.ends_in_flight for seq in self.running)
            assert oldest is None or oldest_runs or ending
            self.check_step(step)
            bench.run(step)
        # One that was preempted with a token under way may end with it while it waits.
        for seq in [seq for seq in (*self.running, *self.waiting.values()) if seq.finished]:
            self.leave(seq)
        for name, sequences in list(self.families.items()):
            if all(seq.finished for seq in sequences):
                bench.fanout.leave(name)
                del self.families[name]
        self.scheduler.check_integrity()

    def is_held(self, name: str) -> bool:
        """Whether a continuation has to wait for its leader's prompt."""
        leader = self.leaders.get(name)
        if leader is None or self.waiting[name].first_scheduled_time is not None or name in self.released:
            return False
        if leader.finished or leader.num_computed_tokens >= leader.num_prompt_tokens:
            self.released.add(name)
            return False
        return True

    def waits_for_first_load(self, seq: Sequence) -> bool:
        missing = [adapter for adapter in seq.adapters if not self.cache.is_ready(adapter)]
        coming = any(self.cache.is_coming(adapter) for adapter in missing)
        return coming and not any(self.cache.was_lost(adapter) for adapter in missing)

    def follow(self, step: ScheduledStep, only_loading: set[str]) -> None:
        """Take over who runs and who waits, and count who passed whom."""
        for seq in step.preempted:
            assert seq is self.running[-1]
            self.running.remove(seq)
            assert (seq.num_computed_tokens, seq.page_ids) == (0, [])
            self.waiting[seq.request_id] = seq
            self.overtaken[seq.request_id] = 0
        admitted = [seq for seq in self.waiting.values() if seq.status is SequenceStatus.RUNNING]
        for seq in admitted:
            del self.waiting[seq.request_id]
        order = [seq for seq in self.scheduler_running() if seq in admitted]
        assert len(order) == len(admitted)
        self.running += order

        def key(seq: Sequence) -> tuple[int, bool, int]:
            return (seq.priority, seq.num_preemptions == 0, self.orders[seq.request_id])

        for name, seq in self.waiting.items():
            if name not in only_loading:
                self.overtaken[name] += sum(key(other) > key(seq) for other in admitted)
            assert self.overtaken[name] <= self.scheduler.config.max_overtakes

    def scheduler_running(self) -> list[Sequence]:
        return [entry.seq for entry in self.scheduler._running.values()]

    def check_step(self, step: ScheduledStep) -> None:
        bench, config = self.bench, self.scheduler.config
        sequences = step.decodes + [seq for seq, _ in step.prefills]
        assert len(set(sequences)) == len(sequences) <= config.max_num_seqs
        assert self.running == self.scheduler_running()
        assert self.scheduler.num_waiting == len(self.waiting)
        assert set(sequences) <= set(self.running)
        live = [seq for seq in self.running if not seq.ends_in_flight]
        assert len(live) <= config.max_num_seqs
        decoding = {seq for seq in live if seq.num_pending_tokens == 1}
        # One that lacks a page waits for those that end in this moment.
        assert decoding == set(step.decodes) or (decoding > set(step.decodes) and len(live) < len(self.running))
        budget = config.max_num_batched_tokens, max_blocks(config.max_num_batched_tokens, config.prefill_block)
        used = [(n, -(-n // config.prefill_block)) for _, n in step.prefills]
        assert all(sum(values) <= limit for values, limit in zip(zip(*used, strict=True), budget, strict=False))
        full = bool(used) and any(sum(v) == limit for v, limit in zip(zip(*used, strict=True), budget, strict=True))
        for seq, n in step.prefills:
            assert seq.num_pending_tokens > 1
            assert n == seq.num_pending_tokens or (n > 0 and full)  # a part of a prompt only where no more fits
        adapters = {adapter for seq in self.running for adapter in seq.adapters}
        assert config.max_loras is None or len(adapters) <= config.max_loras
        assert sum(-(-a.num_rows // 8) * 8 for a in adapters) <= config.max_rank_rows
        assert len(set(step.adapters)) == len(step.adapters)
        assert set(step.adapters) == {adapter for seq in sequences for adapter in seq.adapters}
        for adapter in adapters:
            assert self.cache.references(adapter) == sum(adapter in seq.adapters for seq in self.running)
            assert self.cache.is_ready(adapter)
            written = [bench.written[adapter][i] for i in range(adapter.num_pages)]
            assert written == self.cache.pages_of(adapter)
        assert bench.allocator.count(PageKind.ADAPTER) <= self.cache.max_adapter_pages
        kv_pages = bench.allocator.count(PageKind.KV) + bench.allocator.count(PageKind.CACHED)
        assert not self.cache.is_split or kv_pages <= bench.allocator.num_total - self.cache.max_adapter_pages
        owners = list({page for seq in self.running for page in seq.page_ids})
        owners += [page for adapter in self.cache.residents() for page in self.cache.pages_of(adapter)]
        owners += [page for page in self.cache.order if isinstance(page, int)]
        assert len(set(owners)) == len(owners)
        assert len(owners) + bench.allocator.num_free == bench.allocator.num_total
        for seq, n in [(seq, 1) for seq in step.decodes] + step.prefills:
            assert len(seq.page_ids) * PAGE_TOKENS >= seq.num_computed_tokens + n

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        live = [*self.running, *self.waiting.values()]
        load_rounds = sum(adapter.num_pages + self.bench.source.delay + 2 for seq in live for adapter in seq.adapters)
        rounds_allowed = sum(seq.max_total_tokens for seq in live) + 4 * load_rounds
        while self.scheduler._live:
            self.one_round()
            rounds_allowed -= 1
            assert rounds_allowed >= 0
        self.bench.settle()
        self.bench.plan()
        assert self.scheduler.schedule() is None
        for adapter in self.everyone:
            assert self.cache.references(adapter) == 0
            self.cache.drop(adapter)
        self.scheduler.check_integrity()
        assert self.bench.fanout.caches or not self.bench.allocator.count(PageKind.CACHED)
        self.bench.evict_all()
        assert self.bench.allocator.num_free == self.bench.allocator.num_total
        assert (len(self.scheduler.active.users), self.scheduler.active.num_rows) == (0, 0)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
