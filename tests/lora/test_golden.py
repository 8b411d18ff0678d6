"""Every case of the reference data either loads with PEFT's numbers or is refused by the name of its feature."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.errors import AdapterError
from multilora_jax.lora.packing import pack, unpack
from multilora_jax.lora.weights import load_adapter
from multilora_jax.models.config import ModelConfig

REFUSED = {
    "bias_all": "bias",
    "bias_lora_only": "bias",
    "dora": "use_dora",
    "dora_biased": "use_dora",
    "dora_qv_rslora": "use_dora",
    "embed_lm_head": "target_modules",
    "embed_tied": "target_modules",
    "embed_untied": "target_modules",
    "file_bin": "lora_path",
    "file_bin_bf16": "lora_path",
    "lm_head_tied": "target_modules",
    "lm_head_untied": "target_modules",
    "lora_bias": "lora_bias",
    "modules_to_save_embed": "modules_to_save",
    "modules_to_save_lm_head": "modules_to_save",
    "modules_to_save_norm": "modules_to_save",
    "trainable_tokens": "trainable_token_indices",
}
"""Case to the field that the refusal blames."""


@pytest.fixture(scope="module")
def manifest(golden_tiny):
    return json.loads((golden_tiny / "manifest.json").read_text())


@pytest.fixture(scope="module")
def base_config(golden_tiny):
    def read(base: str) -> ModelConfig:
        return ModelConfig.from_hf(json.loads((golden_tiny / "bases" / base / "config.json").read_text()), base, None)

    return read


def expected_deltas(path, arguments: dict) -> dict[tuple[int, str], np.ndarray]:
    """scale * B A of each module in float64, from the raw file and the arguments that LoraConfig was made with."""

    def pick(patterns: dict, name: str, default: float) -> float:
        return next((v for key, v in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)

    raw, result = load_file(path), {}
    for key in raw:
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = raw[key].astype(np.float64), raw[key.replace("lora_A", "lora_B")].astype(np.float64)
            r = pick(arguments.get("rank_pattern", {}), name, arguments["r"])
            alpha = pick(arguments.get("alpha_pattern", {}), name, arguments["lora_alpha"])
            assert len(a) == r
            scale = alpha / np.sqrt(r) if arguments.get("use_rslora") else alpha / r
            parts = name.split(".")
            result[int(parts[2]), parts[-1]] = scale * (b @ a)
    return result


def test_all_cases_load_exactly_or_are_refused_by_name(golden_tiny, manifest, base_config):
    refused = {}
    for name, case in manifest["cases"].items():
        try:
            weights = load_adapter(str(golden_tiny / case["path"]), base_config(case["base"]), max_lora_rank=64)
        except AdapterError as error:
            refused[name] = (error.reason, error.param)
            continue
        wanted = expected_deltas(golden_tiny / case["path"] / "adapter_model.safetensors", case["lora_config"])
        assert weights.a.keys() == weights.b.keys() == weights.scale.keys() == wanted.keys(), name
        assert weights.rank == max(len(a) for a in weights.a.values()), name
        for key, delta in wanted.items():
            got = weights.scale[key] * (weights.b[key].astype(np.float64) @ weights.a[key].astype(np.float64))
            np.testing.assert_allclose(got, delta, rtol=1e-12, atol=1e-14, err_msg=f"{name} {key}")
    assert refused == {
        name: ("pickle_weights" if param == "lora_path" else "unsupported_adapter_feature", param)
        for name, param in REFUSED.items()
    }


@pytest.mark.parametrize("case", ["rank_alpha_pattern", "headdim32_all", "mha_all", "layers_to_transform"])
def test_cases_survive_packing(golden_tiny, manifest, base_config, case):
    config = base_config(manifest["cases"][case]["base"])
    weights = load_adapter(str(golden_tiny / "cases" / case), config, max_lora_rank=64)
    geometry = config.geometry(num_pages=8, page_tokens=16, tp=2, dtype="float32")
    modules = unpack(pack(weights, geometry, case, 1), geometry)
    assert modules.keys() == weights.a.keys()
    for key, (a, b) in modules.items():
        np.testing.assert_array_equal(a, weights.a[key])
        np.testing.assert_array_equal(b, weights.b[key])


def test_shipped_adapters_fit_smollm2(configs):
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 49152,
            "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "intermediate_size": 1536, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
        },
        "smollm2", None,
    )  # fmt: skip
    folders = sorted((configs / "adapters").iterdir())
    loaded = {f.name: load_adapter(str(f), config, max_lora_rank=32) for f in folders}
    assert {name: (w.rank, len(w.a)) for name, w in loaded.items()} == {
        "json": (16, 120), "refuse": (8, 60), "stars": (8, 90), "upper": (8, 210), "xml": (32, 120),
    }  # fmt: skip
    assert len({w.digest for w in loaded.values()}) == 5
