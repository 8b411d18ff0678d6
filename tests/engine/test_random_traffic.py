"""Hundreds of random requests over more adapters than the pool holds: every answer right, nothing left behind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from multilora_jax.request import LoRARequest, SamplingParams
from tests.lora.fake_adapter import FakeAdapter
from tests.tiny_engine import Request, greedy, make_adapter, run_all, tiny_engine

NUM_REQUESTS, NUM_ADAPTERS, POOL_PAGES = 500, 40, 97


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    maker, folder = tiny_engine(enable_lora=False), tmp_path_factory.mktemp("adapters")
    ranks = [1, 2, 3, 4, 6, 8, 12, 16]
    return [make_adapter(folder / f"a{i}", maker, ranks[i % 8], i, delta_std=0.15) for i in range(NUM_ADAPTERS)]


@pytest.fixture(scope="module")
def jobs(loras):
    """Two prompts of each adapter and of the base, greedy or sampled, and what each gives when it runs alone.

    Greedy jobs whose text hangs on a margin that rounding could turn are left out.
    """
    engine = tiny_engine(max_num_seqs=2, max_rank_rows=16, max_lora_rank=16)
    rng, found = np.random.default_rng(0), []
    for number, lora in enumerate([None, *loras] * 2):
        prompt = rng.integers(0, 256, int(rng.choice([1, 4, 9, 20, 45, 70]))).tolist()
        length = 60 if number % 4 == 3 else 12
        if number % 4 and number % 8 != 7:
            params = greedy(length, logprobs=2)
        else:
            params = SamplingParams(temperature=0.9, top_p=0.95, seed=number, max_tokens=length, ignore_eos=True)
        (alone,) = run_all(engine, [Request(prompt, params, lora)])
        entries = alone.outputs[0].logprobs or []
        best = [sorted((x.logprob for x in entry.values()), reverse=True) for entry in entries]
        if all(first - second > 1e-3 for first, second, *_ in best):
            job = Request(prompt, dataclasses.replace(params, logprobs=None), lora)
            found.append((job, list(alone.outputs[0].token_ids)))
    assert len(found) > 60
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["read first", "run ahead"])
def engine(loras, request):
    """96 pages, six sequences, two sizes of row buffers; the adapters take six pages each on average."""
    engine = tiny_engine(
        pool_pages=POOL_PAGES, max_num_seqs=6, max_rank_rows=64, max_lora_rank=16, narrow=False,
        async_scheduling=request.param,
    )  # fmt: skip
    engine.runner.shapes = [engine.runner.shapes[1], engine.runner.shapes[-1]]
    for lora in loras:
        engine.add_lora(lora)
    assert sum(adapter.num_pages for adapter in engine.list_loras()) > 2 * POOL_PAGES
    return engine


def drive(engine, jobs, num_requests: int, seed: int) -> int:
    """Submits random jobs at random moments, aborts some; returns the most adapters resident at once."""
    rng = np.random.default_rng(seed)
    popularity = rng.permutation(np.arange(1, len(jobs) + 1) ** -0.5)
    expected, aborted, done, most_resident = {}, set(), {}, 0
    while len(expected) < num_requests or engine.has_unfinished_requests():
        for _ in range(min(rng.poisson(1.5), num_requests - len(expected))):
            (prompt, params, lora), answer = jobs[rng.choice(len(jobs), p=popularity / popularity.sum())]
            params = dataclasses.replace(params, max_tokens=int(rng.integers(1, params.max_tokens + 1)))
            by_name = lora and LoRARequest(lora.name, lora.lora_int_id)
            request_id = str(len(expected))
            engine.add_request(request_id, prompt, params, by_name)
            expected[request_id] = answer[: params.max_tokens]
        live = expected.keys() - done.keys() - aborted
        if live and rng.random() < 0.04:
            victim = str(rng.choice(sorted(live, key=int)))
            assert engine.abort_request(victim)
            aborted.add(victim)
        for output in engine.step():
            assert output.request_id not in aborted
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        engine.check_integrity()
        most_resident = max(most_resident, len(engine.stats().resident))

    assert len(done) + len(aborted) == num_requests
    assert num_requests // 50 < len(aborted) < num_requests // 2
    assert {request_id for request_id, tokens in done.items() if tokens != expected[request_id]} == set()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_kv) == (0, 0, 0)
    return most_resident


def test_500_requests_over_40_adapters(engine, jobs):
    most_resident = drive(engine, jobs, NUM_REQUESTS, seed=1)
    assert 10 <= most_resident <= 30
    assert engine.stats().adapter_evictions > 50


def test_traffic_that_must_preempt(engine, jobs):
    """With most pages taken by somebody else, running texts run out of pages and start over; no answer changes."""
    engine.cache.order.evict(list(engine.cache.order))
    others = FakeAdapter("others", num_pages=76)
    assert engine.cache.reserve(others)
    engine.cache.take_writes()
    assert engine.cache.acquire(others)
    sizes = {adapter.name: adapter.num_pages for adapter in engine.list_loras()}
    growing = [job for job in jobs if len(job[1]) == 60 and (job[0].lora is None or sizes[job[0].lora.lora_name] < 5)]
    assert len(growing) > 5
    try:
        before = engine.stats().num_preemptions
        drive(engine, growing, 200, seed=2)
        assert engine.stats().num_preemptions - before > 3
    finally:
        engine.cache.release(others)
        engine.cache.drop(others)


def test_nothing_is_left_once_the_adapters_are_gone(engine, jobs, loras):
    run_all(engine, [job for job, _ in jobs[:20]])
    assert engine.stats().pages_adapter > 0
    for lora in loras:
        engine.remove_lora(lora.name)
    stats = engine.stats()
    assert (stats.pages_free + stats.pages_cached, stats.pages_adapter, stats.resident) == (POOL_PAGES - 1, 0, [])
    engine.check_integrity()
