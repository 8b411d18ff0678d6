"""Connections that are too many, clients that do not read or do not write: bounded, and nobody else's business."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress

import httpx
import pytest

from multilora_jax.bench.raw_http import BrokenAnswer, Connection, ask, events_of
from multilora_jax.server import connections
from multilora_jax.server.connections import ConnectionLimits, fit_descriptors
from multilora_jax.server.thread import http_thread
from tests.server.fake_engine import GOLDEN
from tests.server.harness import wait_for

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
GOOD = {"model": "base", "prompt": "hi", "max_tokens": 5}


@contextmanager
def serving(server, max_connections=50, client_timeout_s=30.0):
    with http_thread(server.app, ConnectionLimits(max_connections, client_timeout_s)) as port:
        yield port


@asynccontextmanager
async def connected_to(server, **limits):
    with serving(server, **limits) as port:
        connection = await Connection.open("127.0.0.1", port)
        try:
            yield connection
        finally:
            connection.abort()


def open_sockets(stack: ExitStack, port: int, number: int) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(number)]


def is_open(connection: socket.socket) -> bool:
    """Whether the server has not cut it (so far)."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


async def test_a_connection_too_many_is_told_so_and_probes_are_answered(server):
    with serving(server, max_connections=3) as port, ExitStack() as stack:
        held = open_sockets(stack, port, 3)
        await asyncio.sleep(0.5)
        status, body = await ask("127.0.0.1", port, "POST", COMPLETIONS, GOOD)
        assert (status, json.loads(body)["error"]["reason"]) == (503, "too_many_connections")
        answer = httpx.post(f"http://127.0.0.1:{port}{COMPLETIONS}", json=GOOD)
        assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
        assert (await ask("127.0.0.1", port, "GET", "/health"))[0] == 200
        assert (await ask("127.0.0.1", port, "GET", "/metrics"))[0] == 200
        held[0].close()
        await asyncio.sleep(0.1)
        assert (await ask("127.0.0.1", port, "POST", COMPLETIONS, GOOD))[0] == 200


async def test_thousands_of_connections_cost_no_more_than_the_bound(make_server, monkeypatch):
    """Those far beyond the bound are cut at once, and whoever was there before goes on."""
    monkeypatch.setattr(connections, "SPARE_CONNECTIONS", 5)
    server = make_server(step_seconds=0.001, max_model_len=2000)
    with serving(server, max_connections=20) as port:
        stream = await Connection.open("127.0.0.1", port)
        await stream.send("POST", COMPLETIONS, {**GOOD, "max_tokens": 1000, "stream": True})
        assert (await stream.head())[0] == 200
        with ExitStack() as stack:
            sockets = []
            for _ in range(20):
                sockets += open_sockets(stack, port, 100)
                await asyncio.sleep(0.01)
            await wait_for(lambda: sum(map(is_open, sockets)) == 24, seconds=60)
            assert events_of(await stream.whole())[-1] == "[DONE]"
        stream.abort()
        await asyncio.sleep(0.2)
        assert (await ask("127.0.0.1", port, "POST", COMPLETIONS, GOOD))[0] == 200


