"""Paged attention for any XLA device: a loop over chunks of pages with an online softmax.

Rows are taken in groups, and the loop of a group runs only as far as its longest row needs: one compiled program serves
every context length, a long row costs those beside it in its group alone, and rows of padding cost nothing.
Keys and values are gathered by (page, kind, head), which hands the batched products their operands without a
transposition; on a CPU that is three times faster than gathering whole pages.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

PAGE_CHUNK = 4
"""Pages that one iteration reads of every row (64 tokens at 16 tokens a page). Of a long context 8 at a time would be
as fast, of a short one most would be masked: in 8 rows of 50 tokens attention takes 7 ms with 4 and 12 ms with 8."""

RUN_ROWS = 8
"""Most rows of a run (see attend_runs)."""

LEAST_RUN = 3
"""Rows that runs must have on average to be worth it: one of up to 8 rows takes as long as 2.5 (of 450 tokens) to 3.6
rows (of 60) by themselves, whose pages are gathered row by row."""

_MASKED = -1e30


def paged_attention(
    q_BQNH: jax.Array,
    pool_LPE: jax.Array,
    layer: jax.Array | int,
    table_BP: jax.Array,
    position_BQ: jax.Array,
    chunks_G: jax.Array,
    *,
    group: int,
    num_kv_heads: int,
    page_tokens: int,
    window: int | None = None,
) -> jax.Array:
    """Causal attention of B rows of Q queries each; all queries of a row see that row's pages.

    Group i is the rows from first_row(i, B, group) on, `group` of them, or all B where those are fewer.

    Args:
        q_BQNH: [B, Q, N, H], rotated queries, compute type.
        pool_LPE: uint[L, P, E], the pool's bits; a page is laid out [2, K, page_tokens, H], keys first. All slots of
            the pages read, unseen ones too, must hold finite values: unseen values are multiplied by 0.
        layer: index into L.
        table_BP: int32[B, pages], pages a multiple of PAGE_CHUNK; entries past a row's context may be any valid page.
        position_BQ: int32[B, Q]; a query sees the slots up to its own position, so each must be at least 0. With a
            window no query of a row that counts is before the row's first.
        chunks_G: int32[num_groups(B, group)], ceil(longest context of the group / (PAGE_CHUNK * page_tokens)). Those
            behind the last that is not 0 are left out, and the result of rows in no other group is 0.
        group: rows of a group.
        num_kv_heads: K; page_tokens: slots of a page.
        window: the most slots that a query sees, its own included; None for all. Pages before a row's window are not
            read.

    Returns:
        [B, Q, N, H] in q's type; sums are float32.
    """
    B = len(q_BQNH)
    sizes: dict[str, Any] = {"num_kv_heads": num_kv_heads, "page_tokens": page_tokens, "window": window}
    if group >= B:
        return _one_group(q_BQNH, pool_LPE, layer, table_BP, position_BQ, chunks_G[0], **sizes)

    def turn(i: jax.Array, out_BQNH: jax.Array) -> jax.Array:
        first = first_row(i, B, group)
        q, table, position = (
            jax.lax.dynamic_slice_in_dim(x, first, group) for x in (q_BQNH, table_BP, position_BQ)
        )  # fmt: skip
        out = _one_group(q, pool_LPE, layer, table, position, chunks_G[i], **sizes)
        return jax.lax.dynamic_update_slice_in_dim(out_BQNH, out, first, 0)

    used = jnp.max(jnp.where(chunks_G > 0, jnp.arange(1, len(chunks_G) + 1), 0))
    return jax.lax.fori_loop(0, used, turn, jnp.zeros_like(q_BQNH))


def attend_runs(
    out_BNH: jax.Array,
    q_BNH: jax.Array,
    pool_LPE: jax.Array,
    layer: jax.Array | int,
    table_BP: jax.Array,
    position_B: jax.Array,
    runs_R3: jax.Array,
    *,
    num_kv_heads: int,
    page_tokens: int,
    window: int | None = None,
) -> jax.Array:
    """Causal attention of runs of rows that are consecutive tokens of one sequence: their pages are gathered once.

    Args:
        out_BNH: [B, N, H], what rows in no run keep.
        q_BNH, pool_LPE, layer, table_BP, position_B: see paged_attention; Q is 1.
        runs_R3: int32[R, 3], of each run its first row, the row behind its last (at most RUN_ROWS later), and its
            page chunks, as in paged_attention; those behind the last that has any are left out.
        num_kv_heads, page_tokens, window: see paged_attention.

    Returns:
        [B, N, H], out_BNH with the rows of the runs anew.
    """
    most = min(RUN_ROWS, len(q_BNH))

    def turn(i: jax.Array, out_BNH: jax.Array) -> jax.Array:
        first, end, chunks = runs_R3[i]
        start = jnp.minimum(first, len(q_BNH) - most)
        row = start + jnp.arange(most)
        mine = (row >= first) & (row < end)
        q, position, old = (jax.lax.dynamic_slice_in_dim(x, start, most) for x in (q_BNH, position_B, out_BNH))
        # Other rows look as far as the first of the run: never before its window.
        position = jnp.where(mine, position, position_B[first])
        new = _one_group(
            q[None], pool_LPE, layer, jax.lax.dynamic_slice_in_dim(table_BP, first, 1), position[None], chunks,
            num_kv_heads=num_kv_heads, page_tokens=page_tokens, window=window,
        )  # fmt: skip
        return jax.lax.dynamic_update_slice_in_dim(out_BNH, jnp.where(mine[:, None, None], new[0], old), start, 0)

    used = jnp.sum(runs_R3[:, 2] > 0)
    return jax.lax.fori_loop(0, used, turn, out_BNH)


def num_groups(num_rows: int, group: int) -> int:
    """Groups of so many rows."""
    return max(1, -(-num_rows // group))


def first_row(index: Any, num_rows: int, group: int) -> Any:
    """First row of a group (an int or a traced one): the last reaches back where the rows are no multiple of it."""
    least = max(0, num_rows - group)
    return min(index * group, least) if isinstance(index, int) else jnp.minimum(index * group, least)


def _one_group(
    q_BQNH: jax.Array,
    pool_LPE: jax.Array,
    layer: jax.Array | int,
    table_BP: jax.Array,
    position_BQ: jax.Array,
    num_chunks: jax.Array,
    *,
    num_kv_heads: int,
    page_tokens: int,
    window: int | None,
) -> jax.Array:
    """paged_attention of all rows as far as the longest needs."""
    B, Q, N, H = q_BQNH.shape
    K, S = num_kv_heads, page_tokens
    G = N // K
    dtype = q_BQNH.dtype
    # Rows of one KV head: every query and every head of the group, [B, K, Q*G, H].
    q = (q_BQNH * H**-0.5).astype(dtype).reshape(B, Q, K, G, H).swapaxes(1, 2).reshape(B, K, Q * G, H)
    position = jnp.broadcast_to(position_BQ[:, :, None], (B, Q, G)).reshape(B, Q * G)
    pool = pool_LPE.reshape(*pool_LPE.shape[:2], 2, K, S * H)
    heads = jnp.arange(K)[None, :, None]
    # With a window each row begins at the page of the first slot that its first query sees.
    skipped_B = None
    if window is not None:
        skipped_B = jnp.maximum(position_BQ[:, 0] - (window - 1), 0) // S
        num_chunks = jnp.minimum(num_chunks, -(-(window + Q + S - 2) // (PAGE_CHUNK * S)))

    def gather(pages: jax.Array, kind: int) -> jax.Array:
        bits = pool.at[layer, pages, kind, heads].get(mode="promise_in_bounds")
        return jax.lax.bitcast_convert_type(bits, dtype).reshape(B, K, PAGE_CHUNK * S, H)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, total, out = carry
        if skipped_B is None:
            pages = jax.lax.dynamic_slice_in_dim(table_BP, i * PAGE_CHUNK, PAGE_CHUNK, 1)[:, None, :]
        else:
            wanted_BP = skipped_B[:, None] + i * PAGE_CHUNK + jnp.arange(PAGE_CHUNK)
            pages = jnp.take_along_axis(table_BP, wanted_BP, 1, mode="clip")[:, None, :]
        k, v = gather(pages, 0), gather(pages, 1)
        score = jnp.einsum("bkqh,bksh->bkqs", q, k, preferred_element_type=jnp.float32)
        slots_BC = (i * (PAGE_CHUNK * S) + jnp.arange(PAGE_CHUNK * S))[None]
        if skipped_B is not None:
            slots_BC = slots_BC + skipped_B[:, None] * S
        visible = slots_BC[:, None, :] <= position[:, :, None]
        if window is not None:
            visible &= slots_BC[:, None, :] > position[:, :, None] - window
        score = jnp.where(visible[:, None], score, _MASKED)
        new_top = jnp.maximum(top, score.max(-1))
        p = jnp.exp(score - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        add = jnp.einsum("bkqs,bksh->bkqh", p.astype(dtype), v, preferred_element_type=jnp.float32)
        return new_top, total * shrink + p.sum(-1), out * shrink[..., None] + add

    start = (
        jnp.full((B, K, Q * G), _MASKED, jnp.float32),
        jnp.zeros((B, K, Q * G), jnp.float32),
        jnp.zeros((B, K, Q * G, H), jnp.float32),
    )
    _, total, out = jax.lax.fori_loop(0, num_chunks, body, start)
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return out.astype(dtype).reshape(B, K, Q, G, H).swapaxes(1, 2).reshape(B, Q, N, H)
