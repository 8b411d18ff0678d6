"""config.json to ModelConfig: what is read, and what is refused by name."""

from __future__ import annotations

import json

import pytest

from multilora_jax.errors import ConfigError
from multilora_jax.models.checkpoint.base import expected_shapes
from multilora_jax.models.config import ModelConfig, RopeConfig

BASIC = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def read(generation=None, **changes) -> ModelConfig:
    return ModelConfig.from_hf({**BASIC, **changes}, "test", generation)


def test_absent_fields_take_llama_defaults():
    config = read()
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.max_position_embeddings == 2048
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert config.rope == RopeConfig()
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_given_fields_are_read():
    config = read(
        num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-5, tie_word_embeddings=True, attention_bias=True,
        mlp_bias=True, max_position_embeddings=4096, rope_theta=5e5, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    assert (config.num_kv_heads, config.head_dim, config.q_dim, config.kv_dim) == (2, 32, 128, 64)
    assert config.tie_word_embeddings
    assert config.attention_bias
    assert config.mlp_bias
    assert (config.rms_norm_eps, config.max_position_embeddings, config.rope.theta) == (1e-5, 4096, 5e5)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_old_and_new_spellings_of_rope_agree():
    old = read(rope_scaling={"type": "llama3", **LLAMA3}, rope_theta=5e5)
    mid = read(rope_scaling={"rope_type": "llama3", **LLAMA3}, rope_theta=5e5)
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old.rope == mid.rope == new.rope
    assert new.rope.rope_type == "llama3"
    assert (new.rope.theta, new.rope.original_max_position_embeddings) == (5e5, 32)
    plain = read(rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    assert plain.rope == RopeConfig(theta=1e5)


def test_theta_beside_rope_parameters_is_the_fallback():
    assert read(rope_theta=7.0, rope_parameters={"rope_type": "default"}).rope.theta == 7.0
    assert read(rope_theta=7.0, rope_parameters={"rope_theta": 9.0}).rope.theta == 9.0


def test_eos_of_both_files_are_joined_in_order():
    assert read({"eos_token_id": [5, 2, 9]}, eos_token_id=2).eos_token_ids == (2, 5, 9)
    assert read({"eos_token_id": 3}, eos_token_id=[4, 3]).eos_token_ids == (4, 3)
    assert read({"bos_token_id": 7}, bos_token_id=None).bos_token_id == 7
    assert read(eos_token_id=-1).eos_token_ids == ()


@pytest.mark.parametrize("name", ["tied", "untied", "biased", "headdim32", "mha", "llama3rope"])
def test_parameter_count_is_the_sum_of_the_expected_tensors(golden_tiny, name):
    config = ModelConfig.from_hf(json.loads((golden_tiny / "bases" / name / "config.json").read_text()), name)
    total = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in expected_shapes(config).values())
    assert config.num_parameters == total


def test_config_is_hashable_and_gives_the_pool_its_shape():
    config = read(num_key_value_heads=2, head_dim=32)
    assert hash(config) == hash(read(num_key_value_heads=2, head_dim=32))
    geometry = config.geometry(num_pages=10, page_tokens=16, tp=2, dtype="bfloat16")
    assert (geometry.q_dim, geometry.kv_dim, geometry.ffn, geometry.hidden) == (128, 64, 96, 64)
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.tp, geometry.dtype) == (2, 2, 2, "bfloat16")
    assert (geometry.num_pages, geometry.page_tokens, geometry.head_dim) == (10, 16, 32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gemma2"),
        ("architectures", ["MixtralForCausalLM"]),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("sliding_window", 4096),
        ("partial_rotary_factor", 0.5),
        ("rope_interleaved", True),
        ("no_rope_layers", [1, 0]),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("num_local_experts", 8),
        ("logits_scaling", 8.0),
        ("head_dim", 15),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 3),
        ("hidden_size", "64"),
        ("num_hidden_layers", 0),
        ("intermediate_size", None),
        ("vocab_size", True),
        ("rms_norm_eps", -1.0),
        ("rope_theta", "big"),
        ("attention_bias", "yes"),
        ("eos_token_id", "2"),
    ],
)
def test_unsupported_field_is_refused_by_name_and_value(field, value):
    with pytest.raises(ConfigError) as error:
        read(**{field: value})
    assert field in str(error.value)
    assert repr(value) in str(error.value)
    assert error.value.reason == "unsupported_model_config"


@pytest.mark.parametrize("field", ["sliding_window", "quantization_config", "layer_types", "partial_rotary_factor"])
def test_unsupported_field_that_is_off_is_accepted(field):
    off = {"layer_types": ["full_attention"] * 2, "partial_rotary_factor": 1.0}
    assert read(**{field: off.get(field)}) == read()


def test_pretraining_tp_does_not_change_the_model():
    assert read(pretraining_tp=4) == read()


def test_d11_unknown_rope_type_is_refused():
    with pytest.raises(ConfigError, match="rope_type='longrope'.*llama3"):
        read(rope_scaling={"rope_type": "longrope", "factor": 2.0})
    with pytest.raises(ConfigError, match="rope_type='mystery'"):
        read(rope_scaling={"type": "mystery", "factor": 2.0})


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "linear"}, "factor=None"),
        ({"rope_type": "linear", "factor": 0.0}, "factor=0.0"),
        ({"rope_type": "linear", "factor": "4"}, "factor='4'"),
        ({"rope_type": "linear", "factor": 4.0, "short_factor": [1.0]}, "short_factor"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor=1.0"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor=None"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1.5}, "original_max_position"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama3", "'llama3'"),
    ],
)
def test_bad_rope_values_are_refused_by_name(scaling, named):
    with pytest.raises(ConfigError, match=named):
        read(rope_scaling=scaling)
