"""What a caller asks for and what comes back (host only; the names follow vLLM's)."""

from __future__ import annotations

import enum
import math
import numbers
import os
import time
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any

from multilora_jax.errors import UserError
from multilora_jax.memory.prefix_cache import PrefixChain

MAX_LOGPROBS = 20
"""Most alternatives per position that one request may ask for."""
MAX_N = 128
"""Most continuations that one request may ask for."""
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


_UNSUPPORTED_DEFAULTS: dict[str, Any] = {
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0,
    "logit_bias": None, "allowed_token_ids": None, "bad_words": None, "structured_outputs": None,
}  # fmt: skip


@dataclass
class SamplingParams:
    """How to choose tokens and when to stop; vLLM's names and defaults.

    Fields of vLLM's that are not served yet (the penalties, min_tokens, logit_bias,
    allowed_token_ids, bad_words, structured_outputs) are refused by name when they differ from their default.

    Raises:
        UserError: a value outside its range, named with the value.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        for name, default in _UNSUPPORTED_DEFAULTS.items():
            value = getattr(self, name)
            if value != default and value is not None and value != [] and value != {}:
                raise UserError(
                    f"{name}={value!r} is not supported yet: leave it at {default!r}",
                    reason="unsupported_parameter", param=name,
                )  # fmt: skip
        self.n = self._integer("n", 1, MAX_N)
        self.temperature = self._number("temperature", 0.0, math.inf, high_open=True)
        self.top_p = self._number("top_p", 0.0, 1.0, low_open=True)
        self.min_p = self._number("min_p", 0.0, 1.0)
        self.top_k = 0 if self.top_k == -1 else self._integer("top_k", 0)
        self.max_tokens = None if self.max_tokens is None else self._integer("max_tokens", 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None and self._integer(name, 0) > MAX_LOGPROBS:
                self._fail(name, f"is at most {MAX_LOGPROBS}")
        if self.seed is not None:
            self.seed = self._integer("seed", -(2**63), 2**64 - 1)
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        elif isinstance(self.stop, list | tuple):
            self.stop = list(self.stop)
        else:
            self._fail("stop", "must be a non-empty string or a list of them")
        if not all(isinstance(s, str) and s for s in self.stop):
            self._fail("stop", "must be a non-empty string or a list of them")
        if self.stop and not self.detokenize:
            self._fail("stop", "needs detokenize=True")
        ids: Any = [] if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ids, list | tuple) or not all(
            isinstance(t, numbers.Integral) and not isinstance(t, bool) and int(t) >= 0 for t in ids
        ):
            self._fail("stop_token_ids", "must be a list of token ids")
        self.stop_token_ids = [int(t) for t in ids]

    def _fail(self, name: str, what: str) -> None:
        raise UserError(f"{name}={getattr(self, name)!r} {what}", reason="bad_sampling_params", param=name)

    def _number(self, name: str, low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> float:
        value = getattr(self, name)
        ok = isinstance(value, numbers.Real) and not isinstance(value, bool)
        try:
            value = float(value) if ok else math.nan
        except OverflowError:
            value = math.inf
        ok = ok and (low < value if low_open else low <= value) and (value < high if high_open else value <= high)
        if not ok:
            left, right = "(" if low_open else "[", ")" if high_open else "]"
            self._fail(name, f"is outside {left}{low:g}, {high:g}{right}")
        return value

    def _integer(self, name: str, low: int, high: int | None = None) -> int:
        value = getattr(self, name)
        ok = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        number = int(value) if ok else 0
        if not ok or number < low or (high is not None and number > high):
            self._fail(name, f"must be an integer {f'of at least {low}' if high is None else f'from {low} to {high}'}")
        return number

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, as vLLM does for a temperature below 1e-5."""
        return self.temperature < 1e-5


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

    `num_computed_tokens` counts the tokens whose K and V are in the pool. A sequence always needs the tokens from
    there to the end of `token_ids` to be run; when that leaves one token the step treats it as a decode.

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
        prefix: under which keys it shares full pages with others; None where it shares none.
        index: its place among the continuations of one request.
        num_cached_tokens: tokens that were not computed for it because their pages were there when it first started.
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
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that still have to be run before the next one can be sampled (1 while decoding)."""
        return len(self.token_ids) - self.num_computed_tokens

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
