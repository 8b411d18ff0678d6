"""The bodies that the routes accept: every field checked by name, nothing ignored, nothing converted.

Fields that OpenAI's or vLLM's API has and this server does not serve yet may be sent with the value that means
"off"; any other value is refused by name. A field that neither knows is refused with the closest known name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PrivateAttr,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from multilora_jax.errors import UserError
from multilora_jax.request import SamplingParams, StructuredOutputsParams
from multilora_jax.sampling_params import MAX_EDITED_TOKENS
from multilora_jax.server import json_types
from multilora_jax.server.mixes import MixEntry, check_mix
from multilora_jax.server.structure import read_structure

NOT_SERVED: Mapping[str, tuple[Any, ...]] = {"best_of": (1,), "length_penalty": (1.0,), "use_beam_search": (False,)}
"""Field: its values that change nothing. null always is one, and an integer of the same value for a float."""

NOT_SERVED_COMPLETION: Mapping[str, tuple[Any, ...]] = {"suffix": ("",)}

MAX_REQUEST_ID_LENGTH = 256


def _stop_at_first_wrong_item(schema: Any) -> None:
    """Makes the lists of a schema be left at the first wrong item, which is all that an error tells.

    pydantic goes on to the end, and makes an object of every complaint: of a body of megabytes that is millions, for
    which everybody else would wait.
    """
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_at_first_wrong_item(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_at_first_wrong_item(part)


class Body(BaseModel):
    """A JSON object with known fields."""

    model_config = ConfigDict(strict=True)
    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first_wrong_item(schema)
        return schema

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler.resolve_ref_schema(handler(core))
        schema["additionalProperties"] = False
        for name, allowed in cls.not_served.items():
            schema["properties"][name] = {"enum": [*allowed, None], "description": "no other value is served"}
        return schema

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

    model: str = Field(description="the base, an adapter, or base:adapter")
    lora: Annotated[Any, WithJsonSchema(json_types.LORA)] = Field(
        default_factory=list, description="adapters to mix: a list of {name, scale}"
    )
    temperature: float | None = Field(None, json_schema_extra=json_types.number(minimum=0))
    top_p: float | None = Field(None, json_schema_extra=json_types.number(exclusiveMinimum=0, maximum=1))
    top_k: int | None = Field(None, json_schema_extra=json_types.integer(-1))
    min_p: float | None = Field(None, json_schema_extra=json_types.number(minimum=0, maximum=1))
    presence_penalty: float | None = Field(None, json_schema_extra=json_types.number(minimum=-2, maximum=2))
    frequency_penalty: float | None = Field(None, json_schema_extra=json_types.number(minimum=-2, maximum=2))
    repetition_penalty: float | None = Field(None, json_schema_extra=json_types.number(exclusiveMinimum=0))
    min_tokens: int | None = Field(None, json_schema_extra=json_types.integer(0))
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: Annotated[Any, WithJsonSchema(json_types.STRUCTURED_OUTPUTS)] = None
    response_format: Annotated[Any, WithJsonSchema(json_types.RESPONSE_FORMAT)] = None
    guided_json: Annotated[Any, WithJsonSchema(json_types.GUIDED_JSON)] = None
    guided_regex: Annotated[Any, WithJsonSchema(json_types.GUIDED_TEXT)] = None
    guided_choice: Annotated[Any, WithJsonSchema(json_types.GUIDED_CHOICE)] = None
    guided_grammar: Annotated[Any, WithJsonSchema(json_types.GUIDED_TEXT)] = None
    prompt_lookup_tokens: int | None = Field(None, json_schema_extra=json_types.LOOKUP)
    seed: int | None = None
    stop: Annotated[str | list[str] | None, WithJsonSchema(json_types.STOP)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, json_schema_extra=json_types.LOGPROBS)
    truncate_prompt_tokens: int | None = Field(None, json_schema_extra=json_types.TRUNCATION)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    n: int | None = Field(None, json_schema_extra=json_types.CONTINUATIONS)
    request_id: str | None = None
    user: str | None = None
    _structure_field: str | None = PrivateAttr(None)
    _structure: StructuredOutputsParams | None = PrivateAttr(None)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_num_biases(cls, value: Any) -> Any:
        """Before its entries are looked at, each of which may be wrong in its own way."""
        if isinstance(value, dict) and len(value) > MAX_EDITED_TOKENS:
            raise UserError(
                f"logit_bias lists {len(value)} tokens: at most {MAX_EDITED_TOKENS} are served",
                reason="bad_sampling_params", param="logit_bias",
            )  # fmt: skip
        return value

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
        self._structure_field, self._structure = read_structure(self)
        return self

    @property
    def structure(self) -> StructuredOutputsParams | None:
        """What form the answer must have, by whichever field asks for it."""
        return self._structure

    @property
    def structure_field(self) -> str | None:
        """The field that does."""
        return self._structure_field

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_params(
        self,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        structure: StructuredOutputsParams | None = None,
    ) -> SamplingParams:
        """The engine's parameters. Raises UserError for a value out of range, named.

        Args:
            structure: what form the answer must have, where it is more than `self.structure` says.
        """
        names = (
            "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
            "include_stop_str_in_output", "skip_special_tokens", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words",
            "prompt_lookup_tokens",
        )  # fmt: skip
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        given["structured_outputs"] = structure or self._structure
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    not_served: ClassVar = {**NOT_SERVED, **NOT_SERVED_COMPLETION}

    prompt: Annotated[Any, WithJsonSchema(json_types.PROMPT)] = Field(
        description="text, a list of texts, token ids or a list of lists of token ids"
    )
    max_tokens: int | None = Field(None, json_schema_extra=json_types.integer(0))
    logprobs: int | None = Field(None, json_schema_extra=json_types.LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = Field(None, description="false: no BOS before a prompt of text")

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
