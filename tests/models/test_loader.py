"""Checkpoint tensors to parameters: names, order, splitting, types, dummy weights."""

from __future__ import annotations

import weakref
import zlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from multilora_jax.models.base_tensors import BaseTensors
from multilora_jax.models.checkpoint import expected_shapes
from multilora_jax.models.config import ModelConfig, RopeConfig
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.loader import layer_records, load_llama, param_specs, top_records
from multilora_jax.models.rope import rope_tables


def config(**changes) -> ModelConfig:
    sizes = {
        "name": "tiny", "vocab_size": 64, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 16, "ffn_size": 96, "rms_norm_eps": 1e-5, "rope": RopeConfig(), "max_position_embeddings": 64,
        "attention_bias": True, "mlp_bias": True,
    }  # fmt: skip
    return ModelConfig(**(sizes | changes))


def spec_of(model: ModelConfig, tp=1, dtype="float32", quantization=None) -> LlamaSpec:
    geometry = model.geometry(num_pages=8, page_tokens=16, tp=tp, dtype=dtype)
    return LlamaSpec(model, geometry, quantization=quantization)


class FakeCheckpoint:
    """Random tensors; counts how many bytes of them are alive at once."""

    source = "fake"

    def __init__(self, model: ModelConfig):
        self.config = model
        self.shapes = expected_shapes(model)
        self.read: list[str] = []
        self.alive = self.peak = 0

    def names(self):
        return list(self.shapes)

    def shape(self, name):
        return self.shapes[name]

    def tensor(self, name):
        self.read.append(name)
        tensor = self.expected(name)
        self.alive += tensor.nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(tensor, self.gone, tensor.nbytes)
        return tensor

    def gone(self, size):
        self.alive -= size

    def expected(self, name):
        return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(self.shapes[name], np.float32)

    def load_tokenizer(self, tokenizer=None):
        return None


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def test_every_tensor_is_read_once_and_lands_where_it_belongs(mesh):
    checkpoint = FakeCheckpoint(config())
    params = load_llama(spec_of(config()), 32, mesh, checkpoint).params()
    assert sorted(checkpoint.read) == sorted(checkpoint.shapes)
    top, layer = params["top"], params["layers"][1]
    e = checkpoint.expected
    np.testing.assert_array_equal(top["embed"], e("model.embed_tokens.weight"))
    np.testing.assert_array_equal(top["lm_head"], e("lm_head.weight"))
    np.testing.assert_array_equal(top["final_norm"], e("model.norm.weight"))
    prefix = "model.layers.1."
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        qkv = [e(f"{prefix}self_attn.{n}_proj.{kind}") for n in "qkv"]
        np.testing.assert_array_equal(layer[f"qkv{suffix}"], np.concatenate(qkv))
        gate_up = [e(f"{prefix}mlp.{n}_proj.{kind}") for n in ("gate", "up")]
        np.testing.assert_array_equal(layer[f"gate_up{suffix}"], np.concatenate(gate_up))
        np.testing.assert_array_equal(layer[f"o{suffix}"], e(f"{prefix}self_attn.o_proj.{kind}"))
        np.testing.assert_array_equal(layer[f"down{suffix}"], e(f"{prefix}mlp.down_proj.{kind}"))
    np.testing.assert_array_equal(layer["input_norm"], e(f"{prefix}input_layernorm.weight"))
    np.testing.assert_array_equal(layer["post_norm"], e(f"{prefix}post_attention_layernorm.weight"))
    for name, table in zip(("cos", "sin"), rope_tables(config(), 32), strict=True):
        np.testing.assert_array_equal(top[name], table)


def test_with_two_shards_each_holds_its_heads_of_q_k_and_v(mesh):
    """On a mesh of one device the whole array shows the order that two devices would split in the middle."""
    checkpoint = FakeCheckpoint(config())
    layer = load_llama(spec_of(config(), tp=2), 32, mesh, checkpoint).params()["layers"][0]
    prefix = "model.layers.0.self_attn."
    q, k, v = (checkpoint.expected(f"{prefix}{n}_proj.weight") for n in "qkv")
    np.testing.assert_array_equal(layer["qkv"], np.concatenate([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]]))
    q, k, v = (checkpoint.expected(f"{prefix}{n}_proj.bias") for n in "qkv")
    np.testing.assert_array_equal(layer["qkv_bias"], np.concatenate([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]]))
    gate, up = (checkpoint.expected(f"model.layers.0.mlp.{n}_proj.weight") for n in ("gate", "up"))
    np.testing.assert_array_equal(layer["gate_up"], np.concatenate([gate[:48], up[:48], gate[48:], up[48:]]))
    # Split along its input, or not at all: left as it is.
    np.testing.assert_array_equal(layer["o"], checkpoint.expected(f"{prefix}o_proj.weight"))
    np.testing.assert_array_equal(layer["o_bias"], checkpoint.expected(f"{prefix}o_proj.bias"))


