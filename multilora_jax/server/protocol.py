"""The bodies that the routes accept: every field checked by name, nothing ignored, nothing converted.

Fields that OpenAI's or vLLM's API has and this server does not serve yet may be sent with the value that means
"off"; any other value is refused by name. A field that neither knows is refused with the closest known name.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from multilora_jax.errors import UserError
from multilora_jax.request import MAX_LOGPROBS, SamplingParams, StructuredOutputsParams
from multilora_jax.server.messages import check_messages
from multilora_jax.server.mixes import MixEntry, check_mix
from multilora_jax.server.structure import read_structure
from multilora_jax.tokenizer import Tokenizer

NOT_SERVED: Mapping[str, tuple[Any, ...]] = {"best_of": (1,), "length_penalty": (1.0,), "use_beam_search": (False,)}
"""Field: its values that change nothing. null always is one, and an integer of the same value for a float."""

NOT_SERVED_COMPLETION: Mapping[str, tuple[Any, ...]] = {"suffix": ("",)}

NOT_SERVED_CHAT: Mapping[str, tuple[Any, ...]] = {
    "audio": (), "chat_template": (), "documents": ([],), "function_call": ("none",), "functions": ([],),
    "metadata": ({},), "modalities": (["text"],), "parallel_tool_calls": (True, False), "prediction": (),
    "prompt_cache_key": (), "reasoning_effort": (), "safety_identifier": (), "service_tier": ("auto", "default"),
    "store": (False,), "tool_choice": ("none",), "tools": ([],), "verbosity": (), "web_search_options": (),
}  # fmt: skip

_OWN_ARGUMENTS = frozenset(inspect.signature(Tokenizer.apply_chat_template).parameters) - {"kwargs"}
TEMPLATE_ARGUMENTS = _OWN_ARGUMENTS | {"tools", "documents"}
"""What the server itself passes to a chat template."""

MAX_REQUEST_ID_LENGTH = 256


class Body(BaseModel):
    """A JSON object with known fields."""

    model_config = ConfigDict(strict=True)
    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, value in body.items():
            if name in cls.model_fields:
                continue
            if name in cls.not_served:
                if value is not None and not any(_same(value, allowed) for allowed in cls.not_served[name]):
                    raise _unsupported(name, cls.not_served[name])
                continue
            close = difflib.get_close_matches(name[:100], [*cls.model_fields, *cls.not_served], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(cls.model_fields)}"
            raise UserError(f"unknown field {name[:100]!r}: {hint}", reason="unknown_parameter", param=name[:100])
        return body


class StreamOptions(Body):
    """What a stream sends besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """The fields that completions and chat share; null means the default."""

    model: str
    lora: Any = Field(default_factory=list, description="adapters to mix: a list of {name, scale}")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: Any = None
    response_format: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    prompt_lookup_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    n: int | None = None
    request_id: str | None = None
    user: str | None = None
    _structure: StructuredOutputsParams | None = PrivateAttr(None)

    @field_validator("lora")
    @classmethod
    def _check_lora(cls, value: Any) -> list[MixEntry]:
        return check_mix(value)

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _check_truncation(cls, value: int | None) -> int | None:
        if value is not None and value != -1 and value < 1:
            raise UserError(
                f"truncate_prompt_tokens={value} must be at least 1, or -1 to keep as much as fits",
                reason="bad_value", param="truncate_prompt_tokens",
            )  # fmt: skip
        return value

    @field_validator("cache_salt")
    @classmethod
    def _check_salt(cls, value: str | None) -> str | None:
        if value == "":
            raise UserError(
                "cache_salt is empty: leave it out, or send some text", reason="bad_value", param="cache_salt"
            )
        return value

    @field_validator("request_id")
    @classmethod
    def _check_request_id(cls, value: str | None) -> str | None:
        if value is not None and not (0 < len(value) <= MAX_REQUEST_ID_LENGTH and value.isprintable()):
            raise UserError(
                f"request_id must be 1 to {MAX_REQUEST_ID_LENGTH} printable characters, not {len(value)} characters "
                f"that begin with {value[:50]!r}",
                reason="bad_value", param="request_id",
            )  # fmt: skip
        return value

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise UserError("stream_options needs stream=true", reason="bad_value", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise UserError(
                "prompt_logprobs is not sent in streams: leave out stream", reason="bad_value", param="prompt_logprobs"
            )
        return self

    @model_validator(mode="after")
    def _check_structure(self) -> GenerationBody:
        self._structure = read_structure(self)
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_params(self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """The engine's parameters. Raises UserError for a value out of range, named."""
        names = (
            "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
            "include_stop_str_in_output", "skip_special_tokens", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words",
            "prompt_lookup_tokens",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        given["structured_outputs"] = self._structure
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    not_served: ClassVar = {**NOT_SERVED, **NOT_SERVED_COMPLETION}

    prompt: Any = Field(description="text, a list of texts, token ids or a list of lists of token ids")
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> list[str] | list[list[int]]:
        """As a list of prompts, none of them empty."""
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_ids(prompt)):
            prompt = [prompt]
        if not isinstance(prompt, list):
            raise UserError(f"prompt must be text or token ids, not {prompt!r:.100}", reason="bad_type", param="prompt")
        if not prompt or any(p in ("", []) for p in prompt):
            raise UserError("the prompt is empty: send some text or token ids", reason="empty_prompt", param="prompt")
        if not (all(isinstance(p, str) for p in prompt) or all(isinstance(p, list) and _is_ids(p) for p in prompt)):
            raise UserError(
                "prompt must be a text, a list of texts, a list of token ids or a list of such lists",
                reason="bad_type", param="prompt",
            )  # fmt: skip
        return prompt

    @model_validator(mode="after")
    def _check_lengths(self) -> CompletionBody:
        if self.max_tokens is not None and self.max_tokens < 1 and not (self.max_tokens == 0 and self.echo):
            raise UserError(
                f"max_tokens={self.max_tokens} must be at least 1 (0 is for echo=true)",
                reason="bad_value", param="max_tokens",
            )  # fmt: skip
        return self

    @property
    def new_tokens(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    not_served: ClassVar = {**NOT_SERVED, **NOT_SERVED_CHAT}

    messages: Any = Field(description="the conversation: a list of {role, content}")
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("messages")
    @classmethod
    def _check_messages(cls, messages: Any) -> list[dict[str, Any]]:
        return check_messages(messages)

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_template_kwargs(cls, kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in kwargs or {}:
            if name in TEMPLATE_ARGUMENTS:
                raise UserError(
                    f"chat_template_kwargs.{name}: set the request's own field of that meaning, if there is one",
                    reason="bad_value", param="chat_template_kwargs",
                )  # fmt: skip
        return kwargs

    @model_validator(mode="after")
    def _check_together(self) -> ChatBody:
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise UserError("top_logprobs needs logprobs=true", reason="bad_value", param="top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise UserError(
                    f"top_logprobs={self.top_logprobs} is outside [0, {MAX_LOGPROBS}]",
                    reason="bad_value", param="top_logprobs",
                )  # fmt: skip
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value} must be at least 1", reason="bad_value", param=name)
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise UserError(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} disagree: "
                "send one of them",
                reason="bad_value", param="max_completion_tokens",
            )  # fmt: skip
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise UserError(
                    "continue_final_message and add_generation_prompt exclude each other: send one of them",
                    reason="bad_value", param="continue_final_message",
                )  # fmt: skip
            if self.messages[-1]["role"] != "assistant":
                raise UserError(
                    "continue_final_message needs a last message with the role assistant",
                    reason="bad_value", param="continue_final_message",
                )  # fmt: skip
        return self

    @property
    def new_tokens(self) -> int | None:
        """None: the rest of the context."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per position for the engine to find; None without log probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def generation_prompt(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _same(value: Any, allowed: Any) -> bool:
    """Equality that tells 1 from true and 1.0, which Python does not."""
    kinds = (int, float) if type(allowed) is float else (type(allowed),)
    return type(value) in kinds and value == allowed


def _unsupported(name: str, allowed: tuple[Any, ...]) -> UserError:
    """Refuses a field that is not served, saying which values may be sent, if any."""
    values = " or ".join(json.dumps(value) for value in allowed)
    message = (
        f"{name} must be {values}: this server supports no other value yet"
        if allowed
        else f"{name} is not supported by this server yet: leave it out"
    )
    return UserError(message, reason="unsupported_parameter", param=name)
