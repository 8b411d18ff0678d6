"""What a caller asks for and what comes back (host only; the names follow vLLM's)."""

from __future__ import annotations

import enum
import numbers
import os
import time
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any

from multilora_jax.errors import UserError
from multilora_jax.memory.prefix_cache import PrefixChain
from multilora_jax.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutputsParams

__all__ = [
    "MAX_LOGPROBS", "MAX_SCALE", "CompletionOutput", "FinishReason", "LoRARequest", "Logprob", "RequestMetrics",
    "RequestOutput", "SamplingParams", "Sequence", "SequenceStatus", "StructuredOutputsParams",
]  # fmt: skip

MAX_SCALE = 1000.0
"""Largest factor that a request may put on an adapter's delta."""


@dataclass(frozen=True)
class LoRARequest:
    """One adapter, named by its caller.

    Args:
        lora_name: unique name; requests choose the adapter by it.
        lora_int_id: unique id, 1 or more.
        lora_path: folder with adapter_config.json and adapter_model.safetensors; may be empty once the name is
            registered.
        base_model_name: advisory only; nothing is ever fetched from it.
        load_inplace: replace an adapter of the same name instead of refusing the load.
        scale: factor on the adapter's whole delta; several adapters in one request are a weighted mix.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.lora_path, os.PathLike):
            object.__setattr__(self, "lora_path", os.fspath(self.lora_path))
        if not isinstance(self.lora_path, str):
            raise UserError(
                f"lora_path must be a string, got {self.lora_path!r}", reason="bad_lora_path", param="lora_path"
            )
        if not isinstance(self.lora_name, str) or not self.lora_name.strip():
            raise UserError("lora_name must be a non-empty string", reason="empty_lora_name", param="lora_name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise UserError(
                f"lora_int_id must be an integer of at least 1, got {self.lora_int_id!r}",
                reason="bad_lora_int_id", param="lora_int_id",
            )  # fmt: skip
        if isinstance(self.scale, bool) or not isinstance(self.scale, numbers.Real) or not abs(self.scale) <= MAX_SCALE:
            raise UserError(
                f"scale must be a number from -{MAX_SCALE:g} to {MAX_SCALE:g}, got {self.scale!r}",
                reason="bad_lora_scale", param="scale",
            )  # fmt: skip
        object.__setattr__(self, "scale", float(self.scale))

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are the API's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Sequence:
    """One prompt under way: its tokens, its pages and its place in the queue.

    `num_computed_tokens` counts the tokens whose K and V are in the pool, or will be when the steps launched so far are
    done. A sequence always needs the tokens from there to its end to be run; when that leaves one token the step treats
    it as a decode. That token may be one that a launched step samples and nobody has read yet (`num_in_flight`).

    Attributes:
        request_id: unique among live requests.
        token_ids: prompt and generated tokens, in order.
        num_prompt_tokens: how many of them are the prompt.
        params: sampling parameters.
        adapters: what it is served with (lora.adapter.Adapter), each once; none for the base alone.
        adapter_scales: the request's factor on the delta of each of them.
        vocab_size: token ids below it exist for this sequence.
        eos_token_ids: tokens that end it, empty under ignore_eos.
        max_total_tokens: prompt plus generated tokens at which it ends with finish_reason "length".
        arrival_time: time.monotonic() seconds.
        page_ids: its KV pages in order, owned by the KV manager.
        sampling_state: what it asks to change in its logits (engine.sampling_state.SamplingState); None for nothing.
            Its next step needs the last token on the host.
        tenant: whom its use is counted for; empty for its adapters'.
        lookup: makes proposals for its next tokens (engine.prompt_lookup.PromptLookup); None for none.
        num_in_flight: tokens sampled by launched steps that are not in `token_ids` yet.
        sampled_row: row of the last launched step that sampled for it.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    adapters: tuple[Any, ...] = ()
    adapter_scales: tuple[float, ...] = ()
    vocab_size: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    max_total_tokens: int = 0
    priority: int = 0
    seed: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    page_ids: list[int] = field(default_factory=list)
    prefix: PrefixChain | None = None
    index: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    sampling_state: Any = None
    lookup: Any = None
    tenant: str = ""
    num_in_flight: int = 0
    sampled_row: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that still have to be run before the next one can be sampled (1 while decoding)."""
        return len(self.token_ids) + self.num_in_flight - self.num_computed_tokens

    @property
    def ends_in_flight(self) -> bool:
        """Whether the token under way is its last one whatever it is."""
        return self.num_in_flight > 0 and len(self.token_ids) + self.num_in_flight >= self.max_total_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token at a position, before temperature and truncation.

    Attributes:
        logprob: ln p.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: its text, None where there is no tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One generated continuation (text and ids are cumulative while streaming)."""

    index: int
    text: str
    token_ids: SequenceABC[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | SequenceABC[LoRARequest] | None = None


@dataclass
class RequestMetrics:
    """Seconds on the monotonic clock; None until it happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """The state of one request after a step.

    Attributes:
        outputs: its `n` continuations in the order of their index, each with a finish_reason once it ended.
        num_cached_tokens: prompt tokens whose keys and values were taken from the prefix cache.
        lora_request: as the caller gave it.
        adapter_digest: SHA-256 (hex) of the adapter's content; None for the base and for a mix of several.
        adapter_digests: of each of the request's adapters, in its order; empty for the base.
        error: why the engine gave the request up, where its finish_reason is "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | SequenceABC[LoRARequest] | None = None
    num_cached_tokens: int = 0
    adapter_digest: str | None = None
    adapter_digests: tuple[str, ...] = ()
    error: Exception | None = None
