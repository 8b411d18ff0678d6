"""One request's outputs, handed from the engine thread to a coroutine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace

from multilora_jax.request import CompletionOutput, FinishReason, RequestOutput


class RequestStream:
    """The outputs of one admitted request, as an async iterator of cumulative `RequestOutput`.

    Only the newest output is kept: a reader slower than the engine skips states, never text, and holds no queue.
    Leaving it early (`aclose`, or `async with`) aborts the request.

    Args:
        request_id: unique among live requests.
        lora_names: the adapters that it is served with.
        loop: the reader's event loop.
        abort: called with this stream when its reader leaves early.
        arrival_time: time.monotonic() seconds at which the request came in.
    """

    def __init__(
        self,
        request_id: str,
        lora_names: frozenset[str],
        loop: asyncio.AbstractEventLoop,
        abort: Callable[[RequestStream], None],
        arrival_time: float,
    ):
        self.request_id = request_id
        self.lora_names = lora_names
        self.arrival_time = arrival_time
        self.loop = loop
        self.admitted: asyncio.Future[None] = loop.create_future()
        self._abort = abort
        self._wake = asyncio.Event()
        # Written by the engine thread as whole references, read by the event loop: no lock is needed.
        self.newest: RequestOutput | None = None
        self.error: BaseException | None = None
        self._seen: RequestOutput | None = None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next state.

        Raises:
            UnavailableError: the engine died or was shut down before the request was finished.
            UserError: the engine gave the request up, for example because its adapter could not be loaded.
        """
        while True:
            newest, error = self.newest, self.error
            if newest is not self._seen and newest is not None:
                self._seen = newest
                if newest.error is not None:
                    raise copy.copy(newest.error)  # several requests may have failed of one error
                return newest
            if self._seen is not None and self._seen.finished:
                raise StopAsyncIteration
            if error is not None:
                raise error
            # The engine thread sets its reference first and the event after, so clearing here loses no wake-up.
            self._wake.clear()
            await self._wake.wait()

    def wake(self) -> None:
        """On the event loop: something changed."""
        if not self.admitted.done():
            if self.error is not None:
                self.admitted.set_exception(self.error)
                self.admitted.exception()  # read at once: a caller that has left must not log "never retrieved"
            else:
                self.admitted.set_result(None)
        self._wake.set()

    async def final(self) -> RequestOutput:
        """Wait for the end and return the last output."""
        async for _ in self:
            pass
        assert self.newest is not None  # iteration ends after a finished output only
        return self.newest

    def aborted(self) -> RequestOutput:
        """The newest state as a finished output; the finish_reason of what had not ended is "abort"."""
        last = self.newest or RequestOutput(self.request_id, None, [], None, [CompletionOutput(0, "", [])], False)
        ends = [replace(o, finish_reason=o.finish_reason or FinishReason.ABORT.value) for o in last.outputs]
        return replace(last, outputs=ends, finished=True)

    async def aclose(self) -> None:
        """Abort the request unless it is finished."""
        if self.error is None and not (self.newest is not None and self.newest.finished):
            self._abort(self)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
