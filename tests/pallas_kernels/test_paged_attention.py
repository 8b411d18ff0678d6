"""Paged attention against its oracle: groups of heads, page sizes, several chunks, blocks of queries, padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import attend_runs, paged_attention, paged_attention_reference
from pallas_kernels.paged_attention.xla import PAGE_CHUNK, first_row, num_groups

TOLERANCE = {
    "float32": 2e-5,
    "bfloat16": 3e-2,  # queries, weights and the result are rounded to 8 bits each; values are of order 1
}
LAYERS, LAYER = 3, 1


def check(position_BQ, *, heads, head_dim=16, page_tokens=16, dtype="float32", seed=0, extra_chunks=0, group=99,
          window=None):  # fmt: skip
    """Runs rows of queries at the given positions; slots that no query sees hold huge values."""
    rng = np.random.default_rng(seed)
    position_BQ = np.asarray(position_BQ, np.int32)
    (B, Q), (N, K), S, H = position_BQ.shape, heads, page_tokens, head_dim
    lengths = position_BQ.max(1) + 1
    num_pages = -(-lengths // S)
    width = -(-int(num_pages.max() + extra_chunks * PAGE_CHUNK) // PAGE_CHUNK) * PAGE_CHUNK
    P = int(num_pages.sum()) + 2
    pages = rng.permutation(np.arange(1, P))
    kv = rng.standard_normal((LAYERS, P, 2, K, S, H)).astype(dtype)
    kv[:, 0] = 1e30
    table_BP = np.zeros((B, width), np.int32)
    for b in range(B):
        own, pages = pages[: num_pages[b]], pages[num_pages[b] :]
        table_BP[b, : len(own)] = own
        kv[:, own[-1], :, :, (lengths[b] - 1) % S + 1 :] = 1e30
        if window is not None:
            for slot in range(int(position_BQ[b, 0]) - window + 1):
                kv[:, own[slot // S], :, :, slot % S] = 1e30
    q = rng.standard_normal((B, Q, N, H)).astype(dtype)

    storage = np.uint32 if dtype == "float32" else np.uint16
    pool = jnp.asarray(kv.view(storage).reshape(LAYERS, P, -1))
    firsts = [first_row(i, B, group) for i in range(num_groups(B, group))]
    longest_G = np.array([lengths[first : first + group].max() for first in firsts])
    chunks_G = (-(-longest_G // (PAGE_CHUNK * S)) + extra_chunks).astype(np.int32)
    got = jax.jit(paged_attention, static_argnames=("group", "num_kv_heads", "page_tokens", "window"))(
        q, pool, LAYER, table_BP, position_BQ, chunks_G, group=group, num_kv_heads=K, page_tokens=S, window=window
    )
    assert got.shape == q.shape
    assert got.dtype == dtype
    wanted = paged_attention_reference(q, kv[LAYER, :, 0], kv[LAYER, :, 1], table_BP, position_BQ, window)
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=0, atol=TOLERANCE[dtype])


def block(last: int, queries: int) -> list[int]:
    return list(range(last - queries + 1, last + 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 1), (9, 3)])
def test_groups_of_heads(heads, dtype):
    check([[0], [6], [15], [16], [40]], heads=heads, dtype=dtype)
    check([block(3, 4), block(20, 4)], heads=heads, dtype=dtype)


@pytest.mark.parametrize("head_dim", [2, 32, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_dims(head_dim, dtype):
    check([block(17, 2), block(50, 2)], heads=(4, 2), head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("page_tokens", [8, 16])
@pytest.mark.parametrize("longest", [0, 63, 64, 128, 300])
def test_several_chunks(longest, page_tokens):
    """64 or 128 tokens a chunk; short rows beside a long one see nothing in its later chunks."""
    check([[longest], [0], [longest // 2]], heads=(4, 2), page_tokens=page_tokens)


@pytest.mark.parametrize("page_tokens", [8, 16])
def test_blocks_of_queries_see_only_the_past(page_tokens):
    check([block(31, 32), block(140, 32), block(200, 32)], heads=(4, 2), page_tokens=page_tokens)


def test_padding_rows_and_queries():
    """A row of padding reads slot 0 of page 0; padding queries behind a short chunk repeat position 0."""
    check([[0] * 4, [30, 31, 0, 0], block(131, 4)], heads=(4, 2))


def test_chunks_past_every_context_change_nothing():
    check([[5], [90]], heads=(4, 2), extra_chunks=2)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [4, 5, 7])
def test_rows_in_groups(rows, group, queries):
    """Each group goes as far as its own longest row; the last shares rows where they are no multiple of it."""
    check([block(7 + 37 * row, queries) for row in range(rows)], heads=(4, 2), group=group)


@pytest.mark.parametrize("window", [1, 7, 16, 64, 100, 1000])
@pytest.mark.parametrize("queries", [1, 5, 32])
def test_a_window_hides_what_is_before_it(window, queries):
    """Also where a row's window begins in mid-page, and where rows beside it have long and short contexts."""
    rows = [block(last, queries) for last in (max(queries, 3), 40, 63, 64, 131, 300)]
    check(rows, heads=(4, 2), window=window, page_tokens=8)
    check(rows, heads=(4, 2), window=window, group=2)


