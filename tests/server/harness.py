"""A server over a FakeEngine for the HTTP tests, called in process or over a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.server.app import create_app
from tests.server.fake_engine import FakeEngine


class Server:
    """One app with its engine.

    Attributes:
        engine: the FakeEngine; async_engine, app: what is tested.
        client: httpx client bound to the app.
    """

    def __init__(self, engine: FakeEngine):
        self.engine = engine
        self.async_engine = AsyncEngine(engine)  # type: ignore[arg-type]
        self.app = create_app(self.async_engine, engine.config)
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30)

    async def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **kwargs)

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """Body of a successful completion; model and prompt have defaults."""
        response = await self.post("/v1/completions", {"model": "base", "prompt": "hi", **fields})
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "hi"}]
        response = await self.post("/v1/chat/completions", {"model": "base", "messages": messages, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, the last one checked to be [DONE] and left out."""
        response = await self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        return parse_events(response)

    def close(self) -> None:
        self.engine.gate.set()
        self.async_engine.shutdown(drain=False)


def parse_events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """Serves an app on a free loopback port; yields its address."""
    config = uvicorn.Config(app, log_level="warning", lifespan="off", loop="asyncio", timeout_graceful_shutdown=5)
    uvicorn_server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=uvicorn_server.run, args=([listener],), daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not uvicorn_server.started:
            assert time.monotonic() < deadline, "uvicorn did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        uvicorn_server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()


async def wait_for(condition: Callable[[], Any], seconds: float = 2.0) -> None:
    """Fails when the condition has not come true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time allowed"
        await asyncio.sleep(0.01)


def step_with_readers(engine: FakeEngine) -> None:
    """Lets steps wait until the event loop has handed on what the one before computed: a reader that is late gets the
    newest state of its answer, in fewer pieces."""
    loop, step = asyncio.get_running_loop(), engine.step

    def step_after_readers() -> Any:
        for _ in range(8):  # from the engine's thread to the stream's task and its client's
            turn = threading.Event()
            loop.call_soon_threadsafe(turn.set)
            assert turn.wait(60)
        return step()

    engine.step = step_after_readers  # type: ignore[method-assign]


async def figures(server: Server) -> dict[str, dict[tuple, float]]:
    """Sample name to its label sets (without model_name, which is checked) and values."""
    response = await server.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    found: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "base"
            found.setdefault(sample.name, {})[tuple(sorted(labels.items()))] = sample.value
    return found


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that a completion stream's events add up to."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for piece in event["choices"]:
            whole = choices.setdefault(piece["index"], {"index": piece["index"], "text": ""})
            assert whole.get("finish_reason") is None, "a piece after the last one"
            whole["text"] += piece["text"]
            whole["finish_reason"], whole["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
            if piece["logprobs"] is None:
                whole["logprobs"] = None
            else:
                into = whole.setdefault("logprobs", {key: [] for key in piece["logprobs"]})
                for key, values in piece["logprobs"].items():
                    into[key] += values
            if "token_ids" in piece:
                whole.setdefault("token_ids", []).extend(piece["token_ids"])
                if piece["prompt_token_ids"] is not None:
                    whole["prompt_token_ids"] = piece["prompt_token_ids"]
    return [choices[index] for index in sorted(choices)]
