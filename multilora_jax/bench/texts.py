"""The text that benchmarks read: prose, dialogue, explanation and code, written for them."""

from __future__ import annotations

from pathlib import Path

from multilora_jax.errors import ConfigError
from multilora_jax.tokenizer import Tokenizer

TEXT = Path(__file__).parent / "data" / "quality_text.txt"
"""Some 2,600 tokens for a vocabulary of 49,000."""


def text_pieces(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Token ids of `count` pieces of the text, each of `length` tokens, spread evenly over it.

    They overlap where the text is shorter than all of them together.

    Raises:
        ConfigError: the text is shorter than one (`bad_value`).
    """
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    room = len(ids) - length
    if room < 0:
        raise ConfigError(f"parts of {length} tokens are longer than the text, which has {len(ids)}: shorten them",
                          reason="bad_value")  # fmt: skip
    starts = [number * room // max(1, count - 1) for number in range(count)]
    return [ids[start : start + length] for start in starts]
