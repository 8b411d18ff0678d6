"""`python -m multilora_jax.serve` as a process: start, banner, signals, exit status."""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from multilora_jax.config import EngineConfig
from multilora_jax.errors import ConfigError
from multilora_jax.serve import build_engine, curl_line, listen, serve, url_host
from tests.server.fake_engine import GOLDEN, byte_tokenizer

ROOT = Path(__file__).parent.parent.parent
ADAPTER = str(GOLDEN / "cases" / "all_linear")
SMALL = ("--max_num_seqs", "4", "--max_num_batched_tokens", "32", "--max_rank_rows", "64")
"""Few programs to compile."""


class Process:
    """A server process whose output can be waited for."""

    def __init__(self, *arguments: str):
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "multilora_jax.serve", *arguments], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        self.output = ""
        self.errors = ""
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_output, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read_output(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.output += line
            self.lines.put(line)

    def _read_errors(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.errors += line

    def line_with(self, words: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"no line with {words!r}: {self.output}\n{self.errors[-3000:]}")
            if words in line:
                return line

    def wait(self, seconds: float = 60) -> int:
        status = self.popen.wait(seconds)
        for reader in self._readers:
            reader.join()
        return status

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for reader in self._readers:
            reader.join()
        for pipe in (self.popen.stdout, self.popen.stderr):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start():
    processes: list[Process] = []

    def make(*arguments: str) -> Process:
        processes.append(Process("--config", str(ROOT / "configs" / "tiny.yaml"), *arguments))
        return processes[-1]

    yield make
    for process in processes:
        process.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_server_s_life(start):
    """503 until warm, the printed curl line works, SIGTERM drains the running stream and exits with 0."""
    port = free_port()
    process = start(*SMALL, "--port", str(port), "--lora_modules", f"mine={ADAPTER}")
    address = f"http://127.0.0.1:{port}"
    statuses = []
    while not statuses or statuses[-1] != 200:
        try:
            statuses.append(httpx.get(f"{address}/health").status_code)
        except httpx.ConnectError:
            assert process.popen.poll() is None, process.errors[-3000:]
        time.sleep(0.02)
    assert set(statuses) <= {200, 503}  # how long it is not ready depends on the machine; the next test waits for it

    ready = process.line_with("ready after", 60)
    assert address in ready
    assert float(ready.split("memory ")[1].split(" MiB")[0]) > 50
    for words in ("tiny", "pool", "tokens", "mine: read when it is first asked for"):
        assert words in process.output
    command = shlex.split(process.line_with("curl ", 5))
    answer = json.loads(subprocess.run([*command, "--silent"], capture_output=True, text=True, check=True).stdout)
    assert (answer["object"], answer["model"]) == ("chat.completion", "mine")
    assert answer["usage"]["completion_tokens"] >= 1

    body = {"model": "mine", "prompt": "hi", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert process.wait() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")
    assert "Traceback" not in process.errors
    # A log, not a terminal: a line for each thing that happened, and no bar redrawn.
    assert "\r" not in process.errors
    for words in ("INFO loading ", "INFO stopping: 1 requests to finish", "INFO stopped"):
        assert process.errors.count(words) == 1, process.errors


def test_a_port_in_use_is_an_error_before_the_model_is_loaded(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("--port", str(port))
        assert process.wait() == 1
    assert f"error: port {port} on 127.0.0.1 is in use" in process.errors
    assert "Loading" not in process.errors
    assert "Traceback" not in process.errors


def test_a_signal_before_the_server_is_ready_ends_it_at_once(start):
    port = free_port()
    process = start("--port", str(port), "--seed", "1", "--warm-up")
    deadline = time.monotonic() + 60
    while True:
        try:
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503
            break
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait(5) == 0
    assert "stopped before the server was ready" in process.errors


def test_a_bad_adapter_at_start_ends_the_process_with_its_reason(start):
    process = start(*SMALL, "--port", "0", "--lora_modules", "mine=/nowhere/at/all")
    assert process.wait() == 1
    assert "/nowhere/at/all" in process.errors
    assert "Traceback" not in process.errors


@pytest.mark.parametrize("hang_up", [signal.SIG_IGN, signal.SIG_DFL], ids=["nohup", "terminal"])
def test_a_failed_start_stops_listening(monkeypatch, hang_up):
    """Until then signals are waited for, the end of the terminal among them unless it was ignored from the start."""

    def fail(config, **_):
        kept = hang_up == signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == (hang_up if kept else signal.getsignal(signal.SIGTERM))
        raise ConfigError("no such model")

    monkeypatch.setattr("multilora_jax.serve.LLMEngine", fail)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, hang_up)
    try:
        with pytest.raises(ConfigError, match="no such model"):
            serve(EngineConfig(model="fake", port=0))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert "http" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("terminal", "warm_up"), [(True, True), (False, True), (False, False)])
def test_bars_on_a_terminal_and_lines_elsewhere(monkeypatch, caplog, terminal, warm_up):
    class Engine:
        def __init__(self, config, *, progress, **_):
            self.bars, self.warm = progress, False
            self.runner = SimpleNamespace(num_compilations=7)

        def warm_up(self):
            self.warm = True

    monkeypatch.setattr("multilora_jax.serve.LLMEngine", Engine)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    caplog.set_level("INFO", "multilora_jax")
    engine = build_engine(EngineConfig(model="fake", warm_up=warm_up))
    assert (engine.bars, engine.warm) == (terminal, warm_up)  # type: ignore[attr-defined]
    lines = [
        "loading fake",
        "compiling every batch shape (--no-warm-up leaves it to the requests)",
        "compiled 7 programs",
    ]
    assert caplog.messages == ([] if terminal else lines if warm_up else lines[:1])


def test_an_answer_s_body_does_not_wait_for_an_acknowledgement_of_its_head():
    """40 ms on a kept connection, by Nagle's algorithm and the client's delayed acknowledgement."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_listen_names_what_is_wrong():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use") as caught:
            listen("127.0.0.1", port)
        assert (caught.value.reason, caught.value.param) == ("address_in_use", "port")
    with pytest.raises(ConfigError, match="203.0.113.7") as caught:
        listen("203.0.113.7", 0)
    assert (caught.value.reason, caught.value.param) == ("bad_address", "host")


def test_addresses_as_a_caller_writes_them():
    assert [url_host(host) for host in ("0.0.0.0", "127.0.0.1", "::1", "example.org")] == [
        "127.0.0.1", "127.0.0.1", "[::1]", "example.org",
    ]  # fmt: skip


def test_the_curl_line_fits_the_server():
    def line(tokenizer, adapters=(), **config):
        settings = SimpleNamespace(**{"chat_template": None, "api_keys": (), "keys_file": None, **config})
        engine = SimpleNamespace(
            base_name="b'ase", tokenizer=tokenizer, config=settings,
            list_loras=lambda: [SimpleNamespace(name=name) for name in adapters],
        )  # fmt: skip
        return curl_line(engine, "http://h:1")  # type: ignore[arg-type]

    def body(text):
        words = shlex.split(text)
        return words[1].removeprefix("http://h:1/v1/"), json.loads(words[-1])

    route, sent = body(line(byte_tokenizer(), ["first", "second"]))
    assert (route, sent["model"], sent["messages"][0]["role"]) == ("chat/completions", "first", "user")
    assert sent["temperature"] == 0
    route, sent = body(line(byte_tokenizer(chat_template=None)))
    assert (route, sent["model"], isinstance(sent["prompt"], str)) == ("completions", "b'ase", True)
    assert body(line(byte_tokenizer(chat_template=None), chat_template="{{ messages }}"))[0] == "chat/completions"
    route, sent = body(line(None))
    assert (route, sent["prompt"]) == ("completions", [1, 2, 3])
    assert '-H "Authorization: Bearer $API_KEY"' in line(None, api_keys=("secret",))
    assert "secret" not in line(None, api_keys=("secret",))
    assert "$API_KEY" in line(None, keys_file="keys.yaml")


def test_peak_memory_grows_with_use():
    code = "from multilora_jax.serve import peak_memory_bytes as p; a = p(); b = b'x' * (300 << 20); print(a, p())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = (int(word) / 2**20 for word in done.stdout.split())
    assert 50 < before < 1000
    assert 200 < after - before < 350
