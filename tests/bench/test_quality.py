"""`bench quality` on a tiny model: what it reports, and its arithmetic."""

from __future__ import annotations

import json
import math

import pytest

from multilora_jax.bench import quality, texts
from multilora_jax.bench.quality import Seen, same_prefix
from multilora_jax.errors import ConfigError
from multilora_jax.tokenizer import Tokenizer


class Characters(Tokenizer):
    """A token for each digit."""

    def __init__(self):
        pass

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(character) for character in text]


@pytest.mark.slow  # compiles three engines of every shape
def test_rows_of_all_weights_with_and_without_an_adapter(run_tiny, narrow_engines, tmp_path, monkeypatch, capsys):
    out, picture, text = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "text.txt"
    text.write_text("A short text. " * 9, encoding="utf-8")
    monkeypatch.setattr(texts, "TEXT", text)
    words = (
        "--adapter --max-num-seqs 2 --max-num-batched-tokens 32 --num-parts 3 --part-len 42 --num-prompts 2 "
        "--input-len 5 --output-len 3 --rounds 1 --max-lora-rank 8"
    )
    assert run_tiny(quality, words, "--json", str(out), "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "perplexity_ratio" in printed
    assert "perplexity, same_next_token: 123 tokens, in 3 parts of a text" in printed
    assert "same_prefix: 9 tokens, in 3 greedy answers; 3 if all are the same" in printed
    assert "tokens_per_second: 1 x 6 tokens, the median of 1 rounds" in printed
    report = json.loads(out.read_text())
    rows = report["rows"]
    assert [row["weights"] for row in rows] == ["float32", "bfloat16", "int8"] * 2
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16", "float32"] * 2
    assert [row["adapter"] == "-" for row in rows] == [True] * 3 + [False] * 3
    assert len(narrow_engines) == 3
    for reference, *others in (rows[:3], rows[3:]):
        assert reference["scored_tokens"] == 3 * (42 - 1)  # the first token of each part is free
        assert reference["perplexity_ratio"] == reference["same_next_token"] == reference["ratio_to_float32"] == 1
        assert reference["same_prefix"] == 3
        for mine in others:
            assert mine["scored_tokens"] == reference["scored_tokens"]
            assert mine["perplexity_ratio"] != 1
            assert mine["perplexity_ratio"] == pytest.approx(1, abs=0.05)
            assert mine["same_next_token"] > 0.8
            assert mine["weight_mib"] < (0.35 if mine["weights"] == "int8" else 0.51) * reference["weight_mib"]
            assert mine["tokens_per_second"] > 0
    assert rows[0]["perplexity"] != rows[3]["perplexity"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--weights int4", "unknown weights 'int4': give some of float32, bfloat16, float16, int8"),
        ("--adapter --noenable-lora", "leave --adapter out"),
    ],
)
def test_what_cannot_be_measured_is_refused(run_tiny, words, match):
    with pytest.raises(ConfigError, match=match):
        run_tiny(quality, words)


def test_pieces_are_spread_over_the_text(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "TEXT", tmp_path / "text.txt")
    texts.TEXT.write_text("0123456789")
    tokenizer = Characters()
    assert texts.text_pieces(tokenizer, 3, 4) == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert texts.text_pieces(tokenizer, 1, 10) == [list(range(10))]
    with pytest.raises(ConfigError, match="parts of 11 tokens are longer than the text, which has 10"):
        texts.text_pieces(tokenizer, 1, 11)


def test_arithmetic():
    assert Seen([math.log(0.5), math.log(0.125)], [], []).perplexity == pytest.approx(4)
    assert [same_prefix((1, 2, 3), other) for other in ((1, 2, 3), (1, 5, 3), (4, 2, 3))] == [3, 1, 0]
