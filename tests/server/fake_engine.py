"""An engine of LLMEngine's interface without a model: one byte a token, outputs written by the test."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE

from multilora_jax.config import EngineConfig
from multilora_jax.detokenizer import IncrementalDetokenizer
from multilora_jax.engine.grammars import Grammar, Grammars
from multilora_jax.engine.metrics import EngineStats
from multilora_jax.engine.policies.gate import Gate, Rate
from multilora_jax.errors import UserError
from multilora_jax.lora.adapter import Adapter
from multilora_jax.models.config import ModelConfig
from multilora_jax.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from multilora_jax.tokenizer import Tokenizer, byte_level_alphabet
from tests.server.fake_adapters import FakeAdapters

GOLDEN = Path(__file__).parent.parent / "data" / "golden_tiny"
BOS, EOS, VOCAB_SIZE = 256, 257, 258
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if not loop.last or not continue_final_message %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PAGE_TOKENS, PAGES = 16, 1000


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Token i is byte i; <s> is 256 and </s> 257."""
    backend = tokenizers.Tokenizer(BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special_tokens=special, chat_template=chat_template, add_bos=True)


class _Request:
    def __init__(self, request_id, prompt_ids, params, adapters, scales, forced, tokenizer):
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.params = params
        self.adapters = adapters
        self.scales = scales
        self.forced = forced
        self.output_ids: list[int] = []
        self.detokenizer = IncrementalDetokenizer(tokenizer, params)
        self.metrics = RequestMetrics(arrival_time=time.monotonic())

    @property
    def voice(self) -> str:
        """Who answers, spelled out: "base", "NAME", or "NAME*SCALE+NAME*SCALE"."""
        if not self.adapters:
            return "base"
        if self.scales == [1.0]:
            return self.adapters[0].name
        return "+".join(f"{a.name}*{scale:g}" for a, scale in zip(self.adapters, self.scales, strict=True))


