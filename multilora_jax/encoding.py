"""Texts to token ids without keeping the other threads of the process waiting (host only)."""

from __future__ import annotations

from typing import Any

import tokenizers

from multilora_jax.errors import UserError

MAX_LOCKED_CHARS = 4096
"""A text of at most so many characters takes less than a turn at the interpreter's lock costs."""


def token_ids(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a text.

    `Tokenizer.encode` holds the interpreter's lock from beginning to end: while it reads a prompt of megabytes, which
    takes seconds, no step runs and no other request is answered. The calls for batches let go of it.
    """
    if len(text) <= MAX_LOCKED_CHARS:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def byte_level_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def check_bytes(text: str, longest: int, limit: int, param: str) -> None:
    """Refuses a text that needs more than `limit` tokens though each were as long as the longest, without reading it.

    Raises:
        UserError: `context_length_exceeded`, blaming `param`.
        UnicodeEncodeError: half of a surrogate pair.
    """
    if len(text) * 4 <= limit * longest:
        return
    size = len(text.encode())
    if size > limit * longest:
        raise UserError(
            f"the prompt has {size} bytes of text, at least {-(-size // longest)} tokens (none has more than "
            f"{longest} bytes), and the model's context is {limit} tokens: shorten the prompt",
            reason="context_length_exceeded", param=param,
        )  # fmt: skip


def longest_token(backend: tokenizers.Tokenizer, state: dict[str, Any]) -> int | None:
    """Most bytes of a text that one token can stand for; None where that is not known.

    It is where every byte ends in some token: BPE over bytes, or with a token for each byte to fall back on, after
    steps that only add to the text.

    Args:
        backend: the tokenizer.
        state: what its file says.
    """
    model, vocab = state["model"], state["model"].get("vocab")
    before, after = _steps(state, "normalizer"), _steps(state, "post_processor")
    pre = _steps(state, "pre_tokenizer")
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if not all(_keeps_all(step) for step in before) or not all(_splits_only(step) for step in pre):
        return None
    if not all(_adds_only(step) for step in after):
        return None
    # The tokens of added_tokens are found in the text as it comes, or in what the normalizer makes of it.
    added = state.get("added_tokens") or []
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # these swallow the white space around them
    contents = [token["content"] for token in added]
    if backend.normalizer is not None:
        contents += [backend.normalizer.normalize_str(content) for content in contents]
    longest = max((len(content.encode()) for content in contents), default=1)
    if any(step["type"] == "ByteLevel" for step in pre):
        # A character of the vocabulary is a byte of the text.
        return max(longest, *map(len, vocab)) if byte_level_alphabet().keys() <= vocab.keys() else None
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return max(longest, *(len(token.encode()) for token in vocab))
    return None


def _steps(state: dict[str, Any], name: str) -> list[dict[str, Any]]:
    step = state.get(name)
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    parts = step.get("normalizers") or step.get("pretokenizers") or step.get("processors") or []
    return [inner for part in parts for inner in _steps({name: part}, name)]


def _keeps_all(normalizer: dict[str, Any]) -> bool:
    """Whether what it makes of a text has no fewer bytes."""
    if normalizer["type"] == "Replace":
        old = normalizer["pattern"].get("String")
        return bool(old) and len(old.encode()) <= len(normalizer["content"].encode())
    return normalizer["type"] == "Prepend"


def _splits_only(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether it leaves out nothing."""
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return pre_tokenizer["type"] in ("ByteLevel", "Metaspace", "Digits")


def _adds_only(processor: dict[str, Any]) -> bool:
    """Whether it leaves all tokens of the text."""
    if processor["type"] == "TemplateProcessing":
        return any(piece.get("Sequence", {}).get("id") == "A" for piece in processor["single"])
    return processor["type"] in ("ByteLevel", "BertProcessing", "RobertaProcessing")
