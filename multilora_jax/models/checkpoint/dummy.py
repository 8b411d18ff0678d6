"""A model without weights: its configuration, and a tokenizer where it has none (host only)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from multilora_jax.errors import ConfigError
from multilora_jax.models.checkpoint.folder import read_config
from multilora_jax.models.config import ModelConfig
from multilora_jax.tokenizer import Tokenizer, byte_level_alphabet

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_NOT_SHAPE = ("name", "bos_token_id", "eos_token_ids", "max_position_embeddings")
"""Fields of ModelConfig that differ between releases of one model, and change no weight."""


def dummy_model(
    model: str, name: str, shape: Mapping[str, Any], tokenizer: str | None
) -> tuple[ModelConfig, Tokenizer | None]:
    """What an engine is built around when weights are made up.

    Args:
        model: a folder with config.json, which is not looked for where there is a shape.
        name: for display.
        shape: config.json's fields; empty to read them from the folder.
        tokenizer: folder of another tokenizer; None takes the model's own, or with a shape one of bytes.

    Raises:
        ConfigError: the model is not supported, or there is no config.json.
    """
    if not shape:
        return read_config(Path(model)), Tokenizer.from_folder(tokenizer or model)
    config = ModelConfig.from_hf(dict(shape), name)
    if tokenizer is not None:
        return config, Tokenizer.from_folder(tokenizer)
    return config, Tokenizer.from_folder(model) or stand_in_tokenizer(config)


def check_shape(config: ModelConfig, shape: Mapping[str, Any], source: str) -> None:
    """Refuses a model that is not of the shape that the configuration gives.

    Raises:
        ConfigError: it names the sizes that differ.
    """
    if not shape:
        return
    wanted = ModelConfig.from_hf(dict(shape), config.name)
    names = [f.name for f in fields(ModelConfig) if f.name not in _NOT_SHAPE]
    wrong = [name for name in names if getattr(config, name) != getattr(wanted, name)]
    if wrong:
        shown = "; ".join(f"{name} is {getattr(config, name)}, not {getattr(wanted, name)}" for name in wrong[:4])
        raise ConfigError(
            f"{source} is not of the configured model_shape: {shown}. Leave model_shape out, or give the model that it "
            "describes",
            reason="conflicting_keys", param="model_shape",
        )  # fmt: skip


def stand_in_tokenizer(config: ModelConfig) -> Tokenizer:
    """One token per byte, the model's own ids for the beginning and the end of a text, and names for all other ids."""
    special = {"eos_token": config.eos_token_ids[0]} if config.eos_token_ids else {}
    if config.bos_token_id is not None:
        special["bos_token"] = config.bos_token_id
    texts = {token_id: f"<{name.removesuffix('_token')}>" for name, token_id in special.items()}
    free = iter(token_id for token_id in range(config.vocab_size) if token_id not in texts)
    if config.vocab_size < 256 + len(texts):
        raise ConfigError(
            f"a vocabulary of {config.vocab_size} tokens does not hold the 256 bytes: give a tokenizer",
            reason="no_tokenizer", param="tokenizer",
        )  # fmt: skip
    vocab = {char: next(free) for char, _ in sorted(byte_level_alphabet().items(), key=lambda item: item[1])}
    vocab |= {f"<{token_id}>": token_id for token_id in free}
    vocab |= {text: token_id for token_id, text in texts.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts.values()])
    return Tokenizer(
        backend, special_tokens={name: texts[token_id] for name, token_id in special.items()}, chat_template=_TEMPLATE,
        add_bos=config.bos_token_id is not None,
    )  # fmt: skip
