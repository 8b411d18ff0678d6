"""Adapters of a batch in a random pool, and the same as dense weights, for the benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.segmented_lora import Plan, RankRows, SegmentShape, lora_delta_reference, make_plan

MIXES = ("identical", "uniform", "skewed", "distinct")


def implementations(op: str, offered: Mapping[str, Any], interpret: bool) -> tuple[str, ...]:
    """Those of an operation to run; the mosaic_gpu kernels on a GPU alone, as their interpreter is not of every jax."""
    names = dispatch.choose(op, offered, interpret=interpret)
    return tuple(name for name in names if not (interpret and name == "mosaic_gpu"))


def tokens_of_adapters(mix: str, num_tokens: int) -> np.ndarray:
    """int[T], the adapter of each token, tokens of one adapter side by side.

    identical: one adapter; uniform: the root of T, equally popular; skewed: the i-th one i^-1.5 as popular as the
    first (Punica's, section 7); distinct: one each; base: none.
    """
    if mix == "base":
        return np.full(num_tokens, -1)
    if mix == "identical":
        return np.zeros(num_tokens, np.int64)
    if mix == "distinct":
        return np.arange(num_tokens)
    count = -(-int(num_tokens**0.5) // 1)
    if mix == "uniform":
        return np.arange(num_tokens) * count // num_tokens
    if mix != "skewed":
        raise ValueError(f"no mix {mix!r}: use one of base, {', '.join(MIXES)}")
    weight = np.arange(1, count + 2) ** -1.5
    edges = np.cumsum(weight / weight.sum()) * num_tokens
    return np.minimum(np.searchsorted(edges, np.arange(num_tokens) + 0.5), count)


@dataclass(frozen=True)
class Batch:
    """T tokens and the adapters that they use, in every one of L layers.

    Attributes:
        x_TI: activations; pool: [units, unit] in x's type, units in arbitrary order.
        rows: of each layer; plan: of all.
        adapter_T, rank_X: on the host.
    """

    x_TI: jax.Array
    pool: jax.Array
    rows: list[RankRows]
    plan: Plan
    adapter_T: np.ndarray
    rank_X: np.ndarray
    unit: int
    out_dim: int

    @property
    def floor_bytes(self) -> float:
        """What a layer must move: x, its rank rows once, the projections, and y read and written (float32)."""
        T, in_dim = self.x_TI.shape
        rank_T = np.where(self.adapter_T >= 0, self.rank_X[self.adapter_T], 0)
        rows = self.rank_X[np.unique(self.adapter_T[self.adapter_T >= 0])].sum()
        item = self.x_TI.dtype.itemsize
        return item * (T * in_dim + rows * (in_dim + self.out_dim) + 2 * rank_T.sum()) + 2 * 4 * T * self.out_dim

    def dense(self, layer: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """A [R, I] and B [O, R] of each adapter, float32 on the host."""
        units = np.asarray(self.pool, np.float32)
        a_RI = units[np.asarray(self.rows[layer].units_a_MRU[0])].reshape(-1, self.x_TI.shape[1])
        b_RO = units[np.asarray(self.rows[layer].units_b_RV)].reshape(-1, self.out_dim)
        edges = np.cumsum(self.rank_X)[:-1]
        return np.split(a_RI, edges), [b.T for b in np.split(b_RO, edges)]

    def oracle(self, layer: int) -> np.ndarray:
        """float32[T, O]."""
        a, b = self.dense(layer)
        return lora_delta_reference(np.asarray(self.x_TI, np.float32), a, b, [1.0] * len(a), self.adapter_T)


def make_batch(
    adapter_T: np.ndarray, ranks: Sequence[int], in_dim: int, out_dim: int, unit: int, *, layers: int, dtype: Any,
    block_tokens: int = 16,
) -> Batch:  # fmt: skip
    """Random weights of the size that keeps activations as they are, drawn on the device.

    Args:
        ranks: of the adapters, repeated as often as there are adapters.
        block_tokens: of the plan's blocks.
    """
    num_adapters = int(adapter_T.max(initial=-1)) + 1
    rank_X = np.resize(np.asarray(ranks), max(num_adapters, 1))
    R, per_row = int(rank_X.sum()), (in_dim + out_dim) // unit
    order = np.random.default_rng(0).permutation(layers * R * per_row).astype(np.int32).reshape(layers, R, per_row)
    split = in_dim // unit
    ones = jnp.ones((1, R), jnp.float32)
    rows = [
        RankRows(jnp.asarray(table[None, :, :split]), jnp.asarray(table[:, split:]), ones, None, (out_dim,))
        for table in order
    ]
    tile_rows = 16 if rank_X.max() <= 16 else 32
    # As an engine's bucket for so many tokens: whatever the mix is, the grid is the same.
    blocks = len(adapter_T)
    shape = SegmentShape(blocks, blocks * -(-int(rank_X.max()) // tile_rows), block_tokens, tile_rows)
    plan = make_plan(np.cumsum(rank_X) - rank_X, rank_X, (shape,), adapter_T=adapter_T)
    size = (in_dim * 16) ** -0.25
    keys = jax.random.split(jax.random.key(0))
    pool = jax.jit(lambda key: jax.random.normal(key, (layers * R * per_row, unit), dtype) * jnp.asarray(size, dtype))
    x_TI = jax.random.normal(keys[1], (len(adapter_T), in_dim), dtype)
    return Batch(x_TI, pool(keys[0]), rows, jax.tree.map(jnp.asarray, plan), adapter_T, rank_X, unit, out_dim)
