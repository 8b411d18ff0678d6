"""The configuration's keys about who may ask the server for what, and about what it tells of itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from multilora_jax.config_values import key_info
from multilora_jax.errors import ConfigError

if TYPE_CHECKING:
    from multilora_jax.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The part of EngineConfig that only the HTTP server reads."""

    # Who may ask for what
    keys_file: str | None = field(
        default=None,
        metadata=key_info(
            "YAML file of hashed keys, each with its tenant, adapters and limits: see `python -m multilora_jax.keys "
            "new --help`. With it every request needs a key, and managing adapters an admin key."
        ),
    )
    metrics_public: bool = field(
        default=False,
        metadata=key_info("Whether /metrics, which names every adapter, needs no key even if keys are set."),
    )
    cors_origins: tuple[str, ...] = field(
        default=(),
        metadata=key_info(
            "Origins (https://example.org) whose web pages may call this server; * for any. By default none may."
        ),
    )
    ssl_certfile: str | None = field(
        default=None, metadata=key_info("Certificate chain in PEM; with it the server speaks HTTPS only.")
    )
    ssl_keyfile: str | None = field(
        default=None, metadata=key_info("Private key of ssl_certfile in PEM, where that file does not hold it too.")
    )

    # How much one request may bring
    max_body_mib: float = field(
        default=16.0, metadata=key_info("Most MiB of a request's body; beyond it the answer is 413.", above=0)
    )
    max_prompt_tokens: int | None = field(
        default=None, metadata=key_info("Most tokens of a prompt; by default what the context holds.", low=1)
    )
    max_prompts_per_request: int = field(
        default=256, metadata=key_info("Most prompts in one request to /v1/completions.", low=1)
    )
    max_adapter_mib: float = field(
        default=8192.0,
        metadata=key_info("Most MiB that the files of one adapter may have; a larger one is refused unread.", above=0),
    )

    # What is told of what happens
    log_format: Literal["text", "json"] = field(
        default="text", metadata=key_info("Log lines for people, or one JSON object a line.")
    )
    log_requests: bool = field(
        default=True,
        metadata=key_info("Log a line for each request: who, which adapter, tokens, times, how it ended; no text."),
    )
    otlp_endpoint: str | None = field(
        default=None,
        metadata=key_info(
            "URL that OpenTelemetry traces are sent to by OTLP over HTTP, http://localhost:4318/v1/traces for "
            "example; needs the extra `otel`."
        ),
    )
    drain_seconds: float = field(
        default=30.0,
        metadata=key_info("Seconds that requests under way get to finish after SIGTERM, SIGINT or SIGHUP.", low=0),
    )


PATH_KEYS = ("keys_file", "ssl_certfile", "ssl_keyfile")
"""Those that hold paths."""


def check_server(config: EngineConfig) -> None:
    """Raises ConfigError, naming a key, where the server's keys contradict each other or cannot be meant."""
    if config.ssl_keyfile and not config.ssl_certfile:
        raise ConfigError(
            "ssl_keyfile is given without ssl_certfile: give the certificate too",
            reason="missing_key", param="ssl_certfile",
        )  # fmt: skip
    for key in PATH_KEYS:
        path = getattr(config, key)
        if path is not None and not os.path.isfile(path):
            raise ConfigError(f"{key}: there is no file {path!r}", reason="bad_value", param=key)
    for origin in config.cors_origins:
        parts = urlsplit(origin)
        if origin != "*" and (parts.scheme not in ("http", "https") or f"{parts.scheme}://{parts.netloc}" != origin):
            raise ConfigError(
                f"cors_origins: {origin!r} is no origin: write scheme, host and port only, as in https://example.org, "
                "or * for any",
                reason="bad_value", param="cors_origins",
            )  # fmt: skip
    if config.otlp_endpoint is not None and urlsplit(config.otlp_endpoint).scheme not in ("http", "https"):
        raise ConfigError(
            f"otlp_endpoint must be a URL of http or https, got {config.otlp_endpoint!r}",
            reason="bad_value", param="otlp_endpoint",
        )  # fmt: skip
