"""The tiers of an engine's adapters before the pool: host memory, and the threads that fill it (host only, no jax)."""

from __future__ import annotations

from collections.abc import Callable

from multilora_jax.config import EngineConfig
from multilora_jax.engine.host_memory import physical_memory
from multilora_jax.lora.builder import AdapterBuilder
from multilora_jax.lora.deltas import BaseTensors
from multilora_jax.lora.host_tier import HostTier
from multilora_jax.lora.pacing import Pacer
from multilora_jax.lora.reader import AdapterReader
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.models.config import ModelConfig
from multilora_jax.tokenizer import Tokenizer

READER_THREADS = 8
"""Adapters read at the same time."""


def make_reader(
    config: EngineConfig,
    model_config: ModelConfig,
    geometry: PoolGeometry,
    base: BaseTensors,
    tokenizer: Tokenizer | None,
    throttle: Callable[[int], float] | None,
    is_busy: Callable[[], bool] | None,
) -> AdapterReader:
    """The reader of an engine and, as its `host`, the host tier.

    Args:
        config: the engine's; without max_cpu_lora_gib host copies may take a quarter of the machine's memory.
        model_config, geometry, base: of the served model.
        tokenizer: the base's, None where it has none.
        throttle: see AdapterReader.
        is_busy: whether sequences run on the cores that the threads share with them; None where they share none.
    """
    most_bytes = physical_memory() // 4 if config.max_cpu_lora_gib is None else config.max_cpu_lora_gib * 2**30
    most_bytes /= config.data_parallel_size  # each replica has host copies of its own
    host = HostTier(
        max_adapters=config.max_cpu_loras, max_bytes=max(1, int(most_bytes)), policy=config.lora_eviction_policy
    )
    builder = AdapterBuilder(
        model_config,
        geometry,
        base,
        max_lora_rank=config.max_lora_rank,
        max_extra_vocab=config.max_extra_vocab,
        base_tokenizer=tokenizer,
        base_name=config.model,
        max_bytes=int(config.max_adapter_mib * 2**20),
    )
    pacer = None if is_busy is None else Pacer(is_busy)
    return AdapterReader(builder, host, threads=READER_THREADS, pacer=pacer, throttle=throttle)
