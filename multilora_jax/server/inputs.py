"""From a request's text to token ids that fit the model's context."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multilora_jax.errors import UserError
from multilora_jax.server.chat_protocol import ChatBody, Conversation
from multilora_jax.server.protocol import CompletionBody

if TYPE_CHECKING:
    from multilora_jax.async_engine import AsyncEngine
    from multilora_jax.server.context import Target
    from multilora_jax.tokenizer import Tokenizer


SHORT_PROMPTS = 2048
"""Characters or token ids, of all prompts of a request: up to so many are read where the request is, which takes less
than to hand them to a thread, and no turn at the interpreter's lock."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text that `echo` gives back."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Voice:
    """How a target reads and writes text.

    Attributes:
        tokenizer: the adapter's own where it brings one, else the base's; None where there is none.
        chat_template: the adapter's own, else the configured one, else the base tokenizer's; None where none has one.
        tool_template: the same for a conversation with tools, for which some tokenizers bring one of its own.
        vocab_limit: prompt token ids are below this.
        max_model_len: most tokens of prompt and answer.
    """

    tokenizer: Tokenizer | None
    chat_template: str | None
    tool_template: str | None
    vocab_limit: int
    max_model_len: int


async def voice_of(engine: AsyncEngine, target: Target, configured_template: str | None) -> Voice:
    """A target's voice; its adapters are loaded first where they never were.

    Raises:
        UserError: an adapter that cannot be loaded.
    """
    lora_request, llm = target.lora_request, engine.engine
    await engine.prepare(lora_request)
    template = llm.chat_template_for(lora_request) or configured_template
    of_base = getattr(llm.tokenizer, "chat_template", None)
    return Voice(
        llm.tokenizer_for(lora_request),
        template or of_base,
        template or getattr(llm.tokenizer, "tool_template", None) or of_base,
        llm.vocab_limit(lora_request),
        llm.max_model_len,
    )


async def completion_prompts(body: CompletionBody, voice: Voice, most: int) -> list[Prompt]:
    """The prompts of a completion request, at most `most`. Raises UserError for one that does not fit the context."""
    check_num_prompts(len(body.prompt), most)
    if sum(map(len, body.prompt)) <= SHORT_PROMPTS:
        prompts = _completion_prompts(body, voice)
    else:
        prompts = await asyncio.to_thread(_completion_prompts, body, voice)
    for prompt in prompts:
        check_length(len(prompt.token_ids), body.new_tokens, voice.max_model_len, "prompt")
    return prompts


async def chat_prompt(body: ChatBody, voice: Voice) -> tuple[Prompt, int]:
    """The rendered conversation, and the most tokens to answer with (the rest of the context by default)."""
    prompt = await asyncio.to_thread(_chat_prompt, body, voice)
    limit, used = voice.max_model_len, len(prompt.token_ids)
    new_tokens = body.new_tokens
    check_length(used, 1 if new_tokens is None else new_tokens, limit, "messages")
    return prompt, limit - used if new_tokens is None else new_tokens


def check_num_prompts(number: int, most: int) -> None:
    """Raises UserError (`too_many_prompts`) where there are more than `most`."""
    if number > most:
        raise UserError(
            f"one request may bring {most} prompts (max_prompts_per_request): send several requests",
            reason="too_many_prompts", param="prompt",
        )  # fmt: skip


def check_length(num_prompt: int, new_tokens: int, limit: int, param: str) -> None:
    """Raises UserError where prompt and answer exceed the context, saying by how much."""
    if num_prompt + new_tokens <= limit:
        return
    room = limit - num_prompt
    if room < 1:
        raise UserError(
            f"the prompt has {num_prompt} tokens and the model's context {limit}: shorten the prompt to at most "
            f"{limit - 1} tokens, so that there is room to answer",
            reason="context_length_exceeded", param=param,
        )  # fmt: skip
    raise UserError(
        f"the prompt has {num_prompt} tokens and max_tokens asks for {new_tokens} more, together "
        f"{num_prompt + new_tokens}; the model's context is {limit}: lower max_tokens to at most {room} "
        "or shorten the prompt",
        reason="context_length_exceeded", param="max_tokens",
    )  # fmt: skip


def _completion_prompts(body: CompletionBody, voice: Voice) -> list[Prompt]:
    tokenizer = voice.tokenizer
    skip_special = body.skip_special_tokens is not False
    prompts = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            special, limit = body.add_special_tokens is not False, _limit(body, voice)
            ids = encode(required(tokenizer), prompt, special, "prompt", limit)
            kept = _truncate(ids, body.truncate_prompt_tokens, voice.max_model_len - body.new_tokens)
            text = prompt if len(kept) == len(ids) else required(tokenizer).decode(kept, skip_special)
        else:
            kept = _truncate(prompt, body.truncate_prompt_tokens, voice.max_model_len - body.new_tokens)
            limit = voice.vocab_limit
            if not all(0 <= token < limit for token in kept):
                raise UserError(f"the prompt has token ids outside [0, {limit})", reason="bad_token_id", param="prompt")
            text = tokenizer.decode(kept, skip_special) if body.echo and tokenizer is not None else ""
        prompts.append(Prompt(kept, text))
    return prompts


def _chat_prompt(body: ChatBody, voice: Voice) -> Prompt:
    text = render(body, voice)
    # The template has already written every special token that the model wants.
    ids = encode(required(voice.tokenizer), text, False, "messages", _limit(body, voice))
    room = voice.max_model_len - (body.new_tokens or 1)
    return Prompt(_truncate(ids, body.truncate_prompt_tokens, room), text)


def render(body: Conversation, voice: Voice) -> str:
    """The conversation as its template writes it. Raises UserError where there is no template or it fails."""
    tools = body.template_tools
    variables = dict(body.chat_template_kwargs or {})
    if tools:
        variables["tools"] = tools
    return required(voice.tokenizer).apply_chat_template(
        body.messages,
        chat_template=voice.tool_template if tools else voice.chat_template,
        add_generation_prompt=body.generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        **variables,
    )


def _truncate(ids: list[int], keep: int | None, room: int) -> list[int]:
    """The last `keep` ids, or as many as there is room for where `keep` is -1."""
    if keep is None:
        return ids
    return ids[-max(room, 1) :] if keep == -1 else ids[-keep:]


def _limit(body: CompletionBody | ChatBody, voice: Voice) -> int | None:
    """Most tokens of a prompt; None where what is too much is cut off."""
    return voice.max_model_len if body.truncate_prompt_tokens is None else None


def encode(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, param: str, limit: int | None = None
) -> list[int]:
    """The token ids of a text.

    Raises:
        UserError: blaming `param`, for what is no text, has no tokens, or is seen to have more than `limit` unread.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = "the text is not valid Unicode: it has half of a surrogate pair"
        raise UserError(message, reason="bad_text", param=param) from error
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens, limit=limit, param=param)
    if not ids:
        raise UserError("the prompt has no tokens: send some text", reason="empty_prompt", param=param)
    return ids


def required(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer. Raises UserError where there is none."""
    if tokenizer is None:
        raise UserError(
            "this model has no tokenizer: send the prompt as token ids", reason="no_tokenizer", param="prompt"
        )
    return tokenizer
