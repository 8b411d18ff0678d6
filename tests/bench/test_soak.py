"""`bench soak`: it finds what is lost and what leaks; and a short one of the real server."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from multilora_jax.bench import soak
from multilora_jax.bench.soak_clients import Clients
from multilora_jax.config import EngineConfig
from multilora_jax.server.connections import ConnectionLimits
from multilora_jax.server.thread import http_thread
from tests.server.fake_engine import GOLDEN, FakeEngine
from tests.server.harness import Server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
PATHS = {name: str(GOLDEN / "cases" / case) for name, case in (("a", "all_linear"), ("b", "attn_only"))}


@pytest.fixture
def server():
    server = Server(FakeEngine(max_model_len=400, step_seconds=0.001, adapter_roots=(str(GOLDEN / "cases"),)))
    yield server
    server.close()


async def load(app, seconds=2.0, number=16, managers=2, patience_s=20.0, base="base") -> Clients:
    with http_thread(app, ConnectionLimits(500, 30.0)) as port:
        clients = Clients("127.0.0.1", port, base, PATHS, 0, patience_s)
        tasks = [asyncio.create_task(clients.run(i, managers)) for i in range(number)]
        await asyncio.sleep(seconds)
        clients.stop()
        await asyncio.gather(*tasks)
    return clients


async def test_every_kind_of_client_gets_what_it_should(server):
    clients = await load(server.app, seconds=5.0, number=30)
    ledger = clients.ledger
    assert not ledger.faults
    assert sum(ledger.sent.values()) == sum(ledger.outcomes.values()) > 100
    assert set(ledger.sent) == {"whole", "stream", "chat", "slow", "cancel", "deaf", "malformed", "manage"}
    assert ledger.outcomes["whole: 200"] > 3
    assert ledger.outcomes["stream: 200"] > 3
    assert ledger.tokens > 20
    assert not server.engine.requests
    assert server.async_engine.num_live_requests == 0


@pytest.mark.parametrize(
    ("fault", "words"),
    [("drops", "lost ("), ("never", "lost, nothing came"), ("fails", "500 for"), ("cuts", "lost (")],
)
async def test_what_is_lost_is_seen(fault, words):
    async def app(scope, receive, send):
        head = {"type": "http.response.start", "status": 500 if fault == "fails" else 200, "headers": []}
        if fault == "never":
            await asyncio.sleep(3)
        if fault != "drops":
            await send(head)
            await send(
                {"type": "http.response.body", "body": b'data: {"choices": []}\n\n', "more_body": fault == "cuts"}
            )
        raise RuntimeError("the connection ends here")

    clients = await load(app, seconds=0.5, managers=0, number=6, patience_s=1.0)
    assert any(fault.startswith(words) for fault in clients.ledger.faults), clients.ledger.faults


def rows(**columns) -> list[dict]:
    number = len(next(iter(columns.values())))
    return [{"second": 30.0 * i, "rss_mib": 800.0, "files": 60} | {k: v[i] for k, v in columns.items()}
            for i in range(number)]  # fmt: skip


def test_growth_is_told_from_noise_and_from_a_start():
    flat = [800 + 10 * (i % 3) for i in range(20)]
    assert soak.growth(rows(rss_mib=flat)) == []
    assert soak.growth(rows(rss_mib=[300 + 50 * min(i, 8) for i in range(20)])) == []
    [words] = soak.growth(rows(rss_mib=[800 + 10 * i for i in range(20)]))
    assert words.startswith("rss_mib grows: 90 MiB over the last 270 s")
    [words] = soak.growth(rows(files=[60 + 10 * i for i in range(20)]))
    assert "descriptors" in words


def test_a_report_says_what_failed():
    report = {"sent": 3, "streamed_pieces": 9, "outcomes": {"whole: 200": 2}, "failures": ["1 x lost"], "rows": []}
    assert "FAILED: 1 x lost" in soak.show(report)
    assert "the pool is sound" in soak.show(report | {"failures": []})


def test_a_short_soak_of_the_real_server(configs):
    """20 seconds of everything at once; nothing lost, nothing held, sound books (D14, D24, D28)."""
    config = EngineConfig.from_yaml(configs / "tiny.yaml", SMALL)
    work = soak.Workload(minutes=1 / 3, clients=40, managers=3, adapters=5, patience_s=300.0, samples=6)
    report = soak.measure(config, work)
    assert report["failures"] == [], soak.show(report)
    assert report["sent"] > 40
    assert len(report["rows"]) == 6
    assert json.dumps(report)
    assert os.path.basename(report["config"]["model"]) == "tiny_model"
