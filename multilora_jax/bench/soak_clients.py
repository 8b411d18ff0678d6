"""The clients of `bench soak`: well-behaved, hasty, slow, hostile, and those who manage adapters."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from multilora_jax.bench.raw_http import BrokenAnswer, Connection, ask, events_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

WORDS = tuple(f"word{number}" for number in range(50))

REFUSED = (404, 429, 503)
"""What a good request may get beside 200: its adapter was just unloaded, or there is too much to do."""

MALFORMED: tuple[tuple[str, str, bytes], ...] = (
    ("POST", COMPLETIONS, b"{"),
    ("POST", COMPLETIONS, b"[]"),
    ("POST", COMPLETIONS, b'{"model": "no such adapter", "prompt": "a"}'),
    ("POST", COMPLETIONS, b'{"prompt": [1, 2, 999999999], "model": "BASE"}'),
    ("POST", COMPLETIONS, b'{"prompt": "", "model": "BASE"}'),
    ("POST", COMPLETIONS, b'{"prompt": "a", "model": "BASE", "max_tokens": -1}'),
    ("POST", COMPLETIONS, b'{"prompt": "a", "model": "BASE", "temperature": "hot"}'),
    ("POST", COMPLETIONS, b'{"prompt": "a", "model": "BASE", "logit_bias": {"-1": 5}}'),
    ("POST", COMPLETIONS, b'{"prompt": "' + b"word " * 5000 + b'", "model": "BASE"}'),
    ("POST", CHAT, b'{"messages": [{"role": "user"}], "model": "BASE"}'),
    ("POST", CHAT, b'{"messages": "hi", "model": "BASE"}'),
    ("POST", "/v1/load_lora_adapter", b'{"lora_name": "x", "lora_path": "../../etc"}'),
    ("POST", "/v1/load_lora_adapter", b'{"lora_name": "x", "lora_path": "/etc"}'),
    ("POST", "/v1/load_lora_adapter", b'{"lora_name": "' + b"x" * 4000 + b'", "lora_path": "/etc\\u0000"}'),
    ("GET", COMPLETIONS, b""),
    ("DELETE", "/v1/models/..%2f..%2fetc", b""),
)
"""(method, path, body); each is answered with 4xx."""


@dataclass
class Ledger:
    """What became of every request.

    Attributes:
        sent: requests by kind of client; outcomes: "KIND: what came of it".
        faults: what must not happen, in words, each with its number.
        tokens: pieces of text that streams brought.
    """

    sent: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    tokens: int = 0


class Clients:
    """Clients of one server.

    Args:
        host, port: of the server.
        base: name of its base model.
        adapters: name to folder of the adapters that managers load, swap, pin and unload.
        seed: of everything that is drawn.
        patience_s: silence of the server after which a request counts as lost.
    """

    def __init__(self, host: str, port: int, base: str, adapters: dict[str, str], seed: int, patience_s: float):
        self.ledger = Ledger()
        self._host, self._port = host, port
        self._base = base
        self._adapters = adapters
        self._rng = random.Random(seed)
        self._patience_s = patience_s
        self._stop = False

    def stop(self) -> None:
        """No request is begun from now on."""
        self._stop = True

    async def run(self, number: int, managers: int) -> None:
        """Client `number`; the first few manage adapters, the others ask for text, each in a way drawn anew."""
        kinds: dict[str, tuple[Callable[[], Awaitable[str]], float]] = {
            "whole": (self._whole, 4), "stream": (self._stream, 6), "chat": (self._chat, 2), "slow": (self._slow, 1),
            "cancel": (self._cancel, 3), "deaf": (self._deaf, 0.3), "malformed": (self._malformed, 2),
        }  # fmt: skip
        while not self._stop:
            if number < managers:
                kind, work = "manage", self._manage
            else:
                kind = self._rng.choices([*kinds], [weight for _, weight in kinds.values()])[0]
                work = kinds[kind][0]
            self.ledger.sent[kind] += 1
            try:
                outcome = await asyncio.wait_for(work(), self._patience_s)
            except TimeoutError:
                outcome = self._fault(f"lost, nothing came for {self._patience_s:g} s")
            except (BrokenAnswer, OSError) as error:
                outcome = self._fault(f"lost ({type(error).__name__}: {str(error)[:60]})")
            self.ledger.outcomes[f"{kind}: {outcome}"] += 1
            await asyncio.sleep(self._rng.uniform(0, 0.5) if number >= managers else self._rng.uniform(0.1, 1))

    def _fault(self, words: str) -> str:
        self.ledger.faults[words] += 1
        return words

    def _body(self, **fields: object) -> dict[str, object]:
        rng = self._rng
        model = rng.choice([self._base, *self._adapters])
        prompt = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        return {"model": model, "prompt": prompt, "max_tokens": rng.randint(1, 24), "ignore_eos": True, **fields}

    async def _answered(self, path: str, body: dict[str, object]) -> str:
        status, answer = await ask(self._host, self._port, "POST", path, body)
        if status in REFUSED:
            return str(status)
        if status != 200:
            return self._fault(f"{status} for a good request: {answer[:120]!r}")
        if not body.get("stream"):
            json.loads(answer)
            return "200"
        events = events_of(answer)
        if not events or events[-1] != "[DONE]":
            return self._fault("a stream without its end")
        if "error" in events[-2]:
            error = events[-2]["error"]
            return "error event" if error["code"] in REFUSED else self._fault(f"error event: {error['message'][:120]}")
        self.ledger.tokens += len(events) - 1
        return "200"

    async def _whole(self) -> str:
        return await self._answered(COMPLETIONS, self._body())

    async def _stream(self) -> str:
        return await self._answered(COMPLETIONS, self._body(stream=True))

    async def _chat(self) -> str:
        body = self._body(stream=self._rng.random() < 0.5)
        messages = [{"role": "user", "content": body.pop("prompt")}]
        return await self._answered(CHAT, {**body, "messages": messages})

    async def _cancel(self) -> str:
        """Leaves at once, before an answer, or in the middle of one."""
        connection = await Connection.open(self._host, self._port)
        try:
            await connection.send("POST", COMPLETIONS, self._body(stream=self._rng.random() < 0.7, max_tokens=100))
            patience = self._rng.choice([0.0, 0.05, 0.3])
            if patience:
                try:
                    await asyncio.wait_for(connection.head(), patience)
                    async with aclosing(connection.pieces()) as pieces:
                        async for _ in pieces:
                            if self._rng.random() < 0.3:
                                break
                except TimeoutError:
                    pass
            return "left"
        finally:
            connection.abort()

    async def _slow(self) -> str:
        """Reads piece by piece, with pauses."""
        connection = await Connection.open(self._host, self._port)
        try:
            await connection.send("POST", COMPLETIONS, self._body(stream=True))
            status, _ = await connection.head()
            body = b""
            async for piece in connection.pieces():
                body += piece
                await asyncio.sleep(self._rng.uniform(0, 0.2))
            whole = status in REFUSED or (status == 200 and body.endswith(b"data: [DONE]\n\n"))
            return str(status) if whole else self._fault(f"{status} and {len(body)} bytes for a slow reader")
        finally:
            connection.abort()

    async def _deaf(self) -> str:
        """Asks for much and reads nothing; or begins a request and never ends it."""
        connection = await Connection.open(self._host, self._port)
        try:
            if self._rng.random() < 0.5:
                await connection.send("POST", COMPLETIONS, self._body(stream=True, logprobs=5, max_tokens=100))
            else:
                await connection.send_raw(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
            await asyncio.sleep(self._rng.uniform(0.5, 5))
            return "left"
        finally:
            connection.abort()

    async def _malformed(self) -> str:
        method, path, body = self._rng.choice(MALFORMED)
        status, answer = await ask(self._host, self._port, method, path, body.replace(b"BASE", self._base.encode()))
        if 400 <= status < 500:
            return str(status)
        return self._fault(f"{status} for {method} {path} {body[:60]!r}: {answer[:80]!r}")

    async def _manage(self) -> str:
        """Loads, swaps, pins, unpins or unloads an adapter that others may be doing the same to."""
        name = self._rng.choice([*self._adapters])
        what = self._rng.choices(["load", "swap", "pin", "unpin", "unload"], [4, 2, 1, 2, 2])[0]
        path = self._adapters[self._rng.choice([*self._adapters]) if what == "swap" else name]
        body: dict[str, object] = {"lora_name": name}
        if what in ("load", "swap"):
            body |= {"lora_path": path, "load_inplace": what == "swap"}
        route = f"/v1/{'load' if what == 'swap' else what}_lora_adapter"
        status, answer = await ask(self._host, self._port, "POST", route, body)
        if status in (200, 400, *REFUSED):  # 400: there already, or no room for one more pin
            return f"{what} {status}"
        return self._fault(f"{status} for {what}: {answer[:120]!r}")
