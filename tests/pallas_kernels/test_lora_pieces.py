"""LoRA of prompts in pieces against the oracle: segments, mixes, ranks, both layouts of the rank rows, shards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.segmented_lora import PromptPieces, add_lora_of_pieces
from pallas_kernels.segmented_lora.xla_blocks import BLOCK_ROWS
from pallas_kernels.segmented_lora.xla_pieces import PIECE_BLOCKS, PIECE_TOKENS
from tests.pallas_kernels.test_lora_blocks import Problem

BEFORE = 5
"""Tokens that are no prompt's: of decode rows."""


class Prompts(Problem):
    """BEFORE tokens of decode rows, then prompts of (number of tokens, {adapter: factor}), then padding."""

    def __init__(self, ranks, prompts, in_dim, out_dims, *, padding=0, **options):
        self.num_tokens = sum(count for count, _ in prompts) + padding
        factor_TX = np.zeros((BEFORE + self.num_tokens, len(ranks)), np.float32)
        super().__init__(ranks, factor_TX, in_dim, out_dims, **options)
        self.pieces = PromptPieces.empty(self.num_tokens, max(1, len(prompts)), len(self.owner_R))
        segments, first = [], 0
        for count, mix in prompts:
            blocks = [(block, factor) for x, factor in mix.items() for block in self.blocks[x]]
            segments.append((first, count, blocks))
            for x, factor in mix.items():
                factor_TX[BEFORE + first : BEFORE + first + count, x] = factor
            first += count
        self.factor_TX = factor_TX
        self.pieces.fill(segments)

    def buffers(self, blocked):
        if blocked:
            return self.a_NIC, self.b_MNKO
        N, in_dim, _ = self.a_NIC.shape
        a_MRI = self.a_NIC.reshape(N, in_dim, self.M, BLOCK_ROWS).transpose(2, 0, 3, 1).reshape(self.M, -1, in_dim)
        return a_MRI, [b.reshape(-1, b.shape[2]).T for b in self.b_MNKO]

    def run_pieces(self, blocked):
        """Per module, what is added to an output that is not zero."""
        out_dims = [b.shape[2] for b in self.b_MNKO]
        y_TO = np.random.default_rng(5).standard_normal((len(self.x_TI), sum(out_dims))).astype(np.float32)
        fn = jax.jit(add_lora_of_pieces, static_argnames="num_prompt_tokens")
        tables = self.scale_MR, self.const_MR, self.pieces
        out = fn(y_TO, self.x_TI, *self.buffers(blocked), *tables, num_prompt_tokens=self.num_tokens)
        assert out.dtype == jnp.float32
        return np.split(np.asarray(out) - y_TO, np.cumsum(out_dims)[:-1], 1)

    def check(self, blocked):
        rounding = 2e-2 if self.dtype != np.float32 else 2e-5
        for m, got in enumerate(self.run_pieces(blocked)):
            wanted, size = self.wanted(m)
            assert np.all(np.abs(got - wanted) <= rounding * (size.max() + 1))
            nobody = ~np.any(self.factor_TX, 1)
            np.testing.assert_allclose(got[nobody], 0, atol=1e-6)


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize(
    "prompts",
    [
        [(200, {})],
        [(200, {1: 1.0})],
        [(50, {0: 1.0}), (50, {1: 1.0}), (50, {}), (50, {2: 1.0})],
        [(3, {0: 1.0}), (130, {1: 1.0}), (3, {0: 1.0})],  # the windows of the last two overlap
        [(40, {1: 1.0}), (40, {1: 1.0}), (40, {1: 0.5})],
        [(70, {0: 0.5, 1: -2.0}), (9, {0: 0.5})],
        [(20, {2: 1.0})],  # fewer tokens than a piece has
    ],
)
def test_prompts(prompts, blocked):
    Prompts([64, 5, 16], prompts, 48, (40, 16, 16)).check(blocked)


