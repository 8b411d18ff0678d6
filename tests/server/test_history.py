"""The last minutes' figures: buckets, quantiles, totals by adapter."""

from __future__ import annotations

import pytest

from multilora_jax.request import CompletionOutput, LoRARequest, RequestMetrics, RequestOutput
from multilora_jax.server import history as module
from multilora_jax.server.history import History


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def output(request_id, tokens, *, adapter=None, finished=False, waited=0.5, prompt=10, cached=0):
    metrics = RequestMetrics(arrival_time=0.0)
    metrics.first_token_time = waited
    names = adapter if isinstance(adapter, list) else [adapter] if adapter else []
    loras = [LoRARequest(name, 1, "x") for name in names]
    return RequestOutput(
        request_id, None, [0] * prompt, None, [CompletionOutput(0, "", [0] * tokens)], finished, metrics=metrics,
        lora_request=(loras[0] if len(loras) == 1 else loras) or None, num_cached_tokens=cached,
    )  # fmt: skip


def test_tokens_are_counted_once_in_the_bucket_of_their_time(clock):
    history = History(2.0, 5, clock)
    history.observe(output("a", 1))
    history.observe(output("a", 3))
    clock.now = 102.0
    history.observe(output("a", 4, finished=True))
    assert history.points(50) == [(50, 3, 10, 0.5, 0.5), (51, 1, 0, None, None)]
    assert history.points(51) == [(51, 1, 0, None, None)]


def test_silence_is_shown_and_old_buckets_go(clock):
    history = History(1.0, 3, clock)
    history.observe(output("a", 5, finished=True))
    clock.now = 102.0
    assert [point[:2] for point in history.points()] == [(100, 5), (101, 0), (102, 0)]
    clock.now = 103.0
    assert [point[:2] for point in history.points()] == [(101, 0), (102, 0), (103, 0)]


def test_quantiles_of_first_token_times(clock):
    history = History(2.0, 5, clock)
    for i in range(100):
        history.observe(output(f"r{i}", 1, waited=(i + 1) / 100, finished=True))
    _, generated, prompt, median, most = history.points()[-1]
    assert (generated, prompt, median, most) == (100, 1000, 0.51, 0.96)


def test_totals_by_adapter(clock):
    history = History(clock=clock)
    history.observe(output("a", 2, adapter="x", cached=4))
    history.observe(output("a", 6, adapter="x", finished=True, cached=4))
    history.observe(output("b", 1, adapter=["x", "y"], finished=True))
    history.observe(output("c", 9, finished=True))
    x, y = history.totals("x"), history.totals("y")
    assert (x.requests, x.prompt_tokens, x.cached_tokens, x.tokens) == (2, 20, 4, 7)
    assert (y.requests, y.tokens) == (1, 1)
    assert history.totals("never").requests == 0


def test_a_server_with_ever_new_names_does_not_grow(clock, monkeypatch):
    monkeypatch.setattr(module, "MAX_NAMES", 3)
    monkeypatch.setattr(module, "MAX_LIVE", 3)
    history = History(clock=clock)
    for i in range(50):
        history.observe(output(f"r{i}", 1, adapter=f"n{i}"))
    assert len(history._totals) == len(history._live) == 3
    assert history.totals("n49").tokens == 1
