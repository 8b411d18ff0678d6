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
