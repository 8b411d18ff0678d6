"""Plans of steps: whatever adapters and mixes a bucket's rank rows allow, they fit, and say who meets which rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.engine.batch import BatchShape
from multilora_jax.engine.lora_plans import build_plan, empty_plan, segment_shapes
from multilora_jax.engine.rank_rows import ROW_BLOCK
from pallas_kernels.segmented_lora.plan import NOBODY

SLOTS = 32


def factors(plan, num_rows, num_tokens):
    """float32[R, T] of a plan, and int[T], how many of its blocks each token is in."""
    mix_RT, blocks_T = np.zeros((num_rows, num_tokens), np.float32), np.zeros(num_tokens, int)
    for part in plan:
        for token_C in part.token_NC:
            blocks_T[token_C[token_C != NOBODY]] += 1
        for block, first, rows, mix_C in zip(part.block_W, part.row_W, part.num_rows_W, part.mix_WC, strict=True):
            live_C = part.token_NC[block] != NOBODY
            mix_RT[first : first + rows, part.token_NC[block][live_C]] += mix_C[live_C]
    return mix_RT, blocks_T


def check(shape, num_rows, rows_of, mix_SX, row_P, num_prompt):
    """rows_of: rank rows by slot, side by side in the table in blocks."""
    num_rows_X = np.zeros(SLOTS, np.int64)
    num_rows_X[: len(rows_of)] = rows_of
    whole_X = -(-num_rows_X // ROW_BLOCK) * ROW_BLOCK
    first_X = np.cumsum(whole_X) - whole_X
    plan = build_plan(shape, num_rows, mix_SX, row_P, num_prompt, first_X, num_rows_X)
    row_T = np.concatenate([np.arange(shape.num_decodes), row_P])
    mix_TX = np.where((np.arange(len(row_T)) < shape.num_decodes + num_prompt)[:, None], mix_SX[row_T], 0)
    wanted_RT = np.zeros((num_rows, len(row_T)), np.float32)
    for slot, (first, rows) in enumerate(zip(first_X, num_rows_X, strict=True)):
        wanted_RT[first : first + rows] = mix_TX[:, slot]
    got_RT, blocks_T = factors(plan, num_rows, len(row_T))
    np.testing.assert_array_equal(got_RT, wanted_RT)
    np.testing.assert_array_equal(blocks_T, mix_TX.any(1))  # never two that would write the same token
    sizes, empty = segment_shapes(shape, num_rows), empty_plan(shape, num_rows)
    assert [(len(part.token_NC), len(part.row_W)) for part in plan] == [(s.blocks, s.tiles) for s in sizes]
    for part, none in zip(plan, empty, strict=True):
        assert [(a.shape, a.dtype) for a in list(vars(part).values())[:-1]] == [
            (a.shape, a.dtype) for a in list(vars(none).values())[:-1]
        ]


@settings(max_examples=150)
@given(data=st.data())
def test_every_mix_of_a_bucket_fits(data):
    decodes, blocks = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 6))
    prompt = data.draw(st.integers(blocks, 150)) if blocks else 0
    shape = BatchShape(prompt, blocks, decodes)
    num_rows = data.draw(st.sampled_from([16, 64, 256]))
    rows_of = data.draw(st.lists(st.integers(1, 70), max_size=num_rows // ROW_BLOCK))
    while sum(-(-rows // ROW_BLOCK) for rows in rows_of) > num_rows // ROW_BLOCK:
        rows_of.pop()
    mix_SX = np.zeros((shape.num_rows, SLOTS), np.float32)
    if rows_of:
        slots = st.lists(st.integers(0, len(rows_of) - 1), max_size=data.draw(st.sampled_from([1, 2, 6])))
        for row in range(shape.num_rows):
            for slot in data.draw(slots):
                mix_SX[row, slot] = data.draw(st.sampled_from([1, 0.5, -2]))
    rows_P = st.lists(st.integers(decodes, decodes + max(blocks, 1) - 1), min_size=prompt, max_size=prompt)
    row_P = np.sort(np.array(data.draw(rows_P), int))
    num_prompt = data.draw(st.integers(0, prompt))
    check(shape, num_rows, rows_of, mix_SX, row_P, num_prompt)


@pytest.mark.parametrize("decodes", [2, 16, 33])
def test_every_row_mixes_other_adapters(decodes):
    """So many different mixes of 32 adapters that their tokens must share blocks."""
    mix_SX = np.where(np.random.default_rng(0).random((decodes, SLOTS)) < 0.5, 0, 1.5).astype(np.float32)
    check(BatchShape(0, 0, decodes), 256, [1] * SLOTS, mix_SX, np.zeros(0, int), 0)


def test_one_large_adapter_and_many_small_ones():
    mix_SX = np.zeros((40, SLOTS), np.float32)
    mix_SX[np.arange(40), np.where(np.arange(40) < 24, 0, np.arange(40) - 23)] = 1
    check(BatchShape(0, 0, 40), 256, [120, *[8] * 16], mix_SX, np.zeros(0, int), 0)


def test_a_step_of_the_base_has_an_idle_plan():
    shape = BatchShape(20, 2, 4)
    check(shape, 64, [8], np.zeros((6, SLOTS), np.float32), np.full(20, 4), 20)
    assert not any(part.num_tiles_N.any() for part in empty_plan(shape, 64))
