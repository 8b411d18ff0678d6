"""POST /v1/completions."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.request import CompletionOutput, FinishReason, RequestOutput
from multilora_jax.server import answer_schemas
from multilora_jax.server.answers import (
    Envelope,
    completion_logprobs,
    completion_of,
    engine_id,
    prompt_logprobs,
    usage,
)
from multilora_jax.server.bodies import body_router
from multilora_jax.server.context import ServerContext, Target
from multilora_jax.server.inputs import Prompt, completion_prompts, voice_of
from multilora_jax.server.protocol import CompletionBody
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

if TYPE_CHECKING:
    from multilora_jax.tokenizer import Tokenizer

router = body_router()


@router.post("/v1/completions", responses={200: {"model": answer_schemas.Completion}})
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Continue one or several prompts."""
    arrival_time = time.monotonic()
    context: ServerContext = request.app.state.context
    target = await resolve_target(context, body.model, body.lora)
    voice = await voice_of(context.engine, target, context.chat_template)
    most = context.config.max_prompts_per_request
    prompts = await read_once(request, voice, lambda: completion_prompts(body, voice, most))
    tokenizer = voice.tokenizer
    answer = Envelope("text_completion", target, answer_id("cmpl", body.request_id, request))
    if body.stream:
        streams = await _submit(body, context.engine, target, prompts, answer.id, arrival_time)
        return EventStream(_events(body, prompts, streams, answer, tokenizer), streams)

    async def run() -> list[RequestOutput]:
        streams = await _submit(body, context.engine, target, prompts, answer.id, arrival_time)
        with naming(body.structure_field):
            return await last_outputs(streams)

    try:
        outputs = await until_disconnect(request.receive, run())
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    choices = [
        choice.finish(output)
        for index, output in enumerate(outputs)
        for choice in _choices(body, prompts, index, tokenizer)
    ]
    return JSONResponse(answer.wrap(choices, outputs[0], usage=usage(outputs)))


async def _submit(
    body: CompletionBody,
    engine: AsyncEngine,
    target: Target,
    prompts: list[Prompt],
    id_: str,
    arrival_time: float,
) -> list[OutputStream]:
    logprobs = body.logprobs
    asked = [count for count in (body.prompt_logprobs, logprobs if body.echo else None) if count is not None]
    about_prompt = max(asked, default=None)
    with naming(body.structure_field):
        params = body.sampling_params(max(body.new_tokens, 1), logprobs, about_prompt)
        if body.new_tokens == 0 and about_prompt is None:
            return [_EchoOnly(prompt.token_ids, params.n) for prompt in prompts]
        streams = await submit_all(
            engine.submit(
                {"prompt_token_ids": prompt.token_ids}, params, engine_id(id_, index),
                lora_request=target.lora_request, priority=body.priority or 0, cache_salt=body.cache_salt,
                tenant=body.user, arrival_time=arrival_time,
            )
            for index, prompt in enumerate(prompts)
        )  # fmt: skip
    return streams if body.new_tokens else [_PromptOnly(stream) for stream in streams]


async def _events(
    body: CompletionBody,
    prompts: list[Prompt],
    streams: list[OutputStream],
    answer: Envelope,
    tokenizer: Tokenizer | None,
) -> AsyncGenerator[dict[str, Any], None]:
    choices = [_choices(body, prompts, index, tokenizer) for index in range(len(prompts))]
    newest: dict[int, RequestOutput] = {}
    # A grammar may turn out to be too much in the middle of the answer.
    with naming(body.structure_field):
        async with aclosing(merged(streams)) as outputs:
            async for index, output in outputs:
                newest[index] = output
                for choice in choices[index]:
                    piece = choice.advance(output)
                    if piece is not None:
                        extra = _stream_usage(body, newest)
                        yield answer.wrap([piece], output, **extra)
    if body.include_usage:
        yield answer.wrap([], newest[0], usage=usage(newest.values()))


def _stream_usage(body: CompletionBody, newest: dict[int, RequestOutput]) -> dict[str, Any]:
    if not body.include_usage:
        return {}
    return {"usage": usage(newest.values()) if body.continuous_usage else None}


