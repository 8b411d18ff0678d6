"""Many LoRA adapters on one Llama base, served from one pool of device memory.

Names are imported when first used, so that the host parts (request, memory.allocator, lora.registry, …) load
without jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multilora_jax.async_engine import AsyncEngine
    from multilora_jax.config import EngineConfig
    from multilora_jax.engine.llm_engine import LLMEngine
    from multilora_jax.llm import LLM
    from multilora_jax.models.batch import ForwardBatch
    from multilora_jax.models.llama import forward
    from multilora_jax.request import LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "EngineConfig",
    "ForwardBatch",
    "LLMEngine",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "forward",
]

_HOMES = {
    "LLM": "multilora_jax.llm",
    "AsyncEngine": "multilora_jax.async_engine",
    "EngineConfig": "multilora_jax.config",
    "ForwardBatch": "multilora_jax.models.batch",
    "LLMEngine": "multilora_jax.engine.llm_engine",
    "LoRARequest": "multilora_jax.request",
    "RequestOutput": "multilora_jax.request",
    "SamplingParams": "multilora_jax.request",
    "StructuredOutputsParams": "multilora_jax.request",
    "forward": "multilora_jax.models.llama",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
