"""`serve` over a fake engine, as a process: `python -m tests.server.served_fake '{"key": value}'`.

A line on its standard input holds the engine in its next step ("hold") or lets it go on ("go").
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from types import SimpleNamespace

import multilora_jax.serve as module
from multilora_jax.config import EngineConfig
from multilora_jax.logs import log_to_stderr
from tests.server.fake_engine import FakeEngine


def main() -> int:
    engine = FakeEngine(max_model_len=100_000, step_seconds=0.01)
    engine.runner = SimpleNamespace(programs=SimpleNamespace(announces=False, hosts=None))  # type: ignore[attr-defined]
    engine.describe = lambda: "fake"  # type: ignore[attr-defined]
    module.build_engine = lambda config, replica: engine  # type: ignore[assignment]

    def listen() -> None:
        for line in sys.stdin:
            (engine.gate.clear if line.strip() == "hold" else engine.gate.set)()

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests themselves run under nohup
    threading.Thread(target=listen, daemon=True).start()
    log_to_stderr()
    return module.serve(EngineConfig(model="fake", **json.loads(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