def test_pages_before_the_window_are_not_read():
    """A long context costs what its window does: the loop ends with the pages that the window covers."""
    pool = jnp.full((1, 3, 2 * 2 * 16 * 16), np.float32(np.nan)).view(jnp.uint32)
    pool = pool.at[0, 1].set(jnp.ones(2 * 2 * 16 * 16).view(jnp.uint32))
    # The window lies in the last two pages, which are page 1; all before them hold NaN.
    table_BP = jnp.full((1, 400), 2).at[0, 373:].set(1)
    out = paged_attention(
        jnp.ones((1, 1, 4, 16)), pool, 0, table_BP, jnp.full((1, 1), 375 * 16 - 1), jnp.full(1, 94), group=1,
        num_kv_heads=2, page_tokens=16, window=32,
    )  # fmt: skip
    np.testing.assert_allclose(out, 1, rtol=1e-6)


def test_a_group_without_chunks_is_left_out():
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.standard_normal((1, 9, 2 * 2 * 16 * 16), np.float32)).view(jnp.uint32)
    q = jnp.asarray(rng.standard_normal((5, 1, 4, 16)), jnp.float32)
    table_BP = jnp.arange(1, 6)[:, None] + jnp.zeros((1, PAGE_CHUNK), int)
    sizes = {"group": 2, "num_kv_heads": 2, "page_tokens": 16}
    assert (num_groups(5, 2), [first_row(i, 5, 2) for i in range(3)]) == (3, [0, 2, 3])
    some, every = (
        paged_attention(q, pool, 0, table_BP, jnp.full((5, 1), 9), jnp.asarray(chunks), **sizes)
        for chunks in ([1, 1, 0], [1, 1, 1])
    )
    np.testing.assert_array_equal(some[:4], every[:4])
    assert not np.any(some[4])
    assert np.all(np.any(every, (1, 2, 3)))


def test_queries_of_a_row_read_one_layer_only():
    """The same pages in another layer give another result."""
    rng = np.random.default_rng(0)
    pool = jnp.asarray(rng.standard_normal((2, 3, 2 * 2 * 16 * 16), np.float32)).view(jnp.uint32)
    q = jnp.asarray(rng.standard_normal((1, 1, 4, 16)), jnp.float32)
    table_BP, position_BQ = jnp.array([[1, 2, *[0] * 6]]), jnp.array([[20]])
    first, second = (
        paged_attention(
            q, pool, layer, table_BP, position_BQ, jnp.ones(1, int), group=1, num_kv_heads=2, page_tokens=16
        )
        for layer in (0, 1)
    )
    assert np.abs(first - second).max() > 0.1


@pytest.mark.parametrize("window", [None, 9, 100])
@pytest.mark.parametrize("runs", [[(0, 5, 40)], [(0, 3, 61), (3, 11, 126), (11, 14, 5)], [(0, 1, 0), (1, 2, 64)]])
def test_runs_are_rows_of_one_sequence(runs, window):
    """Each row of (first, end, first position) sees what it would by itself, also in the last rows, where a run's
    eight would reach beyond the batch; rows of no run keep what they have."""
    rng, rows, (K, S, H) = np.random.default_rng(0), 14, (2, 16, 16)
    kv = rng.standard_normal((1, 33, 2, K, S, H)).astype(np.float32)
    pool = jnp.asarray(kv.view(np.uint32).reshape(1, 33, -1))
    q, kept = (rng.standard_normal((rows, 4, H)).astype(np.float32) for _ in range(2))
    table_BP, position_B = np.zeros((rows, 3 * PAGE_CHUNK), np.int32), np.zeros(rows, np.int32)
    runs_R3 = np.zeros((4, 3), np.int32)
    for index, (first, end, position) in enumerate(runs):
        table_BP[first:end, :10] = 1 + 10 * index + np.arange(10)
        position_B[first:end] = position + np.arange(end - first)
        runs_R3[index] = first, end, -(-(position + end - first) // (PAGE_CHUNK * S))
    sizes = {"num_kv_heads": K, "page_tokens": S, "window": window}
    got = jax.jit(lambda *args: attend_runs(*args, **sizes))(kept, q, pool, 0, table_BP, position_B, runs_R3)
    used = slice(0, runs[-1][1])
    wanted = paged_attention_reference(
        q[used, None], kv[0, :, 0], kv[0, :, 1], table_BP[used], position_B[used, None], window
    )
    np.testing.assert_allclose(got[used], wanted[:, 0], rtol=0, atol=TOLERANCE["float32"])
    np.testing.assert_array_equal(got[used.stop :], kept[used.stop :])


@settings(max_examples=12)
@given(
    lasts=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    queries=st.integers(1, 5),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    page_tokens=st.sampled_from([4, 8, 16]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    window=st.none() | st.integers(1, 200),
    seed=st.integers(0, 99),
)
def test_anything(lasts, queries, group, kv_heads, page_tokens, dtype, window, seed):
    positions = [block(max(last, queries - 1), queries) for last in lasts]
    check(positions, heads=(kv_heads * group, kv_heads), page_tokens=page_tokens, dtype=dtype, seed=seed,
          window=window)  # fmt: skip
