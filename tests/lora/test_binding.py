"""Config and tensors must say the same: DoRA, biases and modules that are replaced whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from multilora_jax.errors import AdapterError
from multilora_jax.lora.weights import AdapterWeights, weights_from_arrays
from multilora_jax.models.config import ModelConfig

PREFIX = "base_model.model.model.layers"
QV = {("q_proj", 64), ("v_proj", 32)}
NORMS = [f"{PREFIX}.{layer}.{norm}_layernorm" for layer in (0, 1) for norm in ("input", "post_attention")]
NORMS += ["base_model.model.model.norm"]


@pytest.fixture
def read(model_config):
    def run(tensors: dict[str, np.ndarray], base: ModelConfig = model_config, **config: Any) -> AdapterWeights:
        return weights_from_arrays(tensors, {"r": 8, "lora_alpha": 16, **config}, base, max_lora_rank=16)

    return run


@pytest.fixture
def refusal(read):
    def run(*args: Any, **config: Any) -> tuple[str, str | None, str]:
        with pytest.raises(AdapterError) as caught:
            read(*args, **config)
        return caught.value.reason, caught.value.param, caught.value.message

    return run


def of_every(suffix: str, modules: set[tuple[str, int]] = QV) -> dict[str, np.ndarray]:
    """A vector for each q_proj and v_proj, all of them different."""
    names = [(f"{PREFIX}.{layer}.self_attn.{module}.{suffix}", n) for layer in (0, 1) for module, n in sorted(modules)]
    return {name: np.full(n, index + 1, np.float32) for index, (name, n) in enumerate(names)}


@pytest.mark.parametrize("suffix", ["lora_magnitude_vector", "lora_magnitude_vector.default.weight"])
def test_magnitudes(read, peft_tensors, suffix):
    named = suffix.endswith("default.weight")
    raw = {name.replace(".weight", ".default.weight") if named else name: a for name, a in peft_tensors().items()}
    magnitudes = of_every(suffix)
    weights = read(raw | {name: array[:, None] for name, array in magnitudes.items()}, use_dora=True)
    assert {key: (m.shape, m[0]) for key, m in weights.magnitude.items()} == {
        (0, "q_proj"): ((64,), 1), (0, "v_proj"): ((32,), 2), (1, "q_proj"): ((64,), 3), (1, "v_proj"): ((32,), 4),
    }  # fmt: skip
    assert not weights.lora_bias
    assert not weights.bias


@pytest.mark.parametrize(
    ("field", "suffix"), [("use_dora", "lora_magnitude_vector"), ("lora_bias", "lora_B.bias")]
)  # fmt: skip
def test_d04_what_goes_with_every_lora_is_there_for_each_or_none(read, refusal, peft_tensors, field, suffix):
    raw, extra = peft_tensors(), of_every(suffix)
    assert read(raw | extra, **{field: True}).digest != read(raw).digest
    first = next(iter(extra))
    for tensors, on in ((raw | extra, False), (raw, True), (raw | dict([*extra.items()][1:]), True)):
        reason, param, message = refusal(tensors, **{field: on})
        assert (reason, param) == ("contradictory_adapter", field)
        assert first.split(suffix)[0] in message
    assert refusal(raw | extra | {first: np.ones(5, np.float32)}, **{field: True})[0] == "shape_mismatch"
    other = f"{PREFIX}.0.self_attn.k_proj.{suffix}"
    reason, _, message = refusal(raw | extra | {other: np.ones(32, np.float32)}, **{field: True})
    assert reason == "incomplete_tensors"
    assert other in message


@pytest.mark.parametrize("leaf", ["bias", "base_layer.bias"])
def test_d04_biases(read, refusal, peft_tensors, make_model_config, leaf):
    raw, base = peft_tensors(), make_model_config(attention_bias=True)
    trained = of_every(leaf)
    weights = read(raw | trained, base, bias="lora_only")
    assert {key: bias[0] for key, bias in weights.bias.items()} == {
        (0, "q_proj"): 1, (0, "v_proj"): 2, (1, "q_proj"): 3, (1, "v_proj"): 4,
    }  # fmt: skip
    everywhere = {("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64)}
    weights = read(raw | of_every(leaf, everywhere), base, bias="all")
    assert weights.bias.keys() == {(i, f"{m}_proj") for i in (0, 1) for m in "qkvo"}
    assert weights.a.keys() == {(i, f"{m}_proj") for i in (0, 1) for m in "qv"}
    for config, tensors in (
        ({"bias": "all"}, raw | trained), ({"bias": "lora_only"}, raw), ({"bias": "none"}, raw | trained),
    ):  # fmt: skip
        assert refusal(tensors, base, **config)[:2] == ("contradictory_adapter", "bias")
    assert (
        refusal(raw | of_every(leaf, {("q_proj", 32), ("v_proj", 32)}), base, bias="lora_only")[0] == "shape_mismatch"
    )


def test_d04_biases_of_a_base_that_has_none(read, refusal, peft_tensors, make_model_config):
    raw = peft_tensors()
    for bias in ("all", "lora_only"):
        assert not read(raw, bias=bias).bias
    reason, _, message = refusal(raw | of_every("bias"), bias="all")
    assert reason == "unbound_tensors"
    assert "no biases" in message
    mlp_only = make_model_config(mlp_bias=True)
    assert refusal(raw | of_every("bias"), mlp_only, bias="lora_only")[0] == "unbound_tensors"
    assert not read(raw, mlp_only, bias="lora_only").bias


def norms(names: list[str], infix: str = "") -> dict[str, np.ndarray]:
    return {f"{name}{infix}.weight": np.full(64, index + 1, np.float32) for index, name in enumerate(names)}


@pytest.mark.parametrize("infix", ["", ".modules_to_save", ".modules_to_save.default"])
def test_norms_by_the_bare_end_of_their_names(read, peft_tensors, infix):
    name = ".default.weight" if infix.endswith("default") else ".weight"
    raw = {key.replace(".weight", name): array for key, array in peft_tensors().items()}
    weights = read(raw | norms(NORMS, infix), modules_to_save=["norm"])
    assert {key: norm[0] for key, norm in weights.norms.items()} == {
        (0, "input"): 1, (0, "post"): 2, (1, "input"): 3, (1, "post"): 4,
    }  # fmt: skip
    assert weights.final_norm is not None
    assert weights.final_norm[0] == 5
    last = read(raw | norms(NORMS[4:], infix), modules_to_save=["model.norm"])
    assert (last.norms, last.final_norm is None) == ({}, False)


def test_an_adapter_of_norms_alone(read):
    weights = read(norms(NORMS[:1]), modules_to_save=["layers.0.input_layernorm"])
    assert (weights.a, weights.rank, weights.norms.keys()) == ({}, 0, {(0, "input")})
    assert weights.warnings == ()


@pytest.mark.parametrize(
    ("names", "saved", "missing"),
    [
        (NORMS[:4], ["norm"], "model.norm"),
        (NORMS[:3] + NORMS[4:], ["norm"], "post_attention_layernorm"),
        ([], ["model.norm"], "model.norm"),
        ([], ["lm_head"], "lm_head"),
        ([], ["embed_tokens"], "embed_tokens"),
        (NORMS[4:], [], "model.norm"),
        (NORMS, ["model.norm"], "input_layernorm"),
    ],
)
def test_d04_modules_to_save_and_their_weights(refusal, peft_tensors, names, saved, missing):
    reason, param, message = refusal(peft_tensors() | norms(names), modules_to_save=saved)
    assert (reason, param) == ("contradictory_adapter", "modules_to_save")
    assert missing in message


@pytest.mark.parametrize("name", ["o_proj", "layers.1.mlp.up_proj", "mlp", "layers.0", "model"])
def test_d04_other_modules_to_save_are_refused_by_name(refusal, peft_tensors, name):
    reason, param, message = refusal(peft_tensors(), modules_to_save=[name])
    assert (reason, param) == ("unsupported_adapter_feature", "modules_to_save")
    assert f"{name}'" in message


@pytest.mark.parametrize("name", ["self_attn.o_proj.weight", "mlp.up_proj.modules_to_save.default.weight"])
def test_d04_replaced_projections_are_refused_whatever_the_config_says(refusal, peft_tensors, name):
    name = f"{PREFIX}.0.{name}"
    reason, param, message = refusal(peft_tensors() | {name: np.ones((64, 64), np.float32)})
    assert (reason, param) == ("unsupported_adapter_feature", "modules_to_save")
    assert name in message


def test_modules_to_save_that_the_model_lacks_change_nothing(read, peft_tensors):
    assert read(peft_tensors(), modules_to_save=["classifier", "score"]).rank == 8


def test_norms_of_another_width(refusal, peft_tensors):
    raw = peft_tensors() | {f"{NORMS[4]}.weight": np.ones(32, np.float32)}
    assert refusal(raw, modules_to_save=["model.norm"])[0] == "shape_mismatch"


def test_several_adapters_are_told_apart_by_any_tensor(refusal, peft_tensors):
    raw = peft_tensors() | of_every("lora_magnitude_vector.other")
    assert refusal(raw, use_dora=True)[0] == "ambiguous_tensors"
