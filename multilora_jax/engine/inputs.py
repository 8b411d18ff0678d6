"""Checking what a request brings before the engine takes it (host only, no jax)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from multilora_jax.errors import UserError
from multilora_jax.models.config import ModelConfig
from multilora_jax.request import LoRARequest, SamplingParams
from multilora_jax.tokenizer import Tokenizer

Prompt = str | list[int] | dict[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. A dict with both is a rendered conversation: the ids
are run as they are and the answer is a text of its own, not a continuation of the prompt's. A dict may hold a
"cache_salt" too."""


Mix = LoRARequest | list[LoRARequest] | None
"""What a request runs on: one adapter, a weighted mix of several, or the base."""


def read_mix(mix: Any) -> list[LoRARequest]:
    """The adapters of a Mix. Raises UserError for anything else (`bad_lora_request`)."""
    requests = [] if mix is None else list(mix) if isinstance(mix, list | tuple) else [mix]
    for request in requests:
        if not isinstance(request, LoRARequest):
            raise UserError(
                f"lora_request must be a LoRARequest or a list of them, not {type(request).__name__}",
                reason="bad_lora_request", param="lora_request",
            )  # fmt: skip
    return requests


def continues_text(prompt: Prompt) -> bool:
    """Whether the output goes on from the prompt's text, so that a space before its first word is kept."""
    return not (isinstance(prompt, dict) and "prompt" in prompt and "prompt_token_ids" in prompt)


class InputReader:
    """Prompts to token ids, and parameters against what answers the request.

    Args:
        model_config: of the base.
        tokenizer: the base's or the adapter's own; None for a model without one.
        vocab_size: token ids below it exist for the request.
        max_model_len: context in tokens, prompt and answer together.
    """

    def __init__(self, model_config: ModelConfig, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int):
        self.eos_token_ids = frozenset(model_config.eos_token_ids)
        if tokenizer is not None:
            self.eos_token_ids |= frozenset(tokenizer.eos_token_ids)
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len

    def read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, where it has one, and its token ids.

        Raises:
            UserError: `bad_prompt`, `no_tokenizer`, `bad_token_id`, `empty_prompt`, `context_length_exceeded`.
        """
        text, ids = self._split(prompt)
        if ids is None:
            ids = self._encode(text)
        for token in ids:
            self._check_token(token, "prompt")
        if not ids:
            raise UserError("the prompt is empty: give at least one token", reason="empty_prompt", param="prompt")
        if len(ids) >= self._max_model_len:
            raise UserError(
                f"the prompt has {len(ids)} tokens, but the context holds {self._max_model_len} and at least one of "
                "them must be left for the answer: shorten the prompt",
                reason="context_length_exceeded", param="prompt",
            )  # fmt: skip
        return text, [int(token) for token in ids]

    def check_params(self, params: SamplingParams) -> SamplingParams:
        """A copy, which its owner cannot change, checked anew: it may have been changed since it was made.

        Raises:
            UserError: a value out of range, or parameters that this model cannot follow.
        """
        if not isinstance(params, SamplingParams):
            raise UserError(
                f"sampling_params must be a SamplingParams, not {type(params).__name__}",
                reason="bad_sampling_params", param="sampling_params",
            )  # fmt: skip
        params = replace(params)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            tokens = getattr(params, name) or ()
            if tokens and max(tokens) >= self.vocab_size:  # what they are SamplingParams has looked at
                for token in tokens:
                    self._check_token(token, name)
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(params, name) and self.tokenizer is None:
                raise UserError(f"{name} needs a tokenizer, this model has none", reason="no_tokenizer", param=name)
        return params

    @staticmethod
    def check_priority(priority: Any) -> None:
        """Raises UserError unless `priority` is an integer."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UserError(f"priority must be an integer, not {priority!r}", reason="bad_priority", param="priority")

    @staticmethod
    def read_salt(prompt: Prompt, salt: Any) -> str | None:
        """The request's cache_salt, given beside its prompt or, as vLLM has it, in the prompt's dict.

        Raises:
            UserError: it is no non-empty string, or both are given and differ (`bad_cache_salt`).
        """
        inside = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        salts = {repr(value): value for value in (salt, inside) if value is not None}
        if len(salts) > 1 or not all(isinstance(value, str) and value for value in salts.values()):
            raise UserError(
                f"cache_salt must be one non-empty string, not {' and '.join(salts)}",
                reason="bad_cache_salt", param="cache_salt",
            )  # fmt: skip
        return next(iter(salts.values()), None)

    @staticmethod
    def check_tenant(tenant: Any) -> str:
        """The name of a tenant, empty for None. Raises UserError for what is no string (`bad_tenant`)."""
        if not isinstance(tenant, str | None):
            raise UserError(f"tenant must be a string, not {tenant!r}", reason="bad_tenant", param="tenant")
        return tenant or ""

    @staticmethod
    def _split(prompt: Any) -> tuple[str | None, list[Any] | None]:
        text, ids = prompt, None
        if isinstance(prompt, dict):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif not isinstance(prompt, str):
            text, ids = None, prompt
        ids_ok = ids is None or isinstance(ids, list | tuple | np.ndarray)
        if not ids_ok or not isinstance(text, str | None) or (text is None and ids is None):
            raise UserError(
                "a prompt is a string, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}",
                reason="bad_prompt", param="prompt",
            )  # fmt: skip
        return text, None if ids is None else list(ids)

    def _encode(self, text: str | None) -> list[int]:
        if self.tokenizer is None:
            raise UserError(
                "this model has no tokenizer: give token ids, or a tokenizer in the configuration",
                reason="no_tokenizer", param="prompt",
            )  # fmt: skip
        try:
            return self.tokenizer.encode(text, limit=self._max_model_len) if text else []
        except (UnicodeEncodeError, TypeError) as error:  # half of a surrogate pair, which no text file can hold
            raise UserError(
                "the prompt is no valid Unicode text: it holds a lone surrogate", reason="bad_prompt", param="prompt"
            ) from error

    def _check_token(self, token: Any, param: str) -> None:
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < self.vocab_size:
            raise UserError(
                f"{token!r} is no token id of this model: they are integers from 0 to {self.vocab_size - 1}",
                reason="bad_token_id", param=param,
            )  # fmt: skip
