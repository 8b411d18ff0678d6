"""A state machine over scheduler, cache, KV manager and allocator with an engine that computes nothing.

After every step: budgets hold, pages belong to one owner and cover what was computed, adapters of the step are
resident and held, the oldest running sequence advanced, and nobody was overtaken too often. At the end everybody
finishes within as many steps as there are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.scheduler import ScheduledStep, Scheduler, SchedulerConfig
from multilora_jax.errors import UserError
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator, PageKind
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.request import FinishReason, SamplingParams, Sequence, SequenceStatus

PARAMS = SamplingParams()
PAGE_TOKENS = 4
# prompt tokens, new tokens, adapter (5 and above: base), priority
REQUESTS = st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(0, 6), st.sampled_from([0, 0, 1]))


@dataclass(eq=False)
class FakeAdapter:
    name: str
    num_pages: int
    rank: int
    digest: str = "0" * 64


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(8, 24), max_num_seqs=st.integers(1, 6), blocks=st.integers(1, 5),
        prefill_block=st.sampled_from([1, 3, 4, 8]), max_loras=st.sampled_from([None, 1, 2, 3]),
        max_rank_rows=st.integers(2, 8).map(lambda n: 8 * n), max_adapter_pages=st.sampled_from([None, 5, 8]),
        pins=st.integers(0, 2), max_overtakes=st.integers(0, 4), max_scan=st.integers(1, 8),
    )  # fmt: skip
    def start(
        self, num_pages: int, max_num_seqs: int, blocks: int, prefill_block: int, max_loras: int | None,
        max_rank_rows: int, max_adapter_pages: int | None, pins: int, max_overtakes: int, max_scan: int,
    ) -> None:  # fmt: skip
        geometry = PoolGeometry(
            num_layers=1, num_pages=num_pages, page_tokens=PAGE_TOKENS, hidden=8, q_dim=8, kv_dim=8, ffn=8,
            num_kv_heads=1, head_dim=8,
        )  # fmt: skip
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=blocks * prefill_block + prefill_block // 2,
            prefill_block=prefill_block, max_rank_rows=max_rank_rows, max_loras=max_loras,
            max_overtakes=max_overtakes, max_scan=max_scan,
        )  # fmt: skip
        self.blocks = blocks
        self.allocator = PageAllocator(num_pages)
        self.cache: AdapterCache[FakeAdapter] = AdapterCache(self.allocator, max_adapter_pages, max_pinned_pages=pins)
        self.scheduler = Scheduler(
            self.config, self.allocator, KVManager(self.allocator, geometry, self.cache), self.cache
        )
        self.adapters = [FakeAdapter(f"a{i}", 1 + i % 3, rank=1 + 7 * i) for i in range(5)]
        self.waiting: dict[str, tuple[Sequence, int]] = {}
        self.overtaken: dict[str, int] = {}
        self.running: list[Sequence] = []  # in order of admission
        self.written: dict[FakeAdapter, list[int]] = {}
        self.count = 0

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=8))
    def add(self, requests: list[tuple[int, int, int, int]]) -> None:
        for request in requests:
            self.add_one(*request)

    def add_one(self, prompt: int, output: int, which: int, priority: int) -> None:
        adapter = self.adapters[which] if which < 5 else None
        seq = Sequence(str(self.count), [1] * prompt, prompt, PARAMS, adapter, max_total_tokens=prompt + output)
        seq.priority = priority
        try:
            self.scheduler.add(seq)
        except UserError:
            self.scheduler.check_integrity()
            return
        self.waiting[seq.request_id] = (seq, self.count)
        self.overtaken[seq.request_id] = 0
        self.count += 1

    @rule(which=st.integers(0, 40))
    def abort(self, which: int) -> None:
        live = [seq for seq, _ in self.waiting.values()] + self.running
        if live:
            seq = live[which % len(live)]
            assert self.scheduler.abort(seq.request_id) is seq
            self.forget(seq)
        self.scheduler.check_integrity()

    @rule(which=st.integers(0, 4))
    def reload_adapter(self, which: int) -> None:
        old = self.adapters[which]
        self.cache.drop(old)
        self.adapters[which] = FakeAdapter(old.name, old.num_pages, old.rank)
        self.scheduler.check_integrity()

    @rule(which=st.integers(0, 4))
    def pin(self, which: int) -> None:
        adapter = self.adapters[which]
        if self.cache.pinned_pages + adapter.num_pages <= self.cache.max_pinned_pages:
            self.cache.pin(adapter)

    @rule(which=st.integers(0, 4))
    def unpin(self, which: int) -> None:
        self.cache.unpin(self.adapters[which])

    @precondition(lambda self: self.scheduler.has_unfinished())
    @rule(steps=st.integers(1, 5))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.scheduler.has_unfinished():
                self.one_step()

    def forget(self, seq: Sequence) -> None:
        self.waiting.pop(seq.request_id, None)
        if seq in self.running:
            self.running.remove(seq)
        assert seq.page_ids == []
        assert seq.status is SequenceStatus.FINISHED

    def one_step(self) -> None:
        oldest = self.running[0] if self.running else None
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.check_integrity()
        self.written.update(self.cache.take_pending_writes())
        self.follow(step)
        assert oldest is None or oldest in step.decodes or oldest in [seq for seq, _ in step.prefills]
        self.check_step(step)
        for seq, n in [(seq, 1) for seq in step.decodes] + step.prefills:
            seq.num_computed_tokens += n
            if seq.num_pending_tokens == 0:
                seq.token_ids.append(2)
            if seq.num_tokens >= seq.max_total_tokens:
                self.scheduler.finish(seq, FinishReason.LENGTH)
                self.forget(seq)
        self.scheduler.check_integrity()

    def follow(self, step: ScheduledStep) -> None:
        """Take over who runs and who waits, and count who passed whom."""
        for seq in step.preempted:
            assert seq is self.running[-1]
            self.running.remove(seq)
            assert (seq.num_computed_tokens, seq.page_ids) == (0, [])
            self.waiting[seq.request_id] = (seq, int(seq.request_id))
            self.overtaken[seq.request_id] = 0
        before = dict(self.waiting)
        for name, (seq, _) in before.items():
            if seq.status is SequenceStatus.RUNNING:
                del self.waiting[name]
        admitted = [seq for seq, _ in before.values() if seq.status is SequenceStatus.RUNNING]
        order = [seq for seq in self.scheduler_running() if seq in admitted]
        assert len(order) == len(admitted)
        self.running += order

        def key(seq: Sequence) -> tuple[int, bool, int]:
            return (seq.priority, seq.num_preemptions == 0, int(seq.request_id))

        for name, (seq, _) in self.waiting.items():
            self.overtaken[name] += sum(key(other) > key(seq) for other in admitted)
            assert self.overtaken[name] <= self.config.max_overtakes

    def scheduler_running(self) -> list[Sequence]:
        return [entry.seq for entry in self.scheduler._running.values()]

    def check_step(self, step: ScheduledStep) -> None:
        config, sequences = self.config, step.decodes + [seq for seq, _ in step.prefills]
        assert len(set(sequences)) == len(sequences) <= config.max_num_seqs
        assert self.running == self.scheduler_running()
        assert self.scheduler.num_waiting == len(self.waiting)
        assert set(sequences) <= set(self.running)
        assert {seq for seq in self.running if seq.num_pending_tokens == 1} == set(step.decodes)
        assert sum(-(-n // config.prefill_block) for _, n in step.prefills) <= self.blocks
        for seq, n in step.prefills:
            assert seq.num_pending_tokens > 1
            assert n == seq.num_pending_tokens or (n > 0 and n % config.prefill_block == 0)
        adapters = {seq.adapter for seq in self.running} - {None}
        assert config.max_loras is None or len(adapters) <= config.max_loras
        assert sum(-(-a.rank // 8) * 8 for a in adapters) <= config.max_rank_rows
        assert len(set(step.adapters)) == len(step.adapters)
        assert set(step.adapters) == {seq.adapter for seq in sequences} - {None}
        for adapter in step.adapters:
            assert self.cache.references(adapter) == sum(seq.adapter is adapter for seq in self.running)
            assert self.written[adapter] == self.cache.pages_of(adapter)
        assert self.allocator.count(PageKind.ADAPTER) <= self.cache.max_adapter_pages
        owners = [page for seq in self.running for page in seq.page_ids]
        owners += [page for adapter in self.cache.residents() for page in self.cache.pages_of(adapter)]
        assert len(set(owners)) == len(owners)
        assert len(owners) + self.allocator.num_free == self.allocator.num_total
        for seq, n in [(seq, 1) for seq in step.decodes] + step.prefills:
            assert len(seq.page_ids) * PAGE_TOKENS >= seq.num_computed_tokens + n

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        steps_allowed = sum(seq.max_total_tokens for seq in [*self.running, *(seq for seq, _ in self.waiting.values())])
        while self.scheduler.has_unfinished():
            self.one_step()
            steps_allowed -= 1
            assert steps_allowed >= 0
        assert self.scheduler.schedule() is None
        for adapter in self.cache.residents():
            self.cache.unpin(adapter)
        self.cache.evict_idle(self.allocator.num_total)
        self.scheduler.check_integrity()
        assert self.allocator.num_free == self.allocator.num_total


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
