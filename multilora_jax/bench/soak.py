"""`bench soak`: a server under everything that clients do, for minutes, and whether it lost or leaked anything."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from multilora_jax.adapters.make import make_adapters
from multilora_jax.bench.raw_http import BrokenAnswer, ask
from multilora_jax.bench.report import make_report, table
from multilora_jax.bench.soak_clients import Clients
from multilora_jax.bench.workload import command, option
from multilora_jax.config import EngineConfig
from multilora_jax.errors import UnavailableError
from multilora_jax.models.checkpoint import read_config

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench soak --config configs/tiny.yaml --minutes 10 --clients 200"
ABOUT = """Starts a server from the configuration, in a process of its own, and lets clients at it: requests streamed
and whole, chats, cancellations before and in the middle of answers, readers that are slow or do not read at all,
malformed and hostile requests, and managers that load, swap, pin, unpin and unload the same few adapters all the time.

Fails, with status 1, where a request is lost (no answer, no error, half of one), where one gets an answer that it must
not get, where memory or descriptors grow over the second half, where pages are held when all is quiet, where something
was compiled or a step failed, or where the books of the pool disagree at the end."""

LEAK_SHARE, LEAK_MIB = 0.05, 24.0
"""Growth of resident memory over the second half that counts as none, as a share of it or in MiB."""

COLUMNS = {
    "second": ".0f", "rss_mib": ".0f", "files": "d", "running": ".0f", "waiting": ".0f", "kv": ".0f", "cached": ".0f",
    "adapter": ".0f", "free": ".0f", "requests": "d", "faults": "d",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is done."""

    minutes: float = option(10.0, "Minutes of load.", 0)
    clients: int = option(200, "Clients at once.")
    managers: int = option(4, "How many of them manage adapters.", 0)
    adapters: int = option(12, "Adapters that are managed.")
    patience_s: float = option(120.0, "Seconds after which a request without an answer counts as lost.")
    samples: int = option(20, "Rows of the table.", 4)


def measure(config: EngineConfig, work: Workload) -> dict[str, Any]:
    """The report of one soak, with what went wrong in its `failures`."""
    with tempfile.TemporaryDirectory(prefix="multilora_soak_") as folder:
        model = read_config(Path(config.model))
        paths = make_adapters(model, os.path.join(folder, "adapters"), work.adapters, ranks=(4, 8, 16))
        config = dataclasses.replace(
            config, host="127.0.0.1", port=0, adapter_roots=(os.path.join(folder, "adapters"),), lora_modules={},
            api_keys=(), admin_keys=(), warm_up=True, client_timeout_s=min(config.client_timeout_s, 20.0),
        )  # fmt: skip
        with server(config, folder) as (process, port):
            adapters = {os.path.basename(path): path for path in paths}
            return asyncio.run(_soak(process, port, config, work, adapters))


