"""Clients that hang up, over real sockets: their requests stop and their pages come back (D14)."""

from __future__ import annotations

import json
import socket
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server.fake_engine import GOLDEN
from tests.server.harness import listening

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"model": "adapter-a", "prompt": "hi", "max_tokens": 5000},
    CHAT: {"model": "adapter-a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5000},
}


@pytest.fixture
def server(make_server):
    return make_server(step_seconds=0.002, max_model_len=10_000, max_num_seqs=2)


@contextmanager
def half_sent(address: str, path: str, body: dict):
    """A raw connection with the request sent and nothing read; closed abruptly at the end."""
    url = urlsplit(address)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(head.encode() + data)
        yield connection


def until(condition, seconds=2.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time allowed"
        time.sleep(0.01)


def assert_all_returned(server):
    """Within two seconds nothing runs, nothing waits and no page is held."""
    until(lambda: not server.engine.requests)
    stats = server.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_kv) == (0, 0, 0)
    assert server.async_engine.num_live_requests == 0


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_d14_closing_a_stream_after_its_first_chunk(server, path):
    with listening(server.app) as address:
        with httpx.stream("POST", address + path, json={**BODIES[path], "stream": True}, timeout=10) as response:
            lines = response.iter_lines()  # kept: httpx hangs up when the iterator is dropped
            assert next(lines).startswith("data: ")
            assert len(server.engine.requests) == 1
        assert_all_returned(server)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_d14_closing_a_stream_before_its_first_chunk(server, path):
    server.engine.gate.clear()
    with listening(server.app) as address:
        with half_sent(address, path, {**BODIES[path], "stream": True}):
            until(lambda: bool(server.engine.requests))
        time.sleep(0.1)
        server.engine.gate.set()
        assert_all_returned(server)
        assert server.engine.counts.steps <= 3


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_d14_closing_a_call_that_is_no_stream(server, path):
    with listening(server.app) as address:
        with half_sent(address, path, BODIES[path]):
            until(lambda: server.engine.counts.steps > 5)
            assert len(server.engine.requests) == 1
        assert_all_returned(server)


@pytest.mark.parametrize("stream", [True, False])
def test_d14_closing_requests_that_still_wait_and_those_of_several_prompts(server, stream):
    body = {**BODIES[COMPLETIONS], "prompt": ["a", "b", "c", "d"], "stream": stream}
    with listening(server.app) as address:
        with half_sent(address, COMPLETIONS, body):
            until(lambda: len(server.engine.requests) == 4)
            assert server.engine.stats().num_waiting == 2
        assert_all_returned(server)


def test_d14_others_are_not_disturbed(server):
    with listening(server.app) as address:
        with half_sent(address, COMPLETIONS, {**BODIES[COMPLETIONS], "stream": True}):
            until(lambda: bool(server.engine.requests))
        body = {"model": "base", "prompt": "hi", "max_tokens": 50}
        answer = httpx.post(address + COMPLETIONS, json=body, timeout=10).json()
        assert answer["usage"]["completion_tokens"] == 50
        assert_all_returned(server)


def test_a_reader_that_stops_reading_is_sent_newer_states_only(make_server):
    """States that could not be sent are replaced, not queued: what a slow client costs does not grow with its text."""
    long_name = "😀" * 256  # a kilobyte, twice in each event: 12 MB of events
    server = make_server(max_model_len=10_000, lora_modules={long_name: str(GOLDEN / "cases" / "all_linear")})
    server.engine.script["hi"] = b"x" * 5000
    body = {"model": long_name, "prompt": "hi", "max_tokens": 5000, "stream": True, "request_id": long_name}
    with listening(server.app) as address, half_sent(address, COMPLETIONS, body) as connection:
        until(lambda: server.engine.counts.steps == 5000, seconds=30)
        time.sleep(0.1)
        data = b""
        while b"[DONE]" not in data[-40:]:
            data += connection.recv(1 << 20)
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    assert len("".join(event["choices"][0]["text"] for event in events)) == 5000
    assert len(events) < 4900
