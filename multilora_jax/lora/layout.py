"""Where everything of an adapter lies in its pages, and which rows it takes in the tables of a step.

An adapter's units are numbered from 0: first the projections, layer by layer, in each layer module by module in the
order of MODULES, in each module the rows of A, then the rows of B transposed; then the biases, the gains and the norms,
in the same order; last what belongs to the vocabulary. Nothing is padded to a rank, to all modules or to all features.
Unit j lies in page `j // units_per_page_all_layers` of the adapter, there in layer slot `(j // units_per_page) % L`, at
offset `j % units_per_page`: the layer slots of a page are just room, and do not follow the layer a row belongs to. (The
unified paging of S-LoRA, section 5.1 of arXiv 2311.03285, with units small enough for grouped-query attention and the
MLP.)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property

import ml_dtypes
import numpy as np

from multilora_jax.memory.geometry import MODULES, NUM_ATTENTION

COMPUTE_DTYPES = {
    "float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16),
}  # fmt: skip
"""Compute type by name to numpy's."""

NORMS = ("input", "post")
"""The norms of a layer; the order of the axis `2` everywhere."""

_NORM_OF_MODULE = {MODULES.index("o_proj"): 0, MODULES.index("down_proj"): 1}
"""Modules whose output is as wide as a norm: the norm row borrows their rows of B."""


@dataclass(frozen=True)
class VocabLayout:
    """Start units of what an adapter adds around the layers, -1 where it adds nothing.

    A *row* of n elements has n/u units. An *int row* of n integers is one row of uint32 words where the pool's storage
    has 4 bytes, and else two rows of n words: the low INT_BITS bits of all, then the others.

    Attributes:
        embed_rank, embed_scale: of the embedding's LoRA, 0 where it has none.
        embed_a: embed_rank rows of vocab_rows: A.
        embed_b: embed_rank rows of D: B transposed.
        embed_gain: a row of D.
        embed_map: int row of vocab_rows: 1 + index of the token's row delta, 0 for none.
        embed_rows: rows of D, the row deltas.
        final_norm: a row of D.
        head_rank, head_scale: of the head's LoRA, 0 where it has none.
        head_a: head_rank rows of D: A.
        head_b: head_rank rows of vocab_rows: B transposed.
        head_gain, head_bias: a row of vocab_rows each.
        head_ids: int row of num_head_rows, rounded up to units with zeros: the tokens of the row deltas.
        head_rows: num_head_rows rows of D, the row deltas; may be the units of embed_rows.
        num_head_rows: how many.
        extra_tokens: tokens past the base's vocabulary.
    """

    embed_rank: int = 0
    embed_a: int = -1
    embed_b: int = -1
    embed_scale: float = 0.0
    embed_gain: int = -1
    embed_map: int = -1
    embed_rows: int = -1
    final_norm: int = -1
    head_rank: int = 0
    head_a: int = -1
    head_b: int = -1
    head_scale: float = 0.0
    head_gain: int = -1
    head_bias: int = -1
    head_ids: int = -1
    head_rows: int = -1
    num_head_rows: int = 0
    extra_tokens: int = 0


@dataclass(frozen=True, eq=False)
class RowTables:
    """What each of an adapter's R rows does in each module (float32).

    Attributes:
        scale_LMR: factor of a LoRA row, 0 where the module has no such row.
        const_LMR: 1 at the bias row of the modules that have a bias delta.
        gain_LMR: 1 at the gain row of the modules that have a gain.
        norm_L2R: 1 at the norm row of the norms that have a delta.
    """

    scale_LMR: np.ndarray
    const_LMR: np.ndarray
    gain_LMR: np.ndarray
    norm_L2R: np.ndarray


class Reach(enum.IntEnum):
    """What of the model an adapter changes; the larger includes the smaller."""

    ATTENTION = 0
    """LoRA rows and biases of q, k, v and o alone."""
    PROJECTIONS = 1
    """Those of any projection."""
    EXTENDED = 2
    """Gains, norms, embedding or head too."""


