"""From the sampling states of a step's rows to arrays of fixed sizes (numpy in, numpy out)."""

from __future__ import annotations

from typing import Any

import numpy as np

from multilora_jax.engine.sampling_state import MAX_EXTRA_ENTRIES
from multilora_jax.models.batch import SamplingEdits
from multilora_jax.models.edits import ENTRY_CHUNK
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.request import Sequence


def empty_edits(num_rows: int, spec: LlamaSpec) -> SamplingEdits:
    """Edits of nothing, with room for all that a step of so many rows can have.

    A row has an entry for each token of its text, all texts are in the pool, and few more; no row has two for a token.
    """
    vocab, g = spec.geometry.vocab_rows, spec.geometry
    most = min(num_rows * vocab, g.num_pages * g.page_tokens + num_rows * MAX_EXTRA_ENTRIES)
    room = -(-most // ENTRY_CHUNK) * ENTRY_CHUNK
    arrays: dict[str, Any] = {
        "row_E": np.zeros(room, np.int32),
        "token_E": np.zeros(room, np.int32),
        "bias_E": np.zeros(room, np.float32),
        "factor_E": np.zeros(room, np.float32),
        "penalty_E": np.zeros(room, np.float32),
        "num_entries": np.int32(0),
        "masked_S": np.zeros(num_rows, bool),
        "mask_SW": np.zeros((num_rows, -(-vocab // 32)), np.uint32),
    }
    return SamplingEdits(**arrays)


def build_edits(rows: list[tuple[Sequence, int]], num_rows: int, spec: LlamaSpec) -> SamplingEdits | None:
    """What the rows of a step ask to change; None where none asks.

    Args:
        rows: (sequence, row in S) of those that sample.
        num_rows: S.
        spec: of the model.
    """
    asking = [(seq.sampling_state, row) for seq, row in rows if seq.sampling_state is not None]
    if not asking:
        return None
    edits: Any = empty_edits(num_rows, spec)
    used = 0
    for state, row in asking:
        mask_W = edits.mask_SW[row]
        edits.masked_S[row] = masked = state.fill_mask(mask_W)
        token_E, bias_E, factor_E, penalty_E = state.entries(mask_W if masked else None)
        where = slice(used, used + len(token_E))
        edits.row_E[where] = row
        edits.token_E[where] = token_E
        edits.bias_E[where] = bias_E
        edits.factor_E[where] = factor_E
        edits.penalty_E[where] = penalty_E
        used = where.stop
    edits.num_entries = np.int32(used)
    return edits
