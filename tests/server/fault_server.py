"""The server's command over a FakeEngine with one fault: `python -m tests.server.fault_server FAULT PORT [ROOT]`."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

from multilora_jax import serve
from multilora_jax.config import EngineConfig
from tests.server.fake_engine import FakeEngine

KEYS: dict[str, Any] = {"host": "127.0.0.1", "drain_seconds": 1.0, "max_connections": 1024}


class FaultyEngine(FakeEngine):
    """As LLMEngine, as far as `serve` uses it.

    Args:
        fault: "load": reading an adapter never ends; "step": the 20th step never does; "books": the pool's books are
            wrong at the end; "none".
    """

    def __init__(self, fault: str, config: EngineConfig):
        own = {**KEYS, "port": config.port, "adapter_roots": config.adapter_roots}
        super().__init__(max_model_len=10**6, step_seconds=0.01, **own)
        self.runner = SimpleNamespace(num_compilations=0, programs=SimpleNamespace(announces=False, hosts=None))
        self.fault = fault
        if fault == "load":
            for root in config.adapter_roots:
                self.builder.gates[root] = SimpleNamespace(wait=lambda _: time.sleep(10**6))  # type: ignore[assignment]

    def warm_up(self) -> None:
        """There is nothing to compile."""

    def describe(self) -> str:
        return "a fake engine"

    def step(self) -> list[Any]:
        if self.fault == "step" and self.counts.steps == 20:
            time.sleep(10**6)
        return super().step()

    def check_integrity(self) -> None:
        if self.fault == "books":
            raise serve.PoolIntegrityError("a page was lost")


if __name__ == "__main__":
    fault, port, *roots = sys.argv[1:]
    engine_of: Any = lambda config, progress, replica: FaultyEngine(fault, config)  # noqa: E731
    serve.LLMEngine = engine_of  # type: ignore[misc]
    serve.log_to_stderr()
    serve.end_process(serve.serve(EngineConfig(model="fake", port=int(port), adapter_roots=tuple(roots), **KEYS)))
