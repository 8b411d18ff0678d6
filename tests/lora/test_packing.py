"""Pages of adapters: exact round trips, exact sizes, no overlap."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.errors import AdapterError
from multilora_jax.lora.packing import pack, unpack
from multilora_jax.lora.synthetic import random_adapter_weights
from multilora_jax.memory.geometry import MODULES, PoolGeometry
from multilora_jax.models.config import ModelConfig

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def build(ranks, tp=1, dtype="float32", layers=2, page_tokens=16, seed=0):
    """(geometry, weights, packed) of the tiny base's shapes with `ranks`."""
    config = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 256,
            "hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "intermediate_size": 96, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "max_position_embeddings": 512, "tie_word_embeddings": True,
        },
        "tiny", None,
    )  # fmt: skip
    geometry = config.geometry(num_pages=64, page_tokens=page_tokens, tp=tp, dtype=dtype)
    weights = random_adapter_weights(config, ranks, seed=seed)
    return geometry, weights, pack(weights, geometry, "name", 7)


def all_units(host) -> list[np.ndarray]:
    """The units of every A and every B."""
    result = []
    for layer, m in np.argwhere(host.ranks_LM):
        a, b = host.row_units(int(m), 0, int(host.ranks_LM[layer, m]))
        result += [a[layer], b[layer]]
    return result


def read_row(host, geometry: PoolGeometry, units: np.ndarray, dtype) -> np.ndarray:
    """One rank row, put together element by element from the definition of the layout."""
    u, tp = geometry.unit, geometry.tp
    width, per_page = u // tp, geometry.units_per_page
    row = np.empty(len(units) * u, geometry.storage_dtype)
    for k, unit in enumerate(units):
        page, rest = divmod(int(unit), per_page * geometry.num_layers)
        layer, offset = divmod(rest, per_page)
        for t in range(tp):
            start = t * len(row) // tp + k * width
            row[start : start + width] = host.pages[page, layer, t, offset * width : (offset + 1) * width]
    return row.view(dtype)


