"""Sizes of models, and random arguments, for the tests, the compile check and the benchmark of paged attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention.reference import paged_attention_reference

HEADS = {
    "smollm2-135m": (9, 3, 64),
    "llama-3-8b": (32, 8, 128),
    "llama-2-13b": (40, 40, 128),
    "llama-2-70b/8": (8, 1, 128),  # one shard of eight
}
"""Query heads, KV heads and head_dim by model."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of ragged_paged_attention on the host, and what the oracle needs.

    Attributes:
        q_TNH: in the compute type; the last tokens are in no row.
        kv_LP2KSH: the pool's values in the compute type.
        table_SP, start_S, count_S, context_S: see ragged_paged_attention.
        layer: the layer asked for.
    """

    q_TNH: np.ndarray
    kv_LP2KSH: np.ndarray
    table_SP: np.ndarray
    start_S: np.ndarray
    count_S: np.ndarray
    context_S: np.ndarray
    layer: int = 1

    @property
    def arrays(self) -> tuple[np.ndarray | int, ...]:
        """Positional arguments of ragged_paged_attention."""
        L, P, *_ = self.kv_LP2KSH.shape
        bits = np.dtype(f"uint{8 * self.q_TNH.dtype.itemsize}")
        pool_LPE = self.kv_LP2KSH.view(bits).reshape(L, P, -1)
        return (self.q_TNH, pool_LPE, self.layer, self.table_SP, self.start_S, self.count_S, self.context_S)

    def oracle(self, window: int | None = None) -> np.ndarray:
        """float32[T, N, H]."""
        out_TNH = np.zeros(self.q_TNH.shape, np.float32)
        k, v = self.kv_LP2KSH[self.layer, :, 0], self.kv_LP2KSH[self.layer, :, 1]
        for row, (start, count, context) in enumerate(zip(self.start_S, self.count_S, self.context_S, strict=True)):
            if count:
                where = slice(start, start + count)
                position_BQ = np.arange(context - count, context)[None]
                table_BP = self.table_SP[row][None]
                out_TNH[where] = paged_attention_reference(
                    self.q_TNH[where][None], k, v, table_BP, position_BQ, window
                )[0]
        return out_TNH


def random_arguments(
    rows: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    *,
    dtype: str,
    page_tokens: int = 16,
    layers: int = 2,
    num_pages: int | None = None,
    num_tokens: int | None = None,
    width: int | None = None,
    unseen: float | None = 6e4,
    seed: int = 0,
) -> Arguments:
    """Rows in pages of arbitrary order, and everything that they must not see filled with large values.

    Args:
        rows: (queries, context) of each.
        heads: N, K, H.
        num_pages, num_tokens, width: P, T and pages of a table; a little more than the rows need where they are None.
        unseen: value of the slots behind each context and of the pages of nobody; None leaves them random.

    Raises:
        ValueError: the rows do not fit into these sizes.
    """
    (N, K, H), S, L = heads, page_tokens, layers
    rng = np.random.default_rng(seed)
    count_S, context_S = np.asarray(rows, np.int32).reshape(-1, 2).T
    pages_S = -(-context_S // S)
    P = num_pages or int(pages_S.sum()) + 2
    T = num_tokens or int(count_S.sum()) + 3
    width = width or int(pages_S.max(initial=0)) + 1
    if pages_S.sum() > P or count_S.sum() > T or pages_S.max(initial=0) > width:
        raise ValueError(f"{rows} do not fit into {P} pages, {T} tokens and tables of {width} pages")
    free = rng.permutation(P)
    kv = rng.standard_normal((L, P, 2, K, S, H), np.float32).astype(jnp.dtype(dtype))
    table_SP = rng.integers(0, P, (len(rows), width), np.int32)
    for row, count in enumerate(pages_S):
        own, free = free[:count], free[count:]
        table_SP[row, :count] = own
        if unseen is not None and count:
            kv[:, own[-1], :, :, (context_S[row] - 1) % S + 1 :] = unseen
    if unseen is not None:
        kv[:, free] = unseen
    # Rows lie in any order among the tokens.
    order = rng.permutation(len(rows))
    start_S = np.zeros(len(rows), np.int32)
    start_S[order] = np.concatenate([[0], np.cumsum(count_S[order])])[:-1]
    q_TNH = rng.standard_normal((T, N, H), np.float32).astype(jnp.dtype(dtype))
    return Arguments(q_TNH, kv, table_SP, start_S, count_S.astype(np.int32), context_S.astype(np.int32), L - 1)
