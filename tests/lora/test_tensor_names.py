"""Names of tensors in adapter files."""

from __future__ import annotations

import pytest

from multilora_jax.lora.tensor_names import TensorKind, classify, projection_path
from multilora_jax.memory.geometry import MODULES

BASE = "base_model.model."
Q = f"{BASE}model.layers.3.self_attn.q_proj"


@pytest.mark.parametrize(
    ("key", "path", "adapter"),
    [
        (f"{Q}.lora_A.weight", "model.layers.3.self_attn.q_proj", ""),
        (f"{Q}.lora_A.default.weight", "model.layers.3.self_attn.q_proj", "default"),
        (f"{BASE}layers.3.self_attn.q_proj.lora_A.weight", "layers.3.self_attn.q_proj", ""),
    ],
)
def test_projections(key, path, adapter):
    name = classify(key)
    assert (name.kind, name.layer, name.module) == (TensorKind.LORA_A, 3, "q_proj")
    assert (name.module_path, name.adapter) == (path, adapter)
    assert classify(key.replace("lora_A", "lora_B")).kind is TensorKind.LORA_B


@pytest.mark.parametrize("module", MODULES)
def test_every_projection_has_its_block(module):
    path = projection_path(12, module)
    name = classify(f"{BASE}{path}.lora_B.weight")
    assert (name.layer, name.module, name.module_path) == (12, module, path)
    wrong = path.replace("self_attn", "?").replace("mlp", "self_attn").replace("?", "mlp")
    assert classify(f"{BASE}{wrong}.lora_B.weight").kind is TensorKind.UNKNOWN


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (f"{BASE}lm_head.lora_A.weight", TensorKind.VOCAB_LORA),
        (f"{BASE}lm_head.base_layer.weight", TensorKind.VOCAB_LORA),
        (f"{BASE}model.embed_tokens.lora_embedding_A", TensorKind.VOCAB_LORA),
        (f"{BASE}model.embed_tokens.lora_embedding_B.default", TensorKind.VOCAB_LORA),
        (f"{BASE}model.embed_tokens.base_layer.weight", TensorKind.VOCAB_LORA),
        (f"{Q}.lora_magnitude_vector", TensorKind.DORA_MAGNITUDE),
        (f"{Q}.lora_magnitude_vector.default.weight", TensorKind.DORA_MAGNITUDE),
        (f"{Q}.lora_B.bias", TensorKind.LORA_BIAS),
        (f"{Q}.base_layer.bias", TensorKind.BASE_BIAS),
        (f"{Q}.bias", TensorKind.BASE_BIAS),
        (f"{BASE}lm_head.weight", TensorKind.FULL_WEIGHT),
        (f"{BASE}lm_head.modules_to_save.default.weight", TensorKind.FULL_WEIGHT),
        (f"{BASE}model.embed_tokens.weight", TensorKind.FULL_WEIGHT),
        (f"{BASE}model.norm.weight", TensorKind.FULL_WEIGHT),
        (f"{BASE}model.layers.0.post_attention_layernorm.weight", TensorKind.FULL_WEIGHT),
        (f"{Q}.weight", TensorKind.FULL_WEIGHT),
        (f"{BASE}model.embed_tokens.token_adapter.trainable_tokens_delta", TensorKind.TRAINED_TOKENS),
    ],
)
def test_kinds_that_are_not_served(key, kind):
    assert classify(key).kind is kind


@pytest.mark.parametrize(
    "key",
    [
        "", "lora_A.weight", "model.layers.0.self_attn.q_proj.lora_A.weight", f"{Q}.lora_C.weight", f"{Q}.lora_A",
        f"{Q}.lora_A.bias", f"{Q}.base_layer.weight", f"{Q}.lora_A.weight.more", f"{Q}.lora_A.a.b.weight",
        f"{BASE}model.layers.03.self_attn.q_proj.lora_A.weight",
        f"{BASE}model.layers.-1.self_attn.q_proj.lora_A.weight",
        f"{BASE}model.layers.9999999.self_attn.q_proj.lora_A.weight", f"{BASE}x.layers.0.mlp.up_proj.lora_A.weight",
        f"{BASE}model.layers.0.self_attn.qkv_proj.lora_A.weight", f"{BASE}model.visual.proj.lora_A.weight",
        f"{Q}.lora_embedding_A", f"{BASE}score.weight", f"{Q}.lora_A.weight\n",
    ],
)  # fmt: skip
def test_names_that_mean_nothing_here(key):
    assert classify(key).kind is TensorKind.UNKNOWN