@contextmanager
def server(config: EngineConfig, folder: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server process and its port, once it is ready; it is killed at the end if it still runs.

    Raises:
        UnavailableError: it ended before it was ready.
    """
    secrets = ("api_keys", "admin_keys")
    values = {k: v for k, v in config.to_dict().items() if v is not None and k not in secrets}
    path = os.path.join(folder, "server.yaml")
    Path(path).write_text(json.dumps(values), encoding="utf-8")
    words = [sys.executable, "-m", "multilora_jax.serve", "--config", path]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if found := re.search(r"ready after .* at http://[^:]+:(\d+)", line):
                    yield process, int(found[1])
                    break
            else:
                raise UnavailableError("the server ended before it was ready: see above", reason="no_server")
        finally:
            process.kill()


async def _soak(
    process: subprocess.Popen[str], port: int, config: EngineConfig, work: Workload, adapters: dict[str, str]
) -> dict[str, Any]:
    host = config.host
    clients = Clients(host, port, config.base_name, adapters, config.seed, work.patience_s)
    tasks = [asyncio.create_task(clients.run(i, work.managers)) for i in range(work.clients)]
    start, rows = time.monotonic(), list[dict[str, Any]]()
    for number in range(work.samples):
        await asyncio.sleep(max(0.0, start + work.minutes * 60 * (number + 1) / work.samples - time.monotonic()))
        try:
            rows.append(await _sample(process.pid, host, port, clients, time.monotonic() - start))
        except (BrokenAnswer, OSError) as error:
            clients.ledger.faults[f"/metrics does not answer: {error}"] += 1
            break
        lines = table(rows, COLUMNS).split("\n")
        print(*lines[0 if len(rows) == 1 else -1 :], sep="\n", flush=True)
    clients.stop()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [f"{count} x {words}" for words, count in clients.ledger.faults.items()]
    failures += sorted({f"a client failed: {error!r}" for error in done if error is not None})
    if process.poll() is None:
        failures += await _quiet(host, port, config)
        process.terminate()
        status = await asyncio.to_thread(process.wait, config.drain_seconds + 60)
        failures += [f"the server ended with status {status}"] if status else []
    else:
        failures.append(f"the server ended in the middle, with status {process.returncode}")
    failures += growth(rows)
    settings = config.to_dict() | dataclasses.asdict(work)
    ledger = clients.ledger
    report = make_report("soak", settings, rows)
    counts = {"sent": sum(ledger.sent.values()), "streamed_pieces": ledger.tokens, "outcomes": dict(ledger.outcomes)}
    return report | counts | {"failures": failures}


def growth(rows: list[dict[str, Any]]) -> list[str]:
    """What grows from sample to sample over the second half, in words."""
    half = rows[len(rows) // 2 :]
    if len(half) < 3:
        return []
    found = []
    for key, unit, limit in (("rss_mib", "MiB", LEAK_MIB), ("files", "descriptors", 32.0)):
        seconds, values = [np.array([row[k] for row in half], float) for k in ("second", key)]
        grown = float(np.polyfit(seconds, values, 1)[0] * (seconds[-1] - seconds[0]))
        if grown > max(limit, LEAK_SHARE * values[0] if key == "rss_mib" else 0.0):
            found.append(f"{key} grows: {grown:.0f} {unit} over the last {seconds[-1] - seconds[0]:.0f} s")
    return found


async def _sample(pid: int, host: str, port: int, clients: Clients, second: float) -> dict[str, Any]:
    figures, status, ledger = await read_metrics(host, port), Path(f"/proc/{pid}/status"), clients.ledger
    rss = re.search(r"VmRSS:\s+(\d+)", status.read_text())
    return {
        "second": second, "rss_mib": int(rss[1]) / 1024 if rss else 0.0, "files": len(os.listdir(f"/proc/{pid}/fd")),
        "running": figures["vllm:num_requests_running"], "waiting": figures["vllm:num_requests_waiting"],
        **{kind: figures[f"multilora:pages/{kind}"] for kind in ("kv", "cached", "adapter", "free")},
        "requests": sum(ledger.sent.values()), "faults": sum(ledger.faults.values()),
    }  # fmt: skip


async def read_metrics(host: str, port: int) -> Mapping[str, float]:
    """Figures of /metrics by name; of families by `kind`, by name and kind with a slash between them."""
    _, text = await ask(host, port, "GET", "/metrics")
    found: dict[str, float] = {}
    for line in text.decode().splitlines():
        if match := re.fullmatch(r"([a-z_:]+)\{(.*)\} (\S+)", line):
            kind = re.search(r'kind="(\w+)"', match[2])
            name = match[1] + (f"/{kind[1]}" if kind else "")
            found[name] = found.get(name, 0.0) + float(match[3])
    return found


async def _quiet(host: str, port: int, config: EngineConfig) -> list[str]:
    """What is wrong once no client is left: within a minute nothing may run, wait or be held."""
    figures: Mapping[str, float] = {}
    for _ in range(120):
        figures = await read_metrics(host, port)
        held = [figures[f"vllm:num_requests_{state}"] for state in ("running", "waiting")]
        if not any([*held, figures["multilora:pages/kv"]]):
            break
        await asyncio.sleep(0.5)
    else:
        running, waiting = map(int, held)
        return [f"no client is left, but {running} requests run, {waiting} wait, or pages are held"]
    wrong = []
    total = sum(figures[f"multilora:pages/{kind}"] for kind in ("kv", "cached", "adapter", "free"))
    if config.pool_pages is not None and total != config.pool_pages - 1:
        wrong.append(f"{total:.0f} pages are accounted for, of {config.pool_pages - 1}")
    for name, words in (("multilora:recompiles_total", "programs were compiled"),
                        ("multilora:failed_steps_total", "steps failed")):  # fmt: skip
        if figures.get(name):
            wrong.append(f"{figures[name]:.0f} {words} under load")
    status, _ = await ask(host, port, "GET", "/health")
    return wrong + ([f"/health answers {status}"] if status != 200 else [])


def show(report: dict[str, Any]) -> str:
    """What is printed at the end; the table was, row by row."""
    lines = [f"\n{report['sent']} requests, {report['streamed_pieces']} streamed pieces"]
    lines += [f"  {count:7d}  {words}" for words, count in sorted(report["outcomes"].items())]
    lines += [f"FAILED: {words}" for words in report["failures"]] or [
        "no request lost, nothing leaked, the pool is sound"
    ]
    return "\n".join(lines)


define_flags, main = command(Workload, measure, show)
