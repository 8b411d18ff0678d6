"""Pages of adapters: exact round trips, exact sizes, no overlap, every row where the layout says."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.errors import AdapterError
from multilora_jax.lora import packing
from multilora_jax.lora.deltas import AdapterDeltas, VocabDelta
from multilora_jax.lora.layout import AdapterLayout, VocabLayout
from multilora_jax.lora.packing import pack, unpack
from multilora_jax.memory.geometry import MODULES, PoolGeometry
from tests.lora.random_deltas import DTYPES, D, V, assert_same, geometry_of, make, read_row


def all_units(layout: AdapterLayout, geometry: PoolGeometry) -> list[int]:
    """Every unit that the layout's fields speak of; shared ones once."""
    used: list[int] = []
    for m in range(len(MODULES)):
        for units in layout.row_units(m, 0, layout.num_rows):
            used += units[units >= 0].tolist()
    vocab = layout.vocab or VocabLayout()
    int_rows, row_d, row_v = 4 // geometry.storage_dtype.itemsize, D // geometry.unit, V // geometry.unit
    ids = -(-vocab.num_head_rows // geometry.unit) * int_rows
    num_embed = 0 if vocab.embed_map < 0 else EMBED_N
    sizes = {
        "embed_a": vocab.embed_rank * row_v, "embed_b": vocab.embed_rank * row_d, "embed_gain": row_d,
        "embed_map": row_v * int_rows, "embed_rows": num_embed * row_d, "final_norm": row_d,
        "head_a": vocab.head_rank * row_d, "head_b": vocab.head_rank * row_v, "head_gain": row_v, "head_bias": row_v,
        "head_ids": ids, "head_rows": vocab.num_head_rows * row_d,
    }  # fmt: skip
    for name, size in sizes.items():
        start = getattr(vocab, name)
        if start >= 0 and not (name == "head_rows" and start == vocab.embed_rows):
            used += range(start, start + size)
    return used


EMBED_N = 5


def subsets(options: list[Any]) -> st.SearchStrategy[set[Any]]:
    return st.sets(st.sampled_from(options))


PLACES = [(layer, module) for layer in range(3) for module in MODULES]


@settings(max_examples=80, deadline=None)
@given(
    ranks=st.dictionaries(st.sampled_from(PLACES), st.integers(1, 20)),
    bias=subsets(PLACES),
    gain=subsets(PLACES),
    norms=subsets([(layer, kind) for layer in range(3) for kind in ("input", "post")]),
    final_norm=st.booleans(),
    embed=st.none() | subsets(["lora", "gain"]),
    head=st.none() | subsets(["lora", "gain", "bias"]),
    head_n=st.sampled_from([0, 1, 32, 33]),
    tp=st.sampled_from([1, 2]),
    dtype=st.sampled_from(sorted(DTYPES)),
    page_tokens=st.sampled_from([1, 16]),
    block=st.sampled_from([1, 100, 2**20]),
)
def test_round_trip_exact_size_and_no_overlap(
    ranks, bias, gain, norms, final_norm, embed, head, head_n, tp, dtype, page_tokens, block
):
    geometry = geometry_of(tp, dtype, 3, page_tokens)
    if head is not None and not head & {"lora", "bias"}:
        head_n = max(head_n, 1)  # there is something in it
    deltas = make(
        ranks, layers=3, bias=bias, gain=gain, norms=norms, final_norm=final_norm, embed=embed, head=head,
        embed_n=EMBED_N, head_n=head_n, extra_tokens=3,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_BLOCK_ELEMENTS", block)
        packed = pack(deltas, geometry)
    layout = packed.layout
    assert_same(unpack(packed, geometry), deltas, np.dtype(DTYPES[dtype]))
    assert sorted(all_units(layout, geometry)) == list(range(layout.num_units))
    assert layout.num_pages == max(1, geometry.pages_for_units(layout.num_units))
    assert packed.pages.shape == (layout.num_pages, 3, tp, geometry.page_elements // tp)
    assert packed.pages.dtype == geometry.storage_dtype
    assert packed.pages.flags.c_contiguous
    vocab_ranks = [3 for part in (embed, head) if part is not None and "lora" in part]
    assert layout.rank == max([0, *ranks.values(), *vocab_ranks])
    assert layout.num_rows == max(1, max([0, *ranks.values()]) + bool(bias) + bool(gain) + bool(norms))
    assert layout.extended  # it has extra tokens


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("rank", [1, 3, 4, 8, 32, 64])
def test_d12_any_rank_round_trips(rank, tp):
    geometry = geometry_of(tp)
    deltas = make({(layer, module): rank for layer in (0, 1) for module in MODULES})
    packed = pack(deltas, geometry)
    assert (packed.layout.rank, packed.layout.num_rows, packed.layout.vocab) == (rank, rank, None)
    assert not packed.layout.extended
    wanted = 2 * rank * sum(sum(geometry.module_dims(m)) for m in MODULES)
    assert packed.layout.num_units == wanted // geometry.unit
    assert_same(unpack(packed, geometry), deltas, np.dtype(np.float32))


def test_d12_ranks_are_not_padded_to_one_another():
    one, mixed = (
        pack(make(ranks), geometry_of()) for ranks in ({(0, "q_proj"): 1}, {(0, "q_proj"): 1, (1, "q_proj"): 64})
    )
    assert mixed.layout.num_units == 65 * one.layout.num_units


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_rows_lie_where_the_layout_says(tp, dtype):
    ranks = {(0, "q_proj"): 3, (0, "k_proj"): 2, (1, "down_proj"): 5, (1, "gate_proj"): 1}
    geometry, deltas = geometry_of(tp, dtype), make(ranks)
    packed = pack(deltas, geometry)
    for (layer, module), rank in ranks.items():
        a_units, b_units = packed.layout.row_units(MODULES.index(module), 0, rank)
        for i in range(rank):
            row = deltas.a[layer, module][i].astype(DTYPES[dtype])
            np.testing.assert_array_equal(read_row(packed, geometry, a_units[layer, i], row.dtype), row)
            row = deltas.b[layer, module][:, i].astype(DTYPES[dtype])
            np.testing.assert_array_equal(read_row(packed, geometry, b_units[layer, i], row.dtype), row)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_integers_are_words_or_halves_of_words(tp, dtype):
    # Ids that need their high halves, on a vocabulary that has them; the embedding has other rows than the head.
    geometry = replace(geometry_of(tp, dtype), vocab_rows=70_016)
    # The low 16 bits of 32,700 would be a NaN in bfloat16, those of 32,000 one in float16.
    ids = np.array([3, 32_000, 32_700, 65_536, 70_015], np.int32)
    rows = np.arange(5 * D, dtype=np.float32).reshape(5, D)
    deltas = AdapterDeltas(embed=VocabDelta(row_ids=ids[:3], rows=rows[:3]), head=VocabDelta(row_ids=ids, rows=rows))
    packed = pack(deltas, geometry)
    vocab = packed.layout.vocab
    assert vocab is not None

    def ints(start: int, length: int) -> np.ndarray:
        per_row = length // geometry.unit
        if geometry.storage_dtype.itemsize == 4:
            return read_row(packed, geometry, range(start, start + per_row), np.uint32)
        low = read_row(packed, geometry, range(start, start + per_row), np.uint16)
        high = read_row(packed, geometry, range(start + per_row, start + 2 * per_row), np.uint16)
        for words in (low, high):  # pages that are freed become keys and values
            assert np.isfinite(words.view(DTYPES[dtype]).astype(np.float32)).all()
        return low + high.astype(np.uint32) * 2**14

    assert vocab.num_head_rows == 5
    np.testing.assert_array_equal(ints(vocab.head_ids, 32), [*ids, *[0] * 27])
    index_V = ints(vocab.embed_map, 70_016)
    np.testing.assert_array_equal(np.flatnonzero(index_V), ids[:3])
    np.testing.assert_array_equal(index_V[ids[:3]], [1, 2, 3])
    for start in (vocab.embed_rows, vocab.head_rows):
        units = range(start + 4, start + 6)
        np.testing.assert_array_equal(read_row(packed, geometry, units, DTYPES[dtype]), rows[2].astype(DTYPES[dtype]))


def test_rows_of_both_ends_are_kept_once_where_they_are_equal():
    rows = np.arange(3 * D, dtype=np.float32).reshape(3, D)
    embed = VocabDelta(row_ids=np.array([1, 2, 3], np.int32), rows=rows)
    same = VocabDelta(row_ids=np.array([4, 5, 6], np.int32), rows=rows.copy())
    other = VocabDelta(row_ids=embed.row_ids, rows=rows + 1)
    shared, apart = (pack(AdapterDeltas(embed=embed, head=head), geometry_of()) for head in (same, other))
    assert shared.layout.vocab is not None
    assert shared.layout.vocab.head_rows == shared.layout.vocab.embed_rows
    assert apart.layout.num_units == shared.layout.num_units + 3 * D // 32
    for packed, head in ((shared, same), (apart, other)):
        assert_same(unpack(packed, geometry_of()), AdapterDeltas(embed=embed, head=head), np.dtype(np.float32))


def test_units_match_the_pool_s_addresses():
    geometry, deltas = geometry_of(page_tokens=4), make({(1, "up_proj"): 20})
    packed = pack(deltas, geometry)
    page_ids = np.array([9, 4, 17, 30, 2, 11, 5])
    assert packed.layout.num_pages == len(page_ids)
    pool = np.zeros((geometry.num_layers, geometry.num_pages, geometry.page_elements), np.uint32)
    pool[:, page_ids] = packed.pages[:, :, 0].transpose(1, 0, 2)
    a_units, _ = packed.layout.row_units(MODULES.index("up_proj"), 0, 20)
    rows = pool.reshape(-1, geometry.unit)[geometry.unit_addresses(page_ids, a_units[1])]
    np.testing.assert_array_equal(rows.reshape(20, -1).view(np.float32), deltas.a[1, "up_proj"])


OVERFLOWS = {
    "a": ({"ranks": {(1, "k_proj"): 2}}, lambda d: d.a[1, "k_proj"], "layer 1 k_proj"),
    "b": ({"ranks": {(1, "k_proj"): 2}}, lambda d: d.b[1, "k_proj"], "layer 1 k_proj"),
    "bias": ({"bias": [(0, "q_proj")]}, lambda d: d.bias[0, "q_proj"], "layer 0 q_proj bias"),
    "gain": ({"gain": [(1, "o_proj")]}, lambda d: d.gain[1, "o_proj"], "layer 1 o_proj DoRA gain"),
    "norm": ({"norms": [(1, "post")]}, lambda d: d.norms[1, "post"], "layer 1 post norm"),
    "final": ({"final_norm": True}, lambda d: d.final_norm, "final norm"),
    "rows": ({"embed": set(), "embed_n": 2}, lambda d: d.embed.rows, "embed_tokens rows"),
    "head": ({"head": {"lora"}}, lambda d: d.head.b, "lm_head"),
    "head bias": ({"head": {"bias"}}, lambda d: d.head.bias, "lm_head bias"),
}  # fmt: skip


@pytest.mark.parametrize("part", OVERFLOWS)
@pytest.mark.parametrize(("dtype", "value"), [("float16", 70_000.0), ("bfloat16", 3.4e38), ("float16", -1e9)])
def test_values_beyond_the_compute_type_are_refused(part, dtype, value):
    arguments, of, name = OVERFLOWS[part]
    deltas = make(**arguments)
    of(deltas).reshape(-1)[1] = value
    with pytest.raises(AdapterError, match=f"{name} has values up to .* beyond the range of {dtype}") as caught:
        pack(deltas, geometry_of(dtype=dtype))
    assert caught.value.reason == "weights_overflow"


def test_pages_and_tables_cannot_be_written_and_share_nothing():
    deltas = make({(0, "q_proj"): 2})
    packed = pack(deltas, geometry_of())
    before = packed.pages.copy()
    deltas.a[0, "q_proj"][:] = 5
    deltas.b[0, "q_proj"][:] = 5
    np.testing.assert_array_equal(packed.pages, before)
    for array in (packed.pages, packed.layout.ranks_LM, packed.layout.start_bias_LM):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 1
    assert packed != pack(deltas, geometry_of())  # compared by identity: two versions may coexist


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packing_takes_little_more_memory_than_the_pages(tp, dtype, monkeypatch):
    monkeypatch.setattr(packing, "_BLOCK_ELEMENTS", 2**14)
    rows = np.ones((40_000, D), np.float32)
    deltas = AdapterDeltas(head=VocabDelta(row_ids=np.arange(40_000, dtype=np.int32), rows=rows))
    geometry = geometry_of(tp, dtype, page_tokens=64)
    tracemalloc.start()
    packed = pack(deltas, geometry)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < packed.pages.nbytes + 2 * 2**20
    assert packed.pages.nbytes > 5_000_000
