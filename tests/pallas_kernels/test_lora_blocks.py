"""Segmented LoRA over blocks of rank rows against its oracle: mixes, layouts, shards, rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.bench.mixes import MIXES, segments
from multilora_jax.engine.rank_rows import ROW_BLOCK
from pallas_kernels.segmented_lora import (
    BlockUsers,
    lora_delta_reference,
    lora_deltas_of_blocks,
    lora_expand,
)
from pallas_kernels.segmented_lora.xla_blocks import BLOCK_ROWS, TURN_BLOCKS, TURN_USERS, users_of_a_round


class Problem:
    """Adapters of M modules in blocks in any order, with blocks that nobody owns, and tokens with factors on them.

    What a block holds past its adapter's rank, and what foreign blocks hold, is NaN in A and noise in B.
    """

    def __init__(self, ranks, factor_TX, in_dim, out_dims, *, dtype="float32", free=2, seed=0):
        rng = np.random.default_rng(seed)
        self.dtype, self.factor_TX = jnp.dtype(dtype), np.asarray(factor_TX, np.float32)
        num_blocks = sum(-(-r // BLOCK_ROWS) for r in ranks) + free
        places = rng.permutation(num_blocks).tolist()
        self.M, N = len(out_dims), num_blocks
        self.x_TI = rng.standard_normal((len(self.factor_TX), in_dim)).astype(self.dtype)
        a = np.full((N, in_dim, self.M, BLOCK_ROWS), np.nan, np.float32)
        b = [rng.standard_normal((N, BLOCK_ROWS, o)).astype(np.float32) for o in out_dims]
        self.scale_MR, self.const_MR = np.zeros((2, self.M, N, BLOCK_ROWS), np.float32)
        self.owner_R = np.full((N, BLOCK_ROWS), -2)
        self.blocks, self.a, self.b, self.scale = [], [], [], rng.uniform(0.25, 2, (self.M, len(ranks)))
        for x, r in enumerate(ranks):
            mine = [places.pop() for _ in range(-(-r // BLOCK_ROWS))]
            self.blocks.append(mine)
            self.owner_R[mine] = x
            self.a.append(rng.standard_normal((self.M, r, in_dim)).astype(self.dtype))
            self.b.append([rng.standard_normal((o, r)).astype(self.dtype) for o in out_dims])
            for row in range(r):
                block, k = mine[row // BLOCK_ROWS], row % BLOCK_ROWS
                a[block, :, :, k] = self.a[x][:, row].T
                self.scale_MR[:, block, k] = self.scale[:, x]
                for m in range(self.M):
                    b[m][block, k] = self.b[x][m][:, row]
        self.a_NIC = a.reshape(N, in_dim, -1).astype(self.dtype)
        self.b_MNKO = [x.astype(self.dtype) for x in b]
        self.scale_MR, self.const_MR = self.scale_MR.reshape(self.M, -1), self.const_MR.reshape(self.M, -1)
        self.owner_R = self.owner_R.reshape(-1)
        self.mix_RT = np.where(self.owner_R[:, None] >= 0, self.factor_TX.T[np.maximum(self.owner_R, 0)], 0).astype(
            np.float32
        )

    def run(self, features_first, **options):
        """Per module float32[T, O]."""
        users = jax.jit(BlockUsers.of)(self.mix_RT)
        fn = jax.jit(lora_deltas_of_blocks, static_argnames=("features_first",))
        x = self.x_TI.T if features_first else self.x_TI
        out = fn(x, self.a_NIC, self.b_MNKO, self.scale_MR, self.const_MR, users, features_first=features_first)
        assert all(y.dtype == jnp.float32 for y in out)
        return [np.asarray(y).T if features_first else np.asarray(y) for y in out]

    def wanted(self, m):
        """By the oracle, one adapter at a time; and the size of what was added up."""
        T, X = self.factor_TX.shape
        b = [self.b[x][m] for x in range(X)]
        parts = [
            lora_delta_reference(self.x_TI, [a[m] for a in self.a], b, self.scale[m].tolist(), np.full(T, x))
            for x in range(X)
        ]
        weighted = [self.factor_TX[:, [x]] * part for x, part in enumerate(parts)]
        return np.sum(weighted, 0), np.sum(np.abs(weighted), 0)

    def check(self, features_first):
        got = self.run(features_first)
        for m in range(self.M):
            wanted, size = self.wanted(m)
            rounding = 2e-2 if self.dtype != np.float32 else 2e-5
            assert np.all(np.abs(got[m] - wanted) <= rounding * (size.max() + 1))
            assert np.all(got[m][~self.factor_TX.any(1)] == 0)


def one_each(adapter_T, num_adapters):
    return (np.asarray(adapter_T)[:, None] == np.arange(num_adapters)).astype(np.float32)


def test_a_block_is_what_the_engine_places():
    assert BLOCK_ROWS == ROW_BLOCK


@pytest.mark.parametrize(("num_blocks", "num_tokens"), [(64, 32), (32, 32), (64, 2), (2, 32), (96, 17), (40, 1)])
def test_a_round_has_room_for_twice_the_tokens_at_most(num_blocks, num_tokens):
    users = users_of_a_round(num_blocks, num_tokens)
    assert num_tokens % users == 0
    assert users == 1 or num_blocks * users <= 2 * num_tokens


@pytest.mark.parametrize("features_first", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_segment_mixes(mix, features_first):
    adapter_T = np.random.default_rng(1).permutation(segments(mix, 24))
    num_adapters = max(int(adapter_T.max()) + 1, 1)
    ranks = [(1, 8, 16, 30)[i % 4] for i in range(num_adapters)]
    Problem(ranks, one_each(adapter_T, num_adapters), 64, (64, 32)).check(features_first)


@pytest.mark.parametrize("features_first", [True, False])
def test_a_mix_is_the_sum_of_scaled_deltas_and_an_overflow_stays_where_it_is(features_first):
    factors = [[1, 0, 0], [0.5, -2, 0], [0, 0, 0], [0.25, 1, 3], [0, 0, 1], [1, 0, 0]]
    problem = Problem([4, 20, 8], factors, 32, (16, 24, 8), dtype="bfloat16")
    problem.check(features_first)
    clean = problem.run(features_first)
    problem.x_TI[4] = np.inf
    for before, after in zip(clean, problem.run(features_first), strict=True):
        np.testing.assert_array_equal(np.delete(after, 4, 0), np.delete(before, 4, 0))
        assert not np.isfinite(after[4]).any()


def test_nobody_uses_anything():
    problem = Problem([8, 8], np.zeros((4, 2)), 16, (16,))
    assert int(BlockUsers.of(jnp.asarray(problem.mix_RT)).num_rounds) == 0
    problem.check(True)


@pytest.mark.parametrize("features_first", [True, False])
@pytest.mark.parametrize("shared", [2, 9, 33])
def test_blocks_with_more_users_than_a_round_takes_have_turns(shared, features_first):
    """One adapter of many tokens beside 31 with one each."""
    adapter_T = np.random.default_rng(shared).permutation([0] * shared + list(range(1, 32)))
    problem = Problem([16] + [8] * 31, one_each(adapter_T, 32), 32, (16, 24))
    users = BlockUsers.of(jnp.asarray(problem.mix_RT))
    of_a_round = users_of_a_round(35, len(adapter_T))
    pieces = 2 * -(-shared // TURN_USERS) if shared > of_a_round else 0
    assert (int(users.num_rounds), int(users.num_turns)) == (1, -(-pieces // TURN_BLOCKS))
    problem.check(features_first)


@pytest.mark.parametrize("features_first", [True, False])
@pytest.mark.parametrize(
    ("used", "tokens_each", "rounds", "turns"), [(1, 1, 0, 1), (9, 1, 0, 3), (9, 5, 0, 3), (10, 1, 1, 0), (2, 20, 0, 1)]
)
def test_a_few_blocks_with_users_have_no_round(used, tokens_each, rounds, turns, features_first):
    """Of 40 blocks: a round would read them all."""
    problem = Problem([8] * 40, one_each([*range(used)] * tokens_each, 40), 32, (16, 24), free=0)
    users = BlockUsers.of(jnp.asarray(problem.mix_RT))
    assert (int(users.num_rounds), int(users.num_turns)) == (rounds, turns)
    problem.check(features_first)


@pytest.mark.parametrize("features_first", [True, False])
def test_a_constant_row_is_a_bias(features_first):
    problem = Problem([8, 9], one_each([0, 1, -1, 1], 2), 16, (16, 8))
    row = BLOCK_ROWS * problem.blocks[1][1]
    problem.scale_MR[:, row], problem.const_MR[1, row] = 0, 1
    bias = problem.b_MNKO[1].reshape(-1, 8)[row]
    with_bias = problem.run(features_first)[1]
    problem.const_MR[1, row] = 0
    without = problem.run(features_first)[1]
    np.testing.assert_allclose(with_bias - without, np.outer([0, 1, 0, 1], bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("features_first", [True, False])
def test_a_sharded_input_is_summed(features_first):
    problem = Problem([8, 16], one_each([0, 1, -1, 1], 2), 32, (16, 24))
    problem.const_MR[:, BLOCK_ROWS * problem.blocks[0][0]] = 1
    whole = problem.run(False)
    users = BlockUsers.of(jnp.asarray(problem.mix_RT))
    x_TI = np.stack(np.split(problem.x_TI, 4, 1))

    def shard(x_TI, a_NIC):
        x = x_TI.T if features_first else x_TI
        scale_MR, const_MR = jnp.asarray(problem.scale_MR), jnp.asarray(problem.const_MR)
        b_MNKO = list(map(jnp.asarray, problem.b_MNKO))
        return lora_deltas_of_blocks(
            x, a_NIC, b_MNKO, scale_MR, const_MR, users, features_first=features_first, axis_name="model"
        )

    out = jax.vmap(shard, axis_name="model")(x_TI, np.stack(np.split(problem.a_NIC, 4, 1)))
    for wanted, got in zip(whole, out, strict=True):
        for part in np.asarray(got):
            np.testing.assert_allclose(part.T if features_first else part, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("features_first", [True, False])
def test_expanding_reads_blocks_as_it_reads_rows(features_first):
    problem = Problem([8, 16], one_each([0, 1, -1], 2), 16, (24,))
    s_TR = np.random.default_rng(0).standard_normal((3, len(problem.owner_R))).astype(np.float32)
    b_RO = problem.b_MNKO[0].reshape(-1, 24)
    s = s_TR.T if features_first else s_TR
    for b in (problem.b_MNKO[0], b_RO.T):
        got = np.asarray(lora_expand(jnp.asarray(s), jnp.asarray(b), features_first=features_first))
        np.testing.assert_allclose(got.T if features_first else got, s_TR @ b_RO, rtol=1e-5, atol=1e-5)


@settings(max_examples=12)
@given(
    ranks=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    factors=st.lists(st.lists(st.sampled_from([0.0, 0.0, 1.0, -0.5]), min_size=4, max_size=4), min_size=1, max_size=9),
    in_dim=st.integers(1, 24),
    out_dims=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    features_first=st.booleans(),
    free=st.integers(0, 3),
)
def test_anything(ranks, factors, in_dim, out_dims, dtype, features_first, free):
    factor_TX = np.asarray(factors)[:, : len(ranks)]
    Problem(ranks, factor_TX, in_dim, out_dims, dtype=dtype, free=free).check(features_first)
