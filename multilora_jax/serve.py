"""The server's command: `python -m multilora_jax.serve --config FILE [--key value ...]`.

The port is taken before the model is loaded, so that /health answers 503 meanwhile and a port in use is an error at
once. The engine is built on the main thread (progress bars, signals), HTTP runs on a second one.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import re
import resource
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from multilora_jax import flags
from multilora_jax.async_engine import AsyncEngine
from multilora_jax.config import EngineConfig
from multilora_jax.engine.hosts import HostLostError, exit_without
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.engine.start import load_model
from multilora_jax.errors import ConfigError
from multilora_jax.replicas import ReplicatedEngine
from multilora_jax.server.app import create_app

log = logging.getLogger("multilora_jax.serve")

DRAIN_S = 30
"""Seconds that running requests get to finish after SIGTERM or SIGINT."""


LAST_ANSWERS_S = 2.0
"""Seconds that answers about a lost host get to reach their clients."""


def seconds_since_start() -> float:
    """Seconds since this process was started, imports included."""
    try:
        # Field 22 of proc(5)'s stat, in ticks since boot; the command's name before it may hold spaces.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return time.monotonic() - _IMPORTED


_IMPORTED = time.monotonic()


def serve(config: EngineConfig) -> int:
    """Serve until a signal; returns the exit status.

    SIGTERM and SIGINT stop accepting, let running requests finish for DRAIN_S and return 0; before the server is
    ready they end the process at once. A second SIGINT does not wait.

    Of several hosts only the first listens; the others repeat its steps until it ends.

    Raises:
        ConfigError: the address cannot be listened on, or the engine cannot be built from this configuration.
    """
    if config.host_rank:
        return follow(config)
    with listen(config.host, config.port) as listener:
        app = create_app(None, config)
        http = _Http(app, listener)
        try:
            engines = [build_engine(config, replica) for replica in range(config.data_parallel_size)]
        except BaseException:
            http.stop()
            raise
        engine, replicas = engines[0], [AsyncEngine(engine) for engine in engines]
        async_engine: Any = replicas[0] if len(replicas) == 1 else ReplicatedEngine(replicas)
        app.state.context.attach(async_engine)
        hosts = engine.runner.programs.hosts
        if hosts is not None:
            hosts.on_lost(lambda error: end_without_host(replicas[0], error))
        # What is there now stays for as long as the process: searching it for garbage takes 60
        # milliseconds and more (SmolLM2-135M), in the middle of some step.
        gc.collect()
        gc.freeze()
        address = f"http://{url_host(config.host)}:{listener.getsockname()[1]}"
        seconds = seconds_since_start()
        print(engine.describe())
        print(f"ready after {seconds:.1f} s, peak memory {peak_memory_bytes() / 2**20:.0f} MiB, at {address}")
        print(f"\n{curl_line(engine, address)}\n", flush=True)
        status = http.wait(lambda: async_engine.num_live_requests)
        async_engine.shutdown(drain=False)
        if hosts is not None:
            hosts.stop()
    log.info("stopped")
    return status


def follow(config: EngineConfig) -> int:
    """What a host does that is not the first: its part of every step; returns the exit status."""
    log.info("loading %s on host %d of %d", config.model, config.host_rank, config.num_hosts)
    runner = load_model(config, progress=False).runner
    log.info("host %d follows %s", config.host_rank, config.coordinator)
    assert runner.programs.hosts is not None
    status = runner.programs.hosts.follow(runner.programs)
    if status:
        exit_without(status)
    return status


def end_without_host(async_engine: AsyncEngine, error: HostLostError) -> None:
    """Answers what is under way with the error, then ends the process, whose steps may never return."""
    async_engine.fail(error)
    time.sleep(LAST_ANSWERS_S)
    log.error("stopping: %s", error.message)
    exit_without(1)


def build_engine(config: EngineConfig, replica: int = 0) -> LLMEngine:
    """The engine, or one of several, warmed up if the configuration asks for it; tells what it is at, on stderr.

    On a terminal progress bars do; elsewhere each redrawn bar would be one more line of a log.
    """
    bars = sys.stderr.isatty()

    def tell(text: str, *values: Any) -> None:
        if not bars:
            log.info(text, *values)

    tell("loading %s%s", config.model, f" (replica {replica})" if config.data_parallel_size > 1 else "")
    engine = LLMEngine(config, progress=bars, replica=replica)
    if config.warm_up:
        tell("compiling every batch shape (--no-warm-up leaves it to the requests)")
        engine.warm_up()
        tell("compiled %d programs", engine.runner.num_compilations)
    return engine


def log_to_stderr() -> None:
    """One line with its time for each of the package's log records of level INFO and above."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("multilora_jax")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _Http:
    """uvicorn on a thread, ended by the process's signals, which only the main thread may receive."""

    def __init__(self, app: Any, listener: socket.socket):
        config = uvicorn.Config(
            app, loop="asyncio", lifespan="off", log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=DRAIN_S,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._num_live: Callable[[], int] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="http", daemon=True)
        self._thread.start()

    def wait(self, num_live: Callable[[], int]) -> int:
        """Block until the server has been told to end and has drained; 1 if it ended by itself.

        Args:
            num_live: tells how many requests are under way.
        """
        self._num_live = num_live
        self._thread.join()
        return 0 if self._server.should_exit else 1

    def stop(self) -> None:
        """End without waiting for requests: none can be running yet."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def _on_signal(self, number: int, _: object) -> None:
        if self._num_live is None:
            # Nothing runs yet that could be lost, and a compilation under way would hold up an orderly end.
            print("stopped before the server was ready", file=sys.stderr, flush=True)
            os._exit(0)
        if self._server.should_exit and number == signal.SIGINT:
            self._server.force_exit = True
        if not self._server.should_exit:
            log.info("stopping: %d requests to finish", self._num_live())
        self._server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError where the address is in use or is none of this machine's."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # One socket: "localhost" may stand for both families, and clients try IPv4 more often.
        family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is in use: stop what listens there, or choose another with --port"
            raise ConfigError(message, reason="address_in_use", param="port") from error
        message = f"cannot listen on {host}, port {port}: {error.strerror or error}"
        raise ConfigError(message, reason="bad_address", param="host") from error


def url_host(host: str) -> str:
    """`host` as a caller on this machine writes it in a URL."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host


