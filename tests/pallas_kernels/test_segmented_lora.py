"""Segmented LoRA against its oracle: shapes, layouts, types, mixes of segments and ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from multilora_jax.bench.mixes import MIXES, segments
from pallas_kernels.segmented_lora import lora_delta_reference, lora_expand, lora_shrink

DTYPES = ["float32", "bfloat16"]
LAYOUTS = [True, False]


class Problem:
    """Adapters of M modules that share an input, and the tokens that use them.

    Args:
        ranks: of each adapter; adapter_T: int[T], an adapter or -1; out_dims: of each module.
        padding: rank rows that nobody owns, behind each adapter's.
    """

    def __init__(self, ranks, adapter_T, in_dim, out_dims, dtype, *, padding=0, seed=0):
        rng = np.random.default_rng(seed)
        self.dtype, self.ranks, self.adapter_T, self.padding = jnp.dtype(dtype), ranks, np.asarray(adapter_T), padding

        def draw(*shape):
            return rng.standard_normal(shape).astype(self.dtype)

        self.x_TI = draw(len(self.adapter_T), in_dim)
        self.a = [[draw(r, in_dim) for r in ranks] for _ in out_dims]
        self.b = [[draw(o, r) for r in ranks] for o in out_dims]
        self.scale = rng.uniform(0.25, 2.0, (len(out_dims), len(ranks))).astype(np.float32)

    def rows(self, foreign_a=0.0):
        """a_MRI, per module b_OR, owner_R, and scale_MR; rows that nobody owns hold `foreign_a` in A, noise in B."""
        a, b, owner, scale = [], [], [], []
        for m in range(len(self.a)):
            parts_a, parts_b, parts_s, owner = [], [], [], []
            for i, r in enumerate(self.ranks):
                parts_a += [self.a[m][i], np.full((self.padding, self.x_TI.shape[1]), foreign_a, self.dtype)]
                parts_b += [self.b[m][i], np.full((self.b[m][i].shape[0], self.padding), 7, self.dtype)]
                owner += [i] * r + [-2] * self.padding
                parts_s += [self.scale[m, i]] * r + [0.0] * self.padding
            a.append(np.concatenate(parts_a))
            b.append(np.concatenate(parts_b, 1))
            scale.append(parts_s)
        return np.stack(a), b, np.array(owner), np.array(scale, np.float32)

    def run(self, features_first, **options):
        """Per module [T, O], by the operations under test."""
        a_MRI, b, owner_R, scale_MR = self.rows(**options)
        mix_RT = (owner_R[:, None] == self.adapter_T).astype(np.float32)
        x = self.x_TI.T if features_first else self.x_TI
        shrink = jax.jit(lora_shrink, static_argnames="features_first")
        s = shrink(x, a_MRI, scale_MR, mix_RT, features_first=features_first)
        assert s.dtype == self.dtype
        out = [lora_expand(s[m], jnp.asarray(b[m]), features_first=features_first) for m in range(len(b))]
        assert all(y.dtype == jnp.float32 for y in out)
        return [np.asarray(y).T if features_first else np.asarray(y) for y in out]

    def check(self, features_first, **options):
        for m, got in enumerate(self.run(features_first, **options)):
            wanted = lora_delta_reference(self.x_TI, self.a[m], self.b[m], self.scale[m], self.adapter_T)
            bound = np.full_like(wanted, 1e-6)
            for t, i in enumerate(self.adapter_T):
                if i >= 0:
                    a, b = self.a[m][i].astype(np.float32), self.b[m][i].astype(np.float32)
                    x = self.x_TI[t].astype(np.float32)
                    # Float32 sums in another order; and in bfloat16 the shrunk value is rounded, by half of 2^-8.
                    size = np.abs(b) @ (np.abs(a) @ np.abs(x))
                    rounding = np.abs(b) @ np.abs(a @ x) * (2.0**-8 if self.dtype != np.float32 else 0)
                    bound[t] += self.scale[m, i] * (4e-7 * size + rounding)
            assert np.all(np.abs(got - wanted) <= bound)
            assert np.all(got[self.adapter_T < 0] == 0)


@pytest.mark.parametrize("features_first", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_dim", "out_dims"), [(64, (64, 32, 32)), (96, (64,)), (16, (48, 48)), (200, (1,))])
def test_shapes(in_dim, out_dims, dtype, features_first):
    adapter_T = np.array([0, 1, -1, 2, 2, 0, -1, 3, 1])
    Problem([8, 1, 3, 16], adapter_T, in_dim, out_dims, dtype, padding=2).check(features_first)


@pytest.mark.parametrize(("dtype", "features_first"), [("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize("mix", MIXES)
def test_segment_mixes(mix, dtype, features_first):
    adapter_T = segments(mix, 24)
    num_adapters = max(int(adapter_T.max()) + 1, 1)
    ranks = [(1, 8, 16, 3)[i % 4] for i in range(num_adapters)]
    Problem(ranks, adapter_T, 64, (64, 32), dtype).check(features_first)
    Problem(ranks, np.random.default_rng(0).permutation(adapter_T), 64, (64, 32), dtype).check(features_first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 33, 128])
def test_ranks_from_1_to_64(num_tokens, dtype):
    ranks = [1, 64, 2, 32, 3, 17, 4, 8, 48]
    adapter_T = np.random.default_rng(num_tokens).integers(-1, len(ranks), num_tokens)
    Problem(ranks, adapter_T, 64, (96, 96), dtype, padding=5).check(True)


@pytest.mark.parametrize("features_first", LAYOUTS)
@pytest.mark.parametrize("foreign", [np.nan, np.inf, -np.inf])
def test_rows_that_nobody_owns_never_leak(foreign, features_first):
    problem = Problem([4, 8], [0, 1, -1, 1], 32, (16, 16), "float32", padding=3)
    problem.check(features_first, foreign_a=foreign)


@pytest.mark.parametrize("features_first", LAYOUTS)
def test_a_token_of_another_adapter_may_overflow(features_first):
    problem = Problem([4, 8], [0, 1, -1, 1], 32, (16,), "float32")
    clean = problem.run(features_first)[0]
    problem.x_TI[1] = np.inf
    dirty = problem.run(features_first)[0]
    np.testing.assert_array_equal(dirty[[0, 2, 3]], clean[[0, 2, 3]])
    assert not np.isfinite(dirty[1]).any()


@pytest.mark.parametrize("features_first", LAYOUTS)
def test_a_sharded_input_is_summed(features_first):
    problem = Problem([4, 8], [0, 1, -1, 1, 0], 32, (16, 24), "float32")
    a_MRI, _, owner_R, scale_MR = problem.rows()
    mix_RT = jnp.asarray(owner_R[:, None] == problem.adapter_T, jnp.float32)
    x = problem.x_TI.T if features_first else problem.x_TI
    scale_MR = jnp.asarray(scale_MR)
    const_MR = jnp.asarray(scale_MR > 1, jnp.float32)  # added once, however many shards there are
    whole = lora_shrink(jnp.asarray(x), jnp.asarray(a_MRI), scale_MR, mix_RT, const_MR, features_first=features_first)
    axis = 0 if features_first else 1

    def shard(x, a):
        return lora_shrink(x, a, scale_MR, mix_RT, const_MR, features_first=features_first, axis_name="model")

    parts = jax.vmap(shard, axis_name="model")(np.stack(np.split(x, 4, axis)), np.stack(np.split(a_MRI, 4, 2)))
    for part in parts:
        np.testing.assert_allclose(part, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("features_first", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mix_is_the_sum_of_scaled_deltas(dtype, features_first):
    problem = Problem([4, 8, 3], [0, 0, 0, 0], 32, (16, 24), dtype, padding=2)
    a_MRI, b, owner_R, scale_MR = problem.rows(foreign_a=np.nan)
    mix_TX = np.array([[1, 0, 0], [0.5, -2, 0], [0, 0, 0], [0.25, 1, 3]], np.float32)
    mix_RT = np.where(owner_R[:, None] >= 0, mix_TX.T[np.maximum(owner_R, 0)], 0)
    x = problem.x_TI.T if features_first else problem.x_TI
    s = lora_shrink(*map(jnp.asarray, (x, a_MRI, scale_MR, mix_RT)), features_first=features_first)
    for m in range(2):
        out = np.asarray(lora_expand(s[m], jnp.asarray(b[m]), features_first=features_first))
        one_by_one = [
            lora_delta_reference(problem.x_TI, problem.a[m], problem.b[m], problem.scale[m], np.full(4, i))
            for i in range(3)
        ]
        wanted = np.einsum("tx,xto->to", mix_TX, one_by_one)
        bound = (1e-5 if dtype == "float32" else 3e-2) * np.abs(one_by_one).sum(0).max() * 4
        assert np.abs((out.T if features_first else out) - wanted).max() <= bound
        assert not (out.T if features_first else out)[2].any()


@pytest.mark.parametrize("features_first", LAYOUTS)
def test_a_constant_row_is_a_bias_and_its_row_of_a_is_never_read(features_first):
    problem = Problem([4, 1], [0, 1, -1, 0], 32, (16,), "float32")
    a_MRI, b, owner_R, scale_MR = problem.rows()
    a_MRI[0, 4], scale_MR[0, 4] = np.nan, 0
    const_MR = np.array([[0, 0, 0, 0, 1]], np.float32)
    mix_RT = np.where(owner_R[:, None] == problem.adapter_T, 0.5, 0).astype(np.float32)
    x = problem.x_TI.T if features_first else problem.x_TI
    s = lora_shrink(*map(jnp.asarray, (x, a_MRI, scale_MR, mix_RT, const_MR)), features_first=features_first)
    out = np.asarray(lora_expand(s[0], jnp.asarray(b[0]), features_first=features_first))
    out = out.T if features_first else out
    np.testing.assert_allclose(out[1], 0.5 * b[0][:, 4], rtol=1e-6)
    assert not out[2].any()
    problem.scale[0, 0] *= 0.5
    wanted = lora_delta_reference(problem.x_TI, problem.a[0], problem.b[0], problem.scale[0], np.array([0, -1, -1, 0]))
    np.testing.assert_allclose(out[[0, 3]], wanted[[0, 3]], rtol=1e-4, atol=1e-4)


def test_both_are_differentiable():
    problem = Problem([4, 8], [0, 1, -1, 1], 32, (16,), "float32")
    a_MRI, b, owner_R, scale_MR = problem.rows()
    mix_RT = jnp.asarray(owner_R[:, None] == problem.adapter_T, jnp.float32)

    def loss(a_MRI, b_OR):
        s = lora_shrink(jnp.asarray(problem.x_TI), a_MRI, jnp.asarray(scale_MR), mix_RT, features_first=False)
        return jnp.sum(lora_expand(s[0], b_OR, features_first=False) ** 2)

    check_grads(loss, (jnp.asarray(a_MRI), jnp.asarray(b[0])), order=1, modes=["rev"], rtol=2e-2)


@settings(max_examples=25)
@given(
    ranks=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    tokens=st.lists(st.integers(-1, 4), min_size=1, max_size=12),
    in_dim=st.integers(1, 40),
    out_dims=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    features_first=st.booleans(),
    padding=st.integers(0, 3),
)
def test_anything(ranks, tokens, in_dim, out_dims, dtype, features_first, padding):
    adapter_T = [min(i, len(ranks) - 1) for i in tokens]
    Problem(ranks, adapter_T, in_dim, out_dims, dtype, padding=padding).check(features_first, foreign_a=np.nan)
