"""Every case of the reference data is read whole: the model with what was read in it computes PEFT's logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.lora.tensor_names import projection_path
from multilora_jax.lora.weights import AdapterWeights, VocabWeights, load_adapter
from multilora_jax.models.config import ModelConfig
from tests.oracle import Oracle

CASES = sorted(path.name for path in (Path(__file__).parent.parent / "data" / "golden_tiny" / "cases").iterdir())


@pytest.fixture(scope="module")
def manifest(golden_tiny):
    return json.loads((golden_tiny / "manifest.json").read_text())


@pytest.fixture(scope="module")
def base_config(golden_tiny):
    def read(base: str) -> ModelConfig:
        return ModelConfig.from_hf(json.loads((golden_tiny / "bases" / base / "config.json").read_text()), base, None)

    return read


def with_adapter(oracle: Oracle, adapter: AdapterWeights) -> Oracle:
    """Puts an adapter into the weights of a base, by the formulas of the papers; the base is changed."""
    tensors = oracle.tensors

    def merge(name: str, a: np.ndarray, b: np.ndarray, scale: float, magnitude: np.ndarray | None) -> None:
        merged = tensors[name] + scale * (b.astype(np.float64) @ a.astype(np.float64))
        if magnitude is not None:
            merged *= (magnitude / np.linalg.norm(merged, axis=1))[:, None]
        tensors[name] = merged

    for key, a in adapter.a.items():
        name = projection_path(*key)
        merge(f"{name}.weight", a, adapter.b[key], adapter.scale[key], adapter.magnitude.get(key))
    for key, bias in adapter.bias.items():
        tensors[f"{projection_path(*key)}.bias"] = bias.astype(np.float64)
    for key, bias in adapter.lora_bias.items():
        name = f"{projection_path(*key)}.bias"
        tensors[name] = tensors.get(name, 0) + adapter.scale[key] * bias
    for (layer, kind), norm in adapter.norms.items():
        name = {"input": "input_layernorm", "post": "post_attention_layernorm"}[kind]
        tensors[f"model.layers.{layer}.{name}.weight"] = norm.astype(np.float64)
    if adapter.final_norm is not None:
        tensors["model.norm.weight"] = adapter.final_norm.astype(np.float64)
    for name, part in (("model.embed_tokens.weight", adapter.embed), ("lm_head.weight", adapter.head)):
        if part is not None and part.rows is not None:
            tensors[name] = tensors[name].copy()
            tensors[name][part.row_ids] = part.rows
    if (embed := adapter.embed) is not None and embed.a is not None and embed.b is not None:
        table = tensors["model.embed_tokens.weight"] + embed.scale * (embed.b.astype(np.float64) @ embed.a).T
        if embed.magnitude is not None:
            table *= embed.magnitude / np.linalg.norm(table, axis=0)
        tensors["model.embed_tokens.weight"] = table
    if (head := adapter.head) is not None and head.a is not None and head.b is not None:
        merge("lm_head.weight", head.a, head.b, head.scale, head.magnitude)
        if head.lora_bias is not None:
            tensors["lm_head.bias"] = head.scale * head.lora_bias
    return oracle


@pytest.mark.parametrize("name", CASES)
def test_d04_every_case_computes_what_peft_does(golden_tiny, manifest, base_config, name):
    case = manifest["cases"][name]
    adapter = load_adapter(
        str(golden_tiny / case["path"]), base_config(case["base"]), max_lora_rank=64, base_name=case["base"]
    )
    oracle = with_adapter(Oracle.from_folder(golden_tiny / "bases" / case["base"]), adapter)
    expected = load_file(golden_tiny / case["path"] / "expected.safetensors")
    for i in range(3):
        logits = oracle.logits(expected[f"prompt.{i}"].tolist())
        assert np.abs(logits - expected[f"logits.{i}"]).max() < 1e-3
    assert adapter.warnings == ()
    assert adapter.vocab_size == 256
    assert (adapter.tokenizer_folder, adapter.chat_template) == (None, None)


def test_all_cases_are_there(manifest):
    assert len(CASES) == 41
    assert sorted(manifest["cases"]) == CASES


def parts(part: VocabWeights | None) -> set[str]:
    return set() if part is None else {name for name, value in vars(part).items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize(
    ("case", "embed", "head"),
    [
        ("embed_untied", {"a", "b", "row_ids", "rows"}, set()),
        ("embed_tied", {"a", "b", "row_ids", "rows"}, {"row_ids", "rows"}),  # the frozen copy is both's
        ("lm_head_untied", set(), {"a", "b", "row_ids", "rows"}),
        ("lm_head_tied", {"row_ids", "rows"}, {"a", "b", "row_ids", "rows"}),
        ("modules_to_save_embed", {"row_ids", "rows"}, {"row_ids", "rows"}),
        ("modules_to_save_lm_head", set(), {"row_ids", "rows"}),
        ("trainable_tokens", {"row_ids", "rows"}, set()),
        ("qv", set(), set()),
    ],
)
def test_parts_of_the_vocabulary(golden_tiny, manifest, base_config, case, embed, head):
    config = base_config(manifest["cases"][case]["base"])
    adapter = load_adapter(str(golden_tiny / "cases" / case), config, max_lora_rank=64)
    assert (parts(adapter.embed), parts(adapter.head)) == (embed, head)
    assert adapter.a.keys() == adapter.b.keys() == adapter.scale.keys()
    if case == "trainable_tokens":
        assert adapter.embed is not None
        assert adapter.embed.row_ids is not None
        assert adapter.embed.row_ids.tolist() == [5, 31, 250]


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