class FakeEngine(FakeAdapters):
    """Generates `script[prompt text]` where the test wrote one, else "NAME:abcdefgh..." without end.

    Attributes:
        script: prompt text (without special tokens) to the bytes of the answer; an end of sequence follows them.
        step_seconds: time that a step takes.
        fail_step: raised by the next step.
        give_up: name of an adapter to why the requests that wait for it end with an error.
        gate: steps wait while it is cleared.
        held: a step waits there: requests that come now are not taken in before it ends.
        newest_first: serve the newest requests first.
    """

    def __init__(self, *, max_model_len=128, max_num_seqs=8, step_seconds=0.0, tokenizer=None, **config):
        hf = json.loads((GOLDEN / "bases" / "tied" / "config.json").read_text())
        super().__init__(
            EngineConfig(model="fake", served_model_name="base", **config),
            ModelConfig.from_hf({**hf, "vocab_size": VOCAB_SIZE}, "tiny", None),
            tokenizer or byte_tokenizer(),
        )
        self.base_name = self.config.base_name
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.step_seconds = step_seconds
        self.newest_first = False
        self.script: dict[str, bytes] = {}
        self.fail_step: BaseException | None = None
        self.give_up: dict[str, UserError] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.held = False
        self.requests: dict[str, _Request] = {}
        self.params_seen: list[SamplingParams] = []
        self.salts_seen: list[str | None] = []
        self.tenants_seen: list[str | None] = []
        rate = self.config.adapter_requests_per_s
        limit = None if rate is None else Rate(rate, self.config.adapter_request_burst)
        # Grammars are compiled, so that bad ones are refused; answers do not follow them.
        self._grammars = Grammars()
        self.plans = SimpleNamespace(prepare=self._compiled)
        self.gate_keeper = Gate(self.config.max_queued_requests, limit)
        self.counts = EngineStats()

    def _compiled(self, params: SamplingParams, adapters: list[Adapter]) -> Grammar:
        asked = params.structured_outputs
        assert isinstance(asked, StructuredOutputsParams)
        assert self.tokenizer is not None
        return self._grammars.compile(asked, self.tokenizer, VOCAB_SIZE, frozenset({EOS}))

    # ---- engine thread

    def add_request(self, request_id, prompt, params, lora_request=None, priority=0, cache_salt=None, tenant=None,
                    arrival_time=None):  # fmt: skip
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        adapters = self.adapters_of(lora_request)
        assert all(adapter.version is not None for adapter in adapters), "not prepared"
        asked = lora_request if isinstance(lora_request, list) else [lora_request]
        tokenizer = self.tokenizer_for(lora_request)
        ids: Any = tokenizer.encode(prompt) if isinstance(prompt, str) and tokenizer else list(prompt or [])
        if not ids:
            raise UserError("empty prompt", reason="empty_prompt", param="prompt")
        if not all(0 <= i < self.vocab_limit(lora_request) for i in ids):
            raise UserError("token id out of range", reason="bad_token_id", param="prompt")
        if len(ids) >= self.max_model_len:
            raise UserError("too long", reason="context_length_exceeded", param="prompt")
        text = tokenizer.decode(ids) if tokenizer else ""
        if text == "BUG":
            raise TypeError("a bug in add_request")
        waiting = max(0, len(self.requests) - self.max_num_seqs)
        free = max(0, self.max_num_seqs - len(self.requests))
        self.gate_keeper.enter([adapter.name for adapter in adapters], waiting, free, time.monotonic())
        forced = self.script.get(text)
        self.params_seen.append(params)
        self.salts_seen.append(cache_salt)
        self.tenants_seen.append(tenant)
        scales = [request.scale for request in asked if request is not None]
        self.requests[request_id] = _Request(request_id, ids, params, adapters, scales, forced, tokenizer)
        self.counts.prompt_tokens += len(ids)

    def abort_request(self, request_id: str) -> bool:
        return self.requests.pop(request_id, None) is not None

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        self.held = not self.gate.is_set()
        self.gate.wait()
        self.held = False
        time.sleep(self.step_seconds)
        if self.fail_step is not None:
            raise self.fail_step
        self.counts.steps += 1
        queue = list(self.requests.values())[:: -1 if self.newest_first else 1]
        return [self._advance(request) for request in queue[: self.max_num_seqs]]

    def recover(self) -> list[RequestOutput]:
        assert self.fail_step is not None
        raise self.fail_step

    def check_integrity(self) -> None:
        """There are no pages."""

    def stats(self) -> EngineStats:
        running = list(self.requests.values())[: self.max_num_seqs]
        waiting = list(self.requests.values())[self.max_num_seqs :]
        kv = sum(-(-(len(r.prompt_ids) + len(r.output_ids)) // PAGE_TOKENS) for r in running)
        by_name = [Counter(a.name for r in group for a in r.adapters) for group in (running, waiting)]
        return EngineStats(
            num_running=len(running), num_waiting=len(waiting),
            running_by_adapter=by_name[0], waiting_by_adapter=by_name[1],
            pages_total=PAGES, pages_kv=kv, pages_free=PAGES - kv,
            prompt_tokens=self.counts.prompt_tokens, generation_tokens=self.counts.generation_tokens,
            steps=self.counts.steps, tiers=self.tiers(), registered_adapters=len(self.list_loras()),
            refused=dict(self.gate_keeper.refused),
            host_adapters=len(self.host), host_adapter_bytes=self.host.bytes, host_evictions=self.host.evictions,
        )  # fmt: skip

    def _next_token(self, request: _Request) -> int:
        n = len(request.output_ids)
        if request.forced is not None:
            return request.forced[n] if n < len(request.forced) else EOS
        name = request.voice.encode() + b":"
        return name[n] if n < len(name) else ord("a") + (n - len(name)) % 26

    def _advance(self, request: _Request) -> RequestOutput:
        params, now = request.params, time.monotonic()
        for adapter in request.adapters:
            if adapter.name in self.give_up:
                return self._given_up(request, self.give_up[adapter.name])
            if adapter in self.list_loras():
                self.resident[adapter] = None
        request.metrics.first_scheduled_time = request.metrics.first_scheduled_time or now
        request.metrics.first_token_time = request.metrics.first_token_time or now
        token = self._next_token(request)
        request.output_ids.append(token)
        self.counts.generation_tokens += 1
        reason = stop_reason = None
        if token == EOS and not params.ignore_eos:
            reason = FinishReason.STOP
        elif token in (params.stop_token_ids or []):
            reason, stop_reason = FinishReason.STOP, token
        else:
            stop_reason = request.detokenizer.append([token])
            reason = FinishReason.STOP if stop_reason is not None else None
        total = len(request.prompt_ids) + len(request.output_ids)
        if reason is None and (len(request.output_ids) == params.max_tokens or total >= self.max_model_len):
            reason = FinishReason.LENGTH
        if reason is not None:
            request.detokenizer.finish()
            request.metrics.finished_time = now
            del self.requests[request.request_id]
        outputs = request.output_ids
        completion = CompletionOutput(
            0, request.detokenizer.text, list(outputs),
            logprobs=None if params.logprobs is None else [self._table(t, params.logprobs) for t in outputs],
            finish_reason=reason and reason.value, stop_reason=stop_reason,
        )  # fmt: skip
        digests = tuple(adapter.digest for adapter in request.adapters if adapter.digest)
        about_prompt = None
        if params.prompt_logprobs is not None:
            about_prompt = [None, *(self._table(t, params.prompt_logprobs) for t in request.prompt_ids[1:])]
        return RequestOutput(
            request.request_id, None, request.prompt_ids, about_prompt,
            [replace(completion, index=index) for index in range(params.n)], reason is not None,
            metrics=request.metrics, adapter_digest=digests[0] if len(digests) == 1 else None, adapter_digests=digests,
        )  # fmt: skip

    def _given_up(self, request: _Request, error: UserError) -> RequestOutput:
        del self.requests[request.request_id]
        completion = CompletionOutput(0, "", [], finish_reason=FinishReason.ERROR.value)
        return RequestOutput(request.request_id, None, request.prompt_ids, None, [completion], True, error=error)

    def _table(self, token: int, count: int) -> dict[int, Logprob]:
        """The token with probability 1/2, then its successors with 1/4, 1/8, ...; the last of 2 or more is -inf."""
        assert self.tokenizer is not None
        table = {token: Logprob(-math.log(2), 1, self.tokenizer.token_text(token))}
        for k in range(1, count):
            other = (token + k) % VOCAB_SIZE
            logprob = -math.inf if k == count - 1 else -(k + 1) * math.log(2)
            table[other] = Logprob(logprob, k + 1, self.tokenizer.token_text(other))
        return table
