"""Texts to token ids without keeping the other threads of the process waiting (host only)."""

from __future__ import annotations

import tokenizers

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