def test_one_parameter_s_tensors_are_in_memory_at_a_time(mesh):
    model = config(hidden_size=128, ffn_size=512, num_layers=6, vocab_size=64)
    checkpoint = FakeCheckpoint(model)
    load_llama(spec_of(model), 32, mesh, checkpoint)
    largest = max(np.prod(record.shape) for record in layer_records(spec_of(model), 0)) * 4
    assert 0 < checkpoint.peak <= largest


def test_tied_models_have_no_head(mesh):
    model = config(tie_word_embeddings=True, attention_bias=False, mlp_bias=False)
    params = load_llama(spec_of(model), 32, mesh, FakeCheckpoint(model)).params()
    assert "lm_head" not in params["top"]
    assert not any(name.endswith("bias") for name in params["layers"][0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_cast_to_the_compute_type_and_tables_are_not(mesh, dtype):
    params = load_llama(spec_of(config(), dtype=dtype), 32, mesh, FakeCheckpoint(config())).params()
    assert {str(x.dtype) for x in jax.tree.leaves(params["layers"])} == {dtype}
    assert str(params["top"]["embed"].dtype) == dtype
    assert str(params["top"]["cos"].dtype) == str(params["top"]["sin"].dtype) == "float32"


def test_specs_have_the_structure_of_the_parameters(mesh):
    spec = spec_of(config())
    params = load_llama(spec, 32, mesh, None).params()
    specs = param_specs(spec)
    assert specs["top"].keys() == params["top"].keys()
    assert [s.keys() for s in specs["layers"]] == [p.keys() for p in params["layers"]]


def test_the_vocabulary_ends_in_rows_of_zeros_that_the_shards_divide(mesh):
    model = config(vocab_size=51)
    spec = spec_of(model, tp=2)
    assert {r.name: r.spec for r in top_records(spec)}["embed"] == jax.sharding.PartitionSpec("model", None)
    checkpoint = FakeCheckpoint(model)
    top = load_llama(spec, 32, mesh, checkpoint).params()["top"]
    for name, source in (("embed", "model.embed_tokens.weight"), ("lm_head", "lm_head.weight")):
        assert len(top[name]) == spec.geometry.vocab_rows > 51
        assert len(top[name]) % spec.geometry.unit == 0
        np.testing.assert_array_equal(top[name][:51], checkpoint.expected(source))
        assert not np.asarray(top[name][51:]).any()


@pytest.mark.parametrize("tp", [1, 2])
def test_tensors_can_be_read_back_by_their_names(mesh, tp):
    model = config(vocab_size=51)
    spec, checkpoint = spec_of(model, tp=tp), FakeCheckpoint(model)
    base = BaseTensors(spec, load_llama(spec, 32, mesh, checkpoint).params())
    for name in expected_shapes(model):
        tensor = base.tensor(name)
        assert tensor is not None
        np.testing.assert_array_equal(tensor, checkpoint.expected(name), err_msg=name)
    assert base.tensor("model.layers.0.mlp.gate_proj.nothing") is None


def test_a_tied_head_is_the_embedding(mesh):
    model = config(tie_word_embeddings=True, attention_bias=False)
    spec, checkpoint = spec_of(model, dtype="bfloat16"), FakeCheckpoint(model)
    base = BaseTensors(spec, load_llama(spec, 32, mesh, checkpoint).params())
    head = base.tensor("lm_head.weight")
    assert head is not None
    assert head.dtype == np.float32  # of what is served: rounded
    rounded = checkpoint.expected("model.embed_tokens.weight").astype("bfloat16").astype(np.float32)
    np.testing.assert_array_equal(head, rounded)
    assert base.tensor("model.layers.0.self_attn.q_proj.bias") is None


def test_dummy_weights_follow_the_seed(mesh):
    def load(seed, tp=1):
        return load_llama(spec_of(config(), tp=tp), 32, mesh, None, seed=seed).params()

    one, same, other = load(1), load(1), load(2)
    for a, b, c in zip(*(jax.tree.leaves(x["layers"]) for x in (one, same, other)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.shape == c.shape
    assert not np.array_equal(one["layers"][0]["qkv"], other["layers"][0]["qkv"])
    assert not np.array_equal(one["layers"][0]["qkv"], one["layers"][1]["qkv"])
    assert (np.asarray(one["layers"][0]["input_norm"]) == 1).all()
    assert np.std(one["layers"][0]["down"]) == pytest.approx(96**-0.5, rel=0.05)
    # The same model however it is split: its q, k and v, shard by shard.
    qkv, split = np.asarray(one["layers"][0]["qkv"]), np.asarray(load(1, tp=2)["layers"][0]["qkv"])
    q, k, v = np.split(qkv, [64, 96])
    np.testing.assert_array_equal(split, np.concatenate([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]]))


def test_progress_wraps_the_layers(mesh):
    seen = []

    def progress(layers):
        for layer in layers:
            yield layer
            seen.append(layer)

    load_llama(spec_of(config()), 32, mesh, None, progress=progress)
    assert seen == [0, 1, 2]
