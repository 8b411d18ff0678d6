"""Times of programs on a device, with its caches flushed before each run.

One call of a small kernel is shorter than its launch, so a program is a stack of layers with weights of their own. It
begins with a pass over a buffer much larger than any cache: that flushes them, and while it runs the host has launched
the rest, so what is left is the device's own time. The pass alone is measured as well and taken off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass
class Clock:
    """Measures programs on the default device.

    Args:
        flush_bytes: size of the buffer that flushes the caches.
        calls: runs that are launched in a row and timed together.
        rounds: such groups, of which the median counts.
        deadline: time.monotonic() after which `left` is negative.
    """

    flush_bytes: int
    calls: int
    rounds: int
    deadline: float

    def __post_init__(self) -> None:
        self._buffer = jnp.zeros(self.flush_bytes // 4, jnp.float32)
        alone = jax.jit(lambda buffer, state: (_flush(buffer), state, ()), donate_argnums=0)
        self._flush_seconds = self._seconds(alone, (None,))

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return self.deadline - time.monotonic()

    @property
    def bandwidth(self) -> float:
        """Bytes a second of a large copy, read and written: the pass over the buffer is one."""
        return 2 * self._buffer.nbytes / self._flush_seconds

    def microseconds(self, fn: Callable[..., Any], *args: Any) -> float:
        """Device time of fn(*args), one run, caches cold.

        Args:
            fn: jittable; its first argument is the one that the flush holds back.
        """
        return self.carried(lambda first, *rest: (first, fn(first, *rest)), *args, donate=False)

    def carried(self, fn: Callable[..., tuple[Any, Any]], state: Any, *args: Any, donate: bool = True) -> float:
        """The same of fn(state, *args) -> (state, result), whose state goes from run to run. DONATES state."""

        seconds = self._seconds(jax.jit(flushed(fn, donate), donate_argnums=(0, 1) if donate else 0), (state, *args))
        return max(seconds - self._flush_seconds, 0.0) * 1e6

    def _seconds(self, program: Callable[..., Any], args: tuple[Any, ...]) -> float:
        state, *rest = args

        def run(calls: int) -> float:
            nonlocal state
            begin = time.perf_counter()
            result: Any = None
            for _ in range(calls):
                self._buffer, after, result = program(self._buffer, state, *rest)
                state = state if after is None else after
            jax.block_until_ready((self._buffer, result))
            return (time.perf_counter() - begin) / calls

        try:
            run(1)  # compiles
            return statistics.median(run(self.calls) for _ in range(self.rounds))
        finally:
            if self._buffer.is_deleted():  # given to a program that failed
                self._buffer = jnp.zeros(self.flush_bytes // 4, jnp.float32)


def flushed(fn: Callable[..., tuple[Any, Any]], donate: bool) -> Callable[..., tuple[jax.Array, Any, Any]]:
    """fn(state, *args) -> (state, result) behind a pass over a buffer: (buffer, state, *args) to (buffer, .., result).

    The state comes back where it is donated, else None.
    """

    def program(buffer: jax.Array, state: Any, *rest: Any) -> tuple[jax.Array, Any, Any]:
        buffer, state = jax.lax.optimization_barrier((_flush(buffer), state))
        after, result = fn(state, *rest)
        return buffer, after if donate else None, result

    return program


def _flush(buffer: jax.Array) -> jax.Array:
    return buffer + 1
