"""`serve` itself over a fake engine: TLS by file, and the end after a signal."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from multilora_jax.config import EngineConfig
from multilora_jax.errors import ConfigError
from multilora_jax.serve import check_certificate
from tests.server.test_serve import free_port

ROOT = Path(__file__).parent.parent.parent
TLS = Path(__file__).parent.parent / "data" / "tls"
CERTIFICATE = {"ssl_certfile": str(TLS / "cert.pem"), "ssl_keyfile": str(TLS / "key.pem")}


@pytest.fixture
def start():
    """Starts served_fake; returns its process and its port."""
    processes: list[subprocess.Popen[str]] = []

    def make(**config: Any) -> tuple[subprocess.Popen[str], int]:
        port = free_port()
        command = [sys.executable, "-m", "tests.server.served_fake", json.dumps({"port": port, **config})]
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        processes.append(process)
        return process, port

    yield make
    for process in processes:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    pytest.fail("not ready")


def test_tls_by_file(start):
    process, port = start(**CERTIFICATE)
    trust = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    with httpx.Client(base_url=f"https://localhost:{port}", verify=trust) as secure:
        ready(secure)
        assert secure.get("/v1/models").status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/health")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"at https://127.0.0.1:{port}" in output


def look_while_draining(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as caller:
        deadline = time.monotonic() + 20
        while caller.get("/ready").status_code != 503:
            assert time.monotonic() < deadline
        refused = caller.post("/v1/completions", json={"model": "base", "prompt": "hi"})
        assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "draining")
        assert caller.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("number", "drain_seconds"), [(signal.SIGTERM, 60.0), (signal.SIGTERM, 0.3), (signal.SIGHUP, 60.0)]
)
def test_after_a_signal_what_runs_gets_drain_seconds(start, number, drain_seconds):
    """Enough: it is finished, and the server ends at once then. Too few: it gets an error, and the server ends."""
    enough = drain_seconds > 1
    process, port = start(drain_seconds=drain_seconds)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as caller:
        ready(caller)
        body = {"model": "base", "prompt": "hi", "max_tokens": 50 if enough else 90_000, "ignore_eos": True}
        with caller.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            events = [next(lines)]
            if enough:
                tell(process, "hold")  # nothing ends before all has been looked at
            process.send_signal(number)
            if enough:
                look_while_draining(port)
                tell(process, "go")
            events += [line for line in lines if line]
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert events[-1] == "data: [DONE]"
    last = json.loads(events[-2].removeprefix("data: "))
    if enough:
        assert last["choices"][0]["finish_reason"] == "length"
    else:
        assert last["error"]["reason"] == "shutting_down"
    assert ("did not finish within drain_seconds" in errors) != enough
    assert "stopping: 1 requests to finish" in errors


def test_a_certificate_that_cannot_be_used_is_refused_before_anything_starts(tmp_path):
    other = tmp_path / "other.pem"
    other.write_text("no certificate")
    for pair in ({"ssl_certfile": str(other)}, {**CERTIFICATE, "ssl_keyfile": str(other)},
                 {"ssl_certfile": CERTIFICATE["ssl_certfile"]}):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            check_certificate(EngineConfig.from_dict({"model": "m", **pair}))
        assert caught.value.reason == "bad_certificate"
    with pytest.raises(ConfigError, match="ssl_keyfile is given without ssl_certfile"):
        EngineConfig(model="m", ssl_keyfile=CERTIFICATE["ssl_keyfile"])
    with pytest.raises(ConfigError, match="there is no file"):
        EngineConfig(model="m", keys_file="/nowhere/keys.yaml")
    for key, bad in (("cors_origins", ["https://a.example/path"]), ("otlp_endpoint", "localhost:4318")):
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_dict({"model": "m", key: bad})
        assert caught.value.param == key
