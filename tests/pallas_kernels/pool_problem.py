"""Adapters in a pool of units, a batch of tokens that use them, and the oracle's answer with its error bound."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.segmented_lora import (
    RankRows,
    SegmentShape,
    lora_delta,
    lora_mix_reference,
    make_plan,
)

TRACES: list[tuple[int, ...]] = []
"""Shape of x of every trace of run_delta."""


def _traced(x_TI, *args, **options):
    TRACES.append(x_TI.shape)
    return lora_delta(x_TI, *args, **options)


run_delta = jax.jit(_traced, static_argnames=("unit", "axis_name", "implementation", "interpret"))
"""One cache for all tests: batches of one bucket share their compiled kernels."""

SHORT = (SegmentShape(8, 24),)
"""Blocks of 16 tokens and tiles of 16 rows."""


class PoolProblem:
    """Adapters of M modules that share an input.

    Args:
        ranks: int[X], of the adapters, or int[M, X] where the modules' differ.
        adapter_T: int[T], an adapter or -1, or None for
        mix_TX: float[T, X].
        in_dim, out_dims: whole numbers of units; unit: elements of one.
        num_rows: R of the tables.
        const: an adapter gets one more row with a bias in every module.
        as_bits: the pool holds unsigned integers.
    """

    def __init__(
        self, ranks, adapter_T=None, *, mix_TX=None, in_dim=64, out_dims=(64, 32, 32), unit=32, dtype="float32",
        num_rows=96, const=False, as_bits=False, seed=0,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        self.dtype, self.unit, self.out_dims, self.as_bits = jnp.dtype(dtype), unit, out_dims, as_bits
        M = len(out_dims)
        self.rank_MX = np.broadcast_to(np.asarray(ranks), (M, np.shape(ranks)[-1]))
        rank_X = self.rank_MX.max(0)
        X = len(rank_X)
        if mix_TX is None:
            adapter_T = np.asarray(adapter_T)
            self.mix_TX = (adapter_T[:, None] == np.arange(X)).astype(np.float32)
        else:
            self.mix_TX = np.asarray(mix_TX, np.float32)
        self.adapter_T = adapter_T
        T = len(self.mix_TX)
        self.rows_X = rank_X + const
        self.first_X = np.cumsum(self.rows_X) - self.rows_X
        assert self.rows_X.sum() <= num_rows

        def draw(*shape):
            return rng.standard_normal(shape).astype(self.dtype)

        self.x_TI = draw(T, in_dim)
        self.y_TO = rng.standard_normal((T, sum(out_dims))).astype(np.float32)
        self.scale_MX = rng.uniform(0.25, 2, (M, X)).astype(np.float32)
        self.a = [[draw(self.rank_MX[m, i], in_dim) for i in range(X)] for m in range(M)]
        self.b = [[draw(self.rank_MX[m, i] + const, out) for i in range(X)] for m, out in enumerate(out_dims)]
        ua, ub = in_dim // unit, sum(out_dims) // unit
        self.units_a = np.full((M, num_rows, ua), -1, np.int32)
        self.units_b = np.full((num_rows, ub), -1, np.int32)
        self.scale = np.zeros((M, num_rows), np.float32)
        self.const = np.zeros((M, num_rows), np.float32)
        size = M * num_rows * ua + num_rows * ub
        pool = np.full((size + 7, unit), np.nan).astype(self.dtype)  # what nobody owns must not be read
        free = iter(rng.permutation(size + 7))

        def put(vector):
            places = np.array([next(free) for _ in range(len(vector) // unit)])
            pool[places] = vector.reshape(-1, unit)
            return places

        starts = np.cumsum((0, *out_dims)) // unit
        for m in range(M):
            for i in range(X):
                for k in range(self.rank_MX[m, i]):
                    self.units_a[m, self.first_X[i] + k] = put(self.a[m][i][k])
                    self.units_b[self.first_X[i] + k, starts[m] : starts[m + 1]] = put(self.b[m][i][k])
                    self.scale[m, self.first_X[i] + k] = self.scale_MX[m, i]
                if const:
                    row = self.first_X[i] + rank_X[i]
                    self.units_b[row, starts[m] : starts[m + 1]] = put(self.b[m][i][-1])
                    self.const[m, row] = 1
        self.has_const = const
        bits = {2: np.uint16, 4: np.uint32}[self.dtype.itemsize]
        self.pool = jnp.asarray(pool.view(bits) if as_bits else pool)

    def rank_rows(self) -> RankRows:
        const = jnp.asarray(self.const) if self.has_const else None
        units_a, units_b, scale = map(jnp.asarray, (self.units_a, self.units_b, self.scale))
        return RankRows(units_a, units_b, scale, const, self.out_dims)

    def plan(self, shapes, long_segment=32):
        chosen = {"adapter_T": self.adapter_T} if self.adapter_T is not None else {"mix_TX": self.mix_TX}
        return make_plan(self.first_X, self.rows_X, shapes, long_segment=long_segment, **chosen)

    def wanted(self):
        """float32[T, O] of the oracle, y included, and how far a kernel may be off."""
        wanted, bound = self.y_TO.copy(), np.full(self.y_TO.shape, 1e-6, np.float32)
        half = 2.0**-8 if self.dtype == jnp.bfloat16 else 2.0**-11 if self.dtype == jnp.float16 else 0.0
        start = 0
        for m, out in enumerate(self.out_dims):
            part = slice(start, start + out)
            start += out
            for i in range(self.mix_TX.shape[1]):
                a, b = (np.asarray(side[m][i], np.float32) for side in (self.a, self.b))
                rank, w_T = len(a), self.mix_TX[:, i]
                delta = lora_mix_reference(self.x_TI, [a], [b[:rank].T], [self.scale_MX[m, i]], w_T[:, None])
                x = np.asarray(self.x_TI, np.float32)
                size = (np.abs(x) @ np.abs(a).T) @ np.abs(b[:rank])
                rounded = np.abs(x @ a.T) @ np.abs(b[:rank]) * half
                wanted[:, part] += delta + w_T[:, None] * (b[rank:].sum(0) if self.has_const else 0)
                bound[:, part] += np.abs(w_T * self.scale_MX[m, i])[:, None] * (4e-7 * size + rounded)
                if self.has_const:  # the factor on the bias is rounded as a projection is
                    bound[:, part] += np.abs(w_T)[:, None] * (half + 4e-7) * np.abs(b[rank:]).sum(0)
        return wanted, bound + 4e-7 * np.abs(wanted)

    def given(self, implementation, shapes=SHORT):
        """What lora_delta gives, called as it is, with numpy arrays."""
        arrays: Any = self.x_TI, np.asarray(self.pool), self.y_TO
        x_TI, pool, y_TO = arrays
        rows, plan = jax.tree.map(np.asarray, self.rank_rows()), self.plan(shapes)
        return np.asarray(lora_delta(
            x_TI, pool, rows, plan, y_TO, unit=self.unit, implementation=implementation,
            interpret=implementation != "xla",
        ))  # fmt: skip

    def check(self, implementation, shapes=SHORT, long_segment=32):
        rows, plan = self.rank_rows(), self.plan(shapes, long_segment)
        got = run_delta(
            self.x_TI, self.pool, rows, jax.tree.map(jnp.asarray, plan), self.y_TO, unit=self.unit,
            implementation=implementation, interpret=True,
        )  # fmt: skip
        assert got.dtype == jnp.float32
        wanted, bound = self.wanted()
        assert np.all(np.abs(np.asarray(got) - wanted) <= bound), np.max(np.abs(np.asarray(got) - wanted) / bound)
        idle = ~self.mix_TX.any(1)
        np.testing.assert_array_equal(np.asarray(got)[idle], self.y_TO[idle])


def check_modules_without_rows(implementation, shapes=SHORT, **sizes):
    """Outputs of a module that a token's adapter is without stay as they are, whatever the token holds."""
    problem = PoolProblem([[4, 0], [0, 2]], [0, 1, -1, 0], **sizes)
    problem.x_TI[:] = np.inf
    got, (first, _) = problem.given(implementation, shapes), problem.out_dims
    with_rows = np.zeros(got.shape, bool)
    with_rows[[0, 3], :first] = with_rows[1, first:] = True
    np.testing.assert_array_equal(got[~with_rows], problem.y_TO[~with_rows])
    assert not np.isfinite(got[with_rows]).any()
