"""Rank rows on their way from pool pages to the buffers that the model multiplies by."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multilora_jax.lora.deltas import to_deltas
from multilora_jax.lora.packing import pack, unpack
from multilora_jax.lora.synthetic import random_adapter_weights
from multilora_jax.memory.geometry import MODULES
from multilora_jax.models.config import ModelConfig, RopeConfig
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.rows import insert_rows, make_rows

CONFIG = ModelConfig(
    name="tiny", vocab_size=64, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96,
    rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=64,
)  # fmt: skip
BLOCK = 8
BUFFERS = {
    "q_proj": ("a_qkv", 0, "b_q"), "k_proj": ("a_qkv", 1, "b_k"), "v_proj": ("a_qkv", 2, "b_v"),
    "o_proj": ("a_o", 0, "b_o"), "gate_proj": ("a_gate_up", 0, "b_gate"), "up_proj": ("a_gate_up", 1, "b_up"),
    "down_proj": ("a_down", 0, "b_down"),
}  # fmt: skip


class NoBase:
    """Plain LoRA is the same on every base."""

    def tensor(self, name):
        raise AssertionError(name)


def spec_of(dtype):
    return LlamaSpec(CONFIG, CONFIG.geometry(num_pages=64, page_tokens=16, dtype=dtype))


def units(geometry, layout, page_ids, first_row):
    """Unit addresses of one block of rows; unit 0 where there is no row."""
    parts = [part for m in range(len(MODULES)) for part in layout.row_units(m, first_row, BLOCK)]
    return np.maximum(geometry.unit_addresses(np.asarray(page_ids), np.concatenate(parts, 2)), 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_arrive_where_they_belong(dtype):
    spec, rng = spec_of(dtype), np.random.default_rng(0)
    geometry = spec.geometry
    ranks = {(layer, module): int(rng.integers(1, 17)) for layer in range(3) for module in MODULES}
    del ranks[1, "k_proj"], ranks[2, "up_proj"]
    adapters = [
        pack(to_deltas(random_adapter_weights(CONFIG, rank, seed=i), CONFIG, NoBase(), geometry.vocab_rows), geometry)
        for i, rank in enumerate([ranks, 5])
    ]
    pool = rng.integers(1, 1000, (3, 64, 1024)).astype(geometry.storage_dtype)
    free = rng.permutation(np.arange(1, 64)).tolist()
    layers = jax.tree.map(lambda x: jnp.full_like(x, 9), make_rows(spec, 32, 3))
    insert = jax.jit(insert_rows, static_argnums=0)
    wanted, touched = {}, set()
    for adapter, start in zip(adapters, (8, 0), strict=True):
        layout = adapter.layout
        page_ids = [free.pop() for _ in range(layout.num_pages)]
        pool[:, page_ids] = adapter.pages[:, :, 0].swapaxes(0, 1)
        deltas = unpack(adapter, geometry)
        modules = {key: (a, deltas.b[key]) for key, a in deltas.a.items()}
        for first in range(0, layout.num_rows, BLOCK):
            rows = units(geometry, layout, page_ids, first)
            # In two groups of layers, as a runner may have it.
            layers = [
                *insert(spec, layers[:1], pool, rows, np.int32(0), np.int32(start + first)),
                *insert(spec, layers[1:], pool, rows, np.int32(1), np.int32(start + first)),
            ]
            touched |= set(range(start + first, start + first + BLOCK))
            for key, (a, b) in modules.items():
                for row in range(first, min(first + BLOCK, len(a))):
                    wanted[key, start + row] = a[row], b[:, row]
    assert touched == set(range(24))
    for layer, buffers in enumerate(layers):
        for module, (a_name, place, b_name) in BUFFERS.items():
            a_RI, b_OR = np.asarray(getattr(buffers, a_name))[place], np.asarray(getattr(buffers, b_name))
            assert a_RI.dtype == b_OR.dtype == spec.dtype
            for row in range(32):
                if ((layer, module), row) in wanted:
                    a, b = wanted[(layer, module), row]
                    np.testing.assert_array_equal(a_RI[row], a)
                    np.testing.assert_array_equal(b_OR[:, row], b)
                elif row not in touched:
                    assert (a_RI[row] == 9).all()
                    assert (b_OR[:, row] == 9).all()


def test_buffers_start_as_zeros_of_the_compute_type():
    layers = make_rows(spec_of("bfloat16"), 24, 3)
    assert len(layers) == 3
    shapes = {name: array.shape for name, array in vars(layers[0]).items()}
    assert shapes == {
        "a_qkv": (3, 24, 64), "a_o": (1, 24, 64), "a_gate_up": (2, 24, 64), "a_down": (1, 24, 96),
        "b_q": (64, 24), "b_k": (32, 24), "b_v": (32, 24), "b_o": (64, 24), "b_gate": (96, 24), "b_up": (96, 24),
        "b_down": (64, 24),
    }  # fmt: skip
    for array in jax.tree.leaves(layers):
        assert array.dtype == jnp.bfloat16
        assert not np.asarray(array).any()


def test_modules_that_are_not_copied_stay_as_they_are():
    spec = spec_of("float32")
    packed = pack(to_deltas(random_adapter_weights(CONFIG, 8, seed=1), CONFIG, NoBase(), 64), spec.geometry)
    pool = np.zeros((3, 64, 1024), np.uint32)
    page_ids = list(range(1, 1 + packed.layout.num_pages))
    pool[:, page_ids] = packed.pages[:, :, 0].swapaxes(0, 1)
    before = jax.tree.map(lambda x: jnp.full_like(x, 9), make_rows(spec, 16, 3))
    rows = jnp.asarray(units(spec.geometry, packed.layout, page_ids, 0))
    after = insert_rows(spec, before, jnp.asarray(pool), rows, jnp.int32(0), jnp.int32(8), modules=MODULES[:4])
    whole = insert_rows(spec, before, jnp.asarray(pool), rows, jnp.int32(0), jnp.int32(8))
    for old, some, all_ in zip(before, after, whole, strict=True):
        for name in ("a_qkv", "a_o", "b_q", "b_k", "b_v", "b_o"):
            np.testing.assert_array_equal(getattr(some, name), getattr(all_, name))
        for name in ("a_gate_up", "a_down", "b_gate", "b_up", "b_down"):
            np.testing.assert_array_equal(getattr(some, name), getattr(old, name))
