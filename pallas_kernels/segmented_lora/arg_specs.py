"""Shapes to compile, tune and measure the segmented kernels with: those of the models that they serve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.segmented_lora.plan import Plan, Segments, SegmentShape, make_plan
from pallas_kernels.segmented_lora.rank_rows import RankRows


@dataclass(frozen=True)
class Widths:
    """Widths of a model, whole; `tp` shards share out every projection, and every rank row's long dimension."""

    hidden: int
    kv: int
    ffn: int
    tp: int = 1

    @property
    def unit(self) -> int:
        """Elements of a unit of one shard."""
        return math.gcd(self.hidden, self.kv, self.ffn) // self.tp

    def group(self, name: str) -> tuple[int, tuple[int, ...]]:
        """(I, O of each module) of one shard."""
        hidden, kv, ffn = (width // self.tp for width in (self.hidden, self.kv, self.ffn))
        return {
            "qkv": (hidden, (hidden, kv, kv)), "o": (hidden, (hidden,)), "gate_up": (hidden, (ffn, ffn)),
            "down": (ffn, (hidden,)),
        }[name]  # fmt: skip


GROUPS = ("qkv", "o", "gate_up", "down")
"""Projections that share an input."""

MODELS = {
    "smollm2-135m": Widths(576, 192, 1536),
    "llama-3-8b": Widths(4096, 1024, 14336),
    "llama-2-13b": Widths(5120, 5120, 13824),
    "llama-2-70b-tp8": Widths(8192, 1024, 28672, tp=8),
}
"""By name; Llama-2-70B as one of eight tensor-parallel shards holds it."""


@dataclass(frozen=True)
class Arguments:
    """Everything that lora_delta takes, as shapes."""

    x_TI: Any
    pool: Any
    rows: RankRows
    plan: Plan
    y_TO: Any
    unit: int


def segment_specs(shape: SegmentShape) -> Segments:
    """A Segments of this shape."""
    N, W, C = shape.blocks, shape.tiles, shape.block_tokens

    def ints(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    mix_WC = jax.ShapeDtypeStruct((W, C), jnp.float32)
    return Segments(ints(N, C), ints(N), ints(N), ints(W), ints(W), ints(W), mix_WC, shape.tile_rows)


def arguments(
    widths: Widths, group: str, tokens: int, num_rows: int, plan: tuple[SegmentShape, ...], dtype: Any,
    pool_units: int = 1 << 20, pool_dtype: Any = None,
) -> Arguments:  # fmt: skip
    """The arguments of one projection group.

    Args:
        num_rows: R, rank rows of all adapters of the batch.
        pool_units: units of the pool; the default's offsets need 64 bits from units of 2049 bytes on.
    """
    in_dim, out_dims = widths.group(group)
    unit, modules = widths.unit, len(out_dims)

    def spec(*dims: int, of: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, of)

    rows = RankRows(
        spec(modules, num_rows, in_dim // unit, of=jnp.int32),
        spec(num_rows, sum(out_dims) // unit, of=jnp.int32),
        spec(modules, num_rows, of=jnp.float32), spec(modules, num_rows, of=jnp.float32), out_dims,
    )  # fmt: skip
    parts = tuple(segment_specs(shape) for shape in plan)
    pool = spec(pool_units, unit, of=pool_dtype or dtype)
    return Arguments(
        spec(tokens, in_dim, of=dtype), pool, rows, parts, spec(tokens, sum(out_dims), of=jnp.float32), unit
    )


def draw(
    widths: Widths, group: str, adapter_T: np.ndarray, ranks: Sequence[int], shapes: tuple[SegmentShape, ...],
    dtype: Any, seed: int = 0,
) -> Arguments:  # fmt: skip
    """Random arguments of one projection group, no unit used twice.

    Args:
        adapter_T: int[T], the adapter of each token, -1 for the base.
        ranks: of each adapter, the same for every module.
    """
    rng = np.random.default_rng(seed)
    in_dim, out_dims = widths.group(group)
    unit, modules, num_rows = widths.unit, len(out_dims), max(sum(ranks), 1)
    columns_a, columns_b = in_dim // unit, sum(out_dims) // unit
    count_a = modules * num_rows * columns_a
    units = rng.permutation(count_a + num_rows * columns_b).astype(np.int32)
    rows = RankRows(
        jnp.asarray(units[:count_a].reshape(modules, num_rows, columns_a)),
        jnp.asarray(units[count_a:].reshape(num_rows, columns_b)),
        jnp.ones((modules, num_rows)), None, out_dims,
    )  # fmt: skip
    first_X = np.cumsum(ranks) - np.asarray(ranks)
    plan = jax.tree.map(jnp.asarray, make_plan(first_X, np.asarray(ranks), shapes, adapter_T=adapter_T))

    def normal(*dims: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(dims, np.float32), dtype)

    T = len(adapter_T)
    pool = normal(len(units), unit) / math.sqrt(in_dim)
    return Arguments(normal(T, in_dim), pool, rows, plan, jnp.zeros((T, sum(out_dims))), unit)
