"""Remakes spm_golden.json: a small SentencePiece BPE model with byte fallback, and what it makes of some texts.

Needs sentencepiece (made with 0.2.1): `python make_spm_golden.py`.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece

TEXTS = [
    "Hello world",
    " two  spaces   three",
    "",
    " ",
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "newline\nand tab\tand \r\n both",
    "naïve café, déjà vu",
    "emoji 👩‍👩‍👧 and flag 🇫🇷",
    "e\u0301 combining, 漢字とかな",
    "thethethethe there then",
    "1234567890 12 3",
    "\u2581already marked",
    "print(x) # comment\n    indented",
]


def main() -> None:
    here = Path(__file__).parent
    corpus = (here.parent.parent / "LICENSE").read_text(encoding="utf-8").splitlines() + TEXTS
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=["<extra>"],
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1 for i in ids
    ]
    kinds[processor.piece_to_id("<extra>")] = 4
    golden = {
        "sentencepiece": sentencepiece.__version__,
        "metadata": {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
            "tokenizer.ggml.scores": [processor.get_score(i) for i in ids],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": processor.bos_id(),
            "tokenizer.ggml.eos_token_id": processor.eos_id(),
            "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        },
        "texts": [[text, processor.encode(text), processor.decode(processor.encode(text))] for text in TEXTS],
    }
    path = here / "spm_golden.json"
    path.write_text(json.dumps(golden, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
