"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from multilora_jax.errors import ConfigError
from multilora_jax.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(metadata: dict[str, Any], source: str) -> Tokenizer | None:
    """Rebuild the tokenizer that a file's metadata describes.

    Args:
        metadata: the file's keys and values.
        source: names the file in errors.

    Returns:
        None where the file has none.

    Raises:
        ConfigError: a tokenizer model or pre-tokenizer that cannot be rebuilt exactly, or damaged tables.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind in (None, "none") or not tokens:
        return None
    if kind == "gpt2":
        backend, adds_bos = _byte_level_bpe(metadata, tokens, source)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece_bpe(metadata, tokens, source), True
    else:
        raise _unsupported(source, "tokenizer.ggml.model", kind)
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    for added_type in (_CONTROL, _USER_DEFINED):
        added = [token for token, token_type in zip(tokens, types, strict=True) if token_type == added_type]
        special = added_type == _CONTROL
        backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    special_tokens = {}
    for name, key in _NAMES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= token_id < len(tokens):
            special_tokens[name] = tokens[token_id]
    templates = {"default": metadata.get("tokenizer.chat_template")}
    for name in metadata.get("tokenizer.chat_templates") or []:
        templates[name] = metadata.get(f"tokenizer.chat_template.{name}")
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template={name: template for name, template in templates.items() if template},
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
    )


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str], source: str) -> tuple[tokenizers.Tokenizer, bool]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not merges:
        raise _unsupported(source, "tokenizer.ggml.merges", merges)
    name = metadata.get("tokenizer.ggml.pre")
    add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_space, use_regex=name not in _LLAMA3_NAMES)
    if name == "smollm":
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif name in _LLAMA3_NAMES:
        words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
        split = pre_tokenizers.Sequence([words, byte_level])
    elif name == "gpt-2":
        split = byte_level
    else:
        # "default" included: files say so when their converter did not know the tokenizer.
        raise _unsupported(source, "tokenizer.ggml.pre", name)
    pairs = []
    for merge in merges:
        # A token may itself contain a space, never at its start: the first one after that parts the pair.
        left, _, right = merge[1:].partition(" ")
        pairs.append((merge[0] + left, right))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    model = _model(source, vocab=vocabulary, merges=pairs, ignore_merges=name in _LLAMA3_NAMES)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    return backend, name in _LLAMA3_NAMES


def _sentencepiece_bpe(metadata: dict[str, Any], tokens: list[str], source: str) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: the pair that makes the piece with the best score is merged first."""
    scores, types = metadata.get("tokenizer.ggml.scores"), metadata.get("tokenizer.ggml.token_type")
    if not scores or not types or not len(scores) == len(types) == len(tokens):
        raise _unsupported(source, "tokenizer.ggml.scores", f"<{len(scores or [])} scores for {len(tokens)} tokens>")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    mergeable = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    merges = []
    for token in mergeable:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                merges.append((-scores[vocabulary[token]], vocabulary[token], vocabulary[left], left, right))
    merges.sort()
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    model = _model(
        source,
        vocab=vocabulary,
        merges=[(left, right) for *_, left, right in merges],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    undo: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(undo)
    return backend


def _model(source: str, **options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    # The library raises bare Exception for tables that contradict each other.
    except Exception as error:
        raise ConfigError(f"{source}: the tokenizer's tables are damaged ({error})", reason="bad_tokenizer") from error


def _unsupported(source: str, key: str, value: Any) -> ConfigError:
    return ConfigError(
        f"{source}: {key}={value!r} cannot be rebuilt exactly: give a folder with the model's tokenizer.json as the "
        "tokenizer",
        reason="unsupported_tokenizer", param="tokenizer",
    )  # fmt: skip
