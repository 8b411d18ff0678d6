"""The server's command: `python -m multilora_jax.serve --config FILE [--key value ...]`.

The port is taken before the model is loaded, so that /health answers 503 meanwhile and a port in use is an error at
once. The engine is built on the main thread (progress bars, signals), HTTP runs on a second one.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import math
import os
import shlex
import signal
import socket
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

from multilora_jax import flags
from multilora_jax.async_engine import AsyncEngine
from multilora_jax.config import EngineConfig
from multilora_jax.engine.host_memory import peak_memory_bytes
from multilora_jax.engine.hosts import HostLostError, exit_without
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.engine.start import load_model
from multilora_jax.errors import ConfigError
from multilora_jax.logs import log_to_stderr
from multilora_jax.memory.allocator import PoolIntegrityError
from multilora_jax.replicas import ReplicatedEngine
from multilora_jax.server.app import create_app
from multilora_jax.server.connections import ConnectionLimits, fit_descriptors, make_protocol
from multilora_jax.server.guard import Calls

log = logging.getLogger("multilora_jax.serve")

CLOSE_S = 5
"""Seconds that connections get to take their last bytes when nothing runs any more."""

POLL_S = 0.2
"""How often the main thread looks whether the server is to end."""


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

    SIGTERM, SIGINT and SIGHUP (unless it is ignored, as under nohup) refuse new requests with 503 (/ready too), let
    running ones finish for drain_seconds and return 0; before the server is ready they end the process at once. A
    second SIGINT does not wait. The status is 1 where HTTP ended by itself, or where the books of the pool disagree at
    the end.

    Of several hosts only the first listens; the others repeat its steps until it ends.

    Raises:
        ConfigError: the address cannot be listened on, the certificate is bad, or the engine cannot be built from this
            configuration.
    """
    check_certificate(config)
    if config.host_rank:
        return follow(config)
    with listen(config.host, config.port) as listener:
        app = create_app(None, config)
        http = _Http(app, listener, config)
        try:
            engines = [build_engine(config, replica) for replica in range(config.data_parallel_size)]
        except BaseException:
            http.stop()
            raise
        engine, replicas = engines[0], [AsyncEngine(engine) for engine in engines]
        for each in engines:
            each.runner.programs.announces = True
        async_engine: Any = replicas[0] if len(replicas) == 1 else ReplicatedEngine(replicas)
        http.calls = app.state.context.calls
        app.state.context.attach(async_engine)
        hosts = engine.runner.programs.hosts
        if hosts is not None:
            hosts.on_lost(lambda error: end_without_host(replicas[0], error))
        # What is there now stays for as long as the process: searching it for garbage takes 60
        # milliseconds and more (SmolLM2-135M), in the middle of some step.
        gc.collect()
        gc.freeze()
        address = f"{'https' if config.ssl_certfile else 'http'}://{url_host(config.host)}:{listener.getsockname()[1]}"
        seconds = seconds_since_start()
        ready = f"ready after {seconds:.1f} s, peak memory {peak_memory_bytes() / 2**20:.0f} MiB, at {address}"
        say(engine.describe(), ready, f"\n{curl_line(engine, address)}\n")
        status = http.wait(async_engine)
        async_engine.shutdown(drain=False)
        if hosts is not None:
            hosts.stop()
        if app.state.tracing:
            app.state.tracing.close()
    return status or check_end(replicas)


def check_end(replicas: list[AsyncEngine]) -> int:
    """The exit status of a server that has stopped: 1 where an engine still hangs or lost count of its pool."""
    if not all(replica.stopped for replica in replicas):
        log.error("stopped, but the engine hangs in a step")
        return 1
    try:
        for replica in replicas:
            replica.engine.check_integrity()
    except PoolIntegrityError as error:
        log.error("stopped, but the books of the pool disagree: %s", error)
        return 1
    log.info("stopped")
    return 0


def say(*lines: str) -> None:
    """Prints; a full disk or a closed pipe behind standard output is no reason to end a server."""
    try:
        print(*lines, sep="\n", flush=True)
    except OSError as error:
        log.warning("standard output cannot be written to: %s", error)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is left in the old one's buffer would fail again


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


