"""Weights in 8 bits: rounding, products with them in every form, and how a model's parameters become such."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from multilora_jax.models import quantised
from multilora_jax.models.base_tensors import BaseTensors
from multilora_jax.models.checkpoint import open_checkpoint
from multilora_jax.models.loader import load_llama, param_specs
from multilora_jax.models.quantised import QuantWeight, dequantise, quant_product, quantise, take_rows
from tests.models.test_checkpoint_gguf import Q, write
from tests.models.test_loader import FakeCheckpoint, config, spec_of

MESH = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def weight_of(outputs=96, inputs=80, seed=0) -> np.ndarray:
    """Rows of very different sizes, one of them zeros."""
    rng = np.random.default_rng(seed)
    w_OI = rng.standard_normal((outputs, inputs)) * 10.0 ** rng.uniform(-4, 2, (outputs, 1))
    w_OI[3] = 0
    return w_OI.astype(np.float32)


def on_device(weight: QuantWeight) -> QuantWeight:
    return jax.tree.map(jnp.asarray, weight)


def test_every_value_is_within_half_a_step_of_its_own():
    w_OI = weight_of()
    weight = quantise(w_OI)
    assert (weight.values_OI.dtype, weight.scale_O.dtype) == (np.int8, np.float32)
    assert np.abs(weight.values_OI.astype(int)).max() == 127
    assert (np.abs(weight.values_OI.astype(int)).max(1)[np.arange(len(w_OI)) != 3] == 127).all()
    np.testing.assert_array_equal(dequantise(weight)[3], 0)
    assert (np.abs(dequantise(weight) - w_OI) <= 0.5001 * weight.scale_O[:, None]).all()


def test_rounding_what_is_rounded_changes_nothing_and_one_outlier_costs_its_own_row_alone():
    w_OI = weight_of()
    once = dequantise(quantise(w_OI))
    np.testing.assert_allclose(dequantise(quantise(once)), once, rtol=1e-6)
    w_OI[7, 5] = 1e6
    again = dequantise(quantise(w_OI))
    np.testing.assert_array_equal(np.delete(again, 7, 0), np.delete(once, 7, 0))


@pytest.mark.parametrize("smallest", [1e-45, 1e-42, 1e-38])
def test_the_smallest_numbers_stay_finite(smallest):
    weight = quantise(np.full((2, 8), smallest, np.float32))
    assert np.isfinite(dequantise(weight)).all()
    assert np.abs(weight.values_OI.astype(int)).max() <= 127


@pytest.mark.parametrize("features_first", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 32, 33, 100])
def test_products_are_those_of_the_dequantised_weight(tokens, features_first, monkeypatch):
    monkeypatch.setattr(quantised, "_TILE_BYTES", 4 * 80 * 40)  # 40 of 96 outputs: whole tiles and a rest
    weight = quantise(weight_of())
    rng = np.random.default_rng(tokens)
    x_IT = (rng.standard_normal((80, tokens)) * 10.0 ** rng.uniform(-3, 3, tokens)).astype(np.float32)
    x_IT[:, 0] = 0  # what padding is
    exact = dequantise(weight).astype(np.float64) @ x_IT
    room = np.abs(dequantise(weight)).astype(np.float64) @ np.abs(x_IT) * 3e-7
    if tokens <= quantised.DIGIT_TOKENS:  # half a step of each activation
        room += np.abs(dequantise(weight)).sum(1)[:, None] * (np.abs(x_IT).max(0) / (127 * 256) / 2 * 1.001)
    y = jax.jit(lambda w, x: quant_product(w, x, features_first))(
        on_device(weight), jnp.asarray(x_IT if features_first else x_IT.T)
    )
    assert y.dtype == jnp.float32
    y_OT = np.asarray(y if features_first else y.T)
    assert (np.abs(y_OT - exact) <= room + 1e-30).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("features_first", [True, False])
def test_the_form_of_accelerators_is_the_same_product(dtype, features_first):
    weight = quantise(weight_of())
    x_IT = np.random.default_rng(0).standard_normal((80, 5)).astype(dtype)
    exact = dequantise(weight).astype(np.float64) @ x_IT.astype(np.float64)
    y = quantised._converted(on_device(weight), jnp.asarray(x_IT if features_first else x_IT.T), features_first)
    y_OT = np.asarray(y if features_first else y.T)
    assert y_OT.dtype == np.float32  # nothing but x is rounded to bfloat16
    room = np.abs(dequantise(weight)).astype(np.float64) @ np.abs(x_IT.astype(np.float64)) * 1e-6
    assert (np.abs(y_OT - exact) <= room).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tokens", [4, 40])
def test_what_is_not_finite_stays_in_its_own_token(bad, tokens):
    weight = quantise(weight_of()[:3])
    x_IT = np.random.default_rng(0).standard_normal((80, tokens)).astype(np.float32)
    clean = np.asarray(quant_product(on_device(weight), jnp.asarray(x_IT), True))
    x_IT[11, 2] = bad
    y_OT = np.asarray(quant_product(on_device(weight), jnp.asarray(x_IT), True))
    assert not np.isfinite(y_OT[:, 2]).any()
    np.testing.assert_array_equal(np.delete(y_OT, 2, 1), np.delete(clean, 2, 1))


def test_rows_are_those_of_the_dequantised_weight():
    w_OI, rows = weight_of(), jnp.asarray([5, 0, 95, 5, 3])
    weight = quantise(w_OI)
    np.testing.assert_array_equal(take_rows(on_device(weight), rows), dequantise(weight)[rows])
    np.testing.assert_array_equal(take_rows(jnp.asarray(w_OI), rows), w_OI[rows])


class TestParameters:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_weights_are_rounded_from_the_checkpoint_s_own_values(self, dtype):
        checkpoint = FakeCheckpoint(config())
        params = load_llama(spec_of(config(), dtype=dtype, quantization="int8"), 32, MESH, checkpoint).params()
        layer, expected = params["layers"][1], quantise(checkpoint.expected("model.layers.1.mlp.down_proj.weight"))
        np.testing.assert_array_equal(layer["down"].values_OI, expected.values_OI)
        np.testing.assert_array_equal(layer["down"].scale_O, expected.scale_O)
        kinds = {name: isinstance(array, QuantWeight) for name, array in (layer | params["top"]).items()}
        assert {name for name, quantised in kinds.items() if quantised} == {
            "qkv", "o", "gate_up", "down", "embed", "lm_head",
        }  # fmt: skip
        assert {str(array.dtype) for name, array in layer.items() if not kinds[name]} == {dtype}

    @pytest.mark.parametrize("tp", [1, 2])
    def test_adapters_see_the_base_as_it_is_served(self, tp):
        model = config(vocab_size=51)
        spec, checkpoint = spec_of(model, tp=tp, quantization="int8"), FakeCheckpoint(model)
        base = BaseTensors(spec, load_llama(spec, 32, MESH, checkpoint).params())
        for name in checkpoint.names():
            expected = checkpoint.expected(name)
            if name.endswith("weight") and expected.ndim == 2:
                expected = dequantise(quantise(expected))
            np.testing.assert_array_equal(base.tensor(name), expected, err_msg=name)

    def test_scales_are_split_with_the_outputs(self):
        specs = param_specs(spec_of(config(), tp=2, quantization="int8"))
        assert specs["layers"][0]["qkv"] == QuantWeight(P("model", None), P("model"))
        assert specs["layers"][0]["down"] == QuantWeight(P(None, "model"), P(None))
        assert specs["top"]["embed"] == QuantWeight(P("model", None), P("model"))

    def test_no_float32_model_is_held_beside_it(self):
        model = config(hidden_size=128, ffn_size=512, num_layers=6)
        checkpoint = FakeCheckpoint(model)
        params = load_llama(spec_of(model, quantization="int8"), 32, MESH, checkpoint).params()
        assert 0 < checkpoint.peak <= 2 * 512 * 128 * 4  # gate and up of one layer
        counted = sum(a.nbytes for a in jax.tree.leaves(params))
        counted -= sum(params["top"][name].nbytes for name in ("cos", "sin"))
        assert counted == pytest.approx(model.weight_bytes(4, "int8"), rel=0.02)  # room for further tokens

    @pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": False}])
    def test_bytes_are_counted_as_they_are(self, changes):
        model = config(vocab_size=64, **changes)
        for dtype, quantization in (("float32", "int8"), ("bfloat16", "int8"), ("bfloat16", None)):
            spec = spec_of(model, dtype=dtype, quantization=quantization)
            params = load_llama(spec, 32, MESH, None).params()
            top = {name: array for name, array in params["top"].items() if name not in ("cos", "sin")}
            held = sum(a.nbytes for a in jax.tree.leaves((top, params["layers"])))
            assert held == model.weight_bytes(jnp.dtype(dtype).itemsize, quantization), (dtype, quantization)


def test_a_quantised_gguf_file_is_rounded_anew(golden_tiny, tmp_path):
    """Its blocks of 32 have scales of their own, which one scale for each output cannot keep."""
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", golden_tiny / "bases" / "untied", kind=Q.Q8_0)))
    spec = spec_of(checkpoint.config, quantization="int8")
    down = load_llama(spec, 32, MESH, checkpoint).params()["layers"][0]["down"]
    source = checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
    np.testing.assert_array_equal(down.values_OI, quantise(source).values_OI)
    assert np.abs(dequantise(down) - source).max() <= 0.5001 * np.asarray(down.scale_O).max()
