"""llama.cpp's server as one of the engines of `bench peers`: started, asked over HTTP, ended (host only)."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from multilora_jax.errors import ConfigError, UserError

START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 600.0
TAIL_CHARS = 600

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The server is on this machine, whatever proxy the environment names."""


class LlamaServer:
    """A running llama-server.

    Args:
        path: the binary.
        gguf: the model, a GGUF file: nothing is converted.
        adapters: GGUF files of adapters, numbered in this order.
        slots: sequences at once; context: tokens of each.
        threads: of the computation.

    Raises:
        ConfigError: it cannot be started (`bad_value`).
        UserError: it ended, or was not ready in time (`peer_failed`).
    """

    def __init__(self, path: str, gguf: str, adapters: Sequence[str], *, slots: int, context: int, threads: int):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        argv = [
            path, "--model", gguf, "--host", "127.0.0.1", "--port", str(port), "--parallel", str(slots),
            "--ctx-size", str(slots * context), "--threads", str(threads), "--threads-batch", str(threads),
        ]  # fmt: skip
        for adapter in adapters:
            argv += ["--lora", adapter]
        argv += ["--lora-init-without-apply"] if adapters else []
        self.num_adapters = len(adapters)
        self._words = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in close)
        try:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=self._words, stderr=self._words)
        except OSError as error:
            self._words.close()
            raise ConfigError(
                f"llama_server: cannot run {path!r}: {error.strerror}", reason="bad_value", param="llama_server"
            ) from None
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[list[int]], adapters: Sequence[int | None], max_tokens: int) -> float:
        """Answers all prompts, sent at once; the seconds that it took."""
        bodies = [
            {
                "prompt": prompt, "n_predict": max_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False,
                **({} if number is None else {"lora": [{"id": number, "scale": 1.0}]}),
            }
            for prompt, number in zip(prompts, adapters, strict=True)
        ]  # fmt: skip
        with ThreadPoolExecutor(len(bodies)) as pool:
            start = time.perf_counter()
            answers = list(pool.map(self._complete, bodies))
            seconds = time.perf_counter() - start
        short = [answer["tokens_predicted"] for answer in answers if answer.get("tokens_predicted") != max_tokens]
        if short:
            raise UserError(f"llama.cpp: an answer has {short[0]} tokens instead of {max_tokens}", reason="peer_failed")
        return seconds

    def close(self) -> None:
        """Ends the server."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._words.close()

    def __enter__(self) -> LlamaServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/completion", json.dumps(body).encode(), headers)
        try:
            with _DIRECT.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise UserError(f"llama.cpp: {error.code}: {error.read()[:200]!r}", reason="peer_failed") from None
        except (OSError, ValueError) as error:
            raise self._failed(f"no answer ({error})") from None

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._failed(f"it ended with status {self._process.returncode}")
            try:
                with _DIRECT.open(f"{self._url}/health", timeout=5):
                    return
            except OSError:  # not there yet, or 503 while it loads
                time.sleep(0.1)
        raise self._failed(f"it was not ready within {START_TIMEOUT_S:g} s")

    def _failed(self, what: str) -> UserError:
        self._words.seek(0)
        tail = self._words.read()[-TAIL_CHARS:].strip()
        return UserError(f"llama.cpp: {what}; its last words:\n{tail}", reason="peer_failed")
