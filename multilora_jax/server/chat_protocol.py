"""The body of POST /v1/chat/completions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PrivateAttr, WithJsonSchema, field_validator, model_validator

from multilora_jax.errors import UserError
from multilora_jax.request import MAX_LOGPROBS
from multilora_jax.server import json_types
from multilora_jax.server.messages import check_messages
from multilora_jax.server.protocol import NOT_SERVED, Body, GenerationBody
from multilora_jax.server.tools import Tool, ToolChoice, check_tool_choice, check_tools
from multilora_jax.tokenizer import Tokenizer

NOT_SERVED_CHAT: Mapping[str, tuple[Any, ...]] = {
    "audio": (), "chat_template": (), "documents": ([],), "function_call": ("none",), "functions": ([],),
    "metadata": ({},), "modalities": (["text"],), "prediction": (), "prompt_cache_key": (), "reasoning_effort": (),
    "safety_identifier": (), "service_tier": ("auto", "default"), "store": (False,), "verbosity": (),
    "web_search_options": (),
}  # fmt: skip

_OWN_ARGUMENTS = frozenset(inspect.signature(Tokenizer.apply_chat_template).parameters) - {"kwargs"}
TEMPLATE_ARGUMENTS = _OWN_ARGUMENTS | {"tools", "documents"}
"""What the server itself passes to a chat template."""


class Conversation(Body):
    """What a chat template is applied to, in a chat request and in one to count its tokens."""

    messages: Annotated[Any, WithJsonSchema(json_types.MESSAGES)] = Field(
        description="the conversation: a list of {role, content}"
    )
    tools: Annotated[Any, WithJsonSchema(json_types.TOOLS)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    _tools: list[Tool] = PrivateAttr([])

    @field_validator("messages")
    @classmethod
    def _check_messages(cls, messages: Any) -> list[dict[str, Any]] | None:
        # Without a default, null is no list of messages; with one it stands for it.
        is_default = messages is None and not cls.model_fields["messages"].is_required()
        return None if is_default else check_messages(messages)

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
    def _check_conversation(self) -> Conversation:
        self._tools = check_tools(self.tools)
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise UserError(
                    "continue_final_message and add_generation_prompt exclude each other: send one of them",
                    reason="bad_value", param="continue_final_message",
                )  # fmt: skip
            if self.messages and self.messages[-1]["role"] != "assistant":
                raise UserError(
                    "continue_final_message needs a last message with the role assistant",
                    reason="bad_value", param="continue_final_message",
                )  # fmt: skip
        return self

    @property
    def generation_prompt(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools as a template takes them; None for none."""
        return [tool.given for tool in self._tools] or None


class ChatBody(GenerationBody, Conversation):
    """POST /v1/chat/completions."""

    not_served: ClassVar = {**NOT_SERVED, **NOT_SERVED_CHAT}

    max_tokens: int | None = Field(None, json_schema_extra=json_types.POSITIVE)
    max_completion_tokens: int | None = Field(None, json_schema_extra=json_types.POSITIVE)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, json_schema_extra=json_types.LOGPROBS)
    tool_choice: Annotated[Any, WithJsonSchema(json_types.TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    _tool_choice: ToolChoice = PrivateAttr(ToolChoice("none"))

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
        return self

    @model_validator(mode="after")
    def _check_tool_choice(self) -> ChatBody:
        self._tool_choice = check_tool_choice(self.tool_choice, check_tools(self.tools))
        if self.structure is None or self._tool_choice.mode == "none":
            return self
        # A format for the answer and tools go together: it holds for an answer that calls nothing.
        source, kind = self.structure_field, self.structure.kind
        if self._tool_choice.forced and source != "response_format":
            raise UserError(
                f"{source} and tool_choice both say what form the answer must have: send one of them",
                reason="conflicting_parameters", param="tool_choice",
            )  # fmt: skip
        if kind not in ("json", "json_object"):
            raise UserError(
                f"{source}: {kind} does not go together with tools: ask for JSON, or send tool_choice none",
                reason="conflicting_parameters", param=source,
            )  # fmt: skip
        return self

    @property
    def choice(self) -> ToolChoice:
        """tool_choice as it is meant."""
        return self._tool_choice

    @property
    def checked_tools(self) -> list[Tool]:
        return self._tools

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """None under tool_choice none too: what the model does not see it does not call."""
        return None if self._tool_choice.mode == "none" else super().template_tools

    @property
    def max_calls(self) -> int | None:
        """Most calls of one answer; None for no bound."""
        return 1 if self.parallel_tool_calls is False or self._tool_choice.mode == "named" else None

    @property
    def new_tokens(self) -> int | None:
        """None: the rest of the context."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per position for the engine to find; None without log probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None
