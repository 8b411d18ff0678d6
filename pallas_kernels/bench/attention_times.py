"""Paged attention beside its bytes and beside jax.nn.dot_product_attention over keys that lie side by side."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.loras import implementations
from pallas_kernels.bench.report import Result
from pallas_kernels.bench.timing import Clock
from pallas_kernels.paged_attention import api

SECTION = "attention, one layer"


@dataclass(frozen=True)
class Size:
    """Llama-3-8B on a GPU, something tiny in the interpreter."""

    heads: tuple[int, int, int] = (32, 8, 128)
    page_tokens: int = 16
    layers: int = 16
    dtype: Any = jnp.bfloat16
    rows: tuple[tuple[int, int, int], ...] = (
        (64, 1, 1024), (8, 1, 8192), (1, 1, 65536), (64, 1, 256), (8, 32, 1024), (256, 1, 256),
    )  # fmt: skip
    """(rows, queries of each, context of each)."""


TINY = Size((4, 2, 16), layers=1, rows=((2, 1, 40), (1, 4, 20)))


def attention_times(clock: Clock, size: Size, interpret: bool) -> Iterator[Result]:
    """Every case by every implementation, and decodes by JAX's own over dense keys."""
    names = implementations("paged_attention", api.IMPLEMENTATIONS, interpret)
    N, K, H = size.heads
    num_pages = max(rows * -(-context // size.page_tokens) for rows, _, context in size.rows)
    pool = make_pool(size, num_pages)
    for rows, queries, context in size.rows:
        what = "decodes" if queries == 1 else f"chunks of {queries}"
        case = f"{rows} {what}, {context} slots, heads {N}/{K}, head_dim {H}"
        item = jnp.dtype(size.dtype).itemsize
        floor = item * (rows * context * 2 * K * H + 2 * rows * queries * N * H) / clock.bandwidth * 1e6
        q_TNH = jax.random.normal(jax.random.key(1), (rows * queries, N, H), size.dtype)
        for name in names:
            stack, arguments = pool_stack(size, name, rows, queries, context, interpret and name != "xla")
            yield _timed(case, name, floor, clock, size.layers, stack, (q_TNH, pool, *arguments))
        if queries == 1:
            for name in ("xla",) if interpret else ("xla", "cudnn"):
                label = f"jax.nn.dot_product_attention, {name}"
                yield _timed(case, label, floor, clock, 4, *_dense(size, q_TNH, context, name))


def make_pool(size: Size, num_pages: int) -> jax.Array:
    """The same random pages in every layer, each in memory of its own."""
    _, K, H = size.heads
    elements = 2 * K * size.page_tokens * H
    bits = jnp.dtype(f"uint{8 * jnp.dtype(size.dtype).itemsize}")

    def draw() -> jax.Array:
        page = jax.random.normal(jax.random.key(0), (num_pages, elements), size.dtype)
        return jnp.broadcast_to(jax.lax.bitcast_convert_type(page, bits), (size.layers, num_pages, elements))

    return jax.jit(draw)()


def pool_stack(
    size: Size, name: str, rows: int, queries: int, context: int, interpret: bool
) -> tuple[Any, tuple[jax.Array, ...]]:
    """All layers by ragged_paged_attention, and the arguments behind q and pool."""
    per_row = -(-context // size.page_tokens)
    table = np.random.default_rng(0).permutation(rows * per_row).astype(np.int32).reshape(rows, per_row)
    arrays = (table, np.arange(rows) * queries, np.full(rows, queries), np.full(rows, context))
    fn = jax.jit(functools.partial(  # traced and lowered once for all layers
        api.ragged_paged_attention, num_decodes=rows if queries == 1 else 0, most_queries=queries,
        num_kv_heads=size.heads[1], page_tokens=size.page_tokens, implementation=name, interpret=interpret,
    ))  # fmt: skip

    def stack(q_TNH: jax.Array, pool: jax.Array, *ragged: jax.Array) -> jax.Array:
        for layer in range(size.layers):  # a layer's result is the next one's query
            q_TNH = fn(q_TNH, pool, layer, *ragged)
        return q_TNH

    return stack, tuple(jnp.asarray(array, jnp.int32) for array in arrays)


def _dense(size: Size, q_TNH: jax.Array, context: int, name: str) -> tuple[Any, tuple[Any, ...]]:
    _, K, H = size.heads
    shape = (len(q_TNH), context, K, H)
    keys = [jax.random.normal(jax.random.key(i), shape, size.dtype) for i in range(8)]

    def stack(q_TNH: jax.Array, keys: list[jax.Array]) -> jax.Array:
        for layer in range(4):
            q_B1NH = q_TNH[:, None]
            out = jax.nn.dot_product_attention(q_B1NH, keys[2 * layer], keys[2 * layer + 1], implementation=name)  # pyright: ignore
            q_TNH = out[:, 0]
        return q_TNH

    return stack, (q_TNH, keys)


def _timed(
    case: str, name: str, floor: float, clock: Clock, layers: int, stack: Any, arguments: tuple[Any, ...]
) -> Result:
    if clock.left < 0:
        return Result(SECTION, case, name, note="no time left")
    try:
        return Result(SECTION, case, name, clock.microseconds(stack, *arguments) / layers, floor)
    except Exception as error:  # whatever a compiler or a device raises is the finding
        if name in api.IMPLEMENTATIONS:
            return Result.failed(SECTION, case, name, error, floor=floor)
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Result(SECTION, case, name, floor=floor, note=f"does not run: {lines[0][:120]}")
