"""Small tokenizers for tests: every byte, some longer pieces, special tokens; byte-level and SentencePiece-like."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

BOS, EOS = "<|bos|>", "<|eos|>"
PIECES = ["AB", "DEF", "GHI", "hello", " world", "é", "漢", "\U0001f600"]
"""Texts that are single tokens beside the bytes."""

SPLIT_PIECES = [b"\xf0\x9f", b"\xf0\x9f\x98", b"a\xe6\xbc", b"\xa2b", b"\xf0\x9f\x87", b"e\xcc"]
"""Tokens that end or begin inside a character."""


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(spare)) for byte in range(256)]


def byte_level(*, bos_processor: bool = False) -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes, then SPLIT_PIECES and PIECES, then BOS, EOS and a non-special added token."""
    characters = byte_characters()
    tokens = list(characters)
    for piece in [*SPLIT_PIECES, *(p.encode() for p in PIECES)]:
        tokens.append("".join(characters[byte] for byte in piece))
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(BOS, normalized=False), AddedToken(EOS, normalized=False)])
    backend.add_tokens([AddedToken("<not special>", normalized=False)])
    if bos_processor:
        bos_id = backend.token_to_id(BOS)
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos_id)])
    return backend


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Llama 2's kind: a space mark before every word, bytes for what the vocabulary lacks."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", *"abcdehlorw.", "\u2581hello", "\u2581w", "é", "漢", "\u2581\u2581"]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[("\u2581", "\u2581")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return backend
