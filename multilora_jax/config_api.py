"""The configuration's keys about the HTTP interface: tool calls, and adapters that are found by their name."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from multilora_jax.config_values import key_info
from multilora_jax.errors import ConfigError

if TYPE_CHECKING:
    from multilora_jax.config import EngineConfig

ToolCallParserName = Literal["auto", "hermes", "llama3_json"]


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """The part of EngineConfig about what requests may say and which unknown names are looked for."""

    tool_call_parser: ToolCallParserName = field(
        default="auto",
        metadata=key_info(
            "How the model writes tool calls. hermes: <tool_call>{name, arguments}</tool_call>; llama3_json: "
            "{name, parameters}. auto reads it off the chat template."
        ),
    )
    lora_resolver_folder: str | None = field(
        default=None,
        metadata=key_info(
            "Folder of adapters: a request that names an unknown model NAME is served by the adapter in its folder "
            "NAME, registered then. Off by default. With adapter_roots it must lie in one of them."
        ),
    )
    lora_resolver_hub: tuple[str, ...] = field(
        default=(),
        metadata=key_info(
            "Hub ids of adapters, ORG/NAME or ORG/* for all of one owner, that a request may name as its model without "
            "their being loaded: they are fetched then, which needs the extra `hub`. None by default."
        ),
    )


def check_api(config: EngineConfig) -> None:
    """Raises ConfigError, naming a key, where the resolvers' keys cannot be meant."""
    folder = config.lora_resolver_folder
    if folder is not None:
        if not os.path.isdir(folder):
            raise ConfigError(
                f"lora_resolver_folder: there is no folder {folder!r}", reason="bad_value", param="lora_resolver_folder"
            )
        real, roots = os.path.realpath(folder), [os.path.realpath(root) for root in config.adapter_roots]
        if roots and not any(os.path.commonpath((root, real)) == root for root in roots):
            raise ConfigError(
                f"lora_resolver_folder: {folder!r} lies in none of adapter_roots: add it there, or choose another",
                reason="conflicting_keys", param="lora_resolver_folder",
            )  # fmt: skip
    for pattern in config.lora_resolver_hub:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/(\*|[\w.-]+)", pattern):
            raise ConfigError(
                f"lora_resolver_hub: {pattern!r} is neither ORG/NAME nor ORG/*",
                reason="bad_value", param="lora_resolver_hub",
            )  # fmt: skip
    if config.lora_resolver_hub and importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            "lora_resolver_hub needs huggingface_hub, which is not installed: pip install 'multilora_jax[hub]', or "
            "leave the key out",
            reason="missing_package", param="lora_resolver_hub",
        )  # fmt: skip
    for key in ("lora_resolver_folder", "lora_resolver_hub"):
        if getattr(config, key) and not config.enable_lora:
            raise ConfigError(
                f"{key} looks for adapters but enable_lora is false: drop one of them",
                reason="conflicting_keys", param=key,
            )  # fmt: skip
