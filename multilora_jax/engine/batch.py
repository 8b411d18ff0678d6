"""From a scheduled step to arrays of a bucket's sizes (host only: numpy in, numpy out)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import numpy as np

from multilora_jax.engine.rank_rows import ROW_BLOCK
from multilora_jax.engine.step_plan import ScheduledStep, decode_sizes, max_blocks, prompt_sizes
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.models.batch import ForwardBatch, SamplingBatch
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.request import Sequence
from pallas_kernels.paged_attention.xla import LEAST_RUN, PAGE_CHUNK, RUN_ROWS, first_row, num_groups
from pallas_kernels.segmented_lora.xla_pieces import PromptPieces, Segment

__all__ = [
    "BatchShape", "BuiltBatch", "ForwardBatch", "batch_shapes", "build_batch", "empty_batch", "pack", "pick_shape",
]  # fmt: skip


MAX_TEMPERATURE = 1e30
"""Higher ones are as good as this, where every token is equally likely, and float32 still holds it."""


@dataclass(frozen=True, order=True)
class BatchShape:
    """Sizes of one compiled step: P prompt tokens in N prefill blocks, and B decode rows."""

    num_prompt_tokens: int
    num_blocks: int
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_decodes + self.num_prompt_tokens

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


def batch_shapes(max_num_seqs: int, max_prompt_tokens: int, block: int, *, paced: bool = False) -> list[BatchShape]:
    """All step sizes to compile, smallest first.

    Steps of decodes come in the sizes of `decode_sizes`; those with prompts have room for every sequence, and for the
    prompt tokens that `prompt_sizes` says.
    """
    decodes = decode_sizes(max_num_seqs)
    sizes = prompt_sizes(max_prompt_tokens, block, paced=paced)
    mixed = [BatchShape(n, max_blocks(n, block), decodes[-1]) for n in sizes]
    return [BatchShape(0, 0, n) for n in decodes] + mixed


def pick_shape(shapes: list[BatchShape], num_decodes: int, num_prompt_tokens: int, num_blocks: int) -> BatchShape:
    """The smallest compiled size that holds a step."""
    return next(
        s
        for s in shapes
        if s.num_decodes >= num_decodes and s.num_prompt_tokens >= num_prompt_tokens and s.num_blocks >= num_blocks
    )


def table_width(max_model_len: int, geometry: PoolGeometry) -> int:
    """Pages of a row's page table, rounded to whole chunks of the attention loop."""
    pages = geometry.pages_for_tokens(max_model_len)
    return -(-pages // PAGE_CHUNK) * PAGE_CHUNK


def empty_batch(shape: BatchShape, spec: LlamaSpec, width: int, slots: int = 0) -> ForwardBatch:
    """A batch of padding only, with room for the factors on `slots` adapters; 0 for a step without."""
    T, S, P, N, B = shape.num_tokens, shape.num_rows, shape.num_prompt_tokens, shape.num_blocks, shape.num_decodes
    decode_group, block_group = spec.attention_groups
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
        "row_P": np.full(P, B, np.int32),
        "first_N": np.zeros(N, np.int32),
        "decode_chunks": np.zeros(num_groups(B, decode_group), np.int32),
        "prefill_chunks": np.zeros(num_groups(N, block_group), np.int32),
        "runs_R3": np.zeros((B // LEAST_RUN if not P and spec.attention_backend == "xla" else 0, 3), np.int32),
        "mix_SX": np.zeros((S, slots), np.float32) if slots else None,
    }
    num_rows, pieces = slots * ROW_BLOCK, None
    if N and 0 < spec.pieces_from <= num_rows and not spec.in_place:
        pieces = PromptPieces.empty(P, N, num_rows)
    return ForwardBatch(**arrays, sampling=sampling, pieces=pieces, lora=None)


def build_batch(
    step: ScheduledStep,
    shapes: list[BatchShape],
    spec: LlamaSpec,
    width: int,
    slots: int,
    slot_of: Callable[[Any], int],
    rows_of: Callable[[Any], list[int]],
) -> BuiltBatch:
    """Fills the arrays of a step.

    Args:
        step: what the scheduler chose; every sequence's pages cover its tokens of this step.
        shapes: compiled sizes.
        spec: of the model.
        width: pages of a page table.
        slots: adapter slots of the active rank rows, 0 for a step without adapters.
        slot_of: slot of an active adapter; rows_of: the first row of each of its blocks in the buffers.
    """
    S, block = spec.geometry.page_tokens, spec.prefill_block
    shape = pick_shape(shapes, step.num_decode_rows, step.num_prompt_tokens, step.num_blocks(block))
    batch = empty_batch(shape, spec, width, slots)
    tokens, positions, kv_slots = batch.token_ids_T, batch.positions_T, batch.slots_T
    table: Any = batch.table_SP
    first_N: Any = batch.first_N
    row_P: Any = batch.row_P
    rows: list[tuple[Sequence, int]] = []
    chunks: list[tuple[Sequence, int, int]] = []
    decodes: list[tuple[Sequence, int, int]] = []  # of each decode row: sequence, token, position
    # By length: attention goes as far as the longest of a group.
    for seq in sorted(step.decodes, key=_context):
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
        seqs = [seq for seq, _, _ in decodes]
        _set_tables(table, seqs)
        if slots:
            _set_mixes(batch.mix_SX, seqs, slot_of)
        _set_options(batch.sampling, range(len(seqs)), seqs)
        last_U = np.asarray(positions)[where]
        runs = _runs(step, [seq for seq, _ in rows]) if step.proposals else []
        if runs and len(runs) <= len(batch.runs_R3) and LEAST_RUN * len(runs) <= len(decodes):
            chunks_of = [-(-(1 + int(last_U[end - 1])) // (PAGE_CHUNK * S)) for _, end in runs]
            batch.runs_R3[: len(runs)] = [(*run, count) for run, count in zip(runs, chunks_of, strict=True)]  # pyright: ignore
        else:
            _count_chunks(batch.decode_chunks, last_U, shape.num_decodes, spec.attention_groups[0], S)
    row = start = shape.num_decodes
    last: list[int] = []  # of each block: its last position
    for seq, count in step.prefills:
        first = seq.num_computed_tokens
        position = np.arange(first, first + count)
        pages = np.asarray(seq.page_ids, np.int32)
        where = slice(start, start + count)
        tokens[where] = seq.token_ids[first : first + count]
        positions[where] = position
        kv_slots[where] = pages[position // S] * S + position % S
        used = -(-count // block)
        begins = np.arange(used) * block
        if slots:
            _set_mixes(batch.mix_SX[row : row + used], [seq] * used, slot_of)  # pyright: ignore
        table[row : row + used, : len(pages)] = pages
        first_N[row - shape.num_decodes :][:used] = start - shape.num_decodes + begins
        row_P[start - shape.num_decodes :][:count] = row + np.arange(count) // block
        last += np.minimum(first + begins + block, first + count).tolist()
        chunks.append((seq, start, count))
        if first + count == seq.num_tokens:
            batch.sampling.index_S[row + used - 1] = start + count - 1  # pyright: ignore[reportIndexIssue]
            batch.sampling.position_S[row + used - 1] = first + count  # pyright: ignore[reportIndexIssue]
            rows.append((seq, row + used - 1))
        row += used
        start += count
    begun = rows[len(step.decodes) :]
    _set_options(batch.sampling, [row for _, row in begun], [seq for seq, _ in begun])
    _count_chunks(batch.prefill_chunks, np.asarray(last) - 1, shape.num_blocks, spec.attention_groups[1], S)
    if batch.pieces is not None:
        batch.pieces.fill(_segment(seq, start - shape.num_decodes, count, rows_of) for seq, start, count in chunks)
    return BuiltBatch(batch, shape, rows, chunks)


def _context(seq: Sequence) -> int:
    return seq.num_computed_tokens


def _runs(step: ScheduledStep, decodes: list[Sequence]) -> list[tuple[int, int]]:
    """First and end of the decode rows of each sequence with its proposals, in as many parts as attention takes."""
    runs, row = list[tuple[int, int]](), 0
    for seq in decodes:
        end = row + 1 + len(step.proposals.get(seq, ()))
        runs += [(first, min(first + RUN_ROWS, end)) for first in range(row, end, RUN_ROWS)]
        row = end
    return runs


def _count_chunks(chunks_G: Any, last_U: np.ndarray, num_rows: int, group: int, page_tokens: int) -> None:
    """Sets the chunks of each group of rows from the last position that each of the used rows, the first, sees."""
    for index, start in enumerate(range(0, len(last_U), group)):
        first = first_row(index, num_rows, group)
        seen = 1 + int(last_U[min(first, start) : first + group].max())
        chunks_G[index] = -(-seen // (PAGE_CHUNK * page_tokens))


def pack(batch: ForwardBatch) -> np.ndarray:
    """Every array of a host batch in one int32[N], so that a step is one transfer; `models.batch.unpack` undoes it."""
    return np.concatenate([np.ravel(leaf).view(np.int32) for leaf in jax.tree.leaves(batch)])


def _set_tables(table_SP: Any, seqs: list[Sequence]) -> None:
    """Writes the pages of these sequences into the first rows."""
    pages = [seq.page_ids for seq in seqs]
    used_SP = np.arange(table_SP.shape[1]) < np.array(list(map(len, pages)))[:, None]
    table_SP[: len(seqs)][used_SP] = np.fromiter(chain.from_iterable(pages), np.int32)


def _set_mixes(mix_SX: Any, seqs: list[Sequence], slot_of: Callable[[Any], int]) -> None:
    """Writes the factors of these sequences on their adapters into the first rows."""
    mixed = [
        (row, slot_of(adapter), scale)
        for row, seq in enumerate(seqs)
        if seq.adapters
        for adapter, scale in zip(seq.adapters, seq.adapter_scales, strict=True)
    ]
    if mixed:
        row, slot, scale = zip(*mixed, strict=True)
        mix_SX[row, slot] = scale


def _segment(seq: Sequence, first: int, count: int, rows_of: Callable[[Any], list[int]]) -> Segment:
    """Prompt tokens and the blocks of rank rows that they use."""
    mix = zip(seq.adapters, seq.adapter_scales, strict=True)
    return first, count, [(row // ROW_BLOCK, scale) for adapter, scale in mix for row in rows_of(adapter)]


def _set_options(sampling: Any, rows: Iterable[int], seqs: list[Sequence]) -> None:
    """Writes what these sequences ask of their sampling, column by column: numpy takes long over single values."""
    rows = np.array(rows, int)
    sampling.vocab_S[rows] = [seq.vocab_size for seq in seqs]
    pairs = list(zip(rows.tolist(), seqs, strict=True))
    drawn = [(row, seq.params, seq.seed) for row, seq in pairs if not seq.params.greedy]
    if drawn:
        at = [row for row, _, _ in drawn]
        sampling.temperature_S[at] = [min(params.temperature, MAX_TEMPERATURE) for _, params, _ in drawn]
        sampling.top_p_S[at] = [params.top_p for _, params, _ in drawn]
        sampling.min_p_S[at] = [params.min_p for _, params, _ in drawn]
        most = np.iinfo(np.int32).max  # more than any vocabulary
        sampling.top_k_S[at] = [min(params.top_k, most) for _, params, _ in drawn]
        sampling.seed_S2[at] = [(seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF) for _, _, seed in drawn]
    logged = [
        (row, seq.params.logprobs) for row, seq in zip(rows, seqs, strict=True) if seq.params.logprobs is not None
    ]
    if logged:
        at, count = zip(*logged, strict=True)
        sampling.num_logprobs_S[list(at)] = count
