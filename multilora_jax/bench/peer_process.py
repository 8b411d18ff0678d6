"""Another engine in a process of its own, told over a pipe when to run (host only).

Two frameworks in one process would share its memory, and their pools of threads would spin against each other; here
one waits on a pipe while the other runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from multilora_jax.errors import ConfigError, UserError

TAIL_CHARS = 600
"""How much of a process's last words an error repeats."""

CLOSE_TIMEOUT_S = 10.0
"""Longest wait for the process to end with its input."""


class PeerProcess:
    """A process that answers each line of JSON with one line of JSON.

    Args:
        name: for messages.
        argv: its command line.
        env: variables beside those of this process.

    Raises:
        ConfigError: the program cannot be started (`bad_value`).
    """

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None):
        self.name = name
        self._words = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in close)
        try:
            self._process = subprocess.Popen(
                list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, text=True,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        except OSError as error:
            self._words.close()
            raise ConfigError(
                f"{name}: cannot run {argv[0]!r}: {error.strerror}", reason="bad_value", param="peer_python"
            ) from None

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message and waits for the answer.

        Raises:
            UserError: the process answers with an error (`peer_refused`, or `missing_package` where it lacks one), or
                with something else than JSON, or not at all because it ended (`peer_failed`).
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise self._failed(f"the process ended with status {self._process.wait()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._failed(f"an answer that is no JSON: {line[:80]!r}") from None
        if "error" in answer:
            missing = answer.get("kind") in ("ModuleNotFoundError", "ImportError")
            raise UserError(
                f"{self.name}: {answer.get('kind', 'error')}: {answer['error']}"
                + (": pip install 'multilora_jax[peers]', or name another interpreter: --peer-python PATH"
                   if missing else ""),
                reason="missing_package" if missing else "peer_refused", param="peer_python",
            )  # fmt: skip
        return answer

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):  # it ended by itself
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._words.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _failed(self, what: str) -> UserError:
        self._words.seek(0)
        tail = self._words.read()[-TAIL_CHARS:].strip()
        return UserError(f"{self.name}: {what}" + (f"; its last words:\n{tail}" if tail else ""), reason="peer_failed")