@dataclass(frozen=True, eq=False)
class AdapterLayout:
    """Sizes of an adapter and the places of its rows; small, and known without its pages.

    Rows 0 .. r-1, r being the largest rank of a projection, are LoRA rows; the bias row, the gain row and the norm row
    follow, of those that the adapter has.

    Attributes:
        rank: the largest rank of any module, those of the vocabulary too.
        num_rows: rows in the tables of a step, at least 1.
        num_pages: page ids that it takes in the pool, at least 1.
        num_units: units in use.
        ranks_LM: int32[L, M], 0 where the module is absent.
        scale_LM: float32[L, M], factor on `B A x`, not folded into B; 0 where the module is absent.
        start_a_LM, start_b_LM: int32[L, M], first unit of the rows of A and of B transposed: row i of A has the units
            `start_a + i * units_a_M .. + units_a_M`; 0 where the module is absent.
        units_a_M, units_b_M: int32[M], units per row: in_dim/u and out_dim/u.
        start_bias_LM, start_gain_LM: int32[L, M], first unit of a bias delta and of a gain (a row of out_dim each), -1
            where the module has none.
        start_norm_L2: int32[L, 2], first unit of a norm's delta (a row of D), in the order of NORMS; -1 for none.
        bias_row, gain_row, norm_row: the special rows, -1 where the adapter has none.
        vocab: of the embedding, the head and the last norm; None where none of them changes.
    """

    rank: int
    num_rows: int
    num_pages: int
    num_units: int
    ranks_LM: np.ndarray = field(repr=False)
    scale_LM: np.ndarray = field(repr=False)
    start_a_LM: np.ndarray = field(repr=False)
    start_b_LM: np.ndarray = field(repr=False)
    units_a_M: np.ndarray = field(repr=False)
    units_b_M: np.ndarray = field(repr=False)
    start_bias_LM: np.ndarray = field(repr=False)
    start_gain_LM: np.ndarray = field(repr=False)
    start_norm_L2: np.ndarray = field(repr=False)
    bias_row: int = -1
    gain_row: int = -1
    norm_row: int = -1
    vocab: VocabLayout | None = None

    @cached_property
    def reach(self) -> Reach:
        """What a step must be able to do for it."""
        if self.gain_row >= 0 or self.norm_row >= 0 or self.vocab is not None:
            return Reach.EXTENDED
        mlp = self.ranks_LM[:, NUM_ATTENTION:].any() or (self.start_bias_LM[:, NUM_ATTENTION:] >= 0).any()
        return Reach.PROJECTIONS if mlp else Reach.ATTENTION

    @property
    def extended(self) -> bool:
        """Whether it changes more than LoRA rows and biases can: gains, norms, or anything of the vocabulary."""
        return self.reach is Reach.EXTENDED

    def row_units(self, module_index: int, first_row: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Units of the rows [first_row, first_row + num_rows) of one module in every layer.

        A bias or gain row has its vector in place of a row of B and no row of A. The norm row has the delta of the
        input norm at o_proj and that of the post-attention norm at down_proj, in place of a row of B.

        Args:
            module_index: position in MODULES.
            first_row, num_rows: range of rows; it may reach past num_rows.

        Returns:
            int32[L, num_rows, in/u] and int32[L, num_rows, out/u]: the adapter's own unit numbers (see
            PoolGeometry.unit_addresses), -1 where there is no such row.
        """
        rows_R = np.arange(first_row, first_row + num_rows, dtype=np.int32)
        live_LR = rows_R < self.ranks_LM[:, module_index, None]

        def firsts(start_LM: np.ndarray, per_row: np.ndarray) -> np.ndarray:
            first_LR = start_LM[:, module_index, None] + rows_R * per_row[module_index]
            return np.where(live_LR, first_LR, np.int32(-1))

        first_a_LR, first_b_LR = firsts(self.start_a_LM, self.units_a_M), firsts(self.start_b_LM, self.units_b_M)
        special = [(self.bias_row, self.start_bias_LM[:, module_index])]
        special.append((self.gain_row, self.start_gain_LM[:, module_index]))
        if module_index in _NORM_OF_MODULE:
            special.append((self.norm_row, self.start_norm_L2[:, _NORM_OF_MODULE[module_index]]))
        for row, start_L in special:
            if row >= 0 and first_row <= row < first_row + num_rows:
                first_b_LR[:, row - first_row] = start_L
        return _spread(first_a_LR, self.units_a_M[module_index]), _spread(first_b_LR, self.units_b_M[module_index])

    def row_tables(self) -> RowTables:
        """What the rows 0 .. num_rows-1 do."""
        rows_R = np.arange(self.num_rows)
        live_LMR = rows_R < self.ranks_LM[:, :, None]
        return RowTables(
            np.where(live_LMR, self.scale_LM[:, :, None], np.float32(0)),
            ((rows_R == self.bias_row) & (self.start_bias_LM >= 0)[:, :, None]).astype(np.float32),
            ((rows_R == self.gain_row) & (self.start_gain_LM >= 0)[:, :, None]).astype(np.float32),
            ((rows_R == self.norm_row) & (self.start_norm_L2 >= 0)[:, :, None]).astype(np.float32),
        )


def _spread(first_LR: np.ndarray, per_row: int) -> np.ndarray:
    """int32[L, R, per_row]: the units of the rows that begin at `first_LR`, -1 where that is -1."""
    units_LRU = first_LR[:, :, None] + np.arange(per_row, dtype=np.int32)
    return np.where(first_LR[:, :, None] >= 0, units_LRU, np.int32(-1))
