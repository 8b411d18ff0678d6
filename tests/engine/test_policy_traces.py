"""Random traces through scheduler, allocator, cache and transfers under every policy; reported faults under load."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.engine.policies import POLICIES, Policy, PolicyConfig, make_policy
from multilora_jax.engine.policies.cluster import Cluster
from multilora_jax.engine.policies.fair import Fair
from multilora_jax.engine.step_plan import ScheduledStep, max_blocks
from multilora_jax.errors import UserError
from multilora_jax.memory.allocator import PageKind
from multilora_jax.request import FinishReason
from tests.engine.scheduler_bench import Bench, FakeAdapter, ran

NAMES = sorted(POLICIES)
NUM_ADAPTERS = 5
# rounds since the one before, prompt and new tokens, adapters, priority, tenant, continuations, what else happens then
REQUESTS = st.tuples(
    st.sampled_from([0, 0, 0, 1, 4]),
    st.one_of(st.integers(2, 5), st.integers(1, 40)),
    st.integers(1, 12),
    st.lists(st.integers(0, NUM_ADAPTERS - 1), max_size=2, unique=True),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from(["", "x", "y"]),
    st.sampled_from([1, 1, 1, 1, 2]),
    st.sampled_from([None, None, None, None, "abort", "swap", "evict"]),
)
OPTIONS = st.fixed_dictionaries({
    "num_pages": st.integers(14, 40), "max_num_seqs": st.integers(1, 6), "max_loras": st.sampled_from([None, 1, 2]),
    "max_rank_rows": st.integers(4, 8).map(lambda n: 8 * n), "max_overtakes": st.integers(0, 4),
    "max_overtake_s": st.sampled_from([None, 0.0, 0.5]), "max_seqs_per_adapter": st.sampled_from([None, None, 1, 2]),
    "max_queued_requests": st.sampled_from([None, None, 3]), "adapter_requests_per_s": st.sampled_from([None, 2.0]),
    "adapter_request_burst": st.sampled_from([2, 50]), "target_step_s": st.sampled_from([None, 0.01]),
    "long_prefill_token_threshold": st.sampled_from([None, 5]), "lookahead": st.integers(1, 8),
    "max_scan": st.integers(1, 8), "delay": st.integers(0, 3), "caching": st.booleans(),
    "pages_per_step": st.integers(1, 4), "prefetch": st.booleans(), "max_adapter_pages": st.sampled_from([None, 7]),
    "split": st.booleans(), "prefill_block": st.sampled_from([8, 32]),
})  # fmt: skip


def check_step(bench: Bench, step: ScheduledStep) -> None:
    """No budget is exceeded."""
    config, users = bench.scheduler.config, bench.scheduler.active.users
    sequences = [*step.decodes, *(seq for seq, _ in step.prefills)]
    adapters = {adapter for seq in sequences for adapter in seq.adapters}
    assert len(sequences) <= bench.scheduler.num_running <= config.max_num_seqs
    assert len(adapters) <= (config.max_loras or len(adapters))
    assert sum(config.rank_rows(adapter.num_rows) for adapter in adapters) <= config.max_rank_rows
    assert step.num_prompt_tokens <= config.max_num_batched_tokens
    blocks = sum(-(-n // config.prefill_block) for _, n in step.prefills)
    assert blocks <= max_blocks(config.max_num_batched_tokens, config.prefill_block)
    assert all(n <= (config.long_prefill_token_threshold or n) for _, n in step.prefills)
    assert max(users.values(), default=0) <= (config.max_seqs_per_adapter or 99)
    allocator, cache = bench.allocator, bench.cache
    adapter_pages = allocator.count(PageKind.ADAPTER)
    assert adapter_pages <= cache.max_adapter_pages
    if cache.is_split:
        assert allocator.num_total - allocator.num_free - adapter_pages <= allocator.num_total - cache.max_adapter_pages


def check_forgotten(policy: Policy) -> None:
    """A policy keeps nothing of sequences that have ended."""
    if isinstance(policy, Fair):
        assert not policy._queued
        assert not +policy._waiting
    if isinstance(policy, Cluster):
        assert not any(line.waiting for line in policy._lines.values())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(requests=st.lists(REQUESTS, min_size=1, max_size=25), options=OPTIONS, objective=st.sampled_from([0.3, 100.0]))
def test_every_request_ends_and_nothing_is_left(
    name: str, requests: list[tuple[Any, ...]], options: dict[str, Any], objective: float
) -> None:
    policy = make_policy(PolicyConfig(
        name, first_token_objective_s=objective, cluster_adapters=1, max_overtakes=options["max_overtakes"],
        max_overtake_s=options["max_overtake_s"], max_num_seqs=options["max_num_seqs"], fair_spare_seats=1,
        fair_weights={"x": 3.0, "a1": 0.5},
    ))  # fmt: skip
    options["split"] &= options["max_adapter_pages"] is not None
    bench = Bench(scheduling=policy, prompt_sizes=(8, 16, 32), **options)
    adapters = [FakeAdapter(f"a{i}", 1 + i % 3, rank=1 + 7 * (i % 4), digest=str(i)) for i in range(NUM_ADAPTERS)]
    everyone, live = set(adapters), dict[str, list[Any]]()
    at, num_rounds = 0, 0
    refusals: dict[str, bool] = {}
    for i, (pause, prompt, output, which, priority, tenant, n, event) in enumerate(requests):
        at += pause
        while num_rounds < at:
            num_rounds += 1
            one_round(bench, live)
        mix = tuple(adapters[k] for k in which)
        try:
            live[f"r{i}"] = bench.add_all(f"r{i}", [1] * prompt, output, mix, priority, None, n, tenant)
        except UserError as error:
            refusals[error.reason] = error.retry_after_s is not None
        happen(event, i, bench, adapters)
        everyone.update(adapters)
    most = 400 + 60 * len(requests)  # rounds: far more than tokens and loads take one after the other
    for _ in range(most):
        if not bench.scheduler._live:
            break
        one_round(bench, live)
    bench.drain(max_steps=0)
    later, never = {"queue_full", "adapter_rate"}, {"request_too_large", "mix_too_large", "adapter_too_large"}
    assert refusals.keys() <= later | never
    assert all(again == (reason in later) for reason, again in refusals.items())
    assert all(seq.finished and not seq.page_ids for family in live.values() for seq in family)
    if name not in ("abort", "deadline") or objective == 100:
        assert not bench.given_up
    assert not any(bench.cache.references(adapter) for adapter in everyone)
    assert not bench.scheduler.active.users
    check_forgotten(policy)


def happen(event: str | None, number: int, bench: Bench, adapters: list[FakeAdapter]) -> None:
    """A client hangs up, an adapter gets a new version while requests for the old one are live, idle ones go."""
    live = sorted(bench.scheduler._live)
    if event == "abort" and live:
        bench.scheduler.abort(live[number % len(live)])
    elif event == "swap":
        old = adapters[number % NUM_ADAPTERS]
        bench.cache.drop(old)
        adapters[number % NUM_ADAPTERS] = FakeAdapter(old.name, old.num_pages, rank=old.rank, digest=f"new{number}")
    elif event == "evict":
        bench.evict_all()
    bench.scheduler.check_integrity()


def one_round(bench: Bench, live: dict[str, list[Any]]) -> None:
    bench.now += 0.05
    step = bench.schedule()
    given_up = {request_id for request_id, _ in bench.given_up}
    assert all(error.reason == "first_token_objective" for _, error in bench.given_up)
    for family in live.values():
        ids = {seq.request_id for seq in family if seq.finish_reason is not FinishReason.ABORT}
        assert not ids & given_up or (ids <= given_up and all(seq.first_scheduled_time is None for seq in family))
    if step is not None:
        check_step(bench, step)
        bench.run(step)
        bench.scheduler.saw_step(step, 0.001 * (step.num_prompt_tokens + 1))
        bench.scheduler.check_integrity()


# Reported faults: docs of vLLM's and SGLang's issue trackers call them head-of-line blocking and thrash.


@pytest.mark.parametrize("name", NAMES)
def test_whoever_can_run_passes_one_that_waits_for_a_slot(name):
    """D16: two slots busy with long A and B; of C, base, A in the queue the latter two start before C."""
    policy = make_policy(PolicyConfig(name, first_token_objective_s=1e9, max_num_seqs=8))
    bench = Bench(scheduling=policy, max_loras=2)
    a, b, c = (FakeAdapter(x) for x in "abc")
    bench.add("A", output=60, adapter=a)
    bench.add("B", output=60, adapter=b)
    bench.step()
    for i in range(6):  # load: more of both kinds behind
        bench.add(f"C{i}", adapter=c)
        bench.add(f"base{i}", output=2)
        bench.add(f"A{i}", output=2, adapter=a)
    order: list[str] = []
    while bench.scheduler._live:
        bench.now += 0.01
        order += [x for x in ran(bench.step()) if x not in order]
    first_c = min(order.index(f"C{i}") for i in range(6))
    assert all(order.index(f"{x}{i}") < first_c for x in ("base", "A") for i in range(6))


@pytest.mark.parametrize("name", NAMES)
def test_adapters_that_take_turns_are_loaded_for_several_requests_each(name):
    """D17: twice as many adapters as the pool holds, in turn, with a queue: far fewer loads than requests."""
    policy = make_policy(PolicyConfig(name, first_token_objective_s=1e9, max_num_seqs=4))
    bench = Bench(
        num_pages=35,
        max_adapter_pages=8,
        scheduling=policy,
        max_num_seqs=4,
        delay=2,
        pages_per_step=1,
        max_rank_rows=32,
    )
    adapters = [FakeAdapter(f"a{i}", 2) for i in range(8)]  # of which four fit
    arrived = 0
    while arrived < 160 or bench.scheduler._live:
        while arrived < 160 and bench.scheduler.num_waiting < 48:
            bench.add(f"r{arrived}", output=3, adapter=adapters[arrived % 8])
            arrived += 1
        bench.now += 0.01
        decoding = [e.seq for e in bench.scheduler._running.values() if e.seq.num_pending_tokens == 1]
        step = bench.schedule()
        assert step is not None or not decoding
        if step is not None:
            # Whoever decodes goes on in every step, whatever is being loaded.
            assert all(seq in step.decodes or seq in step.preempted or seq.finished for seq in decoding)
            bench.run(step)
    assert len(bench.finished) == 160
    assert bench.cache.loads < 0.5 * 160


@pytest.mark.parametrize("name", NAMES)
def test_steps_run_while_adapters_load(name):
    """D17: beside a load that takes many steps, decodes go on in each of them and the base's requests start."""
    policy = make_policy(PolicyConfig(name, first_token_objective_s=1e9, max_num_seqs=8))
    bench = Bench(scheduling=policy, max_num_seqs=8, delay=2, pages_per_step=1, max_rank_rows=256)
    here = FakeAdapter("here")
    bench.add("long", output=60, adapter=here)
    while not bench.scheduler.num_running:
        bench.step()
    beside_loads = 0
    for i in range(5):
        cold = FakeAdapter(f"cold{i}", 6)
        bench.add(f"cold{i}", output=2, adapter=cold)
        bench.add(f"base{i}", output=2)
        while not bench.cache.is_ready(cold):
            bench.now += 0.01
            step = bench.schedule()
            assert step is not None
            assert "long" in ran(step)
            beside_loads += bench.cache.is_loading(cold)
            bench.run(step)
        assert f"base{i}" in bench.finished
    assert beside_loads == 5 * 5  # of a load's six steps all but the last, with which it is ready
    bench.drain()