@pytest.mark.parametrize("start", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                                   b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"])  # fmt: skip
async def test_a_request_that_never_ends_is_cut_off(server, start):
    async with connected_to(server, client_timeout_s=0.4) as connection:
        await connection.send_raw(start)
        begun = time.monotonic()
        with pytest.raises(BrokenAnswer):
            await connection.head()
        assert 0.3 < time.monotonic() - begun < 5


async def test_a_request_that_comes_slowly_is_served(server):
    async with connected_to(server, client_timeout_s=0.4) as connection:
        data = json.dumps(GOOD).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        for byte in (head + f"Content-Length: {len(data)}\r\n\r\n").encode() + data:
            await connection.send_raw(bytes([byte]))
            await asyncio.sleep(0.01)
        assert (await connection.head())[0] == 200


async def test_a_request_that_takes_long_is_not_cut_off(server):
    """The server's own slowness is not the client's."""
    server.engine.gate.clear()
    with serving(server, client_timeout_s=0.2) as port:
        answers = [
            asyncio.create_task(ask("127.0.0.1", port, "POST", COMPLETIONS, {**GOOD, "stream": s}))
            for s in (False, True)
        ]
        await asyncio.sleep(1.0)
        server.engine.gate.set()
        assert [status for status, _ in await asyncio.gather(*answers)] == [200, 200]


async def test_d14_a_client_that_reads_nothing_is_cut_off_and_its_request_ends(make_server):
    """Memory for it is bounded meanwhile, others are not held up, and its place comes free."""
    long_name = "😀" * 256  # a kilobyte, twice in each event
    modules = {long_name: str(GOLDEN / "cases" / "all_linear")}
    server = make_server(max_model_len=60_000, step_seconds=0.0005, lora_modules=modules)
    body = {"model": long_name, "prompt": "hi", "max_tokens": 50_000, "stream": True, "request_id": long_name}
    with serving(server, client_timeout_s=1.0) as port, ExitStack() as stack:
        [deaf] = open_sockets(stack, port, 1)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        data = json.dumps(body).encode()
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        )
        deaf.sendall(head.encode() + b"\r\n\r\n" + data)
        await wait_for(lambda: bool(server.engine.requests), seconds=60)
        begun, answered = time.monotonic(), 0
        while server.engine.requests:
            assert (await ask("127.0.0.1", port, "POST", COMPLETIONS, GOOD))[0] == 200
            answered += 1
            assert time.monotonic() - begun < 120
        assert answered > 3
        await wait_for(lambda: server.async_engine.num_live_requests == 0, seconds=60)
        assert time.monotonic() - begun < 25  # the text would have taken longer
        deaf.settimeout(1)
        with suppress(ConnectionError, TimeoutError):  # cut, not ended in order; the rest may come very slowly
            while data := deaf.recv(1 << 16):
                assert b"[DONE]" not in data


async def test_a_client_that_reads_slowly_gets_all_of_it(make_server):
    server = make_server(max_model_len=10_000)
    server.engine.script["hi"] = b"x" * 3000
    async with connected_to(server, client_timeout_s=0.5) as connection:
        await connection.send("POST", COMPLETIONS, {**GOOD, "max_tokens": 3000, "stream": True})
        assert (await connection.head())[0] == 200
        body, begun = b"", time.monotonic()
        async for piece in connection.pieces():
            body += piece
            if time.monotonic() - begun < 1.5:
                await asyncio.sleep(0.02)
        events = events_of(body)
        assert events[-1] == "[DONE]"
        assert len("".join(event["choices"][0]["text"] for event in events[:-1])) == 3000


def test_descriptors_follow_the_connections_as_far_as_the_system_allows(monkeypatch, caplog):
    limits, made = [(256, 4096)], []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, value: made.append(value))
    assert fit_descriptors(ConnectionLimits(1000, 1.0)).max_connections == 1000
    assert made == [(1000 + 64 + 256, 4096)]
    limits[0], made[:] = (1024, 1024), []
    assert fit_descriptors(ConnectionLimits(1000, 1.0)).max_connections == 1024 - 64 - 256
    assert made == []
    assert "704 connections" in caplog.text
    limits[0] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert fit_descriptors(ConnectionLimits(10**6, 1.0)).max_connections == 10**6
    assert made == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_only_its_sending_side_counts_as_gone(make_server, stream):
    """TCP does not tell it from one that hung up, and the engine must not work on for those."""
    server = make_server(step_seconds=0.01, max_model_len=2000)
    server.engine.gate.clear()
    data = json.dumps({**GOOD, "max_tokens": 1000, "stream": stream}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    with serving(server) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        await wait_for(lambda: bool(server.engine.requests))
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(30)
        assert connection.recv(100) == b"", "told at once that there will be no answer"
        server.engine.gate.set()
        await wait_for(lambda: not server.engine.requests)
        assert server.engine.counts.steps < 1000
