"""What a request passes before its route: size of body and prompts, origins, ids, draining."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import time
from collections.abc import Iterable
from typing import Any, get_type_hints

import pytest
from pydantic import ValidationError

from multilora_jax.errors import UserError
from multilora_jax.lora.folders import check_size
from multilora_jax.server import inputs
from multilora_jax.server.protocol import CompletionBody
from tests.server.harness import listening, wait_for
from tests.server.test_auth import all_routes

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY = {"model": "base", "prompt": "hi", "max_tokens": 1}
LIMIT = 0.001
"""MiB: 1048 bytes."""


def body_of(num_bytes: int) -> bytes:
    """A body of exactly so many bytes that is answered with 200."""
    text = b'{"model": "base", "max_tokens": 1, "prompt": "hi"'
    return text + b" " * (num_bytes - len(text) - 1) + b"}"


async def in_pieces(content: bytes, size: int = 100):
    for start in range(0, len(content), size):
        yield content[start : start + size]


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_beyond_the_limit_is_413(make_server, declared):
    server = make_server(max_body_mib=LIMIT)
    headers = {"Content-Type": "application/json"}
    for num_bytes, status in ((1048, 200), (1049, 413), (100_000, 413)):
        content = body_of(num_bytes)
        sent = content if declared else in_pieces(content)
        answer = await server.client.post(PATH, content=sent, headers=headers)
        assert answer.status_code == status, answer.text
        if status == 413:
            error = answer.json()["error"]
            assert (error["reason"], error["code"]) == ("body_too_large", 413)
            assert answer.headers["connection"] == "close"
    assert len(server.engine.params_seen) == 1


def exchange(address: str, parts: Iterable[bytes], wait_s: float = 30.0) -> tuple[bytes, int]:
    """Sends parts until the server answers; what it said, and how many bytes had been sent by then."""
    host, port = address.removeprefix("http://").split(":")
    sent, deadline = 0, time.monotonic() + wait_s
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        connection.settimeout(0.5)
        left, more = b"", iter(parts)
        while time.monotonic() < deadline:
            left = left or next(more, b"")
            writable = [connection] if left else []
            readable, writable, _ = select.select([connection], writable, [], wait_s)
            if readable:
                return connection.recv(65536), sent
            if writable:
                count = connection.send(left)
                sent, left = sent + count, left[count:]
    return b"", sent


@pytest.mark.parametrize("chunked", [True, False])
def test_an_endless_body_is_answered_long_before_its_end(make_server, chunked):
    """Over a socket, where a declared length may be a lie and a chunked body has none."""
    server = make_server(max_body_mib=0.1)
    many = 2000
    size = 16384
    with listening(server.app) as address:
        lines = [f"POST {PATH} HTTP/1.1", "Host: x", "Content-Type: application/json"]
        lines.append("Transfer-Encoding: chunked" if chunked else f"Content-Length: {many * size}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode()
        piece = b" " * size
        part = f"{size:x}\r\n".encode() + piece + b"\r\n" if chunked else piece
        for _ in range(5):
            # The server closes while the client goes on sending, and a reset may overtake the answer.
            with contextlib.suppress(ConnectionResetError):
                answer, sent = exchange(address, [head, *[part] * many])
                break
        else:
            pytest.fail("no answer came before a reset")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    assert sent < 16 * 2**20  # of 31 MiB: what the sockets' buffers took


async def test_a_body_is_refused_for_its_key_before_its_size(make_server):
    server = make_server(max_body_mib=LIMIT, api_keys=("k",))
    answer = await server.client.post(PATH, content=body_of(5000), headers={"Content-Type": "application/json"})
    assert answer.status_code == 401


async def test_prompts_beyond_the_limits_are_refused(make_server):
    server = make_server(max_prompt_tokens=5, max_prompts_per_request=2)
    for prompt, reason in (("1234", None), ("12345", "prompt_too_long"), ([[65] * 5, [66]], None),
                           ([[65] * 6], "prompt_too_long"), (["a", "b", "c"], "too_many_prompts")):  # fmt: skip
        answer = await server.post(PATH, {**BODY, "prompt": prompt})
        assert answer.status_code == (200 if reason is None else 400), answer.text
        if reason is not None:
            assert (answer.json()["error"]["reason"], answer.json()["error"]["param"]) == (reason, "prompt")
    await wait_for(lambda: not server.engine.requests and not server.async_engine.num_live_requests)


async def test_very_many_prompts_are_refused_unread(make_server, monkeypatch):
    """Counted before they are tokenised: by a thread, and one task each, they would keep the server for seconds."""
    server = make_server()

    def read(*_: object) -> None:
        raise AssertionError("the prompts were read")

    monkeypatch.setattr(inputs, "_completion_prompts", read)
    answer = await server.post(PATH, {**BODY, "prompt": ["a"] * 257})
    assert (answer.status_code, answer.json()["error"]["reason"]) == (400, "too_many_prompts")


def test_a_body_of_a_million_wrong_items_is_refused_at_the_first(server):
    """Every route's body: to note each would keep the event loop, and so every other client, for up to minutes."""
    endpoints = [route.endpoint for route in all_routes(server.app.routes)]
    models = {hints["body"] for hints in map(get_type_hints, endpoints) if "body" in hints}
    assert CompletionBody in models
    fields = [(model, name) for model in models for name in model.model_fields]
    wrong: list[Any] = [[object()] * 5000, {str(number): object() for number in range(5000)}]
    num_nested = 0
    for model, name in fields:
        for value in wrong:
            try:
                model.model_validate({name: value})
            except ValidationError as error:
                num_errors = sum(found["loc"][:1] == (name,) for found in error.errors())
                assert num_errors <= 3, (model, name)
                num_nested += any(len(found["loc"]) > 1 for found in error.errors())
            except UserError:
                continue  # refused as a whole
    assert num_nested > 5  # items were looked at


