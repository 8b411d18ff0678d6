"""From a scheduled step to arrays of a bucket's sizes (host only: numpy in, numpy out)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from multilora_jax.engine.rank_rows import ROW_BLOCK
from multilora_jax.engine.step_plan import ScheduledStep
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.models.batch import ForwardBatch, RowChunks, SamplingBatch
from multilora_jax.request import Sequence
from pallas_kernels.paged_attention.xla import PAGE_CHUNK
from pallas_kernels.segmented_lora.xla import ROW_CHUNK

__all__ = [
    "BatchShape", "BuiltBatch", "ForwardBatch", "batch_shapes", "build_batch", "empty_batch", "pack", "pick_shape",
]  # fmt: skip


MAX_TEMPERATURE = 1e30
"""Higher ones are as good as this, where every token is equally likely, and float32 still holds it."""


@dataclass(frozen=True, order=True)
class BatchShape:
    """Sizes of one compiled step: B decode rows and NB prefill blocks."""

    num_blocks: int
    num_decodes: int

    def num_tokens(self, block: int) -> int:
        """T."""
        return self.num_decodes + self.num_blocks * block

    @property
    def num_rows(self) -> int:
        """S."""
        return self.num_decodes + self.num_blocks


@dataclass
class BuiltBatch:
    """A batch on the host and which sequence each sampling row belongs to.

    Attributes:
        batch: numpy leaves.
        shape: its bucket.
        rows: (sequence, row in S) of every sequence whose next token this step samples; those after its proposals are
            in the rows that follow.
        chunks: (sequence, first T index, n) of every prefill chunk, for prompt log-probabilities.
    """

    batch: ForwardBatch
    shape: BatchShape
    rows: list[tuple[Sequence, int]]
    chunks: list[tuple[Sequence, int, int]]


def batch_shapes(max_num_seqs: int, max_blocks: int) -> list[BatchShape]:
    """All step sizes to compile, smallest first.

    Decode-only steps come in a few sizes from 2 rows (a batch of one is far slower than of two on CPUs) by factors of
    four; steps with prefill have room for every sequence, and either two blocks or all.
    """
    decodes = [n for n in (2 * 4**i for i in range(8)) if n < max_num_seqs] + [max(2, max_num_seqs)]
    blocks = sorted({min(2, max_blocks), max_blocks})
    return [BatchShape(0, n) for n in decodes] + [BatchShape(n, decodes[-1]) for n in blocks]


def pick_shape(shapes: list[BatchShape], num_decodes: int, num_blocks: int) -> BatchShape:
    """The smallest compiled size that holds a step."""
    return next(s for s in shapes if s.num_decodes >= num_decodes and s.num_blocks >= num_blocks)


def table_width(max_model_len: int, geometry: PoolGeometry) -> int:
    """Pages of a row's page table, rounded to whole chunks of the attention loop."""
    pages = geometry.pages_for_tokens(max_model_len)
    return -(-pages // PAGE_CHUNK) * PAGE_CHUNK


def empty_batch(shape: BatchShape, block: int, width: int, slots: int = 0) -> ForwardBatch:
    """A batch of padding only, with room for the factors on `slots` adapters; 0 for a step without."""
    T, S = shape.num_tokens(block), shape.num_rows
    sampling = SamplingBatch(
        index_S=np.zeros(S, np.int32),  # pyright: ignore
        position_S=np.zeros(S, np.int32),  # pyright: ignore
        vocab_S=np.ones(S, np.int32),  # pyright: ignore
        temperature_S=np.zeros(S, np.float32),  # pyright: ignore
        top_p_S=np.ones(S, np.float32),  # pyright: ignore
        min_p_S=np.zeros(S, np.float32),  # pyright: ignore
        top_k_S=np.zeros(S, np.int32),  # pyright: ignore
        seed_S2=np.zeros((S, 2), np.uint32),  # pyright: ignore
        num_logprobs_S=np.full(S, -1, np.int32),  # pyright: ignore
    )
    arrays: dict[str, Any] = {
        "token_ids_T": np.zeros(T, np.int32),
        "positions_T": np.zeros(T, np.int32),
        "slots_T": np.zeros(T, np.int32),
        "table_SP": np.zeros((S, width), np.int32),
        "decode_chunks": np.int32(0),
        "prefill_chunks": np.int32(0),
        "mix_SX": np.zeros((S, slots), np.float32) if slots else None,
    }
    num_rows, chunks = slots * ROW_BLOCK, None
    if shape.num_blocks and num_rows > ROW_CHUNK and num_rows % ROW_CHUNK == 0:
        index_C: Any = np.zeros(num_rows // ROW_CHUNK, np.int32)
        chunks = RowChunks(index_C, np.int32(0))  # pyright: ignore[reportArgumentType]
    return ForwardBatch(**arrays, sampling=sampling, row_chunks=chunks, lora=None)


def build_batch(
    step: ScheduledStep,
    shapes: list[BatchShape],
    geometry: PoolGeometry,
    block: int,
    width: int,
    slots: int,
    slot_of: Callable[[Any], int],
    rows_of: Callable[[Any], list[int]],
) -> BuiltBatch:
    """Fills the arrays of a step.

    Args:
        step: what the scheduler chose; every sequence's pages cover its tokens of this step.
        shapes: compiled sizes.
        geometry: of the pool.
        block: tokens of a prefill block.
        width: pages of a page table.
        slots: adapter slots of the active rank rows, 0 for a step without adapters.
        slot_of: slot of an active adapter; rows_of: the first row of each of its blocks in the buffers.
    """
    num_blocks = sum(-(-n // block) for _, n in step.prefills)
    shape = pick_shape(shapes, step.num_decode_rows, num_blocks)
    batch = empty_batch(shape, block, width, slots)
    S, span = geometry.page_tokens, PAGE_CHUNK * geometry.page_tokens
    tokens, positions, kv_slots = batch.token_ids_T, batch.positions_T, batch.slots_T
    table: Any = batch.table_SP
    rows: list[tuple[Sequence, int]] = []
    chunks: list[tuple[Sequence, int, int]] = []
    longest = 0
    decodes: list[tuple[Sequence, int, int]] = []  # of each decode row: sequence, token, position
    for seq in step.decodes:
        rows.append((seq, len(decodes)))
        position = seq.num_computed_tokens
        known = position < seq.num_tokens  # else it is what the step before samples, which stays on the device
        decodes.append((seq, seq.token_ids[position] if known else -1 - seq.sampled_row, position))
        if seq in step.proposals:
            decodes += [(seq, token, position + 1 + i) for i, token in enumerate(step.proposals[seq])]
    if decodes:
        # In one go for all of them: for a large batch the host's work counts.
        where = slice(0, len(decodes))
        tokens[where] = [token for _, token, _ in decodes]
        positions[where] = [position for _, _, position in decodes]
        kv_slots[where] = [seq.page_ids[position // S] * S + position % S for seq, _, position in decodes]
        batch.sampling.index_S[where] = np.arange(len(decodes))  # pyright: ignore[reportIndexIssue]
        batch.sampling.position_S[where] = positions[where] + 1  # pyright: ignore[reportIndexIssue]
        batch.sampling.vocab_S[where] = [seq.vocab_size for seq, _, _ in decodes]  # pyright: ignore[reportIndexIssue]
        for row, (seq, _, _) in enumerate(decodes):
            table[row, : len(seq.page_ids)] = seq.page_ids
            _mix_row(batch, slice(row, row + 1), seq, slot_of)
            _options_row(batch.sampling, row, seq)
        longest = 1 + int(positions[where].max())
    batch.decode_chunks = np.int32(-(-longest // span))  # pyright: ignore[reportAttributeAccessIssue]
    longest, row, start = 0, shape.num_decodes, shape.num_decodes
    for seq, count in step.prefills:
        first = seq.num_computed_tokens
        position = np.arange(first, first + count)
        pages = np.asarray(seq.page_ids, np.int32)
        where = slice(start, start + count)
        tokens[where] = seq.token_ids[first : first + count]
        positions[where] = position
        kv_slots[where] = pages[position // S] * S + position % S
        used = -(-count // block)
        _mix_row(batch, slice(row, row + used), seq, slot_of)
        table[row : row + used, : len(pages)] = pages
        chunks.append((seq, start, count))
        if first + count == seq.num_tokens:
            last = row + used - 1
            _sampling_row(batch, last, start + count - 1, seq)
            rows.append((seq, last))
        longest = max(longest, first + count)
        row += used
        start += used * block
    batch.prefill_chunks = np.int32(-(-longest // span))  # pyright: ignore[reportAttributeAccessIssue]
    if batch.row_chunks is not None:
        adapters = {adapter for seq, _ in step.prefills for adapter in seq.adapters}
        owned = sorted({row // ROW_CHUNK for adapter in adapters for row in rows_of(adapter)})
        batch.row_chunks.index_C[: len(owned)] = owned  # pyright: ignore[reportIndexIssue]
        batch.row_chunks.count = np.int32(len(owned))  # pyright: ignore[reportAttributeAccessIssue]
    return BuiltBatch(batch, shape, rows, chunks)


def pack(batch: ForwardBatch) -> np.ndarray:
    """Every array of a host batch in one int32[N], so that a step is one transfer; `models.batch.unpack` undoes it."""
    return np.concatenate([np.ravel(leaf).view(np.int32) for leaf in jax.tree.leaves(batch)])


def _mix_row(batch: ForwardBatch, rows: slice, seq: Sequence, slot_of: Callable[[Any], int]) -> None:
    for adapter, scale in zip(seq.adapters, seq.adapter_scales, strict=True):
        batch.mix_SX[rows, slot_of(adapter)] = scale  # pyright: ignore[reportOptionalSubscript]


def _sampling_row(batch: ForwardBatch, row: int, token: int, seq: Sequence) -> None:
    sampling: Any = batch.sampling
    sampling.index_S[row] = token
    sampling.position_S[row] = batch.positions_T[token] + 1
    sampling.vocab_S[row] = seq.vocab_size
    _options_row(sampling, row, seq)


def _options_row(sampling: Any, row: int, seq: Sequence) -> None:
    params = seq.params
    if not params.greedy:
        sampling.temperature_S[row] = min(params.temperature, MAX_TEMPERATURE)
        sampling.top_p_S[row] = params.top_p
        sampling.min_p_S[row] = params.min_p
        sampling.top_k_S[row] = min(params.top_k, np.iinfo(np.int32).max)  # more than any vocabulary
        sampling.seed_S2[row] = (seq.seed >> 32 & 0xFFFFFFFF, seq.seed & 0xFFFFFFFF)
    if params.logprobs is not None:
        sampling.num_logprobs_S[row] = params.logprobs