@settings(max_examples=8)
@given(
    ranks=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    prompts=st.lists(
        st.tuples(
            st.integers(1, 150),
            st.dictionaries(st.integers(0, 3), st.sampled_from([1.0, 1.0, 0.5, -2.0]), max_size=3),
        ),
        min_size=1, max_size=6,
    ),
    out_dims=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    blocked=st.booleans(),
    padding=st.integers(0, 70),
)  # fmt: skip
def test_anything(ranks, prompts, out_dims, dtype, blocked, padding):
    prompts = [(count, {x % len(ranks): factor for x, factor in mix.items()}) for count, mix in prompts]
    Prompts(ranks, prompts, 24, tuple(out_dims), dtype=dtype, padding=padding).check(blocked)


def test_a_constant_row_is_a_bias():
    problem = Prompts([16, 8], [(30, {0: 0.5}), (30, {1: 1.0})], 16, (24,))
    before = problem.run_pieces(True)[0]
    row = BLOCK_ROWS * problem.blocks[0][1] + 3
    problem.const_MR[0, row] = 1
    change = problem.run_pieces(True)[0] - before
    np.testing.assert_allclose(change[BEFORE : BEFORE + 30], np.tile(0.5 * problem.b_MNKO[0][row // 8, 3], (30, 1)),
                               rtol=1e-4, atol=1e-5)  # fmt: skip
    assert not np.any(change[:BEFORE])
    assert not np.any(change[BEFORE + 30 :])


def test_shards_add_up():
    """I split in four, as tensor parallelism has it: each shard gets the whole delta."""
    problem = Prompts([24, 8], [(80, {0: 1.0}), (20, {1: 2.0})], 32, (20,))
    (wanted,) = problem.run_pieces(True)
    y_TO = jnp.zeros((len(problem.x_TI), 20))
    pieces = jax.tree.map(jnp.asarray, problem.pieces)

    def shard(x_TI, a_NIC):
        tables = jnp.asarray(problem.scale_MR), jnp.asarray(problem.const_MR), pieces
        b_MNKO = list(map(jnp.asarray, problem.b_MNKO))
        return add_lora_of_pieces(y_TO, x_TI, a_NIC, b_MNKO, *tables, problem.num_tokens, axis_name="model")

    parts = np.stack(np.split(problem.x_TI, 4, 1)), np.stack(np.split(problem.a_NIC, 4, 1))
    for got in jax.vmap(shard, axis_name="model")(*parts):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_room_for_the_most_pieces():
    """As many segments as there may be, each with all rank rows; the last of them a token long."""
    num_rows = 3 * PIECE_BLOCKS * BLOCK_ROWS
    blocks = [(block, 1.0) for block in range(num_rows // BLOCK_ROWS)]
    counts = [1, PIECE_TOKENS + 1, PIECE_TOKENS - 3, 1]
    pieces = PromptPieces.empty(sum(counts), len(counts), num_rows)
    segments, first = [], 0
    for n, count in enumerate(counts):
        segments.append((first, count, [(block, factor + n) for block, factor in blocks]))
        first += count
    pieces.fill(segments)
    assert pieces.num_pieces == 3 * (1 + 2 + 1 + 1)
    assert pieces.end_N[pieces.num_pieces - 1] == sum(counts)
    assert pieces.num_pieces <= len(pieces.first_N)


def test_neighbours_of_one_mix_are_one_segment():
    pieces = PromptPieces.empty(64, 4, 64)
    same = [(3, 1.0)]
    pieces.fill([(0, 20, same), (20, 20, list(same)), (40, 4, []), (44, 20, same)])
    assert pieces.num_pieces == 2
    assert pieces.first_N[:2].tolist() == [0, 44]
    assert pieces.end_N[:2].tolist() == [40, 64]
    assert pieces.block_NG[:2].tolist() == [[3, 0], [3, 0]]
    assert pieces.factor_NG[:2].tolist() == [[1, 0], [1, 0]]
