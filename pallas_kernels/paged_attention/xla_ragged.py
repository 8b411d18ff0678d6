"""The ragged interface of paged attention for any XLA device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.xla import PAGE_CHUNK, first_row, num_groups, paged_attention

_GROUP = 16
"""Rows that the loop over contexts takes at a time, see xla.paged_attention."""


def paged_attention_xla(
    q_TNH: jax.Array,
    pool_LPE: jax.Array,
    layer: jax.Array | int,
    table_SP: jax.Array,
    start_S: jax.Array,
    count_S: jax.Array,
    context_S: jax.Array,
    *,
    num_decodes: int,
    most_queries: int,
    num_kv_heads: int,
    page_tokens: int,
    window: int | None = None,
) -> jax.Array:
    """See `api.ragged_paged_attention`. Rows are padded to most_queries queries, those of decodes to one."""
    out = jnp.zeros_like(q_TNH)
    for rows, queries in (
        (slice(0, num_decodes), 1),
        (slice(num_decodes, len(table_SP)), most_queries),
    ):
        if rows.start == rows.stop:
            continue
        start_B, count_B, context_B = start_S[rows], count_S[rows], context_S[rows]
        place_Q = jnp.arange(queries)
        used_BQ = place_Q < count_B[:, None]
        token_BQ = jnp.where(used_BQ, start_B[:, None] + place_Q, 0)
        position_BQ = jnp.where(used_BQ, (context_B - count_B)[:, None] + place_Q, 0)
        arguments = (q_TNH[token_BQ], pool_LPE, layer, table_SP[rows], position_BQ)
        result = _grouped(*arguments, num_kv_heads=num_kv_heads, page_tokens=page_tokens, window=window)
        # Places behind the end are dropped.
        out = out.at[jnp.where(used_BQ, token_BQ, len(out))].set(result, mode="drop")
    return out


def _grouped(
    q_BQNH: jax.Array, pool_LPE: jax.Array, layer: jax.Array | int, table_BP: jax.Array, position_BQ: jax.Array, *,
    num_kv_heads: int, page_tokens: int, window: int | None,
) -> jax.Array:  # fmt: skip
    """xla.paged_attention with a table of any width, and its chunks counted on the device."""
    B, width = table_BP.shape
    table_BP = jnp.pad(table_BP, ((0, 0), (0, -width % PAGE_CHUNK)))
    group = min(_GROUP, B)
    last_B = position_BQ.max(1)
    longest_G = jnp.stack(
        [last_B[first : first + group].max() for first in (first_row(i, B, group) for i in range(num_groups(B, group)))]
    )
    chunks_G = longest_G // (PAGE_CHUNK * page_tokens) + 1
    return paged_attention(
        q_BQNH, pool_LPE, layer, table_BP, position_BQ, chunks_G, group=group, num_kv_heads=num_kv_heads,
        page_tokens=page_tokens, window=window,
    )  # fmt: skip
