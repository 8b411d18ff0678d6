"""What the routes of one server share: the engine once it is ready, the model names, the figures."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.config import EngineConfig
from multilora_jax.errors import NotFoundError, UnavailableError, UserError
from multilora_jax.request import LoRARequest
from multilora_jax.server.metrics import ServerMetrics


@dataclass(frozen=True)
class Target:
    """The base model (no lora_request) or one adapter, under its own name."""

    name: str
    lora_request: LoRARequest | None


class ServerContext:
    """Shared state of an app. Until `attach` every route that needs the engine answers 503."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.chat_template = config.chat_template_text()
        self.started_at = int(time.time())
        self.loaded_at: dict[str, int] = {}
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
        """Raises UnavailableError while starting, and once the engine thread has died or hangs."""
        if not self.engine.healthy:
            raise UnavailableError("the engine is dead or hangs: restart the server", reason="engine_dead")

    def resolve(self, model: str) -> Target:
        """The model that a request's `model` names: the base, an adapter, or "base:adapter".

        Raises:
            UserError: an empty name.
            NotFoundError: an unknown one; it is never answered by the base.
        """
        llm = self.engine.engine
        if not model.strip():
            raise UserError(
                f"model is empty: name the base model {llm.base_name!r} or an adapter",
                reason="empty_model", param="model",
            )  # fmt: skip
        if model == llm.base_name:
            return Target(model, None)
        try:
            request = llm.lora_request(model)
        except NotFoundError as unknown:
            adapter = model.removeprefix(f"{llm.base_name}:")
            if adapter == model:
                raise
            try:
                request = llm.lora_request(adapter)
            except NotFoundError:
                raise unknown from None  # it quotes the name as it was sent
        # Without its path a request means whatever has the name when it is admitted: it must not bring back an
        # adapter that is being unloaded, nor fail because one was loaded again.
        return Target(request.lora_name, replace(request, lora_path=""))

    def new_lora_id(self) -> int:
        """An adapter id that no loaded adapter has."""
        taken = {adapter.int_id for adapter in self.engine.list_loras()}
        return next(i for i in self._lora_ids if i not in taken)
