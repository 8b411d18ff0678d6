"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from multilora_jax.request import CompletionOutput, RequestOutput
from multilora_jax.server import answer_schemas
from multilora_jax.server.answers import (
    Envelope,
    chat_logprobs,
    completion_of,
    engine_id,
    prompt_logprobs,
    usage,
)
from multilora_jax.server.bodies import body_router
from multilora_jax.server.chat_protocol import ChatBody
from multilora_jax.server.context import ServerContext
from multilora_jax.server.inputs import chat_prompt, voice_of
from multilora_jax.server.request_ids import answer_id
from multilora_jax.server.resolvers import resolve_target
from multilora_jax.server.shared_prompts import read_once
from multilora_jax.server.streaming import (
    CLIENT_CLOSED_REQUEST,
    ClientGone,
    EventStream,
    OutputStream,
    last_outputs,
    merged,
    submit_all,
    until_disconnect,
)
from multilora_jax.server.structure import naming
from multilora_jax.server.tool_answers import ToolUse

if TYPE_CHECKING:
    from multilora_jax.tokenizer import Tokenizer

router = body_router()


@router.post("/v1/chat/completions", responses={200: {"model": answer_schemas.ChatCompletion}})
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    arrival_time = time.monotonic()
    context: ServerContext = request.app.state.context
    engine = context.engine
    target = await resolve_target(context, body.model, body.lora)
    voice = await voice_of(engine, target, context.chat_template)
    tool_use = ToolUse(body, voice, context.config.tool_call_parser)
    prompt, max_tokens = await read_once(request, voice, lambda: chat_prompt(body, voice))
    asked = (max_tokens, body.num_logprobs, body.prompt_logprobs)
    id_ = answer_id("chatcmpl", body.request_id, request)
    tokenizer = voice.tokenizer

    async def submit() -> list[OutputStream]:
        with naming(tool_use.structure_field):
            params = body.sampling_params(*asked, tool_use.structure)
            submission = engine.submit(
                {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids}, params, engine_id(id_, 0),
                lora_request=target.lora_request, priority=body.priority or 0, cache_salt=body.cache_salt,
                tenant=body.user, arrival_time=arrival_time,
            )  # fmt: skip
            return await submit_all([submission])

    if body.stream:
        answer = Envelope("chat.completion.chunk", target, id_)
        streams = await submit()
        return EventStream(_events(body, streams[0], answer, tokenizer, tool_use), streams)

    async def run() -> list[RequestOutput]:
        streams = await submit()
        with naming(tool_use.structure_field):
            return await last_outputs(streams)

    try:
        [output] = await until_disconnect(request.receive, run())
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    answer = Envelope("chat.completion", target, id_)
    extra: dict[str, Any] = {"usage": usage([output])}
    if body.return_token_ids:
        extra["prompt_token_ids"] = list(output.prompt_token_ids)
    if body.prompt_logprobs is not None:
        extra["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    return JSONResponse(answer.wrap(_choices(body, output, tokenizer, tool_use), output, **extra))


def _choices(
    body: ChatBody, output: RequestOutput, tokenizer: Tokenizer | None, tool_use: ToolUse
) -> list[dict[str, Any]]:
    choices = []
    for index in range(len(output.outputs)):
        completion, writer = completion_of(output, index), tool_use.writer()
        choice: dict[str, Any] = {
            "index": index,
            "message": writer.message(completion.text),
            "logprobs": _logprobs(body, completion, 0, len(completion.token_ids), tokenizer),
            "finish_reason": writer.finish_reason(completion.finish_reason),
            "stop_reason": completion.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = list(completion.token_ids)
        choices.append(choice)
    return choices


async def _events(
    body: ChatBody, stream: OutputStream, answer: Envelope, tokenizer: Tokenizer | None, tool_use: ToolUse
) -> AsyncGenerator[dict[str, Any], None]:
    answers = [_Pieces(body, index, tokenizer, tool_use) for index in range(body.n or 1)]
    output: RequestOutput | None = None

    def chunk(output: RequestOutput, choice: dict[str, Any], **extra: Any) -> dict[str, Any]:
        if body.include_usage:
            extra["usage"] = usage([output]) if body.continuous_usage else None
        return answer.wrap([choice], output, **extra)

    # A grammar may turn out to be too much in the middle of the answer.
    with naming(tool_use.structure_field):
        async with aclosing(merged([stream])) as outputs:
            first = True
            async for _, output in outputs:
                if first:
                    for index in range(len(answers)):
                        ids = {"prompt_token_ids": list(output.prompt_token_ids)} if body.return_token_ids else {}
                        delta = {"role": "assistant", "content": ""}
                        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                        yield chunk(output, choice, **(ids if not index else {}))
                    first = False
                for pieces in answers:
                    piece = pieces.advance(output)
                    if piece is not None:
                        yield chunk(output, piece)
    if body.include_usage and output is not None:
        yield answer.wrap([], output, usage=usage([output]))


class _Pieces:
    """One streamed answer: what was sent already is counted here."""

    def __init__(self, body: ChatBody, index: int, tokenizer: Tokenizer | None, tool_use: ToolUse):
        self._body = body
        self._writer = tool_use.writer()
        self._index = index
        self._tokenizer = tokenizer
        self._num_chars = self._num_tokens = 0
        self._ended = False

    def advance(self, output: RequestOutput) -> dict[str, Any] | None:
        """What is new since the last call; None where that is nothing to send."""
        body, completion = self._body, completion_of(output, self._index)
        if self._ended:
            return None
        self._ended = completion.finish_reason is not None
        delta = self._writer.delta(completion.text[self._num_chars :], self._ended)
        self._num_chars = len(completion.text)
        start, end = self._num_tokens, len(completion.token_ids)
        shows_tokens = end > start and (body.logprobs or body.return_token_ids)
        if not (delta or shows_tokens or self._ended):
            return None
        choice: dict[str, Any] = {
            "index": self._index,
            "delta": delta,
            "logprobs": _logprobs(body, completion, start, end, self._tokenizer),
            "finish_reason": self._writer.finish_reason(completion.finish_reason),
        }
        if self._ended:
            choice["stop_reason"] = completion.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = list(completion.token_ids[start:end])
        self._num_tokens = end
        return choice


def _logprobs(
    body: ChatBody, completion: CompletionOutput, start: int, end: int, tokenizer: Tokenizer | None
) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    tables = (completion.logprobs or [])[start:end]
    return chat_logprobs(completion.token_ids[start:end], tables, body.num_logprobs or 0, tokenizer)
