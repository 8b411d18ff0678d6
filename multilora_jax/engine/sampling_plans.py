"""From a request's parameters to its sampling plan, by its adapters' text and vocabulary (host only, no jax)."""

from __future__ import annotations

from collections.abc import Iterable

from multilora_jax.config import EngineConfig
from multilora_jax.engine.adapter_text import AdapterText
from multilora_jax.engine.grammars import Grammar, Grammars
from multilora_jax.engine.inputs import InputReader
from multilora_jax.engine.prompt_lookup import PromptLookup
from multilora_jax.engine.sampling_state import SamplingPlan, bad_word_ids, bitmask
from multilora_jax.lora.adapter import Adapter
from multilora_jax.models.config import ModelConfig
from multilora_jax.request import SamplingParams
from multilora_jax.sampling_params import StructuredOutputsParams


class SamplingPlans:
    """Makes the plans of an engine's requests.

    Args:
        config: the engine's.
        model_config: of the base.
        text: tokenizers and vocabularies of adapters.
        max_model_len: context in tokens.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, text: AdapterText, max_model_len: int):
        self._config = config
        self._model_config = model_config
        self._text = text
        self._max_model_len = max_model_len
        self._grammars = Grammars()

    def inputs_for(self, adapters: Iterable[Adapter]) -> InputReader:
        """The reader of requests on these adapters."""
        tokenizer, vocab_size = self._text.tokenizer_for(adapters), self._text.vocab_size(adapters)
        return InputReader(self._model_config, tokenizer, vocab_size, self._max_model_len)

    def prepare(self, params: SamplingParams, adapters: Iterable[Adapter]) -> Grammar | None:
        """Compiles what structured_outputs ask for, so that `plan` has it at once while the caller holds the result.

        Safe to call from any thread; the compiler leaves the interpreter to the others meanwhile.

        Raises:
            UserError: see InputReader.check_params and Grammars.compile.
        """
        inputs = self.inputs_for(adapters)
        return self._grammar(inputs.check_params(params), inputs)

    def plan(self, params: SamplingParams, inputs: InputReader) -> SamplingPlan | None:
        """The plan of a request; None where its parameters change no logits.

        Args:
            params: as the reader's check_params gave them.
            inputs: from `inputs_for`.

        Raises:
            UserError: as Grammars.compile.
        """
        if not params.edits_logits:
            return None
        vocab_size = inputs.vocab_size
        ends = frozenset() if params.ignore_eos else _existing(inputs)
        words = [] if inputs.tokenizer is None else bad_word_ids(params.bad_words or [], inputs.tokenizer)
        return SamplingPlan(
            params,
            vocab_size,
            stop_ids=(ends | frozenset(params.stop_token_ids or ())) if params.min_tokens else frozenset(),
            bad_words=tuple(word for word in words if all(token < vocab_size for token in word)),
            allowed_W=None if params.allowed_token_ids is None else bitmask(params.allowed_token_ids, vocab_size),
            grammar=self._grammar(params, inputs),
        )

    def lookup(self, params: SamplingParams) -> PromptLookup | None:
        """What makes proposals for a sequence; None where none are wanted, or its logits depend on its last token."""
        config, most = self._config, params.prompt_lookup_tokens
        most = config.prompt_lookup_tokens if most is None else most
        if not most or params.edits_logits:
            return None
        return PromptLookup(most, config.prompt_lookup_max, config.prompt_lookup_min)

    def _grammar(self, params: SamplingParams, inputs: InputReader) -> Grammar | None:
        asked = params.structured_outputs
        if not isinstance(asked, StructuredOutputsParams) or inputs.tokenizer is None:
            return None
        return self._grammars.compile(asked, inputs.tokenizer, inputs.vocab_size, _existing(inputs))


def _existing(inputs: InputReader) -> frozenset[int]:
    """The tokens that end an answer and that the model can generate: a tokenizer may name others."""
    return frozenset(token for token in inputs.eos_token_ids if token < inputs.vocab_size)
