"""Prompts that several requests of one comparison read alike: read once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

from fastapi import Request

T = TypeVar("T")

SCOPE_KEY = "multilora_jax.shared_prompts"
"""Of a request's scope: the SharedPrompts of the comparison that it belongs to, where it does."""


class SharedPrompts:
    """What the requests of one comparison have read, or are reading."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}

    async def get(self, key: Hashable, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `read` gives, or what it gave to whoever came first with this key; raises what it raises."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(read())
        return await asyncio.shield(task)  # one that leaves takes it from no other

    def close(self) -> None:
        """Nobody waits any longer."""
        for task in self._tasks.values():
            task.cancel()


async def read_once(request: Request, key: Hashable, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `read` gives; within a comparison it is called once for each key.

    Args:
        key: what the result depends on besides the comparison's common fields.
    """
    shared: SharedPrompts | None = request.scope.get(SCOPE_KEY)
    return await (read() if shared is None else shared.get(key, read))
