"""POST /tokenize and /detokenize: how a model, or an adapter with a tokenizer of its own, reads and writes text."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, WithJsonSchema, model_validator

from multilora_jax.errors import UserError
from multilora_jax.server import json_types
from multilora_jax.server.answer_schemas import DetokenizeAnswer, TokenizeAnswer
from multilora_jax.server.bodies import body_router
from multilora_jax.server.chat_protocol import Conversation
from multilora_jax.server.context import ServerContext
from multilora_jax.server.inputs import Voice, encode, render, required, voice_of
from multilora_jax.server.protocol import Body
from multilora_jax.server.resolvers import resolve_target

router = body_router()


class TokenizeBody(Conversation):
    """POST /tokenize: a prompt, or the messages of a conversation."""

    model: str | None = Field(None, description="the base, the default, or an adapter")
    prompt: Annotated[str | None, Field(description="a text")] = None
    messages: Annotated[Any, WithJsonSchema(json_types.or_null(json_types.MESSAGES))] = None
    add_special_tokens: bool | None = Field(
        None, description="whether a BOS is added; by default to a prompt only, as a chat template writes its own"
    )
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise UserError(
                "send either prompt or messages" if self.prompt is None else "send prompt or messages, not both",
                reason="missing_field" if self.prompt is None else "conflicting_parameters", param="prompt",
            )  # fmt: skip
        chat = ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        for name in chat if self.messages is None else ():
            if getattr(self, name) is not None:
                raise UserError(f"{name} is about messages: send them", reason="bad_value", param=name)
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = Field(None, description="the base, the default, or an adapter")
    tokens: list[Annotated[int, Field(json_schema_extra={"minimum": 0})]]
    skip_special_tokens: bool | None = Field(None, description="false by default: every token's text is written")


@router.post("/tokenize", response_model=TokenizeAnswer)
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    """The token ids of a text or of a conversation, as a request with it would be read."""
    voice = await _voice(request, body.model)
    return await asyncio.to_thread(_tokenized, body, voice)


@router.post("/detokenize", response_model=DetokenizeAnswer)
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
    """The text of token ids."""
    voice = await _voice(request, body.model)
    tokenizer = required(voice.tokenizer)
    if not all(0 <= token < voice.vocab_limit for token in body.tokens):
        raise UserError(f"tokens has token ids outside [0, {voice.vocab_limit})", reason="bad_token_id", param="tokens")
    return {"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, bool(body.skip_special_tokens))}


async def _voice(request: Request, model: str | None) -> Voice:
    context: ServerContext = request.app.state.context
    name = context.engine.engine.base_name if model is None else model
    return await voice_of(context.engine, await resolve_target(context, name), context.chat_template)


def _tokenized(body: TokenizeBody, voice: Voice) -> dict[str, Any]:
    tokenizer = required(voice.tokenizer)
    if body.messages is None:
        text, special = body.prompt or "", body.add_special_tokens is not False
        ids = encode(tokenizer, text, special, "prompt") if text else tokenizer.encode("", add_special_tokens=special)
    else:
        ids = encode(tokenizer, render(body, voice), bool(body.add_special_tokens), "messages")
    strings = [tokenizer.id_to_token(token) or "" for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": voice.max_model_len, "tokens": ids, "token_strs": strings}
