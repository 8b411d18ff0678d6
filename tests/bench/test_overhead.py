"""`bench overhead`: a small run, and the client that it measures with."""

from __future__ import annotations

import pytest

from multilora_jax.bench import overhead
from multilora_jax.bench.overhead_client import run_round
from multilora_jax.config import EngineConfig
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


@pytest.mark.slow
def test_a_small_run(configs):
    config = EngineConfig.from_yaml(configs / "tiny.yaml", {"max_num_seqs": 4, "max_num_batched_tokens": 32})
    work = overhead.Workload(streams=4, input_len=8, output_len=16, rounds=2, singles=3, requests=10)
    report = overhead.measure(config, work)
    streams, one, sixteen, requests = report["rows"]
    assert streams["http"] > 0
    assert streams["ratio"] > 0
    assert len(streams["rounds"]) == 2
    for row in (one, sixteen):
        assert row["added"] == pytest.approx(row["http"] - row["offline"])
        assert len(row["own_ms"]) == len(row["http_ms"]) == 3
    assert requests["http"] > 0
    assert "tokens/s, 4 streams" in overhead.show(report)
