"""Adapters in few words."""

from __future__ import annotations

import pytest

from multilora_jax.adapters import show


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        ({"q_proj": [0, 1, 2], "v_proj": [0, 1, 2]}, "q_proj, v_proj x 3 layers"),
        ({"q_proj": [0, 1, 2], "up_proj": [0, 2], "lm_head": []}, "q_proj x 3 layers; up_proj x layers 0, 2; lm_head"),
        ({"down_proj": [1]}, "down_proj x layer 1"),
        ({}, "-"),
    ],
)
def test_modules(modules, text):
    assert show.modules_line(modules, 3) == text


def test_ranges():
    assert show.number_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert show.range_line({"q_proj": (8, 8), "v_proj": (8, 8)}) == "8"
    assert show.range_line({"q_proj": (4, 16), "v_proj": (8, 8)}) == "q_proj 4-16, v_proj 8"
    assert show.range_line({"q_proj": (2 / 3, 2 / 3)}) == "0.666667"
    assert show.range_line({}) == "-"


def test_features():
    none = {
        "dora": 0, "replaced_biases": 0, "lora_biases": 0, "norms": 0, "embed_rows": 0, "head_rows": 0,
        "extra_tokens": 0, "tokenizer": False, "chat_template": False,
    }  # fmt: skip
    assert show.features_line(none) == "-"
    some = {**none, "dora": 14, "norms": 1, "lora_biases": 2, "embed_rows": 3, "tokenizer": True}
    text = "DoRA on 14 modules, 2 LoRA biases, 1 norm changed, 3 rows of embed_tokens changed, own tokenizer"
    assert show.features_line(some) == text


def test_columns():
    assert show.columns([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"


def test_printable():
    assert show.printable("Grüße 日本\n\x1b[2J\ud800\u202e") == r"Grüße 日本\n\x1b[2J\ud800\u202e"
