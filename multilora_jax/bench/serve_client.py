"""The client of `bench serve`: sends requests when they are due, reads the streams, and notes when what came."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multilora_jax.bench.extras import require
from multilora_jax.bench.serve_load import Item
from multilora_jax.errors import ConfigError, UnavailableError, UserError

if TYPE_CHECKING:
    import httpx

PROBE_TIMEOUT_S = 10.0
"""Longest wait for the list of models."""


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        base_url: scheme, host and port; endpoint: path of a route for completions or chat.
        api_key: bearer token, None for none.
        timeout_s: longest silence of the server before a request counts as failed.
    """

    base_url: str
    endpoint: str = "/v1/completions"
    api_key: str | None = None
    timeout_s: float = 600.0

    @property
    def is_chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("chat/completions")

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


@dataclass
class Answer:
    """What came of one request. Times are seconds after the start of the run.

    Attributes:
        model: that it asked for.
        due: when it was to be sent; woke: when the client turned to it; sent: when it was sent, which is later where
            --max-concurrency held it back.
        came: when its pieces of text came; ended: when its stream ended.
        input_tokens, output_tokens: as the server counts them; None, and the number of pieces, where it does not.
        error: why it failed, None where it did not.
    """

    model: str
    due: float
    woke: float = 0.0
    sent: float = 0.0
    came: list[float] = field(default_factory=list)
    ended: float = 0.0
    input_tokens: int | None = None
    output_tokens: int = 0
    error: str | None = None

    def times_ms(self, since: float) -> dict[str, Any]:
        """{"ttft_ms", "tpot_ms", "e2el_ms", "itl_ms"}: milliseconds, None where there is no such figure, itl_ms a list.

        Args:
            since: what the first and the last token are counted from, in seconds after the start.
        """
        first, last = self.came[0], self.came[-1]
        more = self.output_tokens - 1
        return {
            "ttft_ms": (first - since) * 1000,
            "tpot_ms": (last - first) * 1000 / more if more > 0 else None,
            "e2el_ms": (last - since) * 1000,
            "itl_ms": [(after - before) * 1000 for before, after in itertools.pairwise(self.came)],
        }


def list_models(target: Target) -> list[str]:
    """The names that a server lists, empty where it does not list any.

    Raises:
        ConfigError: httpx is missing (`missing_package`).
        UnavailableError: nobody answers at that address (`no_server`).
        UserError: it is no address (`bad_value`).
    """
    require("httpx", "bench", "bench serve")
    import httpx

    url = f"{target.base_url}/v1/models"
    try:
        answer = httpx.get(url, headers=target.headers, timeout=PROBE_TIMEOUT_S)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise UserError(
            f"base_url: {target.base_url!r} is no address such as http://127.0.0.1:8000",
            reason="bad_value", param="base_url",
        ) from None  # fmt: skip
    except httpx.HTTPError as error:
        message = f"no answer from {url} ({_words(error)}): is a server running there? (--base-url, or --host, --port)"
        raise UnavailableError(message, reason="no_server", param="base_url") from None
    try:
        return [str(card["id"]) for card in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def body_of(item: Item, model: str, *, chat: bool, ignore_eos: bool) -> bytes:
    """The body of a streamed request.

    Raises:
        ConfigError: messages for a route that takes none, or token ids for the chat route (`bad_dataset`).
    """
    body: dict[str, Any] = {
        "model": model, "max_tokens": item.max_tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if ignore_eos:
        body["ignore_eos"] = True  # no field of OpenAI's own, so that it is sent where it is asked for only
    if not chat and not item.is_chat:
        body["prompt"] = item.prompt
    elif chat and item.is_chat:
        body["messages"] = item.prompt
    elif chat and isinstance(item.prompt, str):
        body["messages"] = [{"role": "user", "content": item.prompt}]
    else:
        raise ConfigError(
            "the requests are chats, or token ids, and --endpoint takes the other kind: messages and texts go to "
            "/v1/chat/completions, texts and token ids to /v1/completions",
            reason="bad_dataset", param="endpoint",
        )  # fmt: skip
    return json.dumps(body).encode()


async def run_load(
    target: Target,
    bodies: Sequence[bytes],
    models: Sequence[str],
    due: Sequence[float],
    max_concurrency: int | None = None,
) -> list[Answer]:
    """Sends every request at its time, whatever became of those before it, and waits for all.

    Args:
        target: where to.
        bodies, models: of each request.
        due: seconds after the start at which each is sent, never decreasing.
        max_concurrency: most requests under way; those beyond it wait, as at a proxy that lets no more through.
    """
    import httpx

    # As many connections as there are requests: a pool with a limit would be a queue that nobody measures.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(target.timeout_s)
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    answers = [Answer(model, at) for model, at in zip(models, due, strict=True)]
    async with httpx.AsyncClient(base_url=target.base_url, headers=target.headers, limits=limits, timeout=timeout) as c:
        start = time.perf_counter()
        tasks = []
        for body, answer in zip(bodies, answers, strict=True):
            wait = start + answer.due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(_send(c, target.endpoint, body, answer, start, slots)))
        await asyncio.gather(*tasks)
    return answers


async def _send(
    client: httpx.AsyncClient, endpoint: str, body: bytes, answer: Answer, start: float, slots: Any
) -> None:
    import httpx

    answer.woke = time.perf_counter() - start
    async with slots:
        answer.sent = time.perf_counter() - start
        try:
            headers = {"Content-Type": "application/json"}
            async with client.stream("POST", endpoint, content=body, headers=headers) as response:
                if response.status_code != 200:
                    answer.error = f"HTTP {response.status_code}: {_refusal(await response.aread())}"
                else:
                    await _read(response.aiter_bytes(), answer, start)
        except httpx.HTTPError as error:
            answer.error = _words(error)
        answer.ended = time.perf_counter() - start


async def _read(pieces: AsyncIterator[bytes], answer: Answer, start: float) -> None:
    """Reads a stream of server-sent events into `answer`."""
    finished, at, num_pieces, rest = False, 0.0, 0, b""
    async for piece in pieces:
        now = time.perf_counter() - start
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError:
                answer.error = f"an event that is no JSON: {data[:80]!r}"
                return
            if "error" in event:
                answer.error = f"in the stream: {_refusal(data)}"
                return
            if usage := event.get("usage"):
                answer.input_tokens = usage.get("prompt_tokens")
                answer.output_tokens = usage.get("completion_tokens") or 0
            for choice in event.get("choices") or ():
                finished = finished or choice.get("finish_reason") is not None
                if choice.get("text") or (choice.get("delta") or {}).get("content"):
                    answer.came.append(now)
                    num_pieces += 1
                at = now
    if not finished:
        answer.error = "the stream broke off"
        return
    answer.came = answer.came or [at]  # tokens without any text
    answer.output_tokens = answer.output_tokens or num_pieces


def _refusal(body: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:200]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def since_of(answer: Answer, rate: float, max_concurrency: int | None) -> float:
    """What a request's times are counted from, in seconds after the start.

    With a rate it is the time that the request was due: a server that falls behind, and a client that does, are not
    excused for the requests that they delay. Without a rate but with a limit on concurrency there is no such time, and
    it is the sending.
    """
    return answer.sent if math.isinf(rate) and max_concurrency else answer.due
