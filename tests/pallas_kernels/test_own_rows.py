"""Of the projections of all devices each token's own rows are summed, and no others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.segmented_lora import SegmentShape, make_plan
from pallas_kernels.segmented_lora.own_rows import packed_size, sum_dense, sum_tiles
from pallas_kernels.segmented_lora.plan import NOBODY, count_own_rows

SHAPES = (SegmentShape(20, 96, tile_rows=32), SegmentShape(6, 24, block_tokens=32))
T, R = 14, 192


def make_case(ranks, mix_TX):
    """A plan of short and of long segments, and bool[T, R]: the rows of each token's own adapters."""
    first_X = np.cumsum(ranks) - ranks
    plan = make_plan(first_X, np.asarray(ranks), SHAPES, mix_TX=mix_TX, long_segment=4)
    own_TR = np.zeros((len(mix_TX), R), bool)
    for x, (first, rank) in enumerate(zip(first_X, ranks, strict=True)):
        own_TR[:, first : first + rank] = (mix_TX[:, x] != 0)[:, None]
    return jax.tree.map(jnp.asarray, plan), own_TR


def live_places(part):
    token_WC = np.asarray(part.token_NC)[np.asarray(part.block_W)]
    row_WK = np.arange(part.tile_rows) < np.asarray(part.num_rows_W)[:, None]
    return (token_WC != NOBODY)[:, :, None] & row_WK[:, None]


def sums_of(parts, plan, own_rows):
    """What each of two devices gets, the second having twice the parts of the first."""
    stacked = [jnp.stack([s, 2 * s]) for s in parts]
    return jax.vmap(lambda parts: sum_tiles(parts, plan, T, R, own_rows, "model"), axis_name="model")(stacked)


@settings(max_examples=40)
@given(data=st.data(), ranks=st.lists(st.integers(0, 40), min_size=4, max_size=4))
def test_tiles_of_any_batch_come_back_summed(data, ranks):
    weights = st.sampled_from([0, 0, 0, 1, -2])
    mix_TX = np.array(data.draw(st.lists(st.lists(weights, min_size=4, max_size=4), min_size=T, max_size=T)), float)
    plan, own_TR = make_case(ranks, mix_TX)
    count = count_own_rows(jax.tree.map(np.asarray, plan))
    assert count == own_TR.sum()
    rng = np.random.default_rng(0)
    # Idle places may hold anything.
    parts = [jnp.asarray(np.where(p := live_places(part), rng.standard_normal((2, 3, *p.shape)), np.nan), jnp.float32)
             for part in plan]  # fmt: skip
    for own_rows in (0, -(-count // T)):
        for part, s, got in zip(plan, parts, sums_of(parts, plan, own_rows), strict=True):
            wanted = np.where(live_places(part), 3 * np.asarray(s).sum(0), 0)
            for device in range(2):
                np.testing.assert_allclose(np.asarray(got)[device, 0], wanted, rtol=1e-6, atol=1e-6)


def test_sizes():
    assert packed_size(64, 1024, 16) == 1024
    assert packed_size(64, 16, 8) == 512
    assert packed_size(64, 16, 16) is packed_size(64, 1024, 0) is None


@pytest.mark.parametrize("features_first", [True, False])
def test_dense_projections(features_first):
    mix_TX = np.zeros((T, 4))
    mix_TX[np.arange(T), np.arange(T) % 4] = 1
    mix_TX[3] = 0
    mix_TX[5, :2] = 0.5
    _, own_TR = make_case([4, 8, 3, 1], mix_TX)
    s_MTR = np.random.default_rng(1).standard_normal((2, 2, T, R)).astype(np.float32)
    own = own_TR.T if features_first else own_TR
    s = s_MTR.swapaxes(2, 3) if features_first else s_MTR

    def run(size):
        return jax.vmap(lambda s: sum_dense(s, jnp.asarray(own), size, "model"), axis_name="model")(jnp.asarray(s))

    count = int(own.sum())
    for size in (None, count, count + 9):
        for got in np.asarray(run(size)):
            np.testing.assert_allclose(got[:, own], s.sum(0)[:, own], rtol=1e-6, atol=1e-6)
    assert not np.asarray(run(count + 9))[0][:, ~own].any()
    # One too few: its last row is lost.
    assert (np.asarray(run(count - 1))[0][:, own] != 0).sum() == 2 * (count - 1)
