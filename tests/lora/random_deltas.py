"""Random deltas of the tiny base's shapes, and a reading of their pages by the definition of the layout."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np

from multilora_jax.lora.deltas import AdapterDeltas, VocabDelta
from multilora_jax.lora.packing import PackedAdapter
from multilora_jax.memory.geometry import MODULES, PoolGeometry

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
D, V = 64, 288


def geometry_of(tp=1, dtype="float32", layers=2, page_tokens=16) -> PoolGeometry:
    """The tiny base's shapes with room for 32 more tokens than its 256; a unit is 32 elements."""
    return PoolGeometry(
        num_layers=layers, num_pages=64, page_tokens=page_tokens, hidden=D, q_dim=64, kv_dim=32, ffn=96,
        num_kv_heads=2, head_dim=16, tp=tp, dtype=dtype, vocab_rows=V,
    )  # fmt: skip


def vocab_delta(rng: np.random.Generator, parts: set[str], dims: tuple[int, int], gain: int, n: int) -> VocabDelta:
    """A part of the vocabulary with LoRA of rank 3, gain, bias and `n` rows, as far as `parts` has them."""
    in_dim, out_dim = dims
    lora = "lora" in parts
    return VocabDelta(
        a=rng.standard_normal((3, in_dim), np.float32) if lora else None,
        b=rng.standard_normal((out_dim, 3), np.float32) if lora else None,
        scale=0.75 if lora else 0.0,
        gain=rng.standard_normal(gain, np.float32) if lora and "gain" in parts else None,
        bias=rng.standard_normal(V, np.float32) if "bias" in parts else None,
        row_ids=np.sort(rng.choice(V, n, replace=False)).astype(np.int32),
        rows=rng.standard_normal((n, D), np.float32),
    )


def make(ranks=None, *, layers=2, seed=0, bias=(), gain=(), norms=(), final_norm=False, **vocab) -> AdapterDeltas:
    """Random deltas: LoRA of `ranks`, vectors at the named places; see `vocab_delta` for embed and head."""
    rng, geometry = np.random.default_rng(seed), geometry_of(layers=layers)
    ranks = ranks or {}
    dims = {module: geometry.module_dims(module) for module in MODULES}

    def vectors(places, length):
        return {place: rng.standard_normal(length(place[1]), np.float32) for place in places}

    embed, head = vocab.get("embed"), vocab.get("head")
    return AdapterDeltas(
        a={key: rng.standard_normal((r, dims[key[1]][0]), np.float32) for key, r in ranks.items()},
        b={key: rng.standard_normal((dims[key[1]][1], r), np.float32) for key, r in ranks.items()},
        scale={key: 0.5 + r for key, r in ranks.items()},
        bias=vectors(bias, lambda module: dims[module][1]),
        gain=vectors(gain, lambda module: dims[module][1]),
        norms=vectors(norms, lambda _: D),
        final_norm=rng.standard_normal(D, np.float32) if final_norm else None,
        embed=None if embed is None else vocab_delta(rng, embed - {"bias"}, (V, D), D, vocab.get("embed_n", 0)),
        head=None if head is None else vocab_delta(rng, head, (D, V), V, vocab.get("head_n", 0)),
        extra_tokens=vocab.get("extra_tokens", 0),
    )


def assert_same(got: Any, wanted: Any, dtype: np.dtype) -> None:
    """Equal up to the rounding to `dtype`, everywhere in a structure of deltas."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_same(got[key], wanted[key], dtype)
    elif isinstance(wanted, AdapterDeltas | VocabDelta):
        for f in fields(wanted):
            assert_same(getattr(got, f.name), getattr(wanted, f.name), dtype)
    elif isinstance(wanted, np.ndarray) and wanted.dtype == np.float32:
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.reshape(wanted.shape), wanted.astype(dtype))
    elif isinstance(wanted, np.ndarray):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    else:
        assert got == wanted


def read_row(packed: PackedAdapter, geometry: PoolGeometry, units: Any, dtype: Any) -> np.ndarray:
    """One row, put together element by element from the definition of the layout."""
    u, tp = geometry.unit, geometry.tp
    width, per_page = u // tp, geometry.units_per_page
    row = np.empty(len(units) * u, geometry.storage_dtype)
    for k, unit in enumerate(units):
        page, rest = divmod(int(unit), per_page * geometry.num_layers)
        layer, offset = divmod(rest, per_page)
        for t in range(tp):
            start = t * len(row) // tp + k * width
            row[start : start + width] = packed.pages[page, layer, t, offset * width : (offset + 1) * width]
    return row.view(dtype)
