"""`bench overhead`: what HTTP costs: the same prompts through the server and through the engine, in turn."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import json
import logging
import os
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
from multilora_jax.logs import TextFormatter
from multilora_jax.request import RequestOutput
from multilora_jax.server.app import create_app
from multilora_jax.server.connections import ConnectionLimits
from multilora_jax.server.thread import http_thread

T = TypeVar("T")

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench overhead --config configs/smollm2.yaml --streams 16"
ABOUT = """One engine, reached in turn by its own loop (offline) and over HTTP by a client in a process of its own on
the same cores. First --streams streams at once: tokens per second of all rounds of either kind, which take turns in
the order A B B A, their ratio, and the least and the largest ratio of a pair of rounds: pairs far apart mean that the
machine was not quiet. Then single requests: what the client waited beyond the steps of that same request, p50 and
p90. (Beside it the time of like requests through the AsyncEngine in the server's process; steps vary by more from one
request to the next than HTTP adds, so the difference of the two says little.) Then requests of one token each, as many
as there can be in a second. With a tiny model (--config configs/tiny.yaml --streams 64 --max-num-batched-tokens 256)
these and the streamed tokens are the ceiling of the front end."""

COMPLETIONS = "/v1/completions"
REQUEST_LOG = "multilora_jax.server.request_log"
COLUMNS = {
    "measure": "", "offline": ".2f", "http": ".2f", "ratio": ".3f", "least": ".3f", "most": ".3f", "added": ".2f",
    "added_p90": ".2f",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is measured."""

    streams: int = option(16, "Streams at once.")
    input_len: int = option(32, "Tokens of each prompt.")
    output_len: int = option(64, "Tokens of each answer.")
    rounds: int = option(4, "Pairs of rounds, offline and HTTP.")
    singles: int = option(30, "Single requests of each kind.")
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
    gc.collect()
    gc.freeze()  # as the server does
    try:
        with (
            _unseen_log(),
            http_thread(app, ConnectionLimits(4096, 600.0)) as port,
            _client(port) as client,
        ):
            rows = list(_rows(async_engine, client, work))
    finally:
        async_engine.shutdown(drain=False)
        gc.unfreeze()
    check_sound(engine)
    return make_report("overhead", settings_of(engine, dataclasses.asdict(work)), rows)


Round = Callable[[list[dict[str, Any]], int], dict[str, Any]]


@contextmanager
def _unseen_log() -> Iterator[None]:
    """Lets each request write its line, which is part of what it costs, where nobody has to read it."""
    logger = logging.getLogger(REQUEST_LOG)
    before = logger.handlers, logger.propagate, logger.level
    with open(os.devnull, "w") as nowhere:
        handler = logging.StreamHandler(nowhere)
        handler.setFormatter(TextFormatter())
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.handlers, logger.propagate, level = before
            logger.setLevel(level)


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
        return run.seconds

    def over_http() -> float:
        return client([body(prompt, work.output_len, stream=True) for prompt in prompts], work.streams)["seconds"]

    offline()
    over_http()
    tokens = work.streams * work.output_len
    yield _row(f"tokens/s, {work.streams} streams", **compare(offline, over_http, work.rounds, tokens))

    finished: list[RequestOutput] = []
    engine.add_observer(lambda output: finished.append(output) if output.finished else None)
    for max_tokens, stream in ((1, False), (16, False), (16, True)):
        own, http, added = [], [], []
        for number in range(work.singles):
            prompt = prompts[number % len(prompts)]
            own.append(asyncio.run(_single(engine, prompt, max_tokens, f"single-{max_tokens}-{stream}-{number}")))
            finished.clear()
            http.append(client([body(prompt, max_tokens, stream=stream)], 1)["e2e_ms"][0])
            added.append(http[-1] - _step_ms(finished[-1]))
        yield _row(
            f"ms, one {'stream' if stream else 'request'} of {max_tokens}, p50", offline=float(np.median(own)),
            http=float(np.median(http)), added=float(np.median(added)), added_p90=float(np.percentile(added, 90)),
            own_ms=own, http_ms=http, added_ms=added,
        )  # fmt: skip
    bodies = [body(prompts[n % len(prompts)][:4], 1, stream=False) for n in range(work.requests)]
    yield _row("requests/s of one token", http=work.requests / client(bodies, 4 * work.streams)["seconds"])


def _row(measure: str, **figures: Any) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | {"measure": measure} | figures


def compare(offline: Callable[[], float], http: Callable[[], float], num_pairs: int, tokens: int) -> dict[str, Any]:
    """Tokens per second of rounds of two kinds, and their ratio.

    Each figure is of all rounds of a kind together, so that the ratio is that of the two that stand beside it; every
    second pair begins with the other kind, so that a machine which slows down steadily changes no ratio.

    Args:
        offline, http: each runs a round and returns its seconds.
        num_pairs: rounds of each.
        tokens: of one round.

    Returns:
        {"offline", "http", "ratio", "least" and "most" ratio of a pair, "rounds": seconds of each pair}.
    """
    pairs = []
    for number in range(num_pairs):
        if number % 2:
            second = http()
            pairs.append((offline(), second))
        else:
            pairs.append((offline(), http()))
    own, served = (sum(seconds) for seconds in zip(*pairs, strict=True))
    ratios = [a / b for a, b in pairs]
    return {
        "offline": num_pairs * tokens / own, "http": num_pairs * tokens / served, "ratio": own / served,
        "least": min(ratios), "most": max(ratios), "rounds": pairs,
    }  # fmt: skip


def _step_ms(output: RequestOutput) -> float:
    """Milliseconds from the beginning of a finished request's first step to the end of its last."""
    times = output.metrics
    assert times is not None
    assert times.first_scheduled_time is not None
    assert times.finished_time is not None
    return (times.finished_time - times.first_scheduled_time) * 1e3


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
