"""The engine behind asyncio: one thread steps it, any number of coroutines wait for their own request.

Every call that touches the requests goes through a command queue to the engine thread; what is about adapters does
not (see adapter_calls).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TYPE_CHECKING, Any

from multilora_jax.adapter_calls import AdapterCalls, Prompt, without_loading
from multilora_jax.engine.inputs import Mix, read_mix
from multilora_jax.engine.metrics import EngineStats
from multilora_jax.engine_vitals import FAILING_PAUSE_S, EngineDeadError, Health
from multilora_jax.errors import UnavailableError, UserError
from multilora_jax.loop_turns import let_arrive, let_send, post, wake_all
from multilora_jax.request import RequestOutput, SamplingParams
from multilora_jax.request_stream import RequestStream

if TYPE_CHECKING:
    from multilora_jax.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)

Observer = Callable[[RequestOutput], None]

TURN_S = 0.02
"""Commands run between two steps for so long, or to their end: thousands that come at once must not hold a batch up."""


class AsyncEngine(AdapterCalls, Health):
    """Serves an `LLMEngine` to asyncio callers; usable from several event loops at once.

    Args:
        engine: a warmed-up engine. From now on only this object may call its `add_request` and `step`.
        stall_after_s: `healthy` turns False when one step has been running for longer than this.
    """

    def __init__(self, engine: LLMEngine, *, stall_after_s: float = 120.0):
        super().__init__(engine)
        Health.__init__(self, stall_after_s)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._lock = threading.Lock()
        self._observers: list[Observer] = []
        self._closing = False
        self._stopped = False
        self._last_stats = EngineStats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # ---- for callers -------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Mix = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's cumulative outputs until it is finished; closing the generator early aborts it.

        The arguments are those of `submit`.

        Raises:
            UserError: bad input, or the engine gave the request up; no other request is affected.
            UnavailableError: the engine is dead or shutting down.
        """
        stream = await self.submit(
            prompt, sampling_params, request_id, lora_request=lora_request, priority=priority, cache_salt=cache_salt,
            tenant=tenant,
        )  # fmt: skip
        async with stream:
            async for output in stream:
                yield output

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Mix = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        arrival_time: float | None = None,
    ) -> RequestStream:
        """Hand a request to the engine and return once it is admitted, so bad input is known before any output.

        An adapter that was never loaded is loaded first; no other request waits for that.

        Args:
            prompt: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: how to sample and when to stop.
            request_id: unique among live requests.
            lora_request: the adapter to answer with, or several as a weighted mix; None for the base model.
            priority: passed on to the scheduler.
            cache_salt: only requests of the same salt share cached prefixes.
            tenant: see LLMEngine.add_request.
            arrival_time: time.monotonic() seconds that the request's times count from; now by default.

        Raises:
            UserError: bad input; no other request is affected.
            RateLimitError: the queue is full, or its adapter gets more requests than it may.
            UnavailableError: the engine is dead or shutting down.
        """
        names = frozenset(request.lora_name for request in read_mix(lora_request))
        arrival = time.monotonic() if arrival_time is None else arrival_time
        stream = RequestStream(request_id, names, asyncio.get_running_loop(), self._post_abort, arrival)
        with self._lock:
            self._check_open()
            if request_id in self._streams:
                raise UserError(
                    f"request_id {request_id!r} is in use by a running request",
                    reason="duplicate_request_id", param="request_id",
                )  # fmt: skip
            self._streams[request_id] = stream
        try:
            await self.prepare(lora_request)
            adapters = without_loading(lora_request) or None
            prompt = await self._tokenized(prompt, adapters)
            # Held until the request is queued: the engine thread must not wait for a compilation either.
            grammar = await self._compiled(sampling_params, adapters)
            request = (prompt, sampling_params, adapters, priority, cache_salt, tenant, arrival)
            self._commands.put(lambda: self._add(stream, *request))
            await stream.admitted
            del grammar
        except asyncio.CancelledError:
            self._post_abort(stream)
            raise
        except BaseException:
            self._take(stream)
            raise
        return stream

    async def abort(self, request_id: str) -> bool:
        """Stop a request; its generator ends with an output whose finish_reason is "abort". False if unknown."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._post_abort(stream)
        return stream is not None

    def add_observer(self, observer: Observer) -> None:
        """Call `observer(output)` on the engine thread for every output of every request, aborted ones included."""
        self._observers.append(observer)

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """The engine's figures, read between two steps; the last known ones if a step takes longer than timeout_s."""

        def read() -> None:
            self._last_stats = self.engine.stats()

        await self.between_steps(read, timeout_s)
        return self._last_stats

    async def between_steps(self, read: Callable[[], None], timeout_s: float = 1.0) -> None:
        """Call `read()` on the engine thread; it is called later, or never, where this takes longer than timeout_s."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()

        def call() -> None:
            read()
            post(loop, lambda: answer.done() or answer.set_result(None))

        with self._lock:
            running = self._cause_of_death is None and not self._stopped
            if running:
                self._commands.put(call)
        if running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(answer, timeout_s)

    @property
    def replicas(self) -> list[AsyncEngine]:
        """The engines that these are: itself; several of a ReplicatedEngine."""
        return [self]

    @property
    def num_live_requests(self) -> int:
        """Requests submitted and not yet finished."""
        return len(self._streams)

    def is_live(self, request_id: str) -> bool:
        """Whether a request of that id was submitted and is not yet finished."""
        return request_id in self._streams

    def shutdown(self, drain: bool = True, timeout: float = 30.0) -> None:
        """Refuse new requests, finish the running ones (if `drain`) for at most `timeout` seconds, stop the thread.

        Blocks; call it from a worker thread when an event loop must go on serving the drained requests. What still
        runs after the timeout ends with UnavailableError.
        """
        with self._lock:
            self._closing = True
        deadline = time.monotonic() + (timeout if drain else 0.0)
        while self._streams and self.healthy and time.monotonic() < deadline:
            time.sleep(0.02)
        self._commands.put(self._stop)
        self._thread.join(timeout=10.0)
        for threads in (self._threads, self._compilers):
            threads.shutdown(wait=False, cancel_futures=True)

    # ---- shared ------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._cause_of_death is not None:
            raise EngineDeadError(self._cause_of_death)
        if self._closing:
            raise UnavailableError("the server is shutting down", reason="shutting_down")
        self.check_moving()

    def _live_streams(self) -> list[RequestStream]:
        with self._lock:
            return list(self._streams.values())

    def _rouse(self) -> None:
        self._commands.put(lambda: None)

    def _post_abort(self, stream: RequestStream) -> None:
        self._commands.put(lambda: self._abort(stream))

    # ---- engine thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                idle = not self.engine.has_unfinished_requests()
                self._run_commands(block=idle)
                if idle:
                    let_arrive(self._live_streams, lambda: self._run_commands(block=False))
                if self._stopped:
                    return
                if self.engine.has_unfinished_requests():
                    self._vitals.busy()
                    start = time.monotonic()
                    self._deliver(self._step())
                    let_send(self._live_streams(), time.monotonic() - start)
        except BaseException as error:
            log.exception("the engine thread died")
            self.fail(error)

    def _step(self) -> list[RequestOutput]:
        try:
            outputs = self.engine.step()
        except Exception:
            log.exception("a step failed; what was in it runs again")
            self._vitals.failed()
            outputs = self.engine.recover()
            if self._vitals.trouble(self.stall_after_s) is not None:
                time.sleep(FAILING_PAUSE_S)
            return outputs
        self._vitals.stepped()
        return outputs

    def _run_commands(self, block: bool) -> None:
        if block:
            self._vitals.rest()
        end = 0.0
        while not self._stopped and (not end or time.monotonic() < end):
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return
            end, block = end or time.monotonic() + TURN_S, False
            self._vitals.busy()
            command()

    def _add(self, stream: RequestStream, *request: Any) -> None:
        if self._streams.get(stream.request_id) is not stream:
            return  # aborted while its adapter was being loaded
        try:
            self.engine.add_request(stream.request_id, *request)
        except Exception as error:  # whatever one request's input does must not end the thread for the others
            if not isinstance(error, UserError):
                log.exception("add_request failed")
            self._take(stream)
            stream.error = error
        self._wake([stream])

    def _abort(self, stream: RequestStream) -> None:
        if not self._take(stream):
            return
        self.engine.abort_request(stream.request_id)
        self._publish(stream, stream.aborted())
        self._wake([stream])

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        changed = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and (not output.finished or self._take(stream)):
                self._publish(stream, output)
                changed.append(stream)
        self._wake(changed)

    def _publish(self, stream: RequestStream, output: RequestOutput) -> None:
        if output.metrics is not None:
            # The engine has known the request for less long than its caller, who waited for its adapter too.
            output.metrics.arrival_time = min(output.metrics.arrival_time, stream.arrival_time)
        stream.newest = output
        for observer in self._observers:
            try:
                observer(output)
            except Exception:
                log.exception("an observer of the engine's outputs failed")

    def _wake(self, streams: Iterable[RequestStream]) -> None:
        for stream in wake_all(streams):
            self._post_abort(stream)

    def _take(self, stream: RequestStream) -> bool:
        """Forget a live request; False if it is none (its id may be a newer request's by now)."""
        with self._lock:
            if self._streams.get(stream.request_id) is not stream:
                return False
            del self._streams[stream.request_id]
            return True

    def _fail_all(self, make_error: Callable[[], Exception]) -> list[RequestStream]:
        """End every live request with an error of its own (a shared one would collect everybody's traceback)."""
        with self._lock:
            streams = list(self._streams.values())
            self._streams.clear()
        for stream in streams:
            stream.error = make_error()
        self._wake(streams)
        return streams

    def _stop(self) -> None:
        self._stopped = True
        for stream in self._fail_all(lambda: UnavailableError("the server was shut down", reason="shutting_down")):
            self.engine.abort_request(stream.request_id)

    def fail(self, cause: BaseException) -> None:
        """End every request and accept none, from any thread: the engine's own may be stuck in a step for good."""
        with self._lock:
            self._cause_of_death = cause
        self._fail_all(lambda: EngineDeadError(cause))