@settings(max_examples=60)
@given(
    ranks=st.dictionaries(st.tuples(st.integers(0, 2), st.sampled_from(MODULES)), st.integers(1, 20), min_size=1),
    tp=st.sampled_from([1, 2]),
    dtype=st.sampled_from(sorted(DTYPES)),
    page_tokens=st.sampled_from([1, 16]),
    seed=st.integers(0, 3),
)
def test_round_trip_exact_size_and_no_overlap(ranks, tp, dtype, page_tokens, seed):
    geometry, weights, host = build(ranks, tp, dtype, layers=3, page_tokens=page_tokens, seed=seed)
    modules = unpack(host, geometry)
    assert modules.keys() == ranks.keys()
    for key, (a, b) in modules.items():
        np.testing.assert_array_equal(a, weights.a[key].astype(DTYPES[dtype]))
        np.testing.assert_array_equal(b, weights.b[key].astype(DTYPES[dtype]))
        assert host.ranks_LM[key[0], MODULES.index(key[1])] == ranks[key]
        assert host.scale_LM[key[0], MODULES.index(key[1])] == np.float32(weights.scale[key])
    wanted = sum(rank * sum(geometry.module_dims(module)) for (_, module), rank in ranks.items())
    used = np.concatenate([units.ravel() for units in all_units(host)])
    assert sorted(used) == list(range(host.num_units))
    assert host.num_units * geometry.unit == wanted
    assert host.num_pages == geometry.pages_for_units(host.num_units)
    assert host.pages.shape == (host.num_pages, 3, tp, geometry.page_elements // tp)
    assert host.pages.dtype == geometry.storage_dtype
    assert host.pages.flags.c_contiguous
    assert host.ranks_LM.sum() == sum(ranks.values())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("rank", [1, 3, 4, 8, 32, 64])
def test_d12_any_rank_round_trips(rank, tp):
    ranks = {(layer, module): rank for layer in (0, 1) for module in MODULES}
    geometry, weights, host = build(ranks, tp)
    assert host.rank == rank
    assert host.num_units == 2 * rank * sum(sum(geometry.module_dims(m)) for m in MODULES) // geometry.unit
    for key, (a, b) in unpack(host, geometry).items():
        np.testing.assert_array_equal(a, weights.a[key])
        np.testing.assert_array_equal(b, weights.b[key])


def test_d12_ranks_are_not_padded_to_one_another():
    one = build({(0, "q_proj"): 1})[2]
    mixed = build({(0, "q_proj"): 1, (1, "q_proj"): 64})[2]
    assert mixed.num_units == 65 * one.num_units


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_rows_lie_where_the_layout_says(tp, dtype):
    ranks = {(0, "q_proj"): 3, (0, "k_proj"): 2, (1, "down_proj"): 5, (1, "gate_proj"): 1}
    geometry, weights, host = build(ranks, tp, dtype)
    for (layer, module), rank in ranks.items():
        a_units, b_units = host.row_units(MODULES.index(module), 0, rank)
        for i in range(rank):
            row = weights.a[layer, module][i].astype(DTYPES[dtype])
            np.testing.assert_array_equal(read_row(host, geometry, a_units[layer, i], row.dtype), row)
            row = weights.b[layer, module][:, i].astype(DTYPES[dtype])
            np.testing.assert_array_equal(read_row(host, geometry, b_units[layer, i], row.dtype), row)


def test_row_i_of_a_starts_where_the_fields_say():
    _, _, host = build({(0, "q_proj"): 2, (1, "down_proj"): 3})
    m = MODULES.index("down_proj")
    a, b = host.row_units(m, 0, 3)
    assert host.units_a_M[m] == 3
    assert host.units_b_M[m] == 2
    np.testing.assert_array_equal(a[1, :, 0], host.start_a_LM[1, m] + np.arange(3) * 3)
    np.testing.assert_array_equal(b[1, :, 0], host.start_b_LM[1, m] + np.arange(3) * 2)


def test_units_match_the_pool_s_addresses():
    geometry, weights, host = build({(1, "up_proj"): 20}, page_tokens=4)
    page_ids = np.array([9, 4, 17, 30, 2, 11, 5])
    assert host.num_pages == len(page_ids)
    pool = np.zeros((geometry.num_layers, geometry.num_pages, geometry.page_elements), np.uint32)
    pool[:, page_ids] = host.pages[:, :, 0].transpose(1, 0, 2)
    a_units, _ = host.row_units(MODULES.index("up_proj"), 0, 20)
    rows = pool.reshape(-1, geometry.unit)[geometry.unit_addresses(page_ids, a_units[1])]
    np.testing.assert_array_equal(rows.reshape(20, -1).view(np.float32), weights.a[1, "up_proj"])


def test_row_units_past_the_rank_and_of_absent_modules_are_minus_one():
    _, _, host = build({(0, "q_proj"): 5, (1, "q_proj"): 9})
    q, k = MODULES.index("q_proj"), MODULES.index("k_proj")
    a, b = host.row_units(q, 4, 4)
    assert a.shape == b.shape == (2, 4, 2)
    assert a.dtype == b.dtype == np.int32
    assert (a[0, 0] >= 0).all()
    assert (a[0, 1:] == -1).all()
    assert (b[0, 1:] == -1).all()
    whole_a, whole_b = host.row_units(q, 0, 9)
    np.testing.assert_array_equal(a[1], whole_a[1, 4:8])
    np.testing.assert_array_equal(b[1], whole_b[1, 4:8])
    assert all((units == -1).all() for units in host.row_units(k, 0, 3))
    assert (host.row_units(k, 0, 3)[0].shape, host.row_units(k, 0, 3)[1].shape) == ((2, 3, 2), (2, 3, 1))
    assert host.row_units(q, 0, 0)[0].shape == (2, 0, 2)


def test_scale_is_kept_apart():
    geometry, weights, host = build({(0, "v_proj"): 2})
    weights.scale[0, "v_proj"] = 100.0
    again = pack(weights, geometry, "name", 7)
    np.testing.assert_array_equal(again.pages, host.pages)
    assert again.scale_LM[0, MODULES.index("v_proj")] == 100.0
    assert np.count_nonzero(again.scale_LM) == 1
    assert again.scale_LM.dtype == np.float32


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize(("dtype", "value"), [("float16", 70_000.0), ("bfloat16", 3.4e38), ("float16", -1e9)])
def test_values_beyond_the_compute_type_are_refused(side, dtype, value):
    geometry, weights, _ = build({(1, "k_proj"): 2}, dtype=dtype)
    getattr(weights, side)[1, "k_proj"][1, 1] = value
    with pytest.raises(AdapterError, match=f"layer 1 k_proj .* beyond the range of {dtype}") as caught:
        pack(weights, geometry, "name", 7)
    assert caught.value.reason == "weights_overflow"


def test_packing_leaves_the_weights_alone_and_shares_nothing():
    geometry, weights, host = build({(0, "q_proj"): 2})
    before = host.pages.copy()
    weights.a[0, "q_proj"][:] = 5
    weights.b[0, "q_proj"][:] = 5
    np.testing.assert_array_equal(host.pages, before)
    assert (host.name, host.int_id, host.digest, host.path) == ("name", 7, weights.digest, "")
    assert host != build({(0, "q_proj"): 2})[2]  # compared by identity: two versions may coexist
    assert len({host, pack(weights, geometry, "name", 7)}) == 2
