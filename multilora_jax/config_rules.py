"""What a configuration's keys must be together, each being right by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multilora_jax.config_api import check_api
from multilora_jax.config_parallel import check_parallel
from multilora_jax.config_scheduling import check_scheduling
from multilora_jax.config_server import check_server
from multilora_jax.errors import ConfigError

if TYPE_CHECKING:
    from multilora_jax.config import EngineConfig

POOL_SIZE_KEYS = ("pool_pages", "pool_memory_gib", "gpu_memory_utilization")
"""At most one of these is given."""


def check_together(config: EngineConfig) -> None:
    """Raises ConfigError, naming a key, where keys contradict each other or ask for what is not offered."""
    if config.quantization == "int4":
        raise ConfigError(
            "quantization int4 is not offered: 16 levels cost far more quality than int8, and products with them "
            "are slower: use int8",
            reason="bad_value", param="quantization",
        )  # fmt: skip
    given = [key for key in POOL_SIZE_KEYS if getattr(config, key) is not None]
    if len(given) > 1:
        raise ConfigError(
            f"give one pool size, not {len(given)}: {', '.join(given)}", reason="conflicting_keys", param=given[1]
        )
    if config.lora_modules and not config.enable_lora:
        raise ConfigError(
            "lora_modules names adapters but enable_lora is false: drop one of them",
            reason="conflicting_keys", param="lora_modules",
        )  # fmt: skip
    if config.base_name in config.lora_modules:
        raise ConfigError(
            f"lora_modules: the name {config.base_name!r} is the base model's: rename the adapter or set "
            "served_model_name",
            reason="conflicting_keys", param="lora_modules",
        )  # fmt: skip
    if config.prompt_lookup_max < config.prompt_lookup_min:
        raise ConfigError("prompt_lookup_max is below prompt_lookup_min: raise it", param="prompt_lookup_max")
    if config.max_num_batched_tokens < config.prefill_block:
        raise ConfigError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} does not hold one prefill_block of "
            f"{config.prefill_block} tokens: raise the first or lower the second",
            reason="conflicting_keys", param="max_num_batched_tokens",
        )  # fmt: skip
    check_scheduling(config)
    check_api(config)
    check_server(config)
    check_parallel(config)
    if config.enable_lora and config.max_rank_rows < -(-config.max_lora_rank // 8) * 8:
        raise ConfigError(
            f"max_rank_rows {config.max_rank_rows} does not hold one adapter of max_lora_rank {config.max_lora_rank}: "
            "raise the first or lower the second",
            reason="conflicting_keys", param="max_rank_rows",
        )  # fmt: skip
