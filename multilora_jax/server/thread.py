"""An app served by a thread of this process, for as long as a block lasts: for benchmarks and tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from multilora_jax.server.connections import ConnectionLimits, make_protocol

_END_S = 10
"""Seconds that answers under way get at the end."""


@contextmanager
def http_thread(app: Any, limits: ConnectionLimits) -> Iterator[int]:
    """Serves `app` on a free port of the loopback address, as `serve` does; yields the port.

    It waits for its thread and not for a clock: on a machine that stops for a while, a server given up would go on
    beside what comes after.

    Raises:
        RuntimeError: the server did not start; the log says why.
    """
    config = uvicorn.Config(
        app, loop="asyncio", lifespan="off", log_level="warning", access_log=False, server_header=False,
        http=make_protocol(limits), ws="none", timeout_graceful_shutdown=_END_S,
    )  # fmt: skip
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        if not server.started:
            raise RuntimeError("the HTTP server did not start: see its log")
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
