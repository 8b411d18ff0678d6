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

import httpx
import pytest
from safetensors.numpy import load_file

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
    assert any("error" in line for line in seen)
    assert "[DONE]" not in "".join(seen[:-1])


def test_a_follower_ends_when_the_first_host_does(configs):
    """Here before anything was loaded."""
    host, _, port = (where := f"127.0.0.1:{free_port()}").rpartition(":")
    server = socket.create_server((host, int(port) + 1))
    with server, processes([serve_command(configs, where, 1, 0)], 1) as (follower,):
        server.accept()[0].close()
        server.close()
        assert follower.wait(timeout=400) != 0
        assert follower.communicate()[1]
