"""What the routes answer, for the OpenAPI document; the answers themselves are plain dicts."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """A JSON object that has these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class ErrorInfo(Answer):
    """What is wrong: for people, and as the stable word `reason` for programs; `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: int
    reason: str


class ErrorAnswer(BaseModel):
    """Every error. SGLang's routes add fields of their own to it."""

    error: ErrorInfo


class CachedTokens(Answer):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class Usage(Answer):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class UsedAdapter(Answer):
    """One adapter of a mix."""

    name: str
    scale: float
    digest: str | None


class _Head(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str | None
    adapters: list[UsedAdapter] = []


class PromptToken(Answer):
    """A token's log probability."""

    logprob: float
    rank: int | None
    decoded_token: str | None


class CompletionLogprobs(Answer):
    """Log probabilities of /v1/completions, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One continuation of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] = []
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None


class Completion(_Head):
    """An answer of /v1/completions, and each event of its stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Spelled(Answer):
    """A token, and its bytes where they may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Spelled):
    """A token of the answer, with its alternatives."""

    top_logprobs: list[Spelled]


class ChatLogprobs(Answer):
    """Log probabilities of /v1/chat/completions."""

    content: list[ChatToken]


class CalledFunction(Answer):
    """A function and its arguments, JSON as text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Answer):
    """The model's answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: int | str | None
    token_ids: list[int] = []


class ChatCompletion(_Head):
    """An answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, PromptToken] | None] | None = None


class TokenizeAnswer(Answer):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    """Text of token ids."""

    prompt: str


class ModelCard(Answer):
    """The base, or an adapter, which has a parent; what is known of its content is null until it was first read."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    digest: str | None = None
    rank: int | None = None
    warnings: list[str] = []
    state: Literal["registered", "host", "loading", "resident"] | None = None
    pinned: bool = False


class ModelList(Answer):
    """All that a request may name."""

    object: Literal["list"]
    data: list[ModelCard]


class AdapterStatus(ModelCard):
    """An adapter's card, with what it holds and who uses it now."""

    pages: int | None
    requests_running: int
    requests_waiting: int


class AdapterList(Answer):
    """A page of adapters; `has_more` says whether others follow the last of them."""

    object: Literal["list"]
    data: list[AdapterStatus]
    has_more: bool


class ValidAdapter(Answer):
    """What a load would make of the adapter."""

    valid: Literal[True]
    lora_path: str
    digest: str
    rank: int
    rank_rows: int
    pages: int
    base_model: str | None
    own_tokenizer: bool
    own_chat_template: bool
    warnings: list[str]


class Unloaded(Answer):
    """An adapter that is withdrawn, and how many requests still run on it."""

    id: str
    object: Literal["model"]
    deleted: Literal[True]
    requests_draining: int


class SGLangAnswer(BaseModel):
    """SGLang's fields, beside those of the route that it stands for."""

    success: bool
    error_message: str = ""
    loaded_adapters: dict[str, str] = {}


class Health(Answer):
    """The server can answer."""

    status: Literal["ok"]


class Ready(Answer):
    """Requests may be sent here."""

    status: Literal["ready"]


class Version(Answer):
    """This package's version."""

    version: str
