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

_START_S = 30.0
_END_S = 10


@contextmanager
def http_thread(app: Any, limits: ConnectionLimits) -> Iterator[int]:
    """Serves `app` on a free port of the loopback address, as `serve` does; yields the port."""
    config = uvicorn.Config(
        app, loop="asyncio", lifespan="off", log_level="warning", access_log=False, server_header=False,
        http=make_protocol(limits), ws="none", timeout_graceful_shutdown=_END_S,
    )  # fmt: skip
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
        thread.start()
        deadline = time.monotonic() + _START_S
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(2 * _END_S)
