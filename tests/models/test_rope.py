"""Rotary tables against transformers' (tests/data/rope_golden.json)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from multilora_jax.models.config import ModelConfig
from multilora_jax.models.rope import inverse_frequencies, rope_tables

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "rope_golden.json").read_text())["cases"]
SIZES = {"model_type": "llama", "vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}


def model(**options) -> ModelConfig:
    return ModelConfig.from_hf({**SIZES, "hidden_size": 128, "num_attention_heads": 2, **options}, "test")


@pytest.mark.parametrize("name", GOLDEN)
def test_tables_equal_transformers(name):
    case = GOLDEN[name]
    config = model(**case["config"])
    inv_freq, scale = inverse_frequencies(config, case["length"])
    assert inv_freq.dtype == np.float32
    # One float32 step is 1.2e-7. Only a stretched base, raised to a power in float32, is not met to the last bit.
    np.testing.assert_allclose(inv_freq, np.float32(case["inv_freq"]), rtol=1.5e-7 if "beyond" in name else 0)
    assert scale == pytest.approx(case["attention_scaling"], rel=1e-12)
    cos, sin = rope_tables(config, case["length"])
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (case["length"], config.head_dim // 2)
    atol = 2e-4 if "beyond" in name else 2e-7
    np.testing.assert_allclose(cos[case["positions"]], np.float32(case["cos"]), atol=atol)
    np.testing.assert_allclose(sin[case["positions"]], np.float32(case["sin"]), atol=atol)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_d11_llama3_scaling_is_applied_under_either_key(key):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    options = {"max_position_embeddings": 256, "rope_scaling": {key: "llama3", **scaling}}
    scaled = rope_tables(model(**options, head_dim=64), 256)
    plain = rope_tables(model(max_position_embeddings=256, head_dim=64), 256)
    reference = GOLDEN["llama3_d11"]
    row = reference["positions"].index(200)
    np.testing.assert_allclose(scaled[0][200], np.float32(reference["cos"][row]), atol=2e-7)
    assert np.abs(scaled[0][200] - plain[0][200]).max() > 0.5


def test_dynamic_is_plain_up_to_the_trained_length_and_one_table_beyond():
    options = {"max_position_embeddings": 64, "head_dim": 64}
    dynamic = model(**options, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    plain = rope_tables(model(**options), 64)
    np.testing.assert_array_equal(rope_tables(dynamic, 64)[0], plain[0])
    np.testing.assert_array_equal(rope_tables(dynamic, 16)[0], plain[0][:16])
    longer = rope_tables(dynamic, 128)[0]
    assert np.abs(longer[:64] - plain[0]).max() > 0.01


def test_first_position_is_not_turned():
    cos, sin = rope_tables(model(), 4)
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()
