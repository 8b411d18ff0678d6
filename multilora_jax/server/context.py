"""What the routes of one server share: the engine once it is ready, the model names, the figures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.config import EngineConfig
from multilora_jax.engine_vitals import TROUBLES
from multilora_jax.errors import NotFoundError, UnavailableError, UserError
from multilora_jax.lora.names import MAX_NAME_LENGTH
from multilora_jax.request import LoRARequest
from multilora_jax.server.call import current_call
from multilora_jax.server.guard import Calls
from multilora_jax.server.live import LiveView
from multilora_jax.server.metrics import ServerMetrics
from multilora_jax.server.mixes import MixEntry
from multilora_jax.server.resolvers import Resolvers
from multilora_jax.server.view import EngineView


@dataclass(frozen=True)
class Target:
    """What answers a request.

    Attributes:
        name: as the answer calls it: the base's or the adapter's own name, the base's for a `lora` field.
        adapters: what the request is served with, each with its scale; none for the base alone.
        is_mix: the request has a `lora` field, whose adapters its answer lists.
    """

    name: str
    adapters: tuple[LoRARequest, ...] = ()
    is_mix: bool = False

    @property
    def lora_request(self) -> list[LoRARequest] | None:
        """The adapters as the engine takes them."""
        return list(self.adapters) or None


class ServerContext:
    """Shared state of an app. Until `attach` every route that needs the engine answers 503."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.chat_template = config.chat_template_text()
        self.resolvers = Resolvers(config)
        self.started_at = int(time.time())
        self._engine: AsyncEngine | None = None
        self._metrics: ServerMetrics | None = None
        self._live: LiveView | None = None
        self.calls = Calls()
        self._lora_ids = itertools.count(1)

    def attach(self, engine: AsyncEngine) -> None:
        """Serve this warmed-up engine from now on."""
        self._metrics = ServerMetrics(engine.engine.base_name, self.config.max_loras)
        engine.add_observer(self._metrics.observe)
        if self.config.page:
            self._live = LiveView(engine)
        self.calls.add_observer(self._metrics.observe_call)
        self._engine = engine

    @property
    def engine(self) -> AsyncEngine:
        """The engine; while a request is served, as its caller sees it. Raises UnavailableError before `attach`."""
        engine, call = self.whole_engine, current_call()
        if call is None:
            return engine
        if call.view is None:
            call.view = EngineView(engine, call, self.config)
        return cast(AsyncEngine, call.view)

    @property
    def whole_engine(self) -> AsyncEngine:
        """The engine with every tenant's adapters, for what only operators are told. Raises UnavailableError."""
        if self._engine is None:
            raise UnavailableError("the server is starting: the model is not loaded yet", reason="starting")
        return self._engine

    @property
    def metrics(self) -> ServerMetrics:
        """Raises UnavailableError before `attach`."""
        _ = self.engine
        assert self._metrics is not None
        return self._metrics

    @property
    def live(self) -> LiveView:
        """What the page shows. Raises UnavailableError before `attach`; there is none where the page is off."""
        _ = self.engine
        assert self._live is not None
        return self._live

    def check_healthy(self) -> None:
        """Raises UnavailableError while starting, and once the engine thread has died, hangs or only fails."""
        trouble = self.engine.trouble
        if trouble is not None:
            raise UnavailableError(TROUBLES[trouble], reason=trouble)

    def check_ready(self) -> None:
        """Raises UnavailableError where no request should be sent here: as check_healthy, and while draining."""
        if self.calls.draining:
            raise UnavailableError("the server is shutting down", reason="draining")
        self.check_healthy()

    def resolve(self, model: str, mix: Sequence[MixEntry] = ()) -> Target:
        """What a request's `model` and `lora` name: the base, an adapter, "base:adapter", or a mix over the base.

        Raises:
            UserError: an empty name, an adapter in both fields, or one named twice.
            NotFoundError: an unknown one; it is never answered by the base.
        """
        llm = self.engine.engine
        if not model.strip():
            raise UserError(
                f"model is empty: name the base model {llm.base_name!r} or an adapter",
                reason="empty_model", param="model",
            )  # fmt: skip
        if model != llm.base_name:
            request = self._adapter(model)
            if mix:
                raise UserError(
                    f"model is the adapter {request.lora_name!r} and lora names adapters too: send the base's name "
                    f"{llm.base_name!r} as model, and every adapter in lora",
                    reason="ambiguous_lora", param="lora",
                )  # fmt: skip
            return Target(request.lora_name, (request,))
        adapters = [replace(self._adapter_of_mix(entry.name), scale=entry.scale) for entry in mix]
        names = [request.lora_name for request in adapters]
        if len(set(names)) < len(names):
            raise UserError(
                "lora names an adapter more than once: add up its scales in one entry",
                reason="duplicate_adapter", param="lora",
            )  # fmt: skip
        return Target(model, tuple(adapters), is_mix=bool(adapters))

    def _adapter_of_mix(self, name: str) -> LoRARequest:
        base = self.engine.engine.base_name
        if name == base:
            raise UserError(
                f"lora: {base!r} is the base model, which every mix contains: name adapters only",
                reason="name_is_base_model", param="lora",
            )  # fmt: skip
        try:
            return self._adapter(name)
        except NotFoundError as error:
            raise NotFoundError(error.message, reason=error.reason, param="lora") from None

    def _adapter(self, name: str) -> LoRARequest:
        """The adapter called NAME or "base:NAME"."""
        llm = self.engine.engine
        # Nobody has a longer name: it is not looked for, matched or kept, each of which takes time by its length.
        longest = len(llm.base_name) + 1 + MAX_NAME_LENGTH
        name = name if len(name) <= longest else name[: longest + 1]
        try:
            request = llm.lora_request(name)
        except NotFoundError as unknown:
            adapter = name.removeprefix(f"{llm.base_name}:")
            if adapter == name:
                raise
            try:
                request = llm.lora_request(adapter)
            except NotFoundError:
                raise unknown from None  # it quotes the name as it was sent
        # Without its path a request means whatever has the name when it is admitted: it must not bring back an
        # adapter that is being unloaded, nor fail because one was loaded again.
        return replace(request, lora_path="")

    def sees(self, name: str) -> bool:
        """Whether an adapter of this name may exist for whom a request is served."""
        call = current_call()
        return call is None or call.caller.sees(name)

    def new_lora_id(self) -> int:
        """An adapter id that no loaded adapter has."""
        taken = {adapter.int_id for adapter in self.whole_engine.list_loras()}
        return next(i for i in self._lora_ids if i not in taken)
