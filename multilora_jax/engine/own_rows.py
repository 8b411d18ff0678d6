"""How many rank rows of each token a step sums over its devices; see pallas_kernels.segmented_lora.own_rows."""

from __future__ import annotations

import numpy as np

from multilora_jax.engine.batch import BuiltBatch
from multilora_jax.engine.in_place_rows import InPlaceRows
from multilora_jax.engine.rank_rows import ROW_BLOCK, RowPlan
from multilora_jax.engine.row_buffers import RowBuffers
from multilora_jax.lora.layout import Reach
from pallas_kernels.segmented_lora import plan as kernel_plan


class OwnRows:
    """Sizes that the layers are compiled for, and which a step takes.

    Args:
        max_lora_rank: the largest rank of an adapter; 0 where steps always sum the rows of all their adapters.
    """

    def __init__(self, max_lora_rank: int):
        self._max_lora_rank = max_lora_rank

    def sizes(self, num_rows: int) -> list[int]:
        """LlamaSpec.own_rows of steps with so many rank rows, ascending; beside them 0 for what does not fit.

        They are the largest rank and by four times less, where that is no more than half of all rows.
        """
        size, sizes = self._max_lora_rank, list[int]()
        while size > 0 and not (sizes and size < ROW_BLOCK):
            sizes.insert(0, -(-size // ROW_BLOCK) * ROW_BLOCK)
            size //= 4
        return [size for size in sizes if 2 * size <= num_rows]

    def of(self, built: BuiltBatch, plan: RowPlan, rows: RowBuffers | InPlaceRows) -> int:
        """LlamaSpec.own_rows of a step: the smallest size that its tokens' own rows fit into; 0 for all rows."""
        sizes = [] if plan.reach is Reach.EXTENDED else self.sizes(plan.bucket)
        if not sizes:
            return 0
        batch = built.batch
        if isinstance(rows, InPlaceRows):
            count = kernel_plan.count_own_rows(batch.plan or ())
        else:
            num_rows_X = rows.rank_rows.num_rows_X()
            rows_P, num_decodes = np.asarray(batch.row_P), built.shape.num_decodes
            count = count_own_rows(np.asarray(batch.mix_SX), rows_P, num_decodes, num_rows_X)
        return next((size for size in sizes if size * built.shape.num_tokens >= count), 0)


def count_own_rows(mix_SX: np.ndarray, row_P: np.ndarray, num_decodes: int, num_rows_X: np.ndarray) -> int:
    """Rank rows of each token's own adapters, over all tokens of a step.

    Args:
        mix_SX: float[S, X], the factor of each row on each adapter.
        row_P: int[P], row of each prompt token.
        num_decodes: B, how many of the S rows have a token each; they come first.
        num_rows_X: int[X], rows of each adapter.
    """
    tokens_S = np.bincount(row_P, minlength=len(mix_SX))
    tokens_S[:num_decodes] = 1
    return int(tokens_S @ ((mix_SX != 0) @ num_rows_X))
