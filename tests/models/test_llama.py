"""The pure forward pass against a numpy Llama: layouts, types, chunks, options of the model, adapters in one batch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from multilora_jax.engine.batch import BatchShape, empty_batch, table_width
from multilora_jax.lora.synthetic import random_adapter_weights
from multilora_jax.memory.geometry import MODULES
from multilora_jax.memory.pool import make_pool
from multilora_jax.models.batch import LayerRows, LoRARows
from multilora_jax.models.checkpoint import open_checkpoint
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.llama import compute_logits, forward
from multilora_jax.models.loader import load_llama
from tests.oracle import Oracle

BLOCK, MAX_LEN = 8, 64
SHAPE = BatchShape(num_prompt_tokens=48, num_blocks=12, num_decodes=2)
FIRST = [5, 17, 200, 31, 7, 99, 250, 12, 13, 14, 15]
SECOND = [(11 + 37 * i) % 254 + 2 for i in range(40)]


class Runner:
    """A model of golden_tiny, a pool, and steps filled in by hand: prompts in chunks, then single tokens."""

    def __init__(self, folder: Path, dtype="float32", features_first=True, adapters=(), backend="xla"):
        checkpoint = open_checkpoint(str(folder))
        geometry = checkpoint.config.geometry(num_pages=32, page_tokens=16, dtype=dtype)
        self.spec = LlamaSpec(
            checkpoint.config, geometry, BLOCK, features_first, attention_backend=backend, interpret=backend != "xla"
        )
        mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
        self.model = load_llama(self.spec, MAX_LEN, mesh, checkpoint)
        self.params = self.model.params()
        self.pool = make_pool(geometry, mesh)
        self.lora = lora_rows(self.spec, adapters) if adapters else None
        self.forward = jax.jit(functools.partial(forward, spec=self.spec), donate_argnums=1)
        self.pages = {0: [3, 9, 4, 20], 1: [7, 1, 30, 2]}

    def step(self, decodes, chunks):
        """decodes: (sequence, position, token, adapter); chunks: (sequence, first position, tokens, adapter).

        Returns:
            float32 logits of each decode [V], then of each chunk [n, V].
        """
        slots_X = 2 if self.lora is not None else 0
        batch: Any = empty_batch(SHAPE, self.spec, table_width(MAX_LEN, self.spec.geometry), slots_X)
        ids, positions, slots = batch.token_ids_T, batch.positions_T, batch.slots_T
        table, where = batch.table_SP, []

        def put(t, row, sequence, position, token, adapter):
            pages = self.pages[sequence]
            ids[t], positions[t] = token, position
            if adapter >= 0:
                batch.mix_SX[row, adapter] = 1
            slots[t] = pages[position // 16] * 16 + position % 16
            table[row, : len(pages)] = pages

        for row, (sequence, position, token, adapter) in enumerate(decodes):
            put(row, row, sequence, position, token, adapter)
            where.append([row])
        t = row = SHAPE.num_decodes
        for sequence, first, tokens, adapter in chunks:
            where.append(list(range(t, t + len(tokens))))
            for i, token in enumerate(tokens):
                put(t + i, row + i // BLOCK, sequence, first + i, token, adapter)
                batch.row_P[t + i - SHAPE.num_decodes] = row + i // BLOCK
            used = -(-len(tokens) // BLOCK)
            batch.first_N[row - SHAPE.num_decodes :][:used] = t - SHAPE.num_decodes + BLOCK * np.arange(used)
            t, row = t + len(tokens), row + used
        batch.decode_chunks[:] = batch.prefill_chunks[:] = 1
        batch.lora = self.lora
        self.pool, hidden = self.forward(self.params, self.pool, batch)
        logits = np.asarray(compute_logits(self.params["top"], hidden, spec=self.spec))
        assert logits.dtype == np.float32
        return [logits[index] for index in where]


def lora_rows(spec, adapters, num_rows=64):
    """Row buffers with the adapters side by side, three rows apart; what lies between would be noticed."""
    rng = np.random.default_rng(0)
    c = spec.config
    owner = np.full(num_rows, -2, np.int32)
    scale = np.zeros((c.num_layers, 7, num_rows), np.float32)
    places = {"q_proj": ("a_qkv", 0), "k_proj": ("a_qkv", 1), "v_proj": ("a_qkv", 2), "o_proj": ("a_o", 0),
              "gate_proj": ("a_gate_up", 0), "up_proj": ("a_gate_up", 1), "down_proj": ("a_down", 0)}  # fmt: skip
    layers = []
    for layer in range(c.num_layers):
        arrays = {}
        for module in MODULES:
            in_dim, out_dim = c.module_dims(module)
            a_name, place = places[module]
            members = sum(name == a_name for name, _ in places.values())
            arrays.setdefault(a_name, rng.standard_normal((members, num_rows, in_dim)))
            b = arrays[f"b_{module.removesuffix('_proj')}"] = rng.standard_normal((out_dim, num_rows))
            start = 3
            for index, weights in enumerate(adapters):
                owner[start : start + weights.rank] = index
                if (layer, module) in weights.a:
                    rank = len(weights.a[layer, module])
                    arrays[a_name][place, start : start + rank] = weights.a[layer, module]
                    b[:, start : start + rank] = weights.b[layer, module]
                    scale[layer, MODULES.index(module), start : start + rank] = weights.scale[layer, module]
                start += weights.rank + 3
        layers.append(LayerRows(**{name: jnp.asarray(x, spec.dtype) for name, x in arrays.items()}))
    return LoRARows(layers, jnp.asarray(owner), jnp.asarray(scale), jnp.zeros(scale.shape), None)


def deltas_of(weights):
    names = {m: f"{'self_attn' if i < 4 else 'mlp'}.{m}" for i, m in enumerate(MODULES)}
    return {
        f"model.layers.{layer}.{names[module]}": weights.scale[layer, module]
        * (weights.b[layer, module].astype(np.float64) @ weights.a[layer, module])
        for layer, module in weights.a
    }


@pytest.mark.parametrize(
    ("base", "features_first", "backend"),
    [
        ("tied", True, "xla"), ("biased", True, "xla"), ("headdim32", True, "xla"), ("biased", False, "xla"),
        ("headdim32", True, "triton"), ("biased", False, "triton"),
    ],
)  # fmt: skip
def test_chunked_prefill_then_decoding(golden_tiny, base, features_first, backend):
    """Both sequences in one step, then one decodes beside the other's next chunk, then both decode."""
    folder = golden_tiny / "bases" / base
    runner, oracle = Runner(folder, features_first=features_first, backend=backend), Oracle.from_folder(folder)
    first, second = oracle.logits(FIRST), oracle.logits(SECOND)

    def close(got, wanted):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-3)

    a, b = runner.step([], [(0, 0, FIRST[:9], -1), (1, 0, SECOND[:17], -1)])
    close(a, first[:9])
    close(b, second[:17])
    a, b = runner.step([(0, 9, FIRST[9], -1)], [(1, 17, SECOND[17:38], -1)])
    close(a, first[9:10])
    close(b, second[17:38])
    a, b = runner.step([(1, 38, SECOND[38], -1), (0, 10, FIRST[10], -1)], [])
    close(a, second[38:39])
    close(b, first[10:11])


