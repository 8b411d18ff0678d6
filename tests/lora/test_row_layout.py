"""Which rows an adapter takes in a step, what they do, and which units they are."""

from __future__ import annotations

import numpy as np
import pytest

from multilora_jax.lora.deltas import AdapterDeltas
from multilora_jax.lora.packing import pack
from multilora_jax.memory.geometry import MODULES
from tests.lora.random_deltas import geometry_of, make, read_row

SPECIAL = make(
    {(0, "q_proj"): 3, (1, "v_proj"): 2},
    bias=[(0, "q_proj"), (1, "k_proj")],
    gain=[(1, "v_proj")],
    norms=[(0, "input"), (1, "post")],
)
"""Rows 0 to 2 are LoRA, then bias, gain and norm."""


@pytest.mark.parametrize("tp", [1, 2])
def test_special_rows_stand_in_place_of_rows_of_b(tp):
    geometry = geometry_of(tp)
    packed = pack(SPECIAL, geometry)
    layout = packed.layout
    assert (layout.rank, layout.num_rows) == (3, 6)
    assert (layout.bias_row, layout.gain_row, layout.norm_row) == (3, 4, 5)
    assert layout.extended
    wanted = {(key, 3): vector for key, vector in SPECIAL.bias.items()}
    wanted |= {(key, 4): vector for key, vector in SPECIAL.gain.items()}
    wanted |= {((0, "o_proj"), 5): SPECIAL.norms[0, "input"], ((1, "down_proj"), 5): SPECIAL.norms[1, "post"]}
    for m, module in enumerate(MODULES):
        a_LRU, b_LRU = layout.row_units(m, 3, 4)
        assert (a_LRU == -1).all()
        for layer in range(2):
            for row in range(3, 7):
                units = b_LRU[layer, row - 3]
                vector = wanted.pop(((layer, module), row), None)
                if vector is None:
                    assert (units == -1).all()
                else:
                    np.testing.assert_array_equal(read_row(packed, geometry, units, np.float32), vector)
    assert not wanted
    # A block that begins or ends among them.
    for m in range(len(MODULES)):
        whole = layout.row_units(m, 0, 8)
        for first, num in ((2, 2), (4, 1), (5, 3), (0, 4)):
            for part, every in zip(layout.row_units(m, first, num), whole, strict=True):
                np.testing.assert_array_equal(part, every[:, first : first + num])


def test_row_tables_say_what_each_row_does():
    tables = pack(SPECIAL, geometry_of()).layout.row_tables()
    q, k, v = (MODULES.index(f"{name}_proj") for name in "qkv")
    scale, const, gain, norm = (np.zeros((2, n, 6), np.float32) for n in (7, 7, 7, 2))
    scale[0, q, :3], scale[1, v, :2] = SPECIAL.scale[0, "q_proj"], SPECIAL.scale[1, "v_proj"]
    const[0, q, 3] = const[1, k, 3] = gain[1, v, 4] = norm[0, 0, 5] = norm[1, 1, 5] = 1
    for name, wanted in {"scale_LMR": scale, "const_LMR": const, "gain_LMR": gain, "norm_L2R": norm}.items():
        got = getattr(tables, name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, wanted, err_msg=name)


def test_rows_are_taken_only_by_what_is_there():
    norms = pack(make(norms=[(1, "post")]), geometry_of()).layout
    assert (norms.rank, norms.num_rows, norms.bias_row, norms.gain_row, norms.norm_row) == (0, 1, -1, -1, 0)
    bias = pack(make({(0, "q_proj"): 4}, bias=[(0, "q_proj")]), geometry_of()).layout
    assert (bias.num_rows, bias.bias_row, bias.extended) == (5, 4, False)
    gain = pack(make({(0, "q_proj"): 4}, gain=[(0, "q_proj")]), geometry_of()).layout
    assert (gain.num_rows, gain.bias_row, gain.gain_row, gain.extended) == (5, -1, 4, True)
    head = pack(make({(0, "q_proj"): 2}, head={"lora"}), geometry_of()).layout
    assert (head.rank, head.num_rows, head.extended) == (3, 2, True)
    nothing = pack(AdapterDeltas(), geometry_of()).layout
    assert (nothing.rank, nothing.num_rows, nothing.num_pages, nothing.num_units) == (0, 1, 1, 0)
    assert nothing.row_tables().scale_LMR.shape == (2, 7, 1)
    assert (nothing.row_units(0, 0, 8)[1] == -1).all()


def test_row_units_past_the_rank_and_of_absent_modules_are_minus_one():
    layout = pack(make({(0, "q_proj"): 5, (1, "q_proj"): 9}), geometry_of()).layout
    q, k = MODULES.index("q_proj"), MODULES.index("k_proj")
    a, b = layout.row_units(q, 4, 4)
    assert a.shape == b.shape == (2, 4, 2)
    assert a.dtype == b.dtype == np.int32
    assert (a[0, 0] >= 0).all()
    assert (a[0, 1:] == -1).all()
    assert (b[0, 1:] == -1).all()
    whole_a, whole_b = layout.row_units(q, 0, 9)
    np.testing.assert_array_equal(a[1], whole_a[1, 4:8])
    np.testing.assert_array_equal(b[1], whole_b[1, 4:8])
    np.testing.assert_array_equal(whole_a[1, :, 0], layout.start_a_LM[1, q] + np.arange(9) * layout.units_a_M[q])
    assert all((units == -1).all() for units in layout.row_units(k, 0, 3))
    assert (layout.row_units(k, 0, 3)[0].shape, layout.row_units(k, 0, 3)[1].shape) == ((2, 3, 2), (2, 3, 1))
    assert layout.row_units(q, 0, 0)[0].shape == (2, 0, 2)
