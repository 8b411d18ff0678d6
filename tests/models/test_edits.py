"""Edits of logits against a loop in numpy, and rows that ask for none."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from multilora_jax.models.batch import SamplingEdits
from multilora_jax.models.edits import ENTRY_CHUNK, edit_logits

edit_jit = jax.jit(edit_logits)


def edits_of(num_rows: int, vocab: int, entries: list[tuple[Any, ...]], masks: dict[int, set[int]]) -> SamplingEdits:
    """Entries (row, token, bias, factor, penalty), and the tokens that masked rows may have."""
    room = 4 * ENTRY_CHUNK
    columns = [np.zeros(room, dtype) for dtype in (np.int32, np.int32, np.float32, np.float32, np.float32)]
    for place, entry in enumerate(entries):
        for column, value in zip(columns, entry, strict=True):
            column[place] = value
    masked_S = np.zeros(num_rows, bool)
    bits_SV = np.zeros((num_rows, -(-vocab // 32) * 32), bool)
    for row, allowed in masks.items():
        masked_S[row] = True
        bits_SV[row, list(allowed)] = True
    mask_SW = np.packbits(bits_SV, axis=-1, bitorder="little").view(np.uint32)
    arrays: Any = [*columns, np.int32(len(entries)), masked_S, mask_SW]
    return SamplingEdits(*arrays)


def by_loop(logits_SV, entries, masks):
    """float32, one entry after the other."""
    out = logits_SV.copy()
    for row, allowed in masks.items():
        out[row, [token for token in range(out.shape[1]) if token not in allowed]] = -np.inf
    for row, token, bias, factor, penalty in entries:
        x = np.float32(out[row, token] + np.float32(bias))
        x = x / np.float32(factor) if x > 0 else x * np.float32(factor)
        out[row, token] = x - np.float32(penalty)
    return out


@pytest.mark.parametrize("num_rows", [1, 3, 17])
@pytest.mark.parametrize("num_entries", [0, 1, ENTRY_CHUNK, ENTRY_CHUNK + 1, 3 * ENTRY_CHUNK])
def test_edits_equal_a_loop(num_rows, num_entries):
    rng, vocab = np.random.default_rng(num_rows * 10_000 + num_entries), 4001
    logits_SV = (3 * rng.standard_normal((num_rows, vocab))).astype(np.float32)
    logits_SV[:, 3990:] = -np.inf  # ids that the rows do not have
    edited = rng.permutation(num_rows)[: num_rows // 2 + 1]
    pairs = rng.permutation(len(edited) * vocab)[:num_entries]
    entries = [
        (
            int(edited[pair // vocab]), int(pair % vocab), rng.choice([0.0, 5.0, -100.0, -np.inf]),
            rng.choice([1.0, 1.3, 0.7]), rng.choice([0.0, 0.5, -2.0]),
        )
        for pair in pairs
    ]  # fmt: skip
    masks = {int(row): set(rng.permutation(vocab)[:50].tolist()) for row in edited[::2]} if num_entries % 2 else {}
    got = np.asarray(edit_jit(logits_SV, edits_of(num_rows, vocab, entries, masks)))
    np.testing.assert_allclose(got, by_loop(logits_SV, entries, masks), rtol=3e-7, atol=0)
    asked = {entry[0] for entry in entries} | set(masks)
    for row in set(range(num_rows)) - asked:
        assert got[row].tobytes() == logits_SV[row].tobytes()


def test_the_last_bit_of_a_mask_and_the_tokens_after_it():
    logits_SV = np.zeros((2, 33), np.float32)
    got = np.asarray(edit_jit(logits_SV, edits_of(2, 33, [], {1: {0, 31, 32}})))
    assert np.isfinite(got[0]).all()
    assert np.flatnonzero(np.isfinite(got[1])).tolist() == [0, 31, 32]


def test_a_ban_survives_every_other_edit():
    logits_SV = np.full((1, 8), 4.0, np.float32)
    entries = [(0, 2, -np.inf, 0.5, -2.0), (0, 3, -np.inf, 1e6, 100.0)]
    got = np.asarray(edit_jit(logits_SV, edits_of(1, 8, entries, {})))
    assert np.flatnonzero(got[0] == -np.inf).tolist() == [2, 3]
    assert not np.isnan(got).any()
