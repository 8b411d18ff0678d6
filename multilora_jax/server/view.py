"""The engine as one caller sees it: only its adapters, its own cache, its limits.

The routes get the engine from ServerContext, which hands out this view during a request: a route cannot forget to ask
who calls. What the view does not change goes to the engine as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from multilora_jax.engine.inputs import read_mix
from multilora_jax.engine.metrics import EngineStats
from multilora_jax.errors import NotFoundError, UserError
from multilora_jax.lora.registry import unknown_adapter
from multilora_jax.request import LoRARequest
from multilora_jax.server.call import Call, Submission
from multilora_jax.server.inputs import check_num_prompts

if TYPE_CHECKING:
    from multilora_jax.async_engine import AsyncEngine
    from multilora_jax.config import EngineConfig
    from multilora_jax.engine.llm_engine import LLMEngine
    from multilora_jax.lora.adapter import Adapter
    from multilora_jax.request_stream import RequestStream
    from multilora_jax.sampling_params import SamplingParams

T = TypeVar("T")


class LLMView:
    """An LLMEngine whose adapters are the caller's."""

    def __init__(self, engine: LLMEngine, call: Call):
        self._engine = engine
        self._caller = call.caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def list_loras(self) -> list[Adapter]:
        """The adapters that the caller may see."""
        return [adapter for adapter in self._engine.list_loras() if self._caller.sees(adapter.name)]

    def lora_request(self, name: str) -> LoRARequest:
        """As LLMEngine's; an adapter that the caller may not see is unknown."""
        self.check_seen([name])
        return self._guarded(self._engine.lora_request, name)

    def adapter_states(self) -> dict[str, str]:
        """As LLMEngine's."""
        return {name: state for name, state in self._engine.adapter_states().items() if self._caller.sees(name)}

    def tokenizer_for(self, lora_request: Any) -> Any:
        """As LLMEngine's."""
        return self._of_mix(self._engine.tokenizer_for, lora_request)

    def chat_template_for(self, lora_request: Any) -> str | None:
        """As LLMEngine's."""
        return self._of_mix(self._engine.chat_template_for, lora_request)

    def vocab_limit(self, lora_request: Any) -> int:
        """As LLMEngine's."""
        return self._of_mix(self._engine.vocab_limit, lora_request)

    def stats(self) -> EngineStats:
        """As LLMEngine's."""
        return self.filtered(self._engine.stats())

    def check_seen(self, names: Iterable[str]) -> None:
        """Raises what an unknown name raises for the first that the caller may not see."""
        for name in names:
            if not self._caller.sees(name):
                raise self._unknown(name)

    def filtered(self, stats: EngineStats) -> EngineStats:
        """The figures without what names others' adapters."""
        sees = self._caller.sees
        return replace(
            stats,
            running_by_adapter={name: n for name, n in stats.running_by_adapter.items() if sees(name)},
            waiting_by_adapter={name: n for name, n in stats.waiting_by_adapter.items() if sees(name)},
            tiers=[row for row in stats.tiers if sees(row[0])],
        )

    def _of_mix(self, function: Callable[[Any], T], lora_request: Any) -> T:
        self.check_seen(request.lora_name for request in read_mix(lora_request))
        return self._guarded(function, lora_request)

    def _guarded(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return function(*args)
        except NotFoundError as error:
            raise self.as_seen(error) from None

    def as_seen(self, error: NotFoundError) -> NotFoundError:
        """An error about an unknown name, with suggestions from among the caller's adapters only."""
        if error.reason != "unknown_adapter" or error.name is None:
            return error
        return self._unknown(error.name, error.param)

    def _unknown(self, name: str, param: str | None = "model") -> NotFoundError:
        names = [self._engine.base_name, *(adapter.name for adapter in self.list_loras())]
        return unknown_adapter(name, names, param)


class EngineView:
    """An AsyncEngine that acts for one call.

    Args:
        engine: the server's.
        call: for whom; what it submits is noted there.
        config: for the limits of a request.
    """

    def __init__(self, engine: AsyncEngine, call: Call, config: EngineConfig):
        self._async_engine = engine
        self._call = call
        self._config = config
        self.engine = LLMView(engine.engine, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._async_engine, name)

    def list_loras(self) -> list[Adapter]:
        """The adapters that the caller may see."""
        return self.engine.list_loras()

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """As AsyncEngine's, without what names others' adapters."""
        return self.engine.filtered(await self._async_engine.stats(timeout_s))

    async def prepare(self, lora_request: Any) -> None:
        """As AsyncEngine's."""
        self.engine.check_seen(request.lora_name for request in read_mix(lora_request))
        try:
            await self._async_engine.prepare(lora_request)
        except NotFoundError as error:
            raise self.engine.as_seen(error) from None

    async def register_lora(self, lora_request: LoRARequest) -> Adapter:
        """As AsyncEngine's, under a name that the caller may see."""
        self.engine.check_seen([lora_request.lora_name])
        return await self._async_engine.register_lora(lora_request)

    async def generate(self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any) -> Any:
        """As AsyncEngine's, by this view's `submit`."""
        async with await self.submit(prompt, sampling_params, request_id, **kwargs) as stream:
            async for output in stream:
                yield output

    async def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        arrival_time: float | None = None,
    ) -> RequestStream:
        """As AsyncEngine's, within the caller's limits, with its own cache and as its tenant.

        Raises:
            UserError: as AsyncEngine's, and `prompt_too_long`, `too_many_prompts`.
            PermissionDeniedError: `priority_too_good`.
            RateLimitError: as AsyncEngine's, and `tokens_per_minute`.
        """
        call, caller = self._call, self._call.caller
        names = tuple(request.lora_name for request in read_mix(lora_request))
        self.engine.check_seen(names)
        priority = caller.priority(priority)
        num_prompt, cost = self._size(prompt, sampling_params)
        now = time.monotonic()
        caller.limits.reserve(cost, now)
        try:
            stream = await self._async_engine.submit(
                prompt, sampling_params, request_id, lora_request=lora_request, priority=priority,
                cache_salt=caller.salt(cache_salt), tenant=caller.tenant if caller.named else tenant,
                arrival_time=arrival_time,
            )  # fmt: skip
        except BaseException as error:
            caller.limits.give_back(cost, now)
            if isinstance(error, NotFoundError):
                raise self.engine.as_seen(error) from None
            raise
        call.submissions.append(Submission(names, num_prompt, cost, stream))
        return stream

    def _size(self, prompt: Any, params: SamplingParams) -> tuple[int, int]:
        """Tokens of a prompt, and the most that it and its answers may take, checked."""
        self._call.num_prompts += 1  # those under way too, which are submitted side by side
        check_num_prompts(self._call.num_prompts, self._config.max_prompts_per_request)
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
        num_prompt = 0 if ids is None or isinstance(ids, str) else len(ids)
        limit = self._config.max_prompt_tokens
        if limit is not None and num_prompt > limit:
            raise UserError(
                f"the prompt has {num_prompt} tokens and this server takes {limit} (max_prompt_tokens): shorten it",
                reason="prompt_too_long", param="prompt",
            )  # fmt: skip
        room = max(0, self._async_engine.engine.max_model_len - num_prompt)
        answer = room if params.max_tokens is None else min(params.max_tokens, room)
        return num_prompt, num_prompt + answer * params.n
