"""Several engines in one process behind one: data parallelism, a scheduler and a pool for each replica."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from multilora_jax.async_engine import AsyncEngine, Observer, Prompt
from multilora_jax.engine.inputs import Mix, read_mix
from multilora_jax.engine.metrics import EngineStats
from multilora_jax.engine.placement import Placement
from multilora_jax.engine.replica_stats import merge_stats
from multilora_jax.errors import NotFoundError, UserError
from multilora_jax.request import LoRARequest, RequestOutput, SamplingParams
from multilora_jax.request_stream import RequestStream

if TYPE_CHECKING:
    from multilora_jax.engine.llm_engine import LLMEngine
    from multilora_jax.lora.adapter import Adapter

T = TypeVar("T")


class ReplicatedEngine:
    """What AsyncEngine is, over several of them; usable from several event loops at once.

    Every adapter has its name on every replica; its weights go where its requests go, see Placement. One replica's
    death is the whole engine's: what lives on the others is still answered, and nothing new is accepted.

    Args:
        replicas: at least one, of one configuration.
    """

    def __init__(self, replicas: list[AsyncEngine]):
        self.replicas = replicas
        seats = replicas[0].engine.config.max_num_seqs
        self._placement = Placement(len(replicas), seats)
        self._lock = threading.Lock()
        self._live: dict[str, int] = {}

    @property
    def engine(self) -> LLMEngine:
        """The first replica's engine: what all have in common (names, limits, tokenizer) may be asked of it."""
        return self.replicas[0].engine

    async def submit(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, *, lora_request: Mix = None, **rest: Any
    ) -> RequestStream:
        """See AsyncEngine.submit; `rest` are its further arguments."""
        names = frozenset(request.lora_name for request in read_mix(lora_request))
        with self._lock:
            if any(replica.is_live(request_id) for replica in self.replicas) or request_id in self._live:
                raise UserError(
                    f"request_id {request_id!r} is in use by a running request",
                    reason="duplicate_request_id", param="request_id",
                )  # fmt: skip
            loads = [replica.num_live_requests for replica in self.replicas]
            for number in self._live.values():  # chosen, and not counted by their replicas yet
                loads[number] += 1
            number = self._live[request_id] = self._placement.choose(names, loads)
        try:
            replica = self.replicas[number]
            return await replica.submit(prompt, sampling_params, request_id, lora_request=lora_request, **rest)
        finally:
            with self._lock:
                del self._live[request_id]

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, **rest: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """See AsyncEngine.generate."""
        stream = await self.submit(prompt, sampling_params, request_id, **rest)
        async with stream:
            async for output in stream:
                yield output

    async def abort(self, request_id: str) -> bool:
        """See AsyncEngine.abort."""
        return any([await replica.abort(request_id) for replica in self.replicas])

    def add_observer(self, observer: Observer) -> None:
        """See AsyncEngine.add_observer; calls come from the replicas' threads, one at a time."""
        lock = threading.Lock()

        def one_at_a_time(output: RequestOutput) -> None:
            with lock:
                observer(output)

        for replica in self.replicas:
            replica.add_observer(one_at_a_time)

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """The figures of all replicas together, with each one's own in `replicas`."""
        return merge_stats(list(await asyncio.gather(*(replica.stats(timeout_s) for replica in self.replicas))))

    @property
    def healthy(self) -> bool:
        """Whether all replicas are."""
        return all(replica.healthy for replica in self.replicas)

    @property
    def trouble(self) -> str | None:
        """See Health.trouble; of the first replica that has any."""
        return next((trouble for replica in self.replicas if (trouble := replica.trouble) is not None), None)

    @property
    def num_live_requests(self) -> int:
        """Requests submitted and not yet finished."""
        return sum(replica.num_live_requests for replica in self.replicas)

    def shutdown(self, drain: bool = True, timeout: float = 30.0) -> None:
        """See AsyncEngine.shutdown."""
        threads = [
            threading.Thread(target=replica.shutdown, kwargs={"drain": drain, "timeout": timeout})
            for replica in self.replicas
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # ---- adapters ----------------------------------------------------------------------------------------------

    async def prepare(self, lora_request: Mix) -> None:
        """Load those of a request's adapters that were never loaded, where the request will go.

        The first replica loads them too: templates, tokenizers and digests are asked of it.
        """
        names = [request.lora_name for request in read_mix(lora_request)]
        homes = next((homes for name in names if (homes := self._homes(name))), None)
        number = homes[0] if homes else self._emptiest()
        await asyncio.gather(*(self.replicas[n].prepare(lora_request) for n in {0, number}))
        with self._lock:
            for name in names:
                self._placement.settle(name, number)

    async def add_lora(self, lora_request: LoRARequest, pinned: bool = False) -> Adapter:
        """See AsyncEngine.add_lora; it is pinned on one replica."""
        number = (self._homes(lora_request.lora_name) or [self._emptiest()])[0]
        found = await self._undoing(
            lora_request.lora_name,
            [
                lambda replica=replica, pin=pinned and n == number: replica.add_lora(lora_request, pinned=pin)
                for n, replica in enumerate(self.replicas)
            ],
            first=number,  # where it is pinned is where it may be refused
        )
        with self._lock:
            self._placement.settle(lora_request.lora_name, number)
        return found[number]

    async def examine_lora(self, path: str) -> Adapter:
        """See AsyncEngine.examine_lora."""
        return await self.replicas[0].examine_lora(path)

    async def register_lora(self, lora_request: LoRARequest) -> Adapter:
        """See AsyncEngine.register_lora."""
        calls = [lambda replica=replica: replica.register_lora(lora_request) for replica in self.replicas]
        return (await self._undoing(lora_request.lora_name, calls))[0]

    async def add_adapter(self, name: str, params: Mapping[str, Any], config: Any = None, **rest: Any) -> Adapter:
        """See AsyncEngine.add_adapter."""
        calls = [lambda replica=replica: replica.add_adapter(name, params, config, **rest) for replica in self.replicas]
        return (await self._undoing(name, calls))[0]

    async def pin_lora(self, name_or_id: str | int) -> None:
        """See AsyncEngine.pin_lora; on one replica, to which its requests go from now on."""
        name = self.replicas[0]._lora_name(name_or_id)
        number = (self._homes(name) or [self._emptiest()])[0]
        await self.replicas[number].pin_lora(name)
        with self._lock:
            self._placement.settle(name, number)

    async def unpin_lora(self, name_or_id: str | int) -> None:
        """See AsyncEngine.unpin_lora."""
        for replica in self.replicas:
            await replica.unpin_lora(name_or_id)

    async def remove_lora(self, name_or_id: str | int, *, wait_s: float = 0.0) -> int:
        """See AsyncEngine.remove_lora."""
        name = self.replicas[0]._lora_name(name_or_id)
        left = await asyncio.gather(*(replica.remove_lora(name, wait_s=wait_s) for replica in self.replicas))
        with self._lock:
            self._placement.forget(name)
        return sum(left)

    def list_loras(self) -> list[Adapter]:
        """The adapters that a request may name now."""
        return self.replicas[0].list_loras()

    def _homes(self, name: str) -> list[int]:
        with self._lock:
            return self._placement.homes(name)

    def _emptiest(self) -> int:
        return min(range(len(self.replicas)), key=lambda n: self.replicas[n].num_live_requests)

    async def _undoing(self, name: str, calls: Sequence[Callable[[], Awaitable[T]]], first: int = 0) -> list[T]:
        """Makes the same change on every replica, on the `first` before the others: what that one refuses changes
        nothing anywhere. Where another refuses, those that did not know the name forget it."""
        known = {adapter.name for adapter in self.list_loras()}
        done = await calls[first]()
        others = [call for n, call in enumerate(calls) if n != first]
        results: list[Any] = await asyncio.gather(*(call() for call in others), return_exceptions=True)
        results.insert(first, done)
        errors = [result for result in results if isinstance(result, BaseException)]
        if not errors:
            return [result for result in results if not isinstance(result, BaseException)]
        if name not in known:
            for replica, result in zip(self.replicas, results, strict=True):
                if not isinstance(result, BaseException):
                    try:
                        await replica.remove_lora(name)
                    except NotFoundError:  # removed by somebody else meanwhile
                        continue
        raise errors[0]