@pytest.mark.parametrize("features_first", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_and_base_in_one_batch(golden_tiny, dtype, features_first):
    folder = golden_tiny / "bases" / "untied"
    config = open_checkpoint(str(folder)).config
    mixed = {(0, "q_proj"): 3, (0, "down_proj"): 16, (1, "v_proj"): 1, (1, "o_proj"): 7, (1, "up_proj"): 5}
    adapters = [
        random_adapter_weights(config, 8, seed=1, lora_alpha=16, delta_std=0.1),
        random_adapter_weights(config, mixed, seed=2, delta_std=0.2),
    ]
    runner = Runner(folder, dtype, features_first, adapters)
    exact = Oracle.from_folder(folder)
    coarse = Oracle.from_folder(folder, rounded=lambda x: np.asarray(x, ml_dtypes.bfloat16).astype(np.float64))

    def close(got, tokens, adapter, part):
        deltas = None if adapter < 0 else deltas_of(adapters[adapter])
        wanted = exact.logits(tokens, deltas)[part]
        if dtype == "float32":
            np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-3)
        else:
            # No more than what a float64 model errs that rounds where bfloat16 must.
            allowed = np.mean((coarse.logits(tokens, deltas)[part] - wanted) ** 2) ** 0.5
            assert np.mean((got - wanted) ** 2) ** 0.5 < 1.7 * allowed < 0.25

    a, b = runner.step([], [(0, 0, FIRST, 0), (1, 0, SECOND[:30], -1)])
    close(a, FIRST, 0, slice(0, 11))
    close(b, SECOND[:30], -1, slice(0, 30))
    runner.pages = {0: [11, 12, 13, 14], 1: [15, 16, 17, 18]}
    a, b = runner.step([], [(0, 0, FIRST, 1), (1, 0, SECOND[:30], 0)])
    close(a, FIRST, 1, slice(0, 11))
    close(b, SECOND[:30], 0, slice(0, 30))
    a, b = runner.step([(1, 30, SECOND[30], 0), (0, 11, 77, 1)], [])
    close(a, SECOND[:31], 0, slice(30, 31))
    close(b, [*FIRST, 77], 1, slice(11, 12))