def curl_line(engine: LLMEngine, address: str) -> str:
    """A request to paste into a shell; it asks an adapter where there is one."""
    adapters = engine.list_loras()
    body: dict[str, Any] = {"model": adapters[0].name if adapters else engine.base_name}
    has_template = engine.config.chat_template is not None or (engine.tokenizer and engine.tokenizer.chat_template)
    if engine.tokenizer is None:
        route = "completions"
        body["prompt"] = [1, 2, 3]
    elif has_template:
        route = "chat/completions"
        body["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    else:
        route = "completions"
        body["prompt"] = "The capital of France is"
    body |= {"max_tokens": 32, "temperature": 0}
    key = ' -H "Authorization: Bearer $API_KEY"' if engine.config.api_keys else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {address}/v1/{route} -H 'Content-Type: application/json'{key} -d {data}"


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        # Unlike ru_maxrss it does not count what the parent held before it started this program.
        match = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if match:
            return int(match[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(_: list[str]) -> int:
    """Entry point of the command."""
    # jax reports every accelerator that it does not find at the level of information.
    logging.getLogger("jax").setLevel(logging.WARNING)
    log_to_stderr()
    return serve(flags.config_from_flags())


if __name__ == "__main__":
    flags.define_flags()
    flags.run(
        main,
        about="Serves one base model and its LoRA adapters over HTTP, with OpenAI's API.",
        example="python -m multilora_jax.serve --config configs/smollm2.yaml --port 8123",
    )
