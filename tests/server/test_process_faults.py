"""A server process whose disk is full, whose engine hangs, or that is told to end in the middle of something."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import GOLDEN

ROOT = Path(__file__).parent.parent.parent
ADAPTER = str(GOLDEN / "cases" / "all_linear")
START_S = 300
"""A busy machine is no failure."""


class Running:
    """A process that listens on a free port.

    Args:
        words: its arguments; PORT stands for the port.
        limits: of `ulimit`, by option.
        pipes: what its outputs go to.
    """

    def __init__(self, *words: str, limits: str = "", output: Any = subprocess.PIPE):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", *(str(self.port) if word == "PORT" else word for word in words)]
        shell = ["bash", "-c", f'{limits} exec "$@"', "bash", *command]
        self.popen = subprocess.Popen(shell, cwd=ROOT, stdout=output, stderr=output, text=True)
        deadline = time.monotonic() + START_S
        while True:
            try:
                if httpx.get(f"{self.address}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.popen.poll() is None, self.popen.communicate()
            assert time.monotonic() < deadline, "did not start"
            time.sleep(0.05)

    def stop(self, seconds: float = 60) -> int:
        """Sends SIGTERM; the exit status."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(seconds)


@pytest.fixture
def start():
    with ExitStack() as stack:

        def make(*words: str, **options: Any) -> Running:
            running = Running(*words, **options)
            stack.callback(lambda: (running.popen.kill(), running.popen.communicate()))
            return running

        yield make


def body(max_tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"model": "base", "prompt": "hi", "max_tokens": max_tokens, **more}


def fault(start, name: str, **options: Any) -> Running:
    return start("tests.server.fault_server", name, "PORT", ADAPTER, **options)


def test_outputs_on_a_full_disk_do_not_end_a_server(start):
    with open("/dev/full", "w") as full:  # every write to it fails with ENOSPC
        server = fault(start, "none", output=full)
        answer = httpx.post(f"{server.address}/v1/completions", json=body())
        assert answer.status_code == 200
        load = {"lora_name": "a", "lora_path": ADAPTER}  # which writes to the log
        assert httpx.post(f"{server.address}/v1/load_lora_adapter", json=load).status_code == 200
        assert server.stop() == 0


@pytest.mark.slow
def test_a_compilation_cache_on_a_full_disk_is_done_without(start, tmp_path):
    """No file may grow beyond a block, so programs are written in part: neither this start minds nor the next, which
    compiles them anew and keeps them."""
    folder, sizes = tmp_path / "xla", []
    words = ("multilora_jax.serve", "--config", "configs/tiny.yaml", "--port", "PORT", "--max_num_seqs", "4",
             "--max_num_batched_tokens", "32", "--compilation_cache_dir", str(folder))  # fmt: skip
    request = body() | {"model": "tiny", "temperature": 0}
    texts = []
    for limits in ("ulimit -f 1;", ""):
        server = start(*words, limits=limits)
        answer = httpx.post(f"{server.address}/v1/completions", json=request, timeout=START_S)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
        assert server.stop() == 0
        sizes.append(max(path.stat().st_size for path in folder.glob("*-cache")))
    assert texts[0] == texts[1]
    assert sizes[0] <= 1024 < sizes[1]


def test_a_cache_folder_that_cannot_be_made_is_done_without(tmp_path, monkeypatch, caplog):
    import jax

    from multilora_jax.engine.devices import set_compilation_cache

    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    (tmp_path / "file").write_text("")
    set_compilation_cache(str(tmp_path / "file" / "xla"))
    assert jax.config.jax_compilation_cache_dir == before  # type: ignore[attr-defined]
    assert "compiled programs are not kept" in caplog.text


def test_sigterm_in_the_middle_of_streams_that_outlast_the_drain(start):
    """Each ends with an error that says so, and not in the middle of nothing."""
    server = fault(start, "none")
    with httpx.stream("POST", f"{server.address}/v1/completions", json=body(10**5, stream=True), timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        begun = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["reason"] == "shutting_down"
    assert server.popen.wait(30) == 0
    assert 1.0 <= time.monotonic() - begun < 20


def test_sigterm_in_the_middle_of_a_load_that_never_ends(start):
    server = fault(start, "load")
    load = {"lora_name": "a", "lora_path": ADAPTER}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(httpx.post, f"{server.address}/v1/load_lora_adapter", json=load, timeout=60)
        time.sleep(1.0)
        server.popen.send_signal(signal.SIGTERM)
        failed = answer.exception()
        assert isinstance(failed, httpx.TransportError) or answer.result().status_code == 503, answer.result().text
    assert server.popen.wait(30) == 0


def test_d27_sigterm_while_a_step_hangs(start):
    """The process ends all the same, and its status says that not all was well."""
    server = fault(start, "step")
    with httpx.stream("POST", f"{server.address}/v1/completions", json=body(10**5, stream=True), timeout=60) as stream:
        lines = stream.iter_lines()
        for _ in range(19):
            next(lines)
        assert server.stop() == 1


def test_books_that_disagree_at_the_end_are_told(start):
    server = fault(start, "books")
    assert server.stop() == 1
    assert "a page was lost" in server.popen.communicate()[1]


def test_connections_fit_into_the_descriptors_that_there_are(start):
    """`ulimit -n` leaves room for 80 connections; 300 come, and none of the server's own work lacks a descriptor."""
    server = fault(start, "none", limits="ulimit -n 400;")
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        time.sleep(0.5)
        assert len(os.listdir(f"/proc/{server.popen.pid}/fd")) < 200
    time.sleep(0.5)
    load = {"lora_name": "a", "lora_path": ADAPTER}
    assert httpx.post(f"{server.address}/v1/load_lora_adapter", json=load).status_code == 200
    assert httpx.post(f"{server.address}/v1/completions", json=body()).status_code == 200
    assert server.stop() == 0
