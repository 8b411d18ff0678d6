"""Tokenizer, chat template and vocabulary of requests on adapters that bring their own (host only, no jax)."""

from __future__ import annotations

from collections.abc import Iterable

from multilora_jax.errors import UserError
from multilora_jax.lora.adapter import Adapter
from multilora_jax.models.config import ModelConfig
from multilora_jax.tokenizer import Tokenizer


class AdapterText:
    """How requests on loaded adapters read and write text.

    Args:
        model_config: of the base.
        tokenizer: the base's, None where it has none.
    """

    def __init__(self, model_config: ModelConfig, tokenizer: Tokenizer | None):
        self._model_config = model_config
        self._tokenizer = tokenizer

    def tokenizer_for(self, adapters: Iterable[Adapter]) -> Tokenizer | None:
        """The tokenizer that text for these adapters goes through: their own where one brings one, else the base's.

        Raises:
            UserError: two of them bring different ones (`mixed_tokenizers`).
        """
        own = dict.fromkeys(a.version.tokenizer for a in adapters if a.version and a.version.tokenizer)
        if len(own) > 1:
            raise UserError(
                "the adapters of this mix bring tokenizers of their own, and different ones: mix adapters of one "
                "tokenizer", reason="mixed_tokenizers", param="lora_request",
            )  # fmt: skip
        return next(iter(own), self._tokenizer)

    def chat_template_for(self, adapters: Iterable[Adapter]) -> str | None:
        """The first chat template that one of the adapters brings; None for the base's."""
        templates = (a.version.chat_template for a in adapters if a.version)
        return next((template for template in templates if template), None)

    def vocab_size(self, adapters: Iterable[Adapter]) -> int:
        """Token ids below it exist for a request on these adapters: the base's, and those that an adapter adds."""
        layouts = (a.layout.vocab for a in adapters)
        return self._model_config.vocab_size + max((v.extra_tokens for v in layouts if v), default=0)
