"""Pieces of an answer that completions and chat share: usage, log probabilities, ids."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multilora_jax.errors import MultiLoRAError
from multilora_jax.request import CompletionOutput, FinishReason, Logprob, LoRARequest, RequestOutput

if TYPE_CHECKING:
    from multilora_jax.server.context import Target
    from multilora_jax.tokenizer import Tokenizer

Logprobs = Sequence[dict[int, Logprob] | None]

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class GenerationFailed(MultiLoRAError):
    """The engine ended a request with finish_reason "error"."""


@dataclass(frozen=True)
class Envelope:
    """What every chunk of one answer repeats."""

    object: str
    target: Target
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[dict[str, Any]], output: RequestOutput, **extra: Any) -> dict[str, Any]:
        """One answer or chunk.

        `system_fingerprint` tells which contents answered: "lora-" and the start of the adapter's digest, or "mix-"
        and a hash of the digests and scales. The answer to a request with a `lora` field lists them in `adapters`,
        as {"name", "scale", "digest"}.
        """
        head = {
            "id": self.id, "object": self.object, "created": self.created, "model": self.target.name,
            "system_fingerprint": fingerprint(self.target.adapters, output.adapter_digests),
        }  # fmt: skip
        if self.target.is_mix:
            # A request that nothing has answered yet has no digests.
            digests = output.adapter_digests or (None,) * len(self.target.adapters)
            head["adapters"] = [
                {"name": request.lora_name, "scale": request.scale, "digest": digest}
                for request, digest in zip(self.target.adapters, digests, strict=True)
            ]
        return {**head, "choices": choices, **extra}


def fingerprint(adapters: Sequence[LoRARequest], digests: Sequence[str]) -> str | None:
    """A word for the contents that answered, the same for the same ones; None for the base alone."""
    if not digests:
        return None
    if len(digests) == 1 and adapters[0].scale == 1.0:
        return f"lora-{digests[0][:16]}"
    parts = [f"{digest}*{request.scale!r}" for request, digest in zip(adapters, digests, strict=True)]
    return f"mix-{hashlib.sha256('+'.join(parts).encode()).hexdigest()[:16]}"


def engine_id(answer_id: str, index: int) -> str:
    """An id for one prompt inside the engine: unique even when a client sends the same request_id again."""
    return f"{answer_id}-{index}-{uuid.uuid4().hex[:8]}"


def completion_of(output: RequestOutput, index: int = 0) -> CompletionOutput:
    """A continuation of a request. Raises GenerationFailed if the engine could not finish it."""
    completion = output.outputs[index]
    if completion.finish_reason == FinishReason.ERROR.value:
        raise GenerationFailed(f"request {output.request_id} failed in the engine")
    return completion


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Token counts over all prompts of a request, each counted once however many continuations it has."""
    outputs = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Logprobs, num_top: int, tokenizer: Tokenizer | None
) -> dict[str, list[Any]]:
    """The shape of /v1/completions, without text_offset. The first token of a prompt has no probability: null.

    Args:
        token_ids, logprobs: of the same tokens, in order.
        num_top: alternatives to list; the token itself is listed too.
        tokenizer: spells the tokens.
    """
    tokens, chosen, top = [], [], []
    for token_id, table in zip(token_ids, logprobs, strict=False):
        tokens.append(_spelled(token_id, tokenizer))
        if table is None:
            chosen.append(None)
            top.append(None)
            continue
        chosen.append(_finite(table[token_id]))
        alternatives = {token_id: table[token_id], **dict(_most_likely(table, num_top))}
        by_text: dict[str, float] = {}
        for other_id, logprob in _most_likely(alternatives, len(alternatives)):
            by_text.setdefault(_spelled(other_id, tokenizer), _finite(logprob))
        top.append(by_text)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top}


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Logprobs, num_top: int, tokenizer: Tokenizer | None
) -> dict[str, list[Any]]:
    """The shape of /v1/chat/completions."""

    def entry(token_id: int, table: dict[int, Logprob]) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id) if tokenizer is not None else f"token_id:{token_id}".encode()
        text = raw.decode(errors="replace")
        return {"token": text, "logprob": _finite(table[token_id]), "bytes": list(raw)}

    content = []
    for token_id, table in zip(token_ids, logprobs, strict=False):
        if table is not None:
            top = [entry(other_id, table) for other_id, _ in _most_likely(table, num_top)]
            content.append({**entry(token_id, table), "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(logprobs: Logprobs | None) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: for each prompt token, its table of token id to log probability; null for the first."""
    if logprobs is None:
        return None

    def entry(logprob: Logprob) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}

    tables = [None if table is None else {str(i): entry(logprob) for i, logprob in table.items()} for table in logprobs]
    return tables


def _most_likely(table: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    return sorted(table.items(), key=lambda item: -item[1].logprob)[:count]


def _spelled(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token's text; parts of characters, which have none of their own, are told apart as OpenAI does."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)
