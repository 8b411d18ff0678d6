"""config.json of Mistral, Qwen2 and Qwen3: what their own classes leave out, windows, and what is refused."""

from __future__ import annotations

import pytest

from multilora_jax.errors import ConfigError
from multilora_jax.models.checkpoint.base import expected_shapes
from multilora_jax.models.checkpoint.hf_config import hf_config
from multilora_jax.models.config import ModelConfig
from multilora_jax.models.families import FAMILIES

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 32}  # fmt: skip
FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention"] * 2


def read(model_type: str, **changes) -> ModelConfig:
    return ModelConfig.from_hf({"model_type": model_type, **SIZES, **changes}, "test")


def test_absent_fields_take_the_family_s_defaults():
    mistral, qwen2, qwen3 = read("mistral"), read("qwen2"), read("qwen3")
    assert (mistral.num_kv_heads, mistral.sliding_window, mistral.max_position_embeddings) == (8, 4096, 131072)
    assert (mistral.bos_token_id, mistral.eos_token_ids, mistral.head_dim) == (1, (2,), 2)
    assert (qwen2.num_kv_heads, qwen2.sliding_window, qwen2.max_position_embeddings) == (32, None, 32768)
    assert (qwen2.bos_token_id, qwen2.eos_token_ids) == (None, ())
    assert (qwen3.head_dim, qwen3.q_dim, qwen3.qk_norm, qwen2.qk_norm) == (128, 4096, True, False)


def test_biases_are_those_of_the_family():
    assert read("llama").biased_modules == read("mistral").biased_modules == read("qwen3").biased_modules == ()
    assert read("qwen2").biased_modules == ("q_proj", "k_proj", "v_proj")
    assert read("qwen3", attention_bias=True).biased_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    names = expected_shapes(read("qwen2"))
    assert "model.layers.1.self_attn.k_proj.bias" in names
    assert "model.layers.1.self_attn.o_proj.bias" not in names
    assert expected_shapes(read("qwen3"))["model.layers.1.self_attn.q_norm.weight"] == (128,)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_architecture_says_the_family(family):
    config = {**SIZES, "architectures": [FAMILIES[family].architecture]}
    assert ModelConfig.from_hf(config, "test") == read(family)


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0},
                                     {"tie_word_embeddings": True, "head_dim": 8}])  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_can_be_written_again(family, changes):
    if family == "llama":
        changes = {key: value for key, value in changes.items() if key != "sliding_window"}
    config = read(family, **changes)
    assert ModelConfig.from_hf(hf_config(config), "test") == config
    count = sum(rows * (columns or [1])[0] for rows, *columns in expected_shapes(config).values())
    assert config.num_parameters == count
    eights = sum(s[0] * s[1] + 4 * s[0] if len(s) == 2 else 4 * s[0] for s in expected_shapes(config).values())
    assert config.weight_bytes(4, "int8") == eights


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("mistral", {"sliding_window": 7}, 7),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 7, "layer_types": SLIDING}, 7),
        ("mistral", {"sliding_window": 7, "layer_types": FULL}, None),
        ("qwen2", {"sliding_window": 7}, None),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True}, None),  # from layer 28 on
        ("qwen2", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen3", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, 7),
        ("qwen3", {"sliding_window": 7, "use_sliding_window": True, "layer_types": SLIDING}, 7),
        ("qwen3", {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0, "layer_types": FULL}, None),
    ],
)
def test_windows(family, changes, window):
    assert read(family, **changes).sliding_window == window


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gemma2", {}, "model_type='gemma2' is not supported: llama"),
        ("mixtral", {"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.*mistral.*qwen3.*are"),
        ("mistral", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*is not supported with 'mistral'"),
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("qwen2", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias=True"),
        ("qwen3", {"num_experts": 128}, "num_experts=128"),
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
        ("llama", {"sliding_window": 4096}, "sliding_window=4096"),
        ("llama", {"layer_types": SLIDING}, "layer_types"),
        ("mistral", {"sliding_window": -1}, "sliding_window=-1 must be a positive integer"),
        ("mistral", {"sliding_window": "4096"}, "sliding_window='4096'"),
        ("mistral", {"sliding_window": None, "layer_types": SLIDING}, "asks for a sliding window, and none is set"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "all layers must be of one kind"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 2}, "all layers must be of one kind"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "max_window_layers=1 is not supported"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": None}, "max_window_layers=None"),
    ],
)
def test_what_is_not_served_is_refused_by_name(family, changes, words):
    with pytest.raises(ConfigError, match=words) as error:
        read(family, **changes)
    assert error.value.reason == "unsupported_model_config"