def check_certificate(config: EngineConfig) -> None:
    """Raises ConfigError (`bad_certificate`) where the certificate and its key cannot be used together."""
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Without a password of its own OpenSSL would ask for one on the terminal.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ssl_certfile {config.ssl_certfile!r} and its key cannot be used ({error}): give a certificate chain and "
            "its unencrypted private key, both in PEM",
            reason="bad_certificate", param="ssl_certfile",
        ) from error  # fmt: skip


class _Http:
    """uvicorn on a thread, ended by the process's signals, which only the main thread may receive.

    Attributes:
        calls: the requests under way; None until there can be any.
    """

    def __init__(self, app: Any, listener: socket.socket, config: EngineConfig):
        limits = fit_descriptors(ConnectionLimits(config.max_connections, config.client_timeout_s))
        uvicorn_config = uvicorn.Config(
            app, loop="asyncio", lifespan="off", log_level="warning", access_log=False, server_header=False,
            http=make_protocol(limits), ws="none", timeout_graceful_shutdown=CLOSE_S,
            ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile,
        )  # fmt: skip
        self._server = uvicorn.Server(uvicorn_config)
        self._drain_s = config.drain_seconds
        self.calls: Calls | None = None
        self._deadline = math.inf
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: to outlive the terminal
                signal.signal(number, self._on_signal)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="http", daemon=True)
        self._thread.start()

    def wait(self, engine: AsyncEngine) -> int:
        """Block until the server has been told to end and has drained; 1 if it ended by itself.

        While it drains it goes on listening, so that whoever comes is told so. What still runs at the end of
        drain_seconds gets an error.
        """
        calls = self.calls
        assert calls is not None
        while not self._server.should_exit:
            self._thread.join(POLL_S)
            if not self._thread.is_alive():
                break
            if calls.draining and (not calls.active or time.monotonic() >= self._deadline):
                if calls.active:
                    log.warning("%d requests did not finish within drain_seconds", calls.active)
                    engine.shutdown(drain=False)
                self._server.should_exit = True
        self._thread.join()
        return 0 if self._server.should_exit else 1

    def stop(self) -> None:
        """End without waiting for requests: none can be running yet."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def _on_signal(self, number: int, _: object) -> None:
        if self.calls is None:
            # Nothing runs yet that could be lost, and a compilation under way would hold up an orderly end.
            print("stopped before the server was ready", file=sys.stderr, flush=True)
            os._exit(0)
        if self.calls.draining and number == signal.SIGINT:
            self._server.should_exit = self._server.force_exit = True
        if not self.calls.draining:
            log.info("stopping: %d requests to finish", self.calls.active)
            self._deadline = time.monotonic() + self._drain_s
        self.calls.draining = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError where the address is in use or is none of this machine's."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # One socket: "localhost" may stand for both families, and clients try IPv4 more often.
        family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        listener = socket.create_server(address[:2], family=family, backlog=2048)
        # Connections inherit it; asyncio sets it only where a socket says IPPROTO_TCP, which this one does not. Without
        # it an answer's body waits for the client's delayed acknowledgement of its head, 40 ms on kept connections.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
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
    needs_key = engine.config.api_keys or engine.config.keys_file
    key = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {address}/v1/{route} -H 'Content-Type: application/json'{key} -d {data}"


def end_process(status: int) -> None:
    """Ends at once: threads that wait for a disk, or for a device that hangs, must not hold it up."""
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


def main(_: list[str]) -> int:
    """Entry point of the command."""
    # jax reports every accelerator that it does not find at the level of information.
    logging.getLogger("jax").setLevel(logging.WARNING)
    config = flags.config_from_flags()
    log_to_stderr(config.log_format)
    end_process(serve(config))
    return 0


if __name__ == "__main__":
    flags.define_flags()
    flags.run(
        main,
        about="Serves one base model and its LoRA adapters over HTTP, with OpenAI's API.",
        example="python -m multilora_jax.serve --config configs/smollm2.yaml --port 8123",
    )
