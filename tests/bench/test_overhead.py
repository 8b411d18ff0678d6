"""`bench overhead`: a small run, and the client that it measures with."""

from __future__ import annotations

import pytest

from multilora_jax.bench import overhead
from multilora_jax.bench.overhead_client import run_round
from multilora_jax.config import EngineConfig
from multilora_jax.request import RequestMetrics, RequestOutput
from multilora_jax.server.connections import ConnectionLimits
from multilora_jax.server.thread import http_thread

COMPLETIONS = "/v1/completions"


@pytest.fixture
def server():
    from tests.server.fake_engine import FakeEngine
    from tests.server.harness import Server

    server = Server(FakeEngine())
    yield server
    server.close()


@pytest.mark.anyio
async def test_the_client_counts_pieces_and_times(server):
    body = {"model": "base", "prompt": "hi", "max_tokens": 6, "stream": True, "ignore_eos": True}
    with http_thread(server.app, ConnectionLimits(10, 30.0)) as port:
        done = await run_round("127.0.0.1", port, COMPLETIONS, [body] * 5, 2)
        with pytest.raises(RuntimeError, match="404"):
            await run_round("127.0.0.1", port, COMPLETIONS, [body | {"model": "none"}], 1)
    assert 10 <= done["pieces"] <= 5 * 7
    assert len(done["e2e_ms"]) == len(done["ttft_ms"]) == 5
    assert all(0 < first <= whole for first, whole in zip(done["ttft_ms"], done["e2e_ms"], strict=True))
    assert done["seconds"] > 0


def test_a_steady_slowdown_changes_no_ratio():
    clock, calls = 0.0, []

    def round_of(name: str, speed: float):
        def run() -> float:
            nonlocal clock
            calls.append(name)
            clock += 1
            return clock / speed

        return run

    row = overhead.compare(round_of("offline", 1.0), round_of("http", 0.8), 2, tokens=30)
    assert calls == ["offline", "http", "http", "offline"]
    assert row["ratio"] == pytest.approx(0.8)
    assert row["offline"] == pytest.approx(2 * 30 / (1 + 4))
    assert row["http"] == pytest.approx(0.8 * row["offline"])
    assert (row["least"], row["most"]) == pytest.approx((0.8 * 1 / 2, 0.8 * 4 / 3))


def test_what_http_adds_is_counted_beyond_the_steps():
    output = RequestOutput("x", None, [1], None, [], True, metrics=RequestMetrics(1.0, 1.5, 1.75, 2.0))
    assert overhead._step_ms(output) == pytest.approx(500)


@pytest.mark.slow
def test_a_small_run(configs):
    config = EngineConfig.from_yaml(configs / "tiny.yaml", {"max_num_seqs": 4, "max_num_batched_tokens": 32})
    work = overhead.Workload(streams=4, input_len=8, output_len=16, rounds=2, singles=3, requests=10)
    report = overhead.measure(config, work)
    streams, *singles, requests = report["rows"]
    assert streams["ratio"] == pytest.approx(streams["http"] / streams["offline"])
    assert streams["least"] <= streams["ratio"] <= streams["most"]
    assert len(streams["rounds"]) == 2
    assert [row["measure"] for row in singles] == [
        "ms, one request of 1, p50", "ms, one request of 16, p50", "ms, one stream of 16, p50"
    ]  # fmt: skip
    for row in singles:
        assert len(row["own_ms"]) == len(row["http_ms"]) == len(row["added_ms"]) == 3
        assert all(0 < added < whole for added, whole in zip(row["added_ms"], row["http_ms"], strict=True))
    assert requests["http"] > 0
    assert "tokens/s, 4 streams" in overhead.show(report)
