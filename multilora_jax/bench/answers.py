"""Requests of any kind through an engine, with the time of decoding apart from that of prompts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.request import LoRARequest, RequestOutput, SamplingParams


class Request(NamedTuple):
    """Arguments of LLMEngine.add_request; `prompt` is a text or token ids, `salt` the cache_salt."""

    prompt: str | list[int]
    params: SamplingParams
    lora: LoRARequest | None = None
    salt: str | None = None


def greedy(output_len: int, **options: Any) -> SamplingParams:
    """Of a greedy answer of exactly `output_len` tokens, of which no text is made."""
    return SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False, **options)


@dataclass
class Answers:
    """What came of some requests.

    Attributes:
        outputs: of each request, in order; each ended without an error.
        seconds: from the first request to the last answer.
        decode_s: of each step before which every request under way had its first token, so that it was of decoding
            alone; decode_tokens: that these steps gave.
    """

    outputs: list[RequestOutput]
    seconds: float = 0.0
    decode_s: list[float] = field(default_factory=list)
    decode_tokens: int = 0

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each answer."""
        return [list(output.outputs[0].token_ids) for output in self.outputs]

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.token_ids))


def answer(engine: LLMEngine, requests: Sequence[Request], *, at_once: int | None = None) -> Answers:
    """Answers requests, a new one whenever one ends.

    Args:
        engine: idle.
        requests: each for one continuation.
        at_once: of them under way together; as many as the engine runs by default.

    Raises:
        UserError: what the engine refuses; or why it gave a request up.
    """
    waiting = deque((f"bench-{number}", request) for number, request in enumerate(requests))
    ids, done = [request_id for request_id, _ in waiting], dict[str, RequestOutput]()
    live, most = dict[str, int](), at_once or engine.config.max_num_seqs  # tokens so far, by request
    answers = Answers([])
    start = time.perf_counter()
    while waiting or live:
        while waiting and len(live) < most:
            request_id, (prompt, params, lora, salt) = waiting.popleft()
            engine.add_request(request_id, prompt, params, lora, cache_salt=salt)
            live[request_id] = 0
        only_decodes, tokens, before = all(live.values()), 0, time.perf_counter()
        for output in step(engine):
            count = len(output.outputs[0].token_ids)
            tokens += count - live[output.request_id]
            live[output.request_id] = count
            if output.finished:
                done[output.request_id] = output
                del live[output.request_id]
        if only_decodes:
            answers.decode_s.append(time.perf_counter() - before)
            answers.decode_tokens += tokens
    answers.seconds = time.perf_counter() - start
    answers.outputs = [done[request_id] for request_id in ids]
    return answers


def step(engine: LLMEngine) -> list[RequestOutput]:
    """A step of an engine; raises why it gave a request up, where it did."""
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise output.error
    return outputs
