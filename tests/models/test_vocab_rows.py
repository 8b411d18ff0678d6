"""What adapters change outside the layers, read from pages in any order, on one shard and on several."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from multilora_jax.engine.vocab_tables import vocab_tables
from multilora_jax.lora.deltas import AdapterDeltas, VocabDelta
from multilora_jax.lora.packing import pack
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.models.config import ModelConfig, RopeConfig
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.shards import own_slice
from multilora_jax.models.vocab_rows import embedding_deltas, final_norm_deltas, head_deltas

CONFIG = ModelConfig(
    name="tiny", vocab_size=500, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96,
    rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=64,
)  # fmt: skip
D, V, PAGES, SLOTS = 64, 512, 96, 6
S = 7
TOKENS = np.array([0, 3, 499, 511, 130, 3, 500], np.int32)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def geometry_of(dtype, tp=1) -> PoolGeometry:
    geometry = CONFIG.geometry(num_pages=PAGES, page_tokens=16, tp=tp, dtype=dtype, extra_vocab=12)
    assert geometry.vocab_rows == V
    return geometry


def rounded(x, dtype):
    return np.asarray(x).astype(DTYPES[dtype]).astype(np.float64)


def empty_deltas(**parts) -> AdapterDeltas:
    fields: dict[str, Any] = {
        "a": {}, "b": {}, "scale": {}, "bias": {}, "gain": {}, "norms": {}, "final_norm": None, "embed": None,
        "head": None, "extra_tokens": 0,
    }  # fmt: skip
    return AdapterDeltas(**{**fields, **parts})


def adapters() -> list[AdapterDeltas]:
    """One with everything, one with a few rows on both sides, one with a whole head, one with nothing here."""
    rng = np.random.default_rng(5)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32) / 4

    no_rows = {"row_ids": np.zeros(0, np.int32), "rows": np.zeros((0, D), np.float32)}
    some = {"row_ids": np.array([3, 130, 499, 500, 511], np.int32), "rows": draw(5, D)}
    whole = {"row_ids": np.arange(V, dtype=np.int32), "rows": draw(V, D)}
    nothing = {"a": None, "b": None, "scale": 0.0, "gain": None, "bias": None}
    return [
        empty_deltas(
            final_norm=draw(D),
            extra_tokens=12,
            embed=VocabDelta(a=draw(11, V), b=draw(D, 11), scale=0.5, gain=draw(D), bias=None, **some),
            head=VocabDelta(a=draw(3, D), b=draw(V, 3), scale=2.0, gain=draw(V), bias=draw(V), **some),
        ),
        empty_deltas(embed=VocabDelta(**nothing, **some), head=VocabDelta(**nothing, **some)),
        empty_deltas(
            embed=VocabDelta(**{**nothing, "a": draw(1, V), "b": draw(D, 1), "scale": -1.5}, **no_rows),
            head=VocabDelta(**nothing, **whole),
        ),
        empty_deltas(norms={(1, "input"): draw(D)}),
    ]


class Host:
    """What vocab_tables reads of an adapter."""

    def __init__(self, layout):
        self.layout = layout


class Setup:
    """The adapters packed in scattered pages of a noisy pool, and rows that use them one by one and mixed."""

    def __init__(self, dtype, tp=1):
        self.dtype, self.tp, self.geometry = dtype, tp, geometry_of(dtype, tp)
        rng = np.random.default_rng(1)
        g = self.geometry
        # Finite noise, such as keys and values are.
        noise = rng.standard_normal((3, PAGES, tp, g.page_elements // tp)).astype(DTYPES[dtype])
        pool = noise.view(g.storage_dtype)
        free = rng.permutation(np.arange(1, PAGES)).tolist()
        self.deltas = adapters()
        hosts, pages = [], {}
        for deltas in self.deltas:
            packed = pack(deltas, g)
            host = Host(packed.layout)
            ids = [free.pop() for _ in range(packed.layout.num_pages)]
            pool[:, ids] = packed.pages.swapaxes(0, 1)
            hosts.append(host)
            pages[host] = ids
        self.shards = [jnp.asarray(pool[:, :, t]) for t in range(tp)]
        slots = dict(zip(hosts, (4, 0, 2, 1), strict=True))
        self.tables = vocab_tables(hosts, pages.__getitem__, slots.__getitem__, PAGES, SLOTS)
        mix = np.zeros((S, 4), np.float32)  # by adapter
        mix[range(4), range(4)] = 1
        mix[4] = [0.5, -2, 1, 1]
        mix[5, 0] = 3  # row 6 is the base
        self.mix = mix
        self.mix_SX = np.zeros((S, SLOTS), np.float32)
        self.mix_SX[:, [4, 0, 2, 1]] = mix

    def run(self, function, *args):
        """The result on every shard must be the same; of heads each shard has its columns."""
        spec = LlamaSpec(CONFIG, self.geometry, axis_name="model" if self.tp > 1 else None)
        tables = jax.tree.map(jnp.asarray, self.tables)

        columns = function is head_deltas

        def call(pool, args):
            if columns:
                args = (own_slice(args[0], 1, spec.axis_name, self.tp), *args[1:])
            return function(spec, pool, tables, *args)

        if self.tp == 1:
            return np.asarray(jax.jit(call)(self.shards[0], args))
        parts = jax.jit(jax.vmap(call, in_axes=(0, None), axis_name="model"))(jnp.stack(self.shards), args)
        if columns:
            return np.concatenate(np.asarray(parts), 1)
        for part in parts[1:]:
            np.testing.assert_array_equal(part, parts[0])
        return np.asarray(parts[0])


@functools.cache
def setup(dtype, tp):
    return Setup(dtype, tp)


def rows_by_id(part, dtype):
    rows = np.zeros((V, D))
    rows[part.row_ids] = rounded(part.rows, dtype)
    return rows


CASES = pytest.mark.parametrize(("dtype", "tp"), [("float32", 1), ("bfloat16", 1), ("float32", 2), ("bfloat16", 2)])


@CASES
def test_embeddings(dtype, tp):
    s = setup(dtype, tp)
    base = np.random.default_rng(2).standard_normal((S, D)).astype(np.float32)
    got = s.run(embedding_deltas, jnp.asarray(base), jnp.asarray(TOKENS), jnp.asarray(s.mix_SX))
    wanted = base.astype(np.float64)
    for deltas, w_S in zip(s.deltas, s.mix.T, strict=True):
        part = deltas.embed
        if part is None:
            continue
        own = rows_by_id(part, dtype)[TOKENS]
        if part.gain is not None:
            own = own + base * rounded(part.gain, dtype)
        if part.a is not None and part.b is not None:
            own = own + part.scale * rounded(part.a, dtype)[:, TOKENS].T @ rounded(part.b, dtype).T
        wanted = wanted + w_S[:, None] * own
    np.testing.assert_allclose(got, wanted, rtol=0, atol=3e-5)
    np.testing.assert_array_equal(got[[3, 6]], base[[3, 6]])  # the adapter of norms, and the base: to the bit


@CASES
def test_the_last_norm(dtype, tp):
    s = setup(dtype, tp)
    got = s.run(final_norm_deltas, jnp.asarray(s.mix_SX))
    norm = s.deltas[0].final_norm
    assert norm is not None
    np.testing.assert_allclose(got, s.mix[:, :1] * rounded(norm, dtype), rtol=1e-6)


@CASES
def test_heads(dtype, tp):
    s = setup(dtype, tp)
    rng = np.random.default_rng(3)
    base = rng.standard_normal((S, V)).astype(np.float32)
    hidden = rng.standard_normal((S, D)).astype(DTYPES[dtype])
    got = s.run(head_deltas, jnp.asarray(base), jnp.asarray(hidden), jnp.asarray(s.mix_SX))
    wanted, h = base.astype(np.float64), hidden.astype(np.float64)
    for deltas, w_S in zip(s.deltas, s.mix.T, strict=True):
        part = deltas.head
        if part is None:
            continue
        own = h @ rows_by_id(part, dtype).T
        if part.gain is not None:
            own = own + base * rounded(part.gain, dtype)
        if part.bias is not None:
            own = own + rounded(part.bias, dtype)
        if part.a is not None and part.b is not None:
            own = own + part.scale * (h @ rounded(part.a, dtype).T) @ rounded(part.b, dtype).T
        wanted = wanted + w_S[:, None] * own
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4)
    np.testing.assert_array_equal(got[[3, 6]], base[[3, 6]])
