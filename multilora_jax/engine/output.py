"""What a live request has produced so far: text, stops, log-probabilities (host only, no jax)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from multilora_jax.detokenizer import IncrementalDetokenizer
from multilora_jax.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    LoRARequest,
    RequestMetrics,
    RequestOutput,
    Sequence,
)
from multilora_jax.tokenizer import Tokenizer


class RequestState:
    """A sequence with everything that its output needs.

    Args:
        seq: the sequence.
        prompt: its text, None if it came as token ids.
        lora_request: as given by the caller.
        tokenizer: that of the request's adapter or of the base; None for a model without one.
        continues_text: the output goes on from the prompt's text, so that a space before its first word is kept.
    """

    def __init__(
        self,
        seq: Sequence,
        prompt: str | None,
        lora_request: LoRARequest | list[LoRARequest] | None,
        tokenizer: Tokenizer | None,
        *,
        continues_text: bool = True,
    ):
        self.seq = seq
        self.prompt = prompt
        self.lora_request = lora_request
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if seq.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, seq.params, continues_text=continues_text)
        self._logprobs: list[dict[int, Logprob]] | None = [] if seq.params.logprobs is not None else None
        self._cumulative_logprob = 0.0
        self._prompt_token_ids = seq.token_ids[: seq.num_prompt_tokens]
        self._digests = tuple(adapter.digest for adapter in seq.adapters)
        self._metrics: RequestMetrics | None = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions are still to be recorded."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.seq.num_prompt_tokens

    def append(self, token: int, now: float, logprobs: list[Any] | None) -> None:
        """Takes the next token and decides whether the sequence ends.

        Args:
            token: token id.
            now: time.monotonic() seconds.
            logprobs: (logprob, rank, top_ids, top_logprobs) of this row, where the step computed them.
        """
        seq, params = self.seq, self.seq.params
        seq.token_ids.append(token)
        seq.first_token_time = seq.first_token_time or now
        seq.last_token_time = now
        if self._logprobs is not None and logprobs is not None:
            entry = self._entry(token, logprobs, params.logprobs or 0)
            self._logprobs.append(entry)
            self._cumulative_logprob += entry[token].logprob
        if seq.sampling_state is not None:
            seq.sampling_state.observe(token)
            if seq.sampling_state.error is not None:
                return self.fail(seq.sampling_state.error)
        stop_token = bool(params.stop_token_ids) and token in params.stop_token_ids
        if token in seq.eos_token_ids or stop_token:
            self.finish_reason = FinishReason.STOP
            seq.stop_reason = token if stop_token else None
            if params.include_stop_str_in_output:
                self._detokenizer.append([token])
        else:
            stop = self._detokenizer.append([token])
            if stop is not None:
                self.finish_reason, seq.stop_reason = FinishReason.STOP, stop
            elif seq.num_tokens >= seq.max_total_tokens:
                self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            self._detokenizer.finish()

    def fail(self, error: Exception) -> None:
        """Ends the request without another token."""
        self.error, self.finish_reason = error, FinishReason.ERROR
        self._detokenizer.finish()

    def add_prompt_logprobs(self, values: Iterable[tuple[Any, ...]], first: int) -> None:
        """Records the prompt tokens from position `first` on (the next one not yet recorded)."""
        assert self.prompt_logprobs is not None
        assert first == len(self.prompt_logprobs)
        for position, value in enumerate(values, first):
            token = self.seq.token_ids[position]
            self.prompt_logprobs.append(self._entry(token, list(value), self.seq.params.prompt_logprobs or 0))

    def _entry(self, token: int, values: list[Any], count: int) -> dict[int, Logprob]:
        logprob, rank, top_ids, top_logprobs = values
        entry = {token: Logprob(float(logprob), int(rank), self._text(token))}
        for place in range(count):
            other = int(top_ids[place])
            if other not in entry:
                entry[other] = Logprob(float(top_logprobs[place]), place + 1, self._text(other))
        return entry

    def _text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)

    def output(self, now: float) -> RequestOutput:
        """The request as it stands."""
        seq = self.seq
        finished = self.finish_reason is not None
        completion = CompletionOutput(
            index=seq.index,
            text=self._detokenizer.text,
            token_ids=seq.output_token_ids,
            cumulative_logprob=self._cumulative_logprob if self._logprobs is not None else None,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self.finish_reason.value if self.finish_reason is not None else None,
            stop_reason=seq.stop_reason,
            lora_request=self.lora_request,
        )
        metrics = self._metrics  # the same from token to token, but for these
        if metrics is None or finished or metrics.num_preemptions != seq.num_preemptions:
            metrics = RequestMetrics(
                seq.arrival_time, seq.first_scheduled_time, seq.first_token_time, now if finished else None,
                seq.num_preemptions,
            )  # fmt: skip
            self._metrics = metrics
        digests = self._digests
        return RequestOutput(
            request_id=seq.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[completion],
            finished=finished,
            metrics=metrics,
            lora_request=self.lora_request,
            num_cached_tokens=seq.num_cached_tokens,
            adapter_digest=digests[0] if len(digests) == 1 else None,
            adapter_digests=digests,
            error=self.error,
        )