def _choices(body: CompletionBody, prompts: list[Prompt], which: int, tokenizer: Tokenizer | None) -> list[_Choice]:
    """The choices of a prompt: those of the first prompt come first, then those of the second."""
    n = body.n or 1
    return [_Choice(body, prompts[which], which * n + i, i, tokenizer) for i in range(n)]


class _Choice:
    """One continuation of a prompt, whole or in pieces: what was sent already is counted here.

    Args:
        index: among all choices of the answer; continuation: among those of its prompt.
    """

    def __init__(
        self, body: CompletionBody, prompt: Prompt, index: int, continuation: int, tokenizer: Tokenizer | None
    ):
        self._body = body
        self._prompt = prompt
        self._index = index
        self._continuation = continuation
        self._started = self._ended = False
        self._num_chars = 0
        self._num_tokens = 0
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = frozenset()
        if tokenizer is not None and body.skip_special_tokens is not False:
            self._hidden = tokenizer.special_ids

    def finish(self, output: RequestOutput) -> dict[str, Any]:
        """The choice of a finished request, in one piece."""
        choice = self.advance(output)
        assert choice is not None
        return choice

    def advance(self, output: RequestOutput) -> dict[str, Any] | None:
        """What is new since the last call; None where that is nothing to send."""
        body, completion = self._body, completion_of(output, self._continuation)
        if self._ended:
            return None
        first, self._ended = not self._started, completion.finish_reason is not None
        text = completion.text[self._num_chars :]
        num_tokens = len(completion.token_ids)
        shows_tokens = num_tokens > self._num_tokens and (body.logprobs is not None or body.return_token_ids)
        if not (text or shows_tokens or self._ended or (first and body.echo)):
            return None
        self._started = True
        choice: dict[str, Any] = {
            "index": self._index,
            "text": self._prompt.text + text if first and body.echo else text,
            "logprobs": None if body.logprobs is None else self._logprobs(output, first, num_tokens),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason if self._ended else None,
        }
        if body.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids) if first else None
            choice["token_ids"] = list(completion.token_ids[self._num_tokens : num_tokens])
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        self._num_chars, self._num_tokens = len(completion.text), num_tokens
        return choice

    def _logprobs(self, output: RequestOutput, first: bool, num_tokens: int) -> dict[str, list[Any]]:
        completion = completion_of(output, self._continuation)
        token_ids = list(completion.token_ids[self._num_tokens : num_tokens])
        tables: list[Any] = list((completion.logprobs or [])[self._num_tokens : num_tokens])
        if first and self._body.echo:
            token_ids = [*output.prompt_token_ids, *token_ids]
            tables = [*(output.prompt_logprobs or []), *tables]
        shape = completion_logprobs(token_ids, tables, self._body.logprobs or 0, self._tokenizer)
        shape["text_offset"] = [self._place(token_id) for token_id in token_ids[: len(shape["tokens"])]]
        return shape

    def _place(self, token_id: int) -> int:
        """Where a token begins in the text: a character belongs to the token that completes it."""
        offset = self._offset
        if self._tokenizer is not None and token_id not in self._hidden:
            self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        return offset


class _EchoOnly:
    """max_tokens 0 without log probabilities: the prompt comes back and nothing has to be computed."""

    def __init__(self, prompt_token_ids: list[int], n: int):
        outputs = [CompletionOutput(i, "", [], finish_reason=FinishReason.LENGTH.value) for i in range(n)]
        self._output = RequestOutput("", None, prompt_token_ids, None, outputs, True)

    async def __aiter__(self) -> AsyncGenerator[RequestOutput, None]:
        yield self._output

    async def aclose(self) -> None:
        """Nothing is under way."""


class _PromptOnly:
    """max_tokens 0 with log probabilities of the prompt: the one token that the engine must generate is left out."""

    def __init__(self, stream: OutputStream):
        self._stream = stream

    async def __aiter__(self) -> AsyncGenerator[RequestOutput, None]:
        async for output in self._stream:
            if output.finished:
                output.outputs = [
                    CompletionOutput(c.index, "", [], logprobs=[], finish_reason=FinishReason.LENGTH.value)
                    for c in output.outputs
                ]
                yield output

    async def aclose(self) -> None:
        """Abort the request unless it is finished."""
        await self._stream.aclose()
