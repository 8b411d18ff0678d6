"""`bench overhead`: what HTTP costs: the same prompts through the server and through the engine, in turn."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.bench.answers import greedy
from multilora_jax.bench.report import make_report, table
from multilora_jax.bench.runs import build_engine, check_length, check_sound, random_prompts, run_once, settings_of
from multilora_jax.bench.workload import command, option
from multilora_jax.config import EngineConfig
from multilora_jax.server.app import create_app
from multilora_jax.server.connections import ConnectionLimits
from multilora_jax.server.thread import http_thread

T = TypeVar("T")

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench overhead --config configs/smollm2.yaml --streams 16"
ABOUT = """One engine, reached in turn by its own loop (offline) and over HTTP by a client in a process of its own on
the same cores: tokens per second of --streams streams, and the ratio, as medians over rounds of one after the other.
Then what HTTP adds to a single request, beside the same one through the AsyncEngine in the server's process, in turn
(p50 of each, and their difference). Then requests of one token each, as many as there can be in a second. With a tiny
model (--config configs/tiny.yaml --streams 64) these and the streamed tokens are the ceiling of the front end."""

COMPLETIONS = "/v1/completions"
COLUMNS = {"measure": "", "offline": ".2f", "http": ".2f", "ratio": ".3f", "added": ".2f"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is measured."""

    streams: int = option(16, "Streams at once.")
    input_len: int = option(32, "Tokens of each prompt.")
    output_len: int = option(64, "Tokens of each answer.")
    rounds: int = option(3, "Rounds of offline and HTTP.")
    singles: int = option(30, "Single requests of either kind.")
    requests: int = option(200, "Requests of one token.")


def measure(config: EngineConfig, work: Workload) -> dict[str, Any]:
    """The report."""
    check_length(config, work.input_len, work.output_len)
    config = dataclasses.replace(
        config, max_num_seqs=max(config.max_num_seqs, work.streams), api_keys=(), admin_keys=(), warm_up=True
    )
    engine = build_engine(config)
    engine.warm_up()
    async_engine = AsyncEngine(engine)
    app = create_app(async_engine, engine.config)
    try:
        with http_thread(app, ConnectionLimits(4096, 600.0)) as port, _client(port) as client:
            rows = list(_rows(async_engine, client, work))
    finally:
        async_engine.shutdown(drain=False)
    check_sound(engine)
    return make_report("overhead", settings_of(engine, dataclasses.asdict(work)), rows)


Round = Callable[[list[dict[str, Any]], int], dict[str, Any]]


@contextmanager
def _client(port: int) -> Iterator[Round]:
    words = [sys.executable, "-m", "multilora_jax.bench.overhead_client", "127.0.0.1", str(port)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def run(bodies: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
            print(
                json.dumps({"path": COMPLETIONS, "bodies": bodies, "concurrency": concurrency}), file=stdin, flush=True
            )
            line = stdout.readline()
            if not line:
                raise RuntimeError("the client process ended, see above")
            return json.loads(line)

        try:
            yield run
        finally:
            stdin.close()


def _rows(engine: AsyncEngine, client: Round, work: Workload) -> Iterator[dict[str, Any]]:
    llm = engine.engine
    prompts, ids = random_prompts(llm, work.streams, work.input_len), (f"offline-{n}" for n in itertools.count())
    salts = itertools.count()

    def body(prompt: list[int], max_tokens: int, *, stream: bool) -> dict[str, Any]:
        # A salt of its own for each, so that none finds a prompt that another computed.
        return {
            "model": llm.base_name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": stream, "cache_salt": f"http-{next(salts)}",
        }  # fmt: skip

    def offline() -> float:
        run = _on_engine_thread(engine, lambda: run_once(llm, prompts, [None] * len(prompts), work.output_len, ids))
        return run.tokens_per_second

    def over_http() -> float:
        done = client([body(prompt, work.output_len, stream=True) for prompt in prompts], work.streams)
        return work.streams * work.output_len / done["seconds"]

    offline()
    over_http()
    pairs = [(offline(), over_http()) for _ in range(work.rounds)]
    yield {
        "measure": f"tokens/s, {work.streams} streams", "offline": statistics.median(pair[0] for pair in pairs),
        "http": statistics.median(pair[1] for pair in pairs), "added": None,
        "ratio": statistics.median(http / own for own, http in pairs), "rounds": pairs,
    }  # fmt: skip
    for max_tokens in (1, 16):
        own, http = [], []
        for number in range(work.singles):
            prompt = prompts[number % len(prompts)]
            own.append(asyncio.run(_single(engine, prompt, max_tokens, f"single-{max_tokens}-{number}")))
            http.append(client([body(prompt, max_tokens, stream=False)], 1)["e2e_ms"][0])
        p50 = [float(np.median(values)) for values in (own, http)]
        yield {
            "measure": f"ms, one request of {max_tokens}, p50", "offline": p50[0], "http": p50[1], "ratio": None,
            "added": p50[1] - p50[0], "own_ms": own, "http_ms": http,
        }  # fmt: skip
    bodies = [body(prompts[n % len(prompts)][:4], 1, stream=False) for n in range(work.requests)]
    yield {
        "measure": "requests/s of one token", "offline": None, "added": None, "ratio": None,
        "http": work.requests / client(bodies, 4 * work.streams)["seconds"],
    }  # fmt: skip


async def _single(engine: AsyncEngine, prompt: list[int], max_tokens: int, request_id: str) -> float:
    """Milliseconds of one request in this process."""
    start = time.perf_counter()
    stream = await engine.submit(list(prompt), greedy(max_tokens), request_id, cache_salt=request_id)
    await stream.final()
    return (time.perf_counter() - start) * 1e3


def _on_engine_thread(engine: AsyncEngine, function: Callable[[], T]) -> T:
    """Runs `function` between two steps, on the only thread that may step the engine."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    engine._commands.put(run)
    return result.result()


def show(report: dict[str, Any]) -> str:
    """The rows as a table."""
    return table(report["rows"], COLUMNS)


define_flags, main = command(Workload, measure, show)
