"""Server-sent events, and work that ends with its client."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from multilora_jax.errors import UserError
from multilora_jax.request import RequestOutput
from multilora_jax.server.errors import error_body, error_response

log = logging.getLogger(__name__)

T = TypeVar("T")

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""json.dumps would make an encoder of its own for each event."""

CLIENT_CLOSED_REQUEST = 499
"""Status of an answer that nobody is left to read (nginx's word for it)."""


class OutputStream(Protocol):
    """What the routes need of a request under way; see request_stream.RequestStream."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    async def aclose(self) -> None: ...


class ClientGone(Exception):
    """The client hung up."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but cancel it when the client hangs up.

    Args:
        receive: the ASGI callable, the request's body already read.

    Raises:
        ClientGone: the client hung up first; `work` has ended by then.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """An answer of server-sent events.

    Args:
        events: JSON values, one event each. A last event [DONE] follows them; an error raised by them is sent as an
            event of its own before it, or as an ordinary answer with its own status if there was no event yet.
        streams: closed when the answer ends for any reason, which aborts what is not finished.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], streams: Iterable[OutputStream]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._streams = list(streams)

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(scope, receive, send))
        except (ClientGone, OSError):
            pass
        finally:
            await self._events.aclose()
            # A generator that was never entered runs no cleanup of its own.
            await close_all(self._streams)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async for event in self._events:
                if not started:
                    await self._start(send)
                    started = True
                await _send_event(send, event)
        except OSError:
            raise  # the client's end of the connection
        except Exception as error:
            if not isinstance(error, UserError):
                log.exception("a stream failed")
            if not started:
                return await error_response(error)(scope, receive, send)
            await _send_event(send, error_body(error)[1])
        if not started:
            await self._start(send)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _send_event(send: Send, event: dict[str, Any]) -> None:
    await send({"type": "http.response.body", "body": f"data: {_encode(event)}\n\n".encode(), "more_body": True})


async def merged(streams: list[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index of the stream, its output), as they come, until all are finished."""
    if len(streams) == 1:  # most requests: no task for each token
        async for output in streams[0]:
            yield 0, output
        return
    iterators = [aiter(stream) for stream in streams]
    pending: dict[asyncio.Task[RequestOutput | None], int] = {}
    try:
        for index, iterator in enumerate(iterators):
            pending[asyncio.create_task(_next(iterator))] = index
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                index = pending.pop(task)
                output = task.result()
                if output is not None:
                    yield index, output
                    pending[asyncio.create_task(_next(iterators[index]))] = index
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _next(iterator: AsyncIterator[RequestOutput]) -> RequestOutput | None:
    return await anext(iterator, None)


async def last_outputs(streams: list[OutputStream]) -> list[RequestOutput]:
    """Each stream's last output; all are closed when one fails or the caller is cancelled."""
    outputs: dict[int, RequestOutput] = {}
    try:
        async for index, output in merged(streams):
            outputs[index] = output
    finally:
        await close_all(streams)
    return [outputs[index] for index in range(len(streams))]


async def submit_all(submissions: Iterable[Coroutine[Any, Any, OutputStream]]) -> list[OutputStream]:
    """Wait until every request is admitted; if one is refused the others are aborted and its error is raised."""
    tasks = [asyncio.create_task(submission) for submission in submissions]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await close_all(result for result in results if not isinstance(result, BaseException))
        raise


async def close_all(streams: Iterable[OutputStream]) -> None:
    """Abort what is not finished."""
    for stream in streams:
        await stream.aclose()
