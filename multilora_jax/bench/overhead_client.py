"""The client process of `bench overhead`: reads rounds from standard input, one JSON object a line, and reports each.

A process of its own, so that its work is not done by the interpreter that serves. It takes
{"path", "bodies", "concurrency"} and answers {"seconds", "pieces", "e2e_ms", "ttft_ms"}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from multilora_jax.bench.raw_http import Connection


async def run_round(host: str, port: int, path: str, bodies: list[dict[str, Any]], concurrency: int) -> dict[str, Any]:
    """Sends all bodies over so many connections that are kept; what came of them, each request's times in order.

    Raises:
        RuntimeError: an answer is none of 200.
    """
    todo = iter(enumerate(bodies))
    e2e_ms, ttft_ms = [0.0] * len(bodies), [0.0] * len(bodies)
    pieces = 0

    async def worker(connection: Connection) -> None:
        nonlocal pieces
        for number, body in todo:
            sent = time.perf_counter()
            await connection.send("POST", path, body)
            status, _ = await connection.head()
            answer, first = await connection.read_out()
            if status != 200:
                raise RuntimeError(f"{status}: {answer[:300]!r}")
            pieces += answer.count(b"data: ") or 1
            e2e_ms[number], ttft_ms[number] = (time.perf_counter() - sent) * 1e3, (first - sent) * 1e3

    connections: list[Connection] = []
    workers: list[asyncio.Task[None]] = []
    try:
        for _ in range(min(concurrency, len(bodies))):
            connections.append(await Connection.open(host, port))
        start = time.perf_counter()
        workers += [asyncio.create_task(worker(connection)) for connection in connections]
        await asyncio.gather(*workers)
        seconds = time.perf_counter() - start
    finally:
        for task in workers:  # one that fails ends the round: nobody writes on a connection that is closed below
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for connection in connections:
            await connection.close()
    return {"seconds": seconds, "pieces": pieces, "e2e_ms": e2e_ms, "ttft_ms": ttft_ms}


def main(host: str, port: int) -> None:
    """Works until standard input ends."""
    for line in sys.stdin:
        work = json.loads(line)
        print(json.dumps(asyncio.run(run_round(host, port, **work))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
