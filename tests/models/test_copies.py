"""KV heads of which there are fewer than shards: neighbouring shards hold the same one, drawn, loaded and restored."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from multilora_jax import checkpoints
from multilora_jax.models.checkpoint import open_checkpoint
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.loader import load_llama
from multilora_jax.models.quantised import QuantWeight

HEAD, SHARDS = 16, 4  # of golden_tiny's bases: four heads and two KV heads


@pytest.fixture(scope="module")
def folders(golden_tiny, tmp_path_factory):
    """A base with biases as it came, converted, and converted in 8 bits."""
    source, out = golden_tiny / "bases" / "biased", tmp_path_factory.mktemp("converted")
    checkpoints.save(source, out / "orbax")
    checkpoints.save(source, out / "int8", quantization="int8")
    return {"files": source, "orbax": out / "orbax", "int8": out / "int8", "dummy": source}


def layers_of(folders, kind, tp, quantization):
    """The layers as they are laid out for so many shards, on one device, which then holds all of them."""
    checkpoint = open_checkpoint(folders[kind])
    spec = LlamaSpec(checkpoint.config, checkpoint.config.geometry(2, 16, tp), quantization=quantization)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    return load_llama(spec, 16, mesh, None if kind == "dummy" else checkpoint, seed=3).params()["layers"]


def by_shard(whole):
    """What each of four shards should hold of rows of q, k and v that lie one behind another."""
    q, k, v = np.split(whole, [4 * HEAD, 6 * HEAD])
    pick = [np.concatenate([q[s * HEAD :][:HEAD], *(x[s // 2 * HEAD :][:HEAD] for x in (k, v))]) for s in range(SHARDS)]
    return np.concatenate(pick)


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [("files", None), ("files", "int8"), ("orbax", None), ("orbax", "int8"), ("int8", "int8"), ("dummy", None),
     ("dummy", "int8")],
)  # fmt: skip
def test_two_shards_hold_each_kv_head(folders, kind, quantization):
    one, four = (layers_of(folders, kind, tp, quantization) for tp in (1, SHARDS))
    for layer, split in zip(one, four, strict=True):
        assert isinstance(layer["qkv"], QuantWeight) == (quantization is not None)
        for name in ("qkv", "qkv_bias"):
            for whole, laid in zip(jax.tree.leaves(layer[name]), jax.tree.leaves(split[name]), strict=True):
                assert len(laid) == 12 * HEAD  # of 8, two of the KV heads' twice
                np.testing.assert_array_equal(np.asarray(laid), by_shard(np.asarray(whole)))
        for name in ("o", "down"):  # nothing else is repeated
            for whole, laid in zip(jax.tree.leaves(layer[name]), jax.tree.leaves(split[name]), strict=True):
                np.testing.assert_array_equal(np.asarray(laid), np.asarray(whole))
