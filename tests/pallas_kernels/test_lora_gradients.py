"""Gradients of lora_delta and lora_matmul against jax.grad of the oracle written in jax; lora_matmul's values."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.segmented_lora import SegmentShape, lora_delta, lora_delta_reference, lora_matmul
from pallas_kernels.segmented_lora import gradients as gradient_module
from tests.pallas_kernels.pool_problem import SHORT, PoolProblem

IMPLEMENTATIONS = ["xla", "triton"]
matmul = jax.jit(lora_matmul, static_argnames=("implementation", "interpret"))


def oracle(x_TI, a_ARI, b_ARO, segment_T, scale_A, rank_A):
    """The reference's loop over tokens, with jax's arrays: float32[T, O]."""
    rows = []
    for t, i in enumerate(np.asarray(segment_T)):
        if i < 0:
            rows.append(jnp.zeros(b_ARO.shape[2]))
            continue
        a, b = (side[i, : rank_A[i]].astype(jnp.float32) for side in (a_ARI, b_ARO))
        rows.append(scale_A[i] * (a @ x_TI[t].astype(jnp.float32)) @ b)
    return jnp.stack(rows)


def draw_dense(dtype, seed=0, T=12, A=3, R=20, I=32, O=48):  # noqa: E741
    rng = np.random.default_rng(seed)
    x, a, b, g = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((T, I), (A, R, I), (A, R, O), (T, O)))
    return x, a, b, g.astype(jnp.float32), rng.uniform(0.5, 2, A).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("implementation",))
def gradients(x, a, b, g, segment_T, scale_A, rank_A, implementation):
    def loss(x, a, b):
        y = lora_matmul(
            x, a, b, segment_T, scale_A=scale_A, rank_A=rank_A, implementation=implementation, interpret=True
        )
        return (y * g).sum()

    return jax.grad(loss, (0, 1, 2))(x, a, b)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_weights(dtype, implementation):
    x, a, b, _, scale_A = draw_dense(dtype)
    segment_T, rank_A = jnp.array([2, 0, -1, 1, 1, 2, 0, 0, -1, 2, 2, 2]), np.array([20, 0, 7])
    y = matmul(x, a, b, segment_T, scale_A=scale_A, rank_A=rank_A, implementation=implementation, interpret=True)
    a32, b32 = np.asarray(a, np.float32), np.asarray(b, np.float32)
    rows, columns = [a32[i, :r] for i, r in enumerate(rank_A)], [b32[i, :r].T for i, r in enumerate(rank_A)]
    wanted = lora_delta_reference(np.asarray(x, np.float32), rows, columns, scale_A.tolist(), np.asarray(segment_T))
    assert y.dtype == jnp.float32
    size = np.abs(np.asarray(x, np.float32)).max() * np.abs(a32).sum((1, 2)).max() * np.abs(b32).max() * 2
    assert np.abs(np.asarray(y) - wanted).max() <= size * (1e-6 if dtype == "float32" else 2.0**-9)
    defaults = matmul(x, a, b, segment_T, implementation=implementation, interpret=True)
    ones = np.ones(3, np.float32)
    explicit = matmul(x, a, b, segment_T, scale_A=ones, rank_A=[20] * 3, implementation=implementation, interpret=True)
    np.testing.assert_array_equal(defaults, explicit)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_gradients_of_dense_weights(dtype, tolerance, implementation):
    x, a, b, g, scale_A = draw_dense(dtype)
    segment_T, rank_A = np.array([2, 0, -1, 1, 1, 2, 0, 0, -1, 2, 2, 2]), np.array([20, 0, 7])
    got = gradients(x, a, b, g, segment_T, scale_A, rank_A, implementation)
    wanted = jax.jit(jax.grad(lambda x, a, b: (oracle(x, a, b, segment_T, scale_A, rank_A) * g).sum(), (0, 1, 2)))(
        x, a, b
    )
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.dtype == theirs.dtype
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        assert np.abs(mine - theirs).max() <= tolerance * np.abs(theirs).max()
    assert not np.asarray(got[1])[1].any()  # an adapter of rank 0
    assert not np.asarray(got[1])[2, 7:].any()
    assert not np.asarray(got[0])[[2, 8]].any()  # tokens of the base


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_second_derivatives(implementation):
    """A gradient of a gradient, as of a penalty on it."""
    x, a, b, g, scale_A = draw_dense("float32", T=5, R=3)
    segment_T, rank_A = np.array([2, 0, -1, 1, 2]), np.array([3, 0, 2])

    def penalty(matmul):
        def loss(x, a, b):
            return (jnp.sin(matmul(x, a, b, segment_T, scale_A, rank_A)) * g).sum()

        def norm(x, a, b):
            return sum((part**2).sum() for part in jax.grad(loss, (0, 1, 2))(x, a, b))

        return jax.jit(jax.grad(norm, (0, 1, 2)))(x, a, b)

    def ours(x, a, b, segment_T, scale_A, rank_A):
        return lora_matmul(
            x, a, b, segment_T, scale_A=scale_A, rank_A=rank_A, implementation=implementation, interpret=True
        )

    for mine, theirs in zip(penalty(ours), penalty(oracle), strict=True):
        assert np.abs(mine - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_not_finite_stays_with_its_own_adapter(implementation):
    """Adapters that are trained side by side: one that has diverged leaves the others their values and gradients."""
    x, a, b, g, scale_A = draw_dense("float32", T=20)
    segment_T, rank_A = np.arange(20) % 4 - 1, np.array([20, 18, 7])
    options: Any = (segment_T, scale_A, rank_A, implementation)

    def everything(x, a, b, g):
        y = matmul(x, a, b, segment_T, scale_A=scale_A, rank_A=rank_A, implementation=implementation, interpret=True)
        return [np.asarray(array) for array in (y, *gradients(x, a, b, g, *options))]

    clean = everything(x, a, b, g)
    # What is beyond an adapter's own rank is not read.
    beyond = [z.at[1, 18:].set(jnp.nan).at[2, 7:].set(jnp.nan) for z in (a, b)]
    for mine, theirs in zip(everything(x, beyond[0], beyond[1], g), clean, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for spoilt in (
        (x, a.at[1, 2, 3].set(jnp.nan), b, g), (x, a, b.at[1, 2, 3].set(jnp.inf), g),
        (x.at[2, 5].set(jnp.inf), a, b, g), (x, a, b, g.at[2, 5].set(jnp.nan)),
    ):  # fmt: skip
        y, dx, da, db = everything(*spoilt)
        others_T = segment_T != 1
        for mine, theirs, others in ((y, clean[0], others_T), (dx, clean[1], others_T), (da, clean[2], [0, 2]),
                                     (db, clean[3], [0, 2])):  # fmt: skip
            np.testing.assert_array_equal(mine[others], theirs[others])
        assert not all(np.isfinite(array).all() for array in (y, dx, da, db))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tokens_no_adapters_no_rows(implementation):
    x, a, b, _, _ = draw_dense("float32")
    segment_T = jnp.zeros(12, jnp.int32)
    for case in ((x[:0], a, b, segment_T[:0]), (x, a[:0], b[:0], segment_T), (x, a[:, :0], b[:, :0], segment_T)):
        y, back = jax.vjp(
            lambda x, a, b, case=case: lora_matmul(x, a, b, case[3], implementation=implementation, interpret=True),
            *case[:3],
        )
        assert y.shape == (len(case[0]), 48)
        assert not np.asarray(y).any()
        assert not any(np.asarray(part).any() for part in back(y))


def test_numbers_that_are_no_adapter_s_and_ranks_past_the_largest():
    """They are the base's, and the largest; arrays may be numpy's or lists."""
    arrays: Any = [np.asarray(array) for array in draw_dense("float32", T=4)]
    x, a, b, *_ = arrays
    got = lora_matmul(x, a, b, [3, 1, 99, -7], rank_A=[20, 1000, 5])  # pyright: ignore
    wanted = lora_matmul(x, a, b, jnp.array([-1, 1, -1, -1]))
    np.testing.assert_array_equal(got, wanted)
    np.testing.assert_allclose(got[1], x[1] @ a[1].T @ b[1], rtol=1e-4, atol=1e-4)


@settings(max_examples=15)
@given(
    segment=st.lists(st.integers(-1, 2), min_size=12, max_size=12),
    ranks=st.lists(st.integers(0, 20), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_anything(segment, ranks, seed, implementation):
    x, a, b, g, scale_A = draw_dense("float32", seed)
    got = gradients(x, a, b, g, np.array(segment), scale_A, np.array(ranks), implementation)
    x, a, b, g = (np.asarray(array, np.float64) for array in (x, a, b, g))
    wanted = [np.zeros_like(x), np.zeros_like(a), np.zeros_like(b)]
    for t, i in enumerate(segment):
        if i >= 0:
            rows_a, rows_b = a[i, : ranks[i]], b[i, : ranks[i]]
            wanted[0][t] = scale_A[i] * (rows_b @ g[t]) @ rows_a
            wanted[1][i, : ranks[i]] += scale_A[i] * np.outer(rows_b @ g[t], x[t])
            wanted[2][i, : ranks[i]] += scale_A[i] * np.outer(rows_a @ x[t], g[t])
    for mine, theirs in zip(got, wanted, strict=True):
        assert np.abs(np.asarray(mine) - theirs).max() <= 1e-5 * max(np.abs(theirs).max(), 1)


def pool_loss(problem, implementation, plan, rows):
    def loss(x, pool, y):
        out = lora_delta(x, pool, rows, plan, y, unit=problem.unit, implementation=implementation, interpret=True)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2), allow_int=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_through_the_pool(implementation):
    """A mix of adapters and a bias: x, y and each unit, against jax.grad of dense products by owner."""
    mix_TX = np.array([[1, 0, 0], [0.5, -2, 0], [0, 0, 0], [0.25, 1, 3], [0, 0, 1]], np.float32)
    problem = PoolProblem([4, 17, 3], mix_TX=mix_TX, const=True, num_rows=32, out_dims=(64, 32))
    pool = jnp.nan_to_num(problem.pool)
    plan, rows = jax.tree.map(jnp.asarray, problem.plan(SHORT)), problem.rank_rows()
    factor_TR = np.zeros((5, 32), np.float32)
    for i, (first, count) in enumerate(zip(problem.first_X, problem.rows_X, strict=True)):
        factor_TR[:, first : first + count] = mix_TX[:, i, None]

    def dense_loss(x, pool, y):
        def gather(units):
            return jnp.where(units[..., None] >= 0, pool[units], 0).reshape(*units.shape[:-1], -1)

        a, b = gather(problem.units_a), gather(problem.units_b)
        s = jnp.einsum("ti,mri->mtr", x, a) * problem.scale[:, None] + problem.const[:, None]
        starts = rows.out_starts
        out = jnp.concatenate([s[m] * factor_TR @ b[:, starts[m] : starts[m + 1]] for m in range(2)], 1) + y
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum()

    args = jnp.asarray(problem.x_TI), pool, jnp.asarray(problem.y_TO)
    got = pool_loss(problem, implementation, plan, rows)(*args)
    wanted = jax.jit(jax.grad(dense_loss, (0, 1, 2)))(*args)
    for mine, theirs in zip(got, wanted, strict=True):
        assert np.abs(mine - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("mixed", [False, True])
def test_products_by_tiles_and_over_all_tokens_agree(mixed):
    """Small and large blocks, several tiles of an adapter, a bias; modules of other ranks."""
    rng = np.random.default_rng(3)
    ranks = [[4, 33, 3], [0, 20, 7]]
    users: dict[str, Any] = {"adapter_T": np.repeat([0, 1, 2, -1], [3, 20, 2, 2])}
    shapes = (SegmentShape(8, 24), SegmentShape(2, 4, block_tokens=32, tile_rows=32))
    if mixed:
        users = {"mix_TX": np.where(rng.random((9, 3)) < 0.4, 0, rng.standard_normal((9, 3)))}
        shapes = SHORT
    problem = PoolProblem(ranks, **users, const=True, num_rows=48, out_dims=(64, 32))
    plan, rows = jax.tree.map(jnp.asarray, problem.plan(shapes)), problem.rank_rows()
    pool, x = jnp.nan_to_num(problem.pool), jnp.asarray(problem.x_TI)
    g = jnp.asarray(rng.standard_normal(problem.y_TO.shape), jnp.float32)
    ways = (gradient_module._of_all, gradient_module._of_tiles)
    both = [jax.jit(way, static_argnums=(5, 6))(x, g, (pool, pool), rows, plan, (32, 32), None) for way in ways]
    for dense, tiles in zip(*both, strict=True):
        np.testing.assert_allclose(tiles, dense, rtol=1e-4, atol=1e-4 * float(jnp.abs(dense).max()))
        assert np.asarray(dense).any()


def test_the_way_with_less_work_is_taken(monkeypatch):
    """Through a pool; of dense weights always the one that keeps adapters apart."""
    taken = []
    for name in ("_of_all", "_of_tiles"):
        way = getattr(gradient_module, name)
        monkeypatch.setattr(gradient_module, name, lambda *a, way=way, name=name: taken.append(name) or way(*a))

    for T in (12, 600):  # three adapters of 20 rows
        problem = PoolProblem([20] * 3, np.zeros(T, int), num_rows=64)
        loss = pool_loss(problem, "xla", problem.plan((SegmentShape(40, 80),)), problem.rank_rows())
        jax.eval_shape(loss, problem.x_TI, problem.pool, problem.y_TO)
    x, a, b, g, _ = draw_dense("float32")
    jax.eval_shape(jax.grad(lambda a: (lora_matmul(x, a, b, jnp.zeros(12, jnp.int32)) * g).sum()), a)
    assert taken == ["_of_all", "_of_tiles", "_of_tiles"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_pool_of_bits_has_no_gradient_and_x_has(implementation):
    problem = PoolProblem([4, 17, 3], [0, 1, 2, -1, 1], num_rows=32, out_dims=(32,), as_bits=True)
    plan, rows = jax.tree.map(jnp.asarray, problem.plan(SHORT)), problem.rank_rows()
    dx, dpool, dy = pool_loss(problem, implementation, plan, rows)(problem.x_TI, problem.pool, problem.y_TO)
    assert dpool.dtype == jax.dtypes.float0
    assert not np.asarray(dx)[3].any()
    assert np.asarray(dx)[:3].all()
    np.testing.assert_allclose(dy, np.cos(np.arange(dy.size)).reshape(dy.shape), rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_named():
    x, a, b, _, _ = draw_dense("float32")
    segment_T = jnp.zeros(12, jnp.int32)
    with pytest.raises(ValueError, match=r"they must be \[A, R, I\] and \[A, R, O\]"):
        lora_matmul(x, a, b[:, :3], segment_T)
    with pytest.raises(ValueError, match=r"they must be \[T, 32\] and \[T\]"):
        lora_matmul(x[:, :16], a, b, segment_T)
    with pytest.raises(TypeError, match="segment_T must be integers, not float32"):
        lora_matmul(x, a, b, segment_T.astype(jnp.float32))
    with pytest.raises(TypeError, match="x is float32, a float32 and b bfloat16: they must be of one type"):
        lora_matmul(x, a, b.astype(jnp.bfloat16), segment_T)
    with pytest.raises(TypeError, match=r"x must be float\[T, I\], not int32"):
        lora_matmul(x.astype(jnp.int32), a.astype(jnp.int32), b.astype(jnp.int32), segment_T)
    with pytest.raises(ValueError, match=r"scale_A is \[\] and rank_A \[3\]: they must be \[3\]"):
        lora_matmul(x, a, b, segment_T, scale_A=2.0)  # pyright: ignore
    with pytest.raises(ValueError, match=r"rank_A \[2\]: they must be \[3\]"):
        lora_matmul(x, a, b, segment_T, rank_A=[1, 2])  # pyright: ignore
    with pytest.raises(TypeError, match="rank_A must be integers, not float32"):
        lora_matmul(x, a, b, segment_T, rank_A=[1.0, 2.0, 3.0])  # pyright: ignore
