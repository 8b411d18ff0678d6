"""What callers of the asyncio engine do with adapters: load, replace, pin, remove, and bring in before first use.

Every call that may wait for a disk runs on a thread of its own pool, so that neither decoding, nor the event loop, nor
a request whose adapter is there already waits for it.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from multilora_jax.engine.inputs import Mix, read_mix
from multilora_jax.errors import NotFoundError, UserError
from multilora_jax.request import LoRARequest
from multilora_jax.request_stream import RequestStream
from multilora_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from multilora_jax.engine.llm_engine import LLMEngine
    from multilora_jax.lora.adapter import Adapter

T = TypeVar("T")
Prompt = str | list[int] | dict[str, Any]

PIN_WAIT_S = 10.0
"""Longest wait for a pinned adapter to be in the pool before the call that pinned it returns."""

MAX_CALLS = 64
"""Calls about adapters under way at once; most wait for a disk or for another call about the same name."""

MAX_COMPILATIONS = 2
"""Grammars compiled at once: some take seconds, and threads that read texts must not all wait for them."""


def without_loading(lora_request: Mix) -> Mix:
    """The same adapters, as they are named once a load in place has been done."""
    if isinstance(lora_request, LoRARequest):
        return replace(lora_request, load_inplace=False)
    return lora_request and [replace(request, load_inplace=False) for request in lora_request]


class AdapterCalls:
    """The part of AsyncEngine that is about adapters."""

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self._threads = ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="adapter")
        self._compilers = ThreadPoolExecutor(MAX_COMPILATIONS, thread_name_prefix="grammar")
        self._first_loads: dict[LoRARequest, Future[None]] = {}
        self._first_loads_lock = threading.Lock()

    async def prepare(self, lora_request: Mix) -> None:
        """Load those of a request's adapters that were never loaded, side by side; at once where there are none.

        Loading one for several requests at the same time is done once.

        Raises:
            UserError: one that is unknown or bad.
        """
        self._check_open()
        loads = [self._first_load(request) for request in read_mix(lora_request) if self._is_new(request)]
        if not loads:
            return
        try:
            # A caller that leaves must not take the load away from the others that wait for it.
            await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(load)) for load in loads))
        except UserError as error:
            raise copy.copy(error) from None  # one error raised by many callers would collect everybody's traceback

    async def add_lora(self, lora_request: LoRARequest, pinned: bool = False) -> Adapter:
        """Read and check an adapter and make it selectable; a pinned one is in the pool then, see `pin_lora`.

        Args:
            lora_request: its name, id and folder; with load_inplace it takes the place of one of that name.
            pinned: keep it in the pool until it is unpinned or removed.

        Raises:
            UserError: it is bad, or there is no room to pin it (`pin_limit`); nothing has changed then.
        """
        adapter = await self._call(self.engine.add_lora, lora_request, pinned=pinned)
        if pinned:
            await self._wait_until_resident(adapter.name)
        return adapter

    async def register_lora(self, lora_request: LoRARequest) -> Adapter:
        """Make an adapter selectable without reading it: the first request that names it does that."""
        return await self._call(self.engine.register_lora, lora_request)

    async def examine_lora(self, path: str) -> Adapter:
        """What `add_lora` would make of a folder, which it checks in the same way; nothing is registered or kept.

        Raises:
            UserError: what add_lora would raise for it.
        """
        return await self._call(self.engine.adapters.registry.examine, path)

    async def add_adapter(
        self,
        name: str,
        params: Mapping[str, Any],
        config: Any = None,
        *,
        int_id: int | None = None,
        load_inplace: bool = False,
    ) -> Adapter:
        """Make an adapter selectable whose weights are in memory; see LLMEngine.add_adapter."""
        return await self._call(
            self.engine.add_adapter, name, params, config, int_id=int_id, load_inplace=load_inplace
        )  # fmt: skip

    async def pin_lora(self, name_or_id: str | int) -> None:
        """Keep an adapter in the pool until it is unpinned or removed.

        Returns when it is there, or after PIN_WAIT_S: running requests may hold the room that it was promised.

        Raises:
            NotFoundError: no such adapter.
            UserError: no room to keep it (`pin_limit`).
        """
        name = self._lora_name(name_or_id)
        await self._call(self.engine.pin_lora, name)
        await self._wait_until_resident(name)

    async def unpin_lora(self, name_or_id: str | int) -> None:
        """Let an adapter leave the pool again when others need the room. Raises NotFoundError."""
        await self._call(self.engine.unpin_lora, self._lora_name(name_or_id))

    async def remove_lora(self, name_or_id: str | int, *, wait_s: float = 0.0) -> int:
        """Withdraw an adapter: new requests for it are refused, running ones finish on it.

        Args:
            name_or_id: the adapter's name or its lora_int_id.
            wait_s: seconds to wait at most for the requests that still run on it, alone or in a mix.

        Returns:
            How many requests still run on it.

        Raises:
            NotFoundError: no such adapter.
        """
        name = self._lora_name(name_or_id)
        await self._call(self.engine.remove_lora, name)
        draining = {stream for stream in self._live_streams() if name in stream.lora_names}
        deadline = time.monotonic() + wait_s
        while True:
            draining &= set(self._live_streams())
            if not draining or time.monotonic() >= deadline:
                return len(draining)
            await asyncio.sleep(0.02)

    def list_loras(self) -> list[Adapter]:
        """The adapters that a request may name now."""
        return self.engine.list_loras()

    # ---- for AsyncEngine ---------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        """Raises UnavailableError once the engine is dead or shutting down."""
        raise NotImplementedError

    def _live_streams(self) -> list[RequestStream]:
        """The requests submitted and not yet finished."""
        raise NotImplementedError

    def _rouse(self) -> None:
        """Make an idle engine thread look whether there is something to do."""
        raise NotImplementedError

    async def _tokenized(self, prompt: Prompt, adapters: Mix) -> Prompt:
        """Text with its token ids, found on a worker thread: the engine thread must not wait for a long text."""
        text = prompt.get("prompt") if isinstance(prompt, dict) and "prompt_token_ids" not in prompt else prompt
        if not isinstance(text, str) or not text:
            return prompt
        tokenizer = self.engine.tokenizer_for(adapters)
        if tokenizer is None:
            return prompt
        rest = prompt if isinstance(prompt, dict) else {}
        return {**rest, "prompt": text, "prompt_token_ids": await asyncio.to_thread(tokenizer.encode, text)}

    async def _compiled(self, params: SamplingParams, adapters: Mix) -> Any:
        if getattr(params, "structured_outputs", None) is None:
            return None
        loaded, _ = self.engine.adapters.resolve(adapters)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compilers, self.engine.plans.prepare, params, loaded)

    # ---- shared ------------------------------------------------------------------------------------------------

    async def _call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        self._check_open()
        call = partial(function, *args, **kwargs)
        result = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        self._rouse()  # there may be pages to copy now
        return result

    async def _wait_until_resident(self, name: str) -> None:
        deadline = time.monotonic() + PIN_WAIT_S
        while time.monotonic() < deadline:
            # Not on the event loop: it takes the engine's lock, and looks at every name.
            state = (await asyncio.to_thread(self.engine.adapter_states)).get(name)
            if state in ("resident", None):  # or removed meanwhile
                return
            await asyncio.sleep(0.02)

    def _lora_name(self, name_or_id: str | int) -> str:
        if isinstance(name_or_id, str):
            return name_or_id
        for adapter in self.list_loras():
            if adapter.int_id == name_or_id:
                return adapter.name
        raise NotFoundError(
            f"no adapter with id {name_or_id} is loaded", reason="adapter_not_found", param="lora_int_id"
        )

    def _is_new(self, request: LoRARequest) -> bool:
        """Whether something has to be loaded before the engine can take a request for this adapter."""
        if request.load_inplace:
            return True
        try:
            return self.engine.adapters.registry.get(request.lora_name).version is None
        except NotFoundError:
            return bool(request.lora_path)  # without a path there is nothing to load: the engine refuses the name

    def _first_load(self, request: LoRARequest) -> Future[None]:
        """The load of an adapter: the one under way, where there is one."""
        request = replace(request, scale=1.0)
        if request.load_inplace:
            return self._threads.submit(self.engine.prepare, [request])
        with self._first_loads_lock:
            load = self._first_loads.get(request)
            if load is None:
                load = self._first_loads[request] = self._threads.submit(self.engine.prepare, [request])
                load.add_done_callback(lambda _: self._first_loads.pop(request, None))
            return load
