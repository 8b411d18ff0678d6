"""Two processes that share one model: they answer together, and one that dies takes the other with it, clearly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.config import EngineConfig
from multilora_jax.engine.hosts import HostLostError, Hosts
from multilora_jax.errors import ConfigError
from tests.engine.test_tensor_parallel import worker_env

ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    """One of two neighbouring free ports, the lower."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@contextmanager
def processes(commands, num_devices):
    """Processes with pipes, killed at the end."""
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", *command], cwd=ROOT, env=worker_env(num_devices), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for command in commands
    ]  # fmt: skip
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("devices_each", [1, 2])
def test_two_hosts_give_the_reference(golden_tiny, devices_each):
    where, tp = f"127.0.0.1:{free_port()}", str(2 * devices_each)
    commands = [("tests.engine.multi_host_worker", str(rank), where, str(golden_tiny), tp) for rank in range(2)]
    with processes(commands, devices_each) as running:
        out, err = running[0].communicate(timeout=900)
        assert running[0].returncode == 0, err[-3000:]
        assert running[1].wait(timeout=60) == 0, running[1].communicate()[1][-3000:]
    facts = json.loads(out.splitlines()[-1])
    folders = ("bases/tied", "cases/all_linear", "cases/dora")
    assert facts["tokens"] == [
        load_file(golden_tiny / f / "expected.safetensors")["greedy.1"].tolist() for f in folders
    ]
    assert facts["pages_whole"]
    assert facts["pool_shards_here"] == [[2, 512, 512]] * devices_each  # one KV head on each device
    assert facts["live_numbers"] < 200  # what is not used any more is given up
    assert facts["dropped"] > 300


def serve_command(configs, where, rank, port):
    return (
        "multilora_jax.serve", "--config", str(configs / "tiny.yaml"), "--num-hosts", "2", "--host-rank", str(rank),
        "--coordinator", where, "--tensor-parallel-size", "2", "--port", str(port),
    )  # fmt: skip


def wait_until_ready(base, process, deadline_s=600.0):
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1][-3000:]
        try:
            if httpx.get(f"{base}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise TimeoutError("the server was not ready in time")


@pytest.mark.slow
def test_a_lost_host_ends_the_server_within_ten_seconds(configs):
    port, where = free_port(), f"127.0.0.1:{free_port()}"
    base = f"http://127.0.0.1:{port}"
    with processes([serve_command(configs, where, rank, port) for rank in range(2)], 1) as (first, second):
        wait_until_ready(base, first)
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{base}/v1/completions", json=body, timeout=600)
        assert answer.json()["usage"]["completion_tokens"] == 4
        seen = []

        def stream():
            body["max_tokens"], body["stream"] = 200, True
            try:
                with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as response:
                    for line in response.iter_lines():
                        seen.append(line)
            except httpx.HTTPError as error:
                seen.append(repr(error))

        reader = threading.Thread(target=stream)
        reader.start()
        while not seen:
            time.sleep(0.01)
        os.kill(second.pid, signal.SIGKILL)
        killed = time.monotonic()
        assert first.wait(timeout=60) == 1
        assert time.monotonic() - killed < 10
        reader.join(timeout=30)
        log = first.communicate()[1]
    assert "host 1 of 2 was lost" in log
    assert "restart all hosts" in log
    *tokens, error, done = [line for line in seen if line]
    assert "host_lost" in error or "was lost" in error
    assert done == "data: [DONE]"
    assert len(tokens) < 200
    assert not any("error" in line or "[DONE]" in line for line in tokens)


def host(rank, connection, **options):
    """One host of two with a connection to the other, without jax over both."""
    keys = {"num_hosts": 2, "host_rank": rank, "coordinator": "a:1", "tensor_parallel_size": 2}
    hosts = Hosts(config := EngineConfig.from_dict({"model": "m", **keys, **options}))
    hosts._peers = [connection]
    return hosts, config


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_a_follower_ends_with_the_first_host(pair, caplog):
    leader, _ = host(0, pair[0])
    follower, _ = host(1, pair[1])
    leader.stop()
    assert follower.follow(None) == 0
    pair[0].close()
    caplog.clear()
    assert follower.follow(None) == 1
    assert "host 0 was lost (the connection was closed): this host ends" in caplog.text


def test_what_fails_on_a_follower_is_told_to_the_first_host(pair, caplog):
    leader, _ = host(0, pair[0])
    follower, _ = host(1, pair[1])
    lost = []
    leader.on_lost(lost.append)
    leader.compile(("rows", 64))
    programs = SimpleNamespace(get=lambda *key: 1 / (len(key) - 2))
    assert follower.follow(programs) == 1
    leader._watch(1, pair[0])
    assert "host 1 of 2 was lost (ZeroDivisionError: division by zero)" in lost[0].message
    assert lost == [leader.lost]
    late = []
    leader.on_lost(late.append)
    assert late == lost
    pair[1].close()
    with pytest.raises(HostLostError, match="restart all hosts"):
        leader.compile(("rows", 64))


def test_hosts_of_different_configurations_do_not_start(pair):
    leader, config = host(0, pair[0], max_num_seqs=8)
    leader.agree(config, {"num_pages": 7})
    follower, config = host(1, pair[1], max_num_seqs=8, port=1234)
    assert follower.agree(config, {"num_pages": 9}) == {"num_pages": 7}
    leader.agree(config, {})
    follower, config = host(1, pair[1])
    with pytest.raises(ConfigError, match="max_num_seqs is 32 here and 8 on host 0"):
        follower.agree(config, {})


def test_what_fails_on_the_first_host_ends_the_group(pair):
    """The other has run the program: arrays would go by different numbers from now on."""
    leader, _ = host(0, pair[0])
    with pytest.raises(ZeroDivisionError):
        leader.call(("rows", 64), lambda: 1 / 0)
    assert "host 0 of 2 was lost (ZeroDivisionError: division by zero)" in str(leader.lost)
    sent = pair[1].recv(1 << 16)
    for call in (lambda: leader.call(("rows", 64), lambda: None), lambda: leader.put(np.zeros(1))):
        with pytest.raises(HostLostError, match="ZeroDivisionError.*restart all hosts"):
            call()
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)
    assert b"rows" in sent
