"""What the routes of one server share: the engine once it is ready, the model names, the figures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.config import EngineConfig
from multilora_jax.engine_vitals import TROUBLES
from multilora_jax.errors import NotFoundError, UnavailableError, UserError
from multilora_jax.request import LoRARequest
from multilora_jax.server.metrics import ServerMetrics
from multilora_jax.server.mixes import MixEntry


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
        self.started_at = int(time.time())
        self._engine: AsyncEngine | None = None
        self._metrics: ServerMetrics | None = None
        self._lora_ids = itertools.count(1)

    def attach(self, engine: AsyncEngine) -> None:
        """Serve this warmed-up engine from now on."""
        self._metrics = ServerMetrics(engine.engine.base_name, self.config.max_loras)
        engine.add_observer(self._metrics.observe)
        self._engine = engine

    @property
    def engine(self) -> AsyncEngine:
        """Raises UnavailableError before `attach`."""
        if self._engine is None:
            raise UnavailableError("the server is starting: the model is not loaded yet", reason="starting")
        return self._engine

    @property
    def metrics(self) -> ServerMetrics:
        """Raises UnavailableError before `attach`."""
        _ = self.engine
        assert self._metrics is not None
        return self._metrics

    def check_healthy(self) -> None:
        """Raises UnavailableError while starting, and once the engine thread has died, hangs or only fails."""
        trouble = self.engine.trouble
        if trouble is not None:
            raise UnavailableError(TROUBLES[trouble], reason=trouble)

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

    def new_lora_id(self) -> int:
        """An adapter id that no loaded adapter has."""
        taken = {adapter.int_id for adapter in self.engine.list_loras()}
        return next(i for i in self._lora_ids if i not in taken)
