"""The adapters of the fake engine: the real registry and reader over files that are checked but never packed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from multilora_jax.config import EngineConfig
from multilora_jax.errors import UserError
from multilora_jax.lora.adapter import Adapter, AdapterVersion
from multilora_jax.lora.host_tier import HostTier
from multilora_jax.lora.reader import AdapterReader
from multilora_jax.lora.registry import AdapterRegistry
from multilora_jax.lora.weights import AdapterWeights, load_adapter
from multilora_jax.models.config import ModelConfig
from multilora_jax.request import LoRARequest
from multilora_jax.tokenizer import Tokenizer

PAGES = np.zeros((1, 1, 1, 16), np.uint32)
"""Stands for every adapter's."""


class FakeBuilder:
    """What AdapterBuilder does, without packing.

    Attributes:
        gates: folders whose reading waits until their event is set.
        reads: folders read, in order.
    """

    def __init__(self, model_config: ModelConfig, config: EngineConfig):
        self._model_config = model_config
        self._config = config
        self.gates: dict[str, threading.Event] = {}
        self.reads: list[str] = []

    def read(self, folder: str, known: AdapterVersion | None = None) -> tuple[AdapterVersion, np.ndarray]:
        self.reads.append(folder)
        if folder in self.gates:
            assert self.gates[folder].wait(20)
        return self.build(load_adapter(folder, self._model_config, **self.limits), known)

    def build(self, weights: AdapterWeights, known: AdapterVersion | None = None) -> tuple[AdapterVersion, np.ndarray]:
        folder = weights.tokenizer_folder
        tokenizer = None if folder is None else Tokenizer.from_folder(folder)
        num_tokens = self._model_config.vocab_size if tokenizer is None else tokenizer.vocab_size
        layout: Any = SimpleNamespace(
            rank=weights.rank, num_rows=weights.rank, num_pages=1,
            extra_tokens=max(0, num_tokens - self._model_config.vocab_size),
        )  # fmt: skip
        version = AdapterVersion(
            weights.digest, layout, None, tokenizer, weights.chat_template, warnings=weights.warnings
        )  # fmt: skip
        return known or version, PAGES

    @property
    def limits(self) -> dict[str, Any]:
        return {"max_lora_rank": self._config.max_lora_rank, "max_extra_vocab": self._config.max_extra_vocab}


class FakeAdapters:
    """LLMEngine's methods about adapters.

    Attributes:
        max_pinned: most adapters that fit in the pool together.
        loading: names of adapters that are on their way to the pool, whatever `resident` says.
        resident: what is in the pool, in the order of its coming.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer):
        self.config = config
        self.model_config = model_config
        self.tokenizer: Tokenizer | None = tokenizer
        self.builder = FakeBuilder(model_config, config)
        self.host = HostTier(max_adapters=config.max_cpu_loras, policy=config.lora_eviction_policy)
        self.registry = AdapterRegistry(
            AdapterReader(self.builder, self.host), config.adapter_roots, base_names=[config.base_name],
            on_replaced=self._drop,
        )  # fmt: skip
        self.adapters = SimpleNamespace(registry=self.registry, resolve=self._resolve)
        self.max_pinned = 100
        self.loading: set[str] = set()
        self.pinned: set[Adapter] = set()
        self.resident: dict[Adapter, None] = {}
        for int_id, (name, path) in enumerate(config.lora_modules.items(), 1):
            self.registry.register(LoRARequest(name, int_id, path), trusted=True)

    def adapters_of(self, lora_request: Any) -> list[Adapter]:
        requests = lora_request if isinstance(lora_request, list) else [lora_request]
        return [self.registry.resolve(request) for request in requests if request is not None]

    def _resolve(self, lora_request: Any) -> tuple[list[Adapter], tuple[float, ...]]:
        return self.adapters_of(lora_request), ()

    def prepare(self, requests: list[LoRARequest]) -> None:
        for request in requests:
            self.registry.ensure_loaded(self.registry.resolve(request))

    def add_lora(self, request: LoRARequest, pinned: bool = False) -> Adapter:
        if pinned:
            self._check_room()
        adapter = self.registry.load(request)
        if pinned:
            self._pin(adapter)
        return adapter

    def register_lora(self, request: LoRARequest) -> Adapter:
        return self.registry.register(request)

    def add_adapter(self, name, params, config=None, *, int_id=None, load_inplace=False) -> Adapter:
        """`params` holds the folder that a real engine would be spared."""
        assert config is None or config["peft_type"] == "LORA"
        weights = load_adapter(params["folder"], self.model_config, **self.builder.limits)
        return self.registry.add(name, int_id, weights, load_inplace=load_inplace)

    def pin_lora(self, name: str) -> None:
        adapter = self.registry.get(name, param="lora_name")
        if adapter not in self.pinned:
            self._check_room()
            self._pin(adapter)

    def unpin_lora(self, name: str) -> None:
        self.pinned.discard(self.registry.get(name, param="lora_name"))

    def remove_lora(self, name: str) -> None:
        self._drop(self.registry.remove(name))

    def list_loras(self) -> list[Adapter]:
        return self.registry.list()

    def lora_request(self, name: str) -> LoRARequest:
        adapter = self.registry.get(name)
        return LoRARequest(name, adapter.int_id, adapter.path)

    def tokenizer_for(self, lora_request: Any) -> Tokenizer | None:
        own = [a.version.tokenizer for a in self.adapters_of(lora_request) if a.version and a.version.tokenizer]
        return own[0] if own else self.tokenizer

    def chat_template_for(self, lora_request: Any) -> str | None:
        adapters = self.adapters_of(lora_request)
        return next((a.version.chat_template for a in adapters if a.version and a.version.chat_template), None)

    def vocab_limit(self, lora_request: Any) -> int:
        extra = [getattr(a.layout, "extra_tokens", 0) for a in self.adapters_of(lora_request)]
        return self.model_config.vocab_size + max(extra, default=0)

    def adapter_states(self) -> dict[str, str]:
        states = dict.fromkeys((adapter.name for adapter in self.list_loras()), "registered")
        states |= {name: tier for name, _, tier, _ in self.tiers()}
        return states | dict.fromkeys(self.loading & states.keys(), "loading")

    def tiers(self) -> list[tuple[str, int, str, bool]]:
        found = []
        for adapter in self.list_loras():
            tier = "resident" if adapter in self.resident else "host" if adapter in self.host else None
            if tier is not None:
                found.append((adapter.name, adapter.rank, tier, adapter in self.pinned))
        return found

    def _check_room(self) -> None:
        if len(self.pinned) >= self.max_pinned:
            raise UserError("no room to keep another adapter: unpin one", reason="pin_limit", param="lora_name")

    def _pin(self, adapter: Adapter) -> None:
        self.registry.ensure_loaded(adapter)
        self.pinned.add(adapter)
        self.resident[adapter] = None

    def _drop(self, adapter: Adapter) -> None:
        self.pinned.discard(adapter)
        self.resident.pop(adapter, None)
