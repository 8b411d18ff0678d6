"""Names of tensors in adapter files."""

from __future__ import annotations

import pytest

from multilora_jax.lora.tensor_names import TensorKind, classify, projection_path
from multilora_jax.memory.geometry import MODULES

BASE = "base_model.model."
Q = f"{BASE}model.layers.3.self_attn.q_proj"
EMBED, HEAD = f"{BASE}model.embed_tokens", f"{BASE}lm_head"


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
    assert name.slot == (TensorKind.LORA_A, 3, "q_proj")
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
    ("key", "kind", "layer", "module", "adapter"),
    [
        (f"{HEAD}.lora_A.weight", TensorKind.LORA_A, -1, "lm_head", ""),
        (f"{HEAD}.lora_B.bias", TensorKind.LORA_BIAS, -1, "lm_head", ""),
        (f"{HEAD}.base_layer.weight", TensorKind.BASE_WEIGHT, -1, "lm_head", None),
        (f"{EMBED}.lora_embedding_A", TensorKind.LORA_A, -1, "embed_tokens", ""),
        (f"{EMBED}.lora_embedding_B.default", TensorKind.LORA_B, -1, "embed_tokens", "default"),
        (f"{EMBED}.base_layer.weight", TensorKind.BASE_WEIGHT, -1, "embed_tokens", None),
        (f"{EMBED}.original_module.weight", TensorKind.BASE_WEIGHT, -1, "embed_tokens", None),
        (f"{EMBED}.token_adapter.base_layer.weight", TensorKind.BASE_WEIGHT, -1, "embed_tokens", None),
        (f"{EMBED}.token_adapter.trainable_tokens_delta", TensorKind.TOKENS, -1, "embed_tokens", ""),
        (f"{HEAD}.token_adapter.trainable_tokens_delta.default", TensorKind.TOKENS, -1, "lm_head", "default"),
        (f"{EMBED}.lora_magnitude_vector", TensorKind.MAGNITUDE, -1, "embed_tokens", ""),
        (f"{Q}.lora_magnitude_vector", TensorKind.MAGNITUDE, 3, "q_proj", ""),
        (f"{Q}.lora_magnitude_vector.weight", TensorKind.MAGNITUDE, 3, "q_proj", ""),
        (f"{Q}.lora_magnitude_vector.default", TensorKind.MAGNITUDE, 3, "q_proj", "default"),
        (f"{Q}.lora_magnitude_vector.default.weight", TensorKind.MAGNITUDE, 3, "q_proj", "default"),
        (f"{Q}.lora_B.bias", TensorKind.LORA_BIAS, 3, "q_proj", ""),
        (f"{Q}.lora_B.default.bias", TensorKind.LORA_BIAS, 3, "q_proj", "default"),
        (f"{Q}.base_layer.bias", TensorKind.BIAS, 3, "q_proj", None),
        (f"{Q}.bias", TensorKind.BIAS, 3, "q_proj", None),
        (f"{Q}.weight", TensorKind.WEIGHT, 3, "q_proj", None),
        (f"{Q}.modules_to_save.weight", TensorKind.SAVED_WEIGHT, 3, "q_proj", ""),
        (f"{HEAD}.weight", TensorKind.WEIGHT, -1, "lm_head", None),
        (f"{HEAD}.modules_to_save.default.weight", TensorKind.SAVED_WEIGHT, -1, "lm_head", "default"),
        (f"{EMBED}.weight", TensorKind.WEIGHT, -1, "embed_tokens", None),
        (f"{BASE}embed_tokens.weight", TensorKind.WEIGHT, -1, "embed_tokens", None),
        (f"{BASE}model.norm.weight", TensorKind.WEIGHT, -1, "norm", None),
        (f"{BASE}model.norm.modules_to_save.weight", TensorKind.SAVED_WEIGHT, -1, "norm", ""),
        (f"{BASE}model.layers.0.input_layernorm.weight", TensorKind.WEIGHT, 0, "input_layernorm", None),
        (
            f"{BASE}model.layers.7.post_attention_layernorm.weight",
            TensorKind.WEIGHT, 7, "post_attention_layernorm", None,
        ),
    ],
)  # fmt: skip
def test_every_kind_that_peft_writes(key, kind, layer, module, adapter):
    name = classify(key)
    assert (name.kind, name.layer, name.module, name.adapter) == (kind, layer, module, adapter)


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
        f"{EMBED}.lora_A.weight", f"{EMBED}.lora_B.bias", f"{HEAD}.lora_embedding_A", f"{HEAD}.bias",
        f"{BASE}model.lm_head.weight", f"{BASE}model.norm.bias", f"{BASE}model.norm.lora_A.weight",
        f"{BASE}model.layers.0.norm.weight", f"{BASE}model.norm.base_layer.weight", f"{BASE}input_layernorm.weight",
        f"{Q}.token_adapter.trainable_tokens_delta", f"{Q}.lora_magnitude_vector.a.b.weight",
    ],
)  # fmt: skip
def test_names_that_mean_nothing_here(key):
    assert classify(key).kind is TensorKind.UNKNOWN
