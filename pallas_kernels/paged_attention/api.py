"""Paged attention of decode rows and prompt chunks in one ragged call, whichever implementation runs it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.paged_attention import pallas_mosaic_gpu
from pallas_kernels.paged_attention.pallas_triton import paged_attention_triton
from pallas_kernels.paged_attention.triton_config import check_supported
from pallas_kernels.paged_attention.xla_ragged import paged_attention_xla

IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "triton": paged_attention_triton, "xla": paged_attention_xla,
    "mosaic_gpu": pallas_mosaic_gpu.paged_attention_mosaic_gpu,
}  # fmt: skip
"""In order of preference. No GPU has run the mosaic_gpu kernels: they run where they are named."""


def ragged_paged_attention(
    q_TNH: jax.Array,
    pool_LPE: jax.Array,
    layer: jax.Array | int,
    table_SP: jax.Array,
    start_S: jax.Array,
    count_S: jax.Array,
    context_S: jax.Array,
    *,
    num_decodes: int = 0,
    most_queries: int,
    num_kv_heads: int,
    page_tokens: int,
    window: int | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of S rows over their pages; row s has count_S[s] queries, the last tokens of its context.

    Query i of a row is at position context - count + i and sees the slots up to its own, softmax(q k / sqrt(H)) v. The
    method is flash attention's online softmax (Dao et al. 2022) over pages (Kwon et al. 2023); contexts are computed in
    parts where there are few rows (flash decoding).

    Args:
        q_TNH: [T, N, H], rotated queries: bfloat16, float16 or float32.
        pool_LPE: uint[L, P, E], the pool's bits, as wide as q's type; a page is laid out [2, K, page_tokens, H], keys
            first, so E = 2 * K * page_tokens * H. Slots that no query sees must hold finite values where a page is
            read: they are multiplied by 0.
        layer: index into L. A traced one is the caller's to check, as the rows' values are.
        table_SP: int32[S, pages], pages of each row in order. All entries name pages of the pool, those behind a
            context any.
        start_S: int32[S], index into T of each row's first query.
        count_S: int32[S], 0 for a row without queries; at most 1 in the first num_decodes rows, at most most_queries
            in the others. No token lies in two rows.
        context_S: int32[S], tokens of the row up to its last query; at least count_S, at most the table's slots. The
            values are the caller's to check: no implementation can.
        num_decodes: leading rows of one query at most, which run in smaller tiles.
        most_queries: bound of count_S.
        num_kv_heads: K; N is a multiple of it.
        page_tokens: slots of a page.
        window: the most slots that a query sees, its own included; None for all.
        implementation: see dispatch.IMPLEMENTATIONS; None takes the best that the device has.
        interpret: runs Pallas kernels in their interpreter, on any device.

    Returns:
        [T, N, H] in q's type, 0 for tokens in no row; sums are float32. Not differentiable in the Pallas
        implementations.

    Raises:
        ValueError: shapes or types that do not go together, a layer that is not there, or an unknown implementation.
        NotImplementedError: the device, or the implementation asked for, cannot run these shapes.
    """
    q_TNH, pool_LPE, table_SP, start_S, count_S, context_S = map(
        jnp.asarray, (q_TNH, pool_LPE, table_SP, start_S, count_S, context_S)
    )
    _check(q_TNH, pool_LPE, table_SP, (start_S, count_S, context_S), num_kv_heads, page_tokens)
    _check_layer(layer, len(pool_LPE))
    if not 0 <= num_decodes <= len(table_SP):
        raise ValueError(f"num_decodes is {num_decodes}, and there are {len(table_SP)} rows")
    if most_queries < 1 or (window is not None and window < 1):
        raise ValueError(f"most_queries ({most_queries}) and window ({window}) must be positive")
    if 0 in q_TNH.shape or not len(table_SP):
        return jnp.zeros_like(q_TNH)
    return dispatch.call(
        "paged_attention", IMPLEMENTATIONS, q_TNH, pool_LPE, layer, table_SP, start_S, count_S, context_S,
        num_decodes=num_decodes, most_queries=most_queries, num_kv_heads=num_kv_heads, page_tokens=page_tokens,
        window=window, implementation=implementation, interpret=interpret,
    )  # fmt: skip


def pick(
    head_dim: int, dtype: str, implementation: str | None = None, *, page_tokens: int = 16, interpret: bool = False
) -> str:
    """The implementation that runs on this device.

    Args:
        head_dim, dtype: of the queries; page_tokens, implementation, interpret: see ragged_paged_attention.

    Raises:
        ValueError: no such implementation.
        NotImplementedError: the one asked for cannot run on this device, or not with these sizes.
    """
    for name in dispatch.choose("paged_attention", IMPLEMENTATIONS, implementation, interpret=interpret):
        try:
            if name == "triton":
                check_supported(head_dim, dtype)
            elif name == "mosaic_gpu":
                pallas_mosaic_gpu.check_supported(head_dim, dtype, page_tokens)
            return name
        except NotImplementedError as error:
            if implementation is not None:
                raise NotImplementedError(f"paged_attention, {name}: {error}") from error
    raise AssertionError("xla takes everything")


def _check(
    q_TNH: jax.Array, pool_LPE: jax.Array, table_SP: jax.Array, per_row: tuple[jax.Array, ...], K: int, page_tokens: int
) -> None:
    if q_TNH.ndim != 3 or pool_LPE.ndim != 3 or table_SP.ndim != 2:
        shapes = f"{q_TNH.shape}, {pool_LPE.shape}, {table_SP.shape}"
        raise ValueError(f"q, pool and table are [T, N, H], [L, P, E] and [S, pages], not {shapes}")
    _, N, H = q_TNH.shape
    if q_TNH.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ValueError(f"queries are bfloat16, float16 or float32, not {q_TNH.dtype}")
    if K < 1 or N % K:
        raise ValueError(f"{N} query heads are no multiple of {K} KV heads")
    if pool_LPE.shape[2] != 2 * K * page_tokens * H:
        raise ValueError(
            f"a page of {pool_LPE.shape[2]} elements is not 2 x {K} KV heads x {page_tokens} tokens x {H}: "
            "num_kv_heads, page_tokens and q's head_dim must be those that the pool was made with"
        )
    if not jnp.issubdtype(pool_LPE.dtype, jnp.unsignedinteger) or pool_LPE.dtype.itemsize != q_TNH.dtype.itemsize:
        raise ValueError(
            f"the pool of {q_TNH.dtype} queries holds unsigned integers of their width, not {pool_LPE.dtype}"
        )
    if not table_SP.shape[1]:
        raise ValueError("the table has no column: a row needs a page at least")
    if any(x.shape != table_SP.shape[:1] for x in per_row):
        raise ValueError(f"start, count and context have a value for each of {len(table_SP)} rows of the table")
    if any(x.dtype != jnp.int32 for x in (table_SP, *per_row)):
        raise ValueError("table, start, count and context are int32")


def _check_layer(layer: jax.Array | int, num_layers: int) -> None:
    if jnp.ndim(layer) or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise ValueError(f"layer is one integer, not {layer}")
    if isinstance(layer, int | np.integer) and not 0 <= layer < num_layers:
        raise ValueError(f"layer is {layer}, and the pool has {num_layers}")
