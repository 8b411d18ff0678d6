"""The oracle: a loop over tokens in float32 that nobody optimises."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def lora_delta_reference(
    x_TI: np.ndarray,
    a_RI: Sequence[np.ndarray],
    b_OR: Sequence[np.ndarray],
    scale: Sequence[float],
    adapter_T: np.ndarray,
) -> np.ndarray:
    """scale_i * (x_t A_i^T) B_i^T for each token t, where i is the token's adapter.

    Args:
        x_TI: float[T, I], activations.
        a_RI: per adapter float[R_i, I]; ranks differ freely.
        b_OR: per adapter float[O, R_i].
        scale: per adapter alpha / r (or alpha / sqrt(r)).
        adapter_T: int[T], index of each token's adapter; -1 is the base, whose delta is zero.

    Returns:
        float32[T, O].
    """
    out_dim = b_OR[0].shape[0] if len(b_OR) else 0
    y_TO = np.zeros((len(x_TI), out_dim), np.float32)
    for t, i in enumerate(np.asarray(adapter_T)):
        if i >= 0:
            s_R = np.asarray(a_RI[i], np.float32) @ np.asarray(x_TI[t], np.float32)
            y_TO[t] = np.float32(scale[i]) * (np.asarray(b_OR[i], np.float32) @ s_R)
    return y_TO


def lora_mix_reference(
    x_TI: np.ndarray,
    a_RI: Sequence[np.ndarray],
    b_OR: Sequence[np.ndarray],
    scale: Sequence[float],
    mix_TX: np.ndarray,
) -> np.ndarray:
    """Weighted mixes: sum over the adapters i of mix_ti scale_i (x_t A_i^T) B_i^T, for each token t.

    Args:
        mix_TX: float[T, X], the factor of token t on adapter i. The others: see lora_delta_reference.

    Returns:
        float32[T, O].
    """
    y_TO = np.zeros((len(x_TI), b_OR[0].shape[0] if len(b_OR) else 0), np.float32)
    for i in range(len(a_RI)):
        used_T = np.where(np.asarray(mix_TX)[:, i] != 0, 0, -1)
        only_TO = lora_delta_reference(x_TI, a_RI[i : i + 1], b_OR[i : i + 1], scale[i : i + 1], used_T)
        y_TO += np.asarray(mix_TX, np.float32)[:, i, None] * only_TO
    return y_TO
