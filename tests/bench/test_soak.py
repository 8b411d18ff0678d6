"""`bench soak`: it finds what is lost and what leaks; and a short one of the real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable

import pytest

from multilora_jax.bench import soak
from multilora_jax.bench.soak_clients import Clients
from multilora_jax.config import EngineConfig
from multilora_jax.server.connections import ConnectionLimits
from multilora_jax.server.thread import http_thread
from tests.server.fake_engine import GOLDEN, FakeEngine
from tests.server.harness import Server, wait_for
from tests.server.real_server import RealServer
from tests.tiny_engine import narrowed

pytestmark = pytest.mark.anyio
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
PATIENCE_S = 120.0
"""A busy machine is no failure."""

PATHS = {name: str(GOLDEN / "cases" / case) for name, case in (("a", "all_linear"), ("b", "attn_only"))}


@pytest.fixture
def server():
    server = Server(FakeEngine(max_model_len=400, step_seconds=0.001, adapter_roots=(str(GOLDEN / "cases"),)))
    yield server
    server.close()


KINDS = {"whole", "stream", "chat", "slow", "cancel", "deaf", "malformed", "manage"}


async def drive(port: int, until: Callable[[Clients], bool], number: int, managers: int, patience_s: float) -> Clients:
    """Lets clients at a server until enough has come of it, however long that takes on a busy machine."""
    clients = Clients("127.0.0.1", port, "base", PATHS, 0, patience_s)
    tasks = [asyncio.create_task(clients.run(i, managers)) for i in range(number)]
    await wait_for(lambda: clients.ledger.faults or until(clients), PATIENCE_S)
    clients.stop()
    await asyncio.gather(*tasks)
    return clients


def has_done_everything(clients: Clients) -> bool:
    """Whether every kind of client has come to an end often enough to say something."""
    outcomes = clients.ledger.outcomes
    ended = Counter(key.split(":")[0] for key in outcomes.elements())
    whole = all(outcomes[f"{kind}: 200"] > 3 for kind in ("whole", "stream", "chat"))
    return whole and all(ended[kind] > 2 for kind in KINDS) and ended.total() > 100


async def check_soak(server: Server | RealServer) -> None:
    with http_thread(server.app, ConnectionLimits(500, 30.0)) as port:
        clients = await drive(port, has_done_everything, number=40, managers=3, patience_s=PATIENCE_S)
        ledger = clients.ledger
        assert not ledger.faults
        assert ledger.sent.total() == ledger.outcomes.total()
        assert ledger.tokens > 20
        await wait_for(lambda: server.async_engine.num_live_requests == 0, PATIENCE_S)


async def test_every_kind_of_client_gets_what_it_should(server):
    await check_soak(server)
    assert not server.engine.requests


@pytest.mark.slow
async def test_a_soak_of_the_real_engine(configs):
    """Everything at once, until enough of each has come to an end; nothing lost, nothing held, sound books."""
    roots = (str(GOLDEN / "cases"),)
    real = RealServer(
        "tied", configs / "tiny_model", adapter_roots=roots, max_num_seqs=8, warm_up=False,
        chat_template="{{ messages[0].content }}>",
    )  # fmt: skip
    narrowed(real.engine)
    real.engine.warm_up()
    try:
        await check_soak(real)
        await wait_for(real.free_of_requests, PATIENCE_S)
    finally:
        real.close()  # which proves the books


EVENT = b'data: {"choices": []}\n\n'
HEAD = b"HTTP/1.1 %s\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
ANSWERS = {
    "drops": b"", "fails": HEAD % b"500 Oh" + CHUNK + b"0\r\n\r\n", "cuts": HEAD % b"200 OK" + CHUNK,
    "unended": HEAD % b"200 OK" + CHUNK + b"0\r\n\r\n",
}  # fmt: skip
"""Fault of a server to the bytes that it answers every request with before it hangs up."""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("drops", "lost (BrokenAnswer: no answer"), ("never", "lost, nothing came"), ("fails", "500 for"),
        ("cuts", "lost (BrokenAnswer: the answer broke off"), ("unended", "a stream without its end"),
    ],
)  # fmt: skip
async def test_what_is_lost_is_seen(fault, words):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
            if fault != "never":
                writer.write(ANSWERS[fault])
                await writer.drain()
                writer.write_eof()
            while await reader.read(1 << 16):  # until the client has gone: a reset would take the answer from it
                pass
        writer.close()

    def is_seen(clients: Clients) -> bool:
        return any(fault.startswith(words) for fault in clients.ledger.faults)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    clients = await drive(port, is_seen, number=6, managers=0, patience_s=1.0 if fault == "never" else PATIENCE_S)
    listener.close()
    await listener.wait_closed()
    assert not [outcome for outcome in clients.ledger.outcomes if outcome == "whole: 200"]


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


@pytest.mark.slow
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
