"""Made-up adapters and their way through a PEFT folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.lora.synthetic import random_adapter_weights, save_peft
from multilora_jax.lora.weights import load_adapter
from multilora_jax.memory.geometry import MODULES


@settings(max_examples=20)
@given(
    ranks=st.dictionaries(st.tuples(st.integers(0, 1), st.sampled_from(MODULES)), st.integers(1, 16), min_size=1),
    alpha=st.sampled_from([None, 1.0, 12.5]),
)
def test_saved_adapters_load_as_they_were(model_config, tmp_path_factory, ranks, alpha):
    weights = random_adapter_weights(model_config, ranks, lora_alpha=alpha)
    folder = tmp_path_factory.mktemp("adapters") / "new" / "folder"
    save_peft(weights, str(folder))
    loaded = load_adapter(str(folder), model_config, max_lora_rank=16)
    assert loaded.a.keys() == ranks.keys()
    assert loaded.scale == weights.scale
    assert loaded.rank == weights.rank == max(ranks.values())
    for key, rank in ranks.items():
        assert len(loaded.a[key]) == rank
        np.testing.assert_array_equal(loaded.a[key], weights.a[key])
        np.testing.assert_array_equal(loaded.b[key], weights.b[key])


def test_random_adapters(model_config):
    def make(seed: int):
        modules = ("q_proj", "down_proj")
        return random_adapter_weights(model_config, 8, modules, layers=[1], seed=seed, lora_alpha=32, delta_std=0.05)

    weights = make(3)
    assert weights.a.keys() == weights.b.keys() == {(1, "q_proj"), (1, "down_proj")}
    assert weights.a[1, "down_proj"].shape == (8, 96)
    assert weights.b[1, "down_proj"].shape == (64, 8)
    for key in weights.a:
        delta = weights.scale[key] * weights.b[key] @ weights.a[key]
        assert delta.std() == pytest.approx(0.05, rel=0.3)
    assert weights.digest == make(3).digest != make(4).digest
    assert len(random_adapter_weights(model_config, 1).a) == 2 * len(MODULES)


def test_saved_names_that_patterns_would_miss(model_config, peft_folder, peft_tensors, tmp_path):
    short = {name.replace("model.model.", "model."): array for name, array in peft_tensors(4).items()}
    weights = load_adapter(str(peft_folder("a", short, rank_pattern={"^layers.*": 4})), model_config, max_lora_rank=8)
    with pytest.raises(ValueError, match="pattern"):
        save_peft(weights, str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()


def test_only_lora_of_projections_is_saved(model_config, peft_folder, peft_tensors, tmp_path):
    raw = peft_tensors() | {"base_model.model.model.norm.weight": np.ones(64, np.float32)}
    weights = load_adapter(str(peft_folder("a", raw, modules_to_save=["model.norm"])), model_config, max_lora_rank=8)
    with pytest.raises(ValueError, match="final_norm"):
        save_peft(weights, str(tmp_path / "b"))


def test_saved_config_is_what_peft_reads(model_config, tmp_path):
    save_peft(random_adapter_weights(model_config, 4, ("v_proj",), lora_alpha=3), str(tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 3.0, ["v_proj"])
