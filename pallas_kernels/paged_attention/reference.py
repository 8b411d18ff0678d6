"""The oracle: one query and one head at a time in float32."""

from __future__ import annotations

import numpy as np


def paged_attention_reference(
    q_BQNH: np.ndarray,
    k_pages_PKSH: np.ndarray,
    v_pages_PKSH: np.ndarray,
    table_BP: np.ndarray,
    position_BQ: np.ndarray,
    window: int | None = None,
) -> np.ndarray:
    """softmax(q k / sqrt(H)) v over the slots at positions up to the query's own.

    Args:
        q_BQNH: float[B, Q, N, H], rotated queries of B rows.
        k_pages_PKSH, v_pages_PKSH: float[P, K, S, H], pages of S slots; N is a multiple of K.
        table_BP: int[B, pages], the pages of each row in order.
        position_BQ: int[B, Q], each query's position.
        window: the most slots that a query sees, the last ones; None for all.

    Returns:
        float32[B, Q, N, H].
    """
    B, Q, N, H = q_BQNH.shape
    _, K, S, _ = k_pages_PKSH.shape
    out = np.zeros((B, Q, N, H), np.float32)
    for b in range(B):
        for i in range(Q):
            end = int(position_BQ[b, i]) + 1
            slots = np.arange(0 if window is None else max(0, end - window), end)
            pages, offsets = table_BP[b][slots // S], slots % S
            for n in range(N):
                k = n // (N // K)
                keys = np.asarray(k_pages_PKSH[pages, k, offsets], np.float32)
                values = np.asarray(v_pages_PKSH[pages, k, offsets], np.float32)
                score = keys @ np.asarray(q_BQNH[b, i, n], np.float32) / np.sqrt(np.float32(H))
                p = np.exp(score - score.max())
                out[b, i, n] = (p / p.sum()) @ values
    return out