def test_an_adapter_beyond_the_limit_is_refused_unread(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with (tmp_path / "adapter_model.safetensors").open("wb") as file:
        file.truncate(3 * 2**20)  # takes no room on the disk
    check_size(str(tmp_path), 4 * 2**20)
    with pytest.raises(Exception, match=r"3\.0 MiB, and 3 are allowed") as caught:
        check_size(str(tmp_path), 3 * 2**20)
    assert caught.value.reason == "adapter_too_large"  # type: ignore[attr-defined]


async def test_no_page_of_another_site_may_read_an_answer_by_default(server):
    for method in ("GET", "OPTIONS", "POST"):
        headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        answer = await server.client.request(method, "/v1/models", headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_listed_origins_may(make_server):
    server = make_server(cors_origins=("https://ui.example",), api_keys=("k",))
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = await server.client.options(PATH, headers={"Origin": "https://ui.example", **ask})
    assert preflight.status_code == 200  # browsers send no key with it
    assert preflight.headers["access-control-allow-origin"] == "https://ui.example"
    refused = await server.client.options(PATH, headers={"Origin": "https://evil.example", **ask})
    assert "access-control-allow-origin" not in refused.headers
    headers = {"Origin": "https://ui.example", "Authorization": "Bearer k"}
    answer = await server.client.post(PATH, json=BODY, headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://ui.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


@pytest.mark.parametrize(
    ("origin", "host", "listens_on", "status"),
    [
        (None, "127.0.0.1:8000", "127.0.0.1", 200),
        (None, "anything", "127.0.0.1", 200),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "127.0.0.1", 200),
        ("http://localhost:8000", "localhost:8000", "127.0.0.1", 200),
        ("http://[::1]:8000", "[::1]:8000", "::1", 200),
        ("https://evil.example", "127.0.0.1:8000", "127.0.0.1", 403),
        ("http://evil.example:8000", "evil.example:8000", "127.0.0.1", 403),
        ("null", "127.0.0.1:8000", "127.0.0.1", 403),
        ("http://[", "127.0.0.1:8000", "127.0.0.1", 403),
        ("http://[", "[", "0.0.0.0", 403),
        ("http://gpu-box:8000", "gpu-box:8000", "0.0.0.0", 200),
        ("https://evil.example", "gpu-box:8000", "0.0.0.0", 403),
        ("https://ui.example", "127.0.0.1:8000", "127.0.0.1", 200),
    ],
)
async def test_a_web_page_cannot_use_a_browser_s_place(make_server, origin, host, listens_on, status):
    """Neither from another site nor by a name that was turned to this machine (DNS rebinding)."""
    server = make_server(host=listens_on, cors_origins=("https://ui.example",))
    headers = {"Host": host} if origin is None else {"Host": host, "Origin": origin}
    for path, body in ((PATH, BODY), ("/v1/pin_lora_adapter", {"lora_name": "adapter-a"})):
        if listens_on == "0.0.0.0" and path != PATH:
            continue
        answer = await server.client.post(path, json=body, headers=headers)
        assert answer.status_code == status, answer.text
        if status == 403:
            assert answer.json()["error"]["reason"] == "foreign_origin"


async def test_a_key_may_come_from_anywhere(make_server):
    server = make_server(api_keys=("k",))
    headers = {"Origin": "https://evil.example", "Authorization": "Bearer k"}
    assert (await server.client.post(PATH, json=BODY, headers=headers)).status_code == 200


async def test_every_answer_has_an_id(server):
    answer = await server.client.get("/health", headers={"X-Request-Id": "client-1.2"})
    assert answer.headers["x-request-id"] == "client-1.2"
    assert len((await server.client.get("/nothing")).headers["x-request-id"]) == 32


async def test_d27_a_draining_server_is_alive_not_ready_and_takes_no_new_work(server):
    assert (await server.client.get("/ready")).status_code == 200
    server.engine.gate.clear()
    running = asyncio.create_task(server.complete())
    await wait_for(lambda: bool(server.engine.requests))
    calls = server.app.state.context.calls
    assert calls.active == 1
    calls.draining = True
    ready = await server.client.get("/ready")
    assert (ready.status_code, ready.json()["error"]["reason"]) == (503, "draining")
    assert (await server.client.get("/health")).status_code == 200
    refused = await server.post(PATH, BODY)
    assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "draining")
    assert refused.headers["retry-after"] == "1"
    server.engine.gate.set()
    await running
    assert calls.active == 0
