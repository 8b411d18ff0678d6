"""The committed tiny model is what its generator makes, and its tokenizer is one token per byte."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from tests import make_tiny_model


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_committed_files_are_the_generator_s(configs, tmp_path, name):
    make_tiny_model.make(tmp_path)
    assert json.loads((configs / "tiny_model" / name).read_text()) == json.loads((tmp_path / name).read_text())


def test_one_token_per_byte(configs):
    tokenizer = Tokenizer.from_file(str(configs / "tiny_model" / "tokenizer.json"))
    for byte in range(128):
        assert tokenizer.encode(chr(byte), add_special_tokens=False).ids == [byte]
    text = "é 🙂\n<|im_start|>user"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == [*"é 🙂\n".encode(), make_tiny_model.IM_START, *b"user"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == make_tiny_model.CONFIG["vocab_size"]
