"""`serve` itself over a fake engine: TLS by file, and the end after a signal."""

from __future__ import annotations

import json
import os
import signal
import ssl
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from multilora_jax.config import EngineConfig
from multilora_jax.errors import ConfigError
from multilora_jax.serve import check_certificate, serve
from tests.server.fake_engine import FakeEngine
from tests.server.test_serve import free_port

TLS = Path(__file__).parent.parent / "data" / "tls"
CERTIFICATE = {"ssl_certfile": str(TLS / "cert.pem"), "ssl_keyfile": str(TLS / "key.pem")}


@pytest.fixture
def served(monkeypatch):
    """Runs `serve` with a client on a thread; returns the exit status, what the client returned, and the seconds."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(client: Any, step_seconds: float = 0.0, **config: Any) -> tuple[int, Any, float]:
        port, engine = free_port(), FakeEngine(max_model_len=100_000, step_seconds=step_seconds)
        engine.runner = SimpleNamespace(programs=SimpleNamespace(announces=False))  # type: ignore[attr-defined]
        engine.describe = lambda: "fake"  # type: ignore[attr-defined]
        monkeypatch.setattr("multilora_jax.serve.build_engine", lambda _: engine)
        result: list[Any] = []

        def call() -> None:
            try:
                result.append(client(port, engine))
            except BaseException as error:
                result.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        status = serve(EngineConfig(model="fake", port=port, **config))
        ended = time.monotonic()
        thread.join(30)
        if isinstance(result[0], BaseException):
            raise result[0]
        started = result[0][1] if isinstance(result[0], tuple) else ended
        return status, result[0], ended - started

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    pytest.fail("not ready")


def test_tls_by_file(served, capsys):
    trust = ssl.create_default_context(cafile=str(TLS / "cert.pem"))

    def client(port: int, _: FakeEngine) -> Any:
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trust) as secure:
            ready(secure)
            answer = secure.get("/v1/models").status_code
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health")
        return answer

    status, answer, _ = served(client, **CERTIFICATE)
    assert (status, answer) == (0, 200)
    assert "at https://127.0.0.1:" in capsys.readouterr().out


def look_while_draining(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as caller:
        deadline = time.monotonic() + 20
        while caller.get("/ready").status_code != 503:
            assert time.monotonic() < deadline
        refused = caller.post("/v1/completions", json={"model": "base", "prompt": "hi"})
        assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "draining")
        assert caller.get("/health").status_code == 200


@pytest.mark.parametrize("drain_seconds", [60.0, 0.3])
def test_after_sigterm_what_runs_gets_drain_seconds(served, drain_seconds):
    """Enough: it is finished, and the server ends at once then. Too few: it gets an error, and the server ends."""
    enough = drain_seconds > 1

    def client(port: int, engine: FakeEngine) -> Any:
        events: list[str] = []
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as caller:
            ready(caller)
            body = {"model": "base", "prompt": "hi", "max_tokens": 20 if enough else 90_000, "ignore_eos": True}
            with caller.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                lines = response.iter_lines()
                events.append(next(lines))
                if enough:
                    engine.gate.clear()  # nothing ends before all has been looked at
                began = time.monotonic()
                os.kill(os.getpid(), signal.SIGTERM)
                if enough:
                    look_while_draining(port)
                    engine.gate.set()
                events += [line for line in lines if line]
        return events, began

    status, (events, _), seconds = served(client, step_seconds=0.02, drain_seconds=drain_seconds)
    assert status == 0
    assert events[-1] == "data: [DONE]"
    last = json.loads(events[-2].removeprefix("data: "))
    if enough:
        assert last["choices"][0]["finish_reason"] == "length"
    else:
        assert last["error"]["reason"] == "shutting_down"
    assert seconds < 30


def test_a_certificate_that_cannot_be_used_is_refused_before_anything_starts(tmp_path):
    other = tmp_path / "other.pem"
    other.write_text("no certificate")
    for pair in ({"ssl_certfile": str(other)}, {**CERTIFICATE, "ssl_keyfile": str(other)},
                 {"ssl_certfile": CERTIFICATE["ssl_certfile"]}):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            check_certificate(EngineConfig(model="m", **pair))
        assert caught.value.reason == "bad_certificate"
    with pytest.raises(ConfigError, match="ssl_keyfile is given without ssl_certfile"):
        EngineConfig(model="m", ssl_keyfile=CERTIFICATE["ssl_keyfile"])
    with pytest.raises(ConfigError, match="there is no file"):
        EngineConfig(model="m", keys_file="/nowhere/keys.yaml")
    for key, bad in (("cors_origins", ("https://a.example/path",)), ("otlp_endpoint", "localhost:4318")):
        with pytest.raises(ConfigError) as caught:
            EngineConfig(model="m", **{key: bad})
        assert caught.value.param == key