def test_padding_changes_no_page_but_page_0(golden_tiny):
    runner = Runner(golden_tiny / "bases" / "untied")
    runner.step([], [(0, 0, FIRST, -1)])
    pool = np.asarray(runner.pool)
    written = {int(page) for page in np.flatnonzero(pool.any((0, 2)))}
    assert written <= {0, runner.pages[0][0]}
    # K and V of 11 of the page's 16 slots, in both layers.
    page = pool[:, runner.pages[0][0]].reshape(2, 2, 2, 16, 16)
    assert page[:, :, :, :11].any((2, 4)).all()
    assert not page[:, :, :, 11:].any()


def test_the_model_itself_can_be_called(golden_tiny):
    runner = Runner(golden_tiny / "bases" / "untied")
    batch: Any = empty_batch(BatchShape(8, 2, 2), runner.spec, table_width(MAX_LEN, runner.spec.geometry))
    batch.token_ids_T[2:5] = [5, 17, 200]
    batch.positions_T[2:5] = [0, 1, 2]
    batch.slots_T[2:5] = 16 + np.arange(3)
    batch.table_SP[2, 0] = 1
    batch.prefill_chunks[0] = 1
    _, hidden = runner.model(runner.pool, batch)
    logits = compute_logits(runner.params["top"], hidden, spec=runner.spec)
    wanted = Oracle.from_folder(golden_tiny / "bases" / "untied").logits([5, 17, 200])
    np.testing.assert_allclose(logits[2:5], wanted, rtol=0, atol=2e-3)


def test_only_finite_values_reach_the_pool(golden_tiny):
    """An overflowing activation must not stay behind in a page: 0 * NaN would reach its next owner."""
    runner = Runner(golden_tiny / "bases" / "untied")
    runner.params["layers"][0]["qkv"] = runner.params["layers"][0]["qkv"].at[70:].multiply(3e38)
    runner.step([], [(0, 0, FIRST, -1)])
    assert np.isfinite(np.asarray(runner.pool).view(np.float32)).all()


def test_the_pool_is_updated_in_place(golden_tiny):
    runner = Runner(golden_tiny / "bases" / "untied")
    address, old = runner.pool.unsafe_buffer_pointer(), runner.pool
    runner.step([], [(0, 0, FIRST, -1)])
    assert old.is_deleted()
    assert runner.pool.unsafe_buffer_pointer() == address
