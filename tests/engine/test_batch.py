"""From a plan to arrays: every token, slot, table and sampling row where the step expects it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.engine.batch import BatchShape, batch_shapes, build_batch, empty_batch, pick_shape, table_width
from multilora_jax.engine.step_plan import ScheduledStep, prompt_sizes
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.models.config import ModelConfig, RopeConfig
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.request import SamplingParams, Sequence
from pallas_kernels.paged_attention.xla import PAGE_CHUNK, first_row

GEOMETRY = PoolGeometry(
    num_layers=2, num_pages=4096, page_tokens=16, hidden=64, q_dim=64, kv_dim=32, ffn=96, num_kv_heads=2, head_dim=16
)
BLOCK, WIDTH = 8, table_width(512, GEOMETRY)
CONFIG = ModelConfig(
    name="tiny", vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96,
    rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=64,
)  # fmt: skip
SPEC = LlamaSpec(CONFIG, GEOMETRY, BLOCK, attention_groups=(2, 3), pieces_from=64)


class Pages:
    """Hands out distinct page ids in a scrambled order."""

    def __init__(self):
        self.free = np.random.default_rng(0).permutation(np.arange(1, 4096)).tolist()

    def take(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // 16))]


def sequence(pages, computed, pending, *, prompt=None, adapter=None, scale=1.0, seed=0, **params):
    total = computed + pending
    return Sequence(
        request_id=str(len(pages.free)),
        token_ids=[1000 + 3 * i for i in range(total)],
        num_prompt_tokens=total if prompt is None else prompt,
        params=SamplingParams(**{"temperature": 0, **params}),
        adapters=() if adapter is None else (adapter,),
        adapter_scales=() if adapter is None else (scale,),
        vocab_size=5000,
        num_computed_tokens=computed,
        page_ids=pages.take(total),
        seed=seed,
    )


def build(decodes, prefills, shapes=None, index=None, rows=None, proposals=None):
    shapes = shapes or batch_shapes(8, 48, BLOCK)
    step = ScheduledStep(decodes=decodes, prefills=prefills, proposals=proposals or {})
    slots = max(index.values()) + 1 if index else 0
    starts = rows or {adapter: [] for adapter in index or ()}
    slot_of = (index or {}).__getitem__
    return build_batch(step, shapes, SPEC, WIDTH, slots, slot_of, starts.__getitem__)


def test_shapes():
    def decodes(*sizes):
        return [BatchShape(0, 0, n) for n in sizes]

    assert batch_shapes(1, 32, 32) == [*decodes(2), BatchShape(32, 2, 2)]
    assert batch_shapes(16, 256, 32) == [
        *decodes(2, 8, 16), BatchShape(64, 4, 16), BatchShape(128, 8, 16), BatchShape(256, 16, 16),
    ]  # fmt: skip
    assert batch_shapes(40, 100, 128) == [*decodes(2, 8, 32, 40), BatchShape(100, 2, 40)]
    mixed = [BatchShape(16, 1, 8), BatchShape(32, 2, 8), BatchShape(64, 4, 8), BatchShape(100, 7, 8)]
    assert batch_shapes(8, 100, 32, paced=True) == [*decodes(2, 8), *mixed]
    assert prompt_sizes(512, 32, paced=True) == (16, 32, 64, 128, 256, 512)
    assert prompt_sizes(8192, 32, paced=True) == (16, 64, 256, 1024, 4096, 8192)
    assert prompt_sizes(8, 4, paced=True) == (8,)
    assert [prompt_sizes(n, 32) for n in (64, 512, 4096)] == [(64,), (64, 256, 512), (64, 256, 1024, 4096)]
    assert batch_shapes(8, 300, 128) == [*decodes(2, 8), BatchShape(128, 2, 8), BatchShape(300, 5, 8)]
    assert BatchShape(96, 3, 5).num_tokens == 101
    assert BatchShape(96, 3, 5).num_rows == 8


def test_the_smallest_shape_that_holds_a_step_is_picked():
    shapes = batch_shapes(16, 256, 32)
    small, middle, large = BatchShape(64, 4, 16), BatchShape(128, 8, 16), BatchShape(256, 16, 16)
    assert pick_shape(shapes, 1, 0, 0) == BatchShape(0, 0, 2)
    assert pick_shape(shapes, 3, 0, 0) == BatchShape(0, 0, 8)
    assert pick_shape(shapes, 0, 1, 1) == pick_shape(shapes, 16, 64, 4) == small
    assert pick_shape(shapes, 0, 65, 3) == pick_shape(shapes, 0, 64, 5) == middle
    assert pick_shape(shapes, 0, 129, 5) == pick_shape(shapes, 0, 65, 9) == large


def test_table_width_is_whole_chunks():
    assert table_width(1, GEOMETRY) == PAGE_CHUNK
    assert table_width(16 * PAGE_CHUNK, GEOMETRY) == PAGE_CHUNK
    assert table_width(16 * PAGE_CHUNK + 1, GEOMETRY) == 2 * PAGE_CHUNK


def test_padding_writes_to_page_0_and_is_the_base():
    batch = empty_batch(BatchShape(16, 2, 4), SPEC, WIDTH)
    assert batch.token_ids_T.shape == (20,)
    assert batch.table_SP.shape == (6, WIDTH)
    assert not np.any(batch.slots_T)
    assert not np.any(batch.positions_T)
    assert batch.mix_SX is None
    assert not np.asarray(empty_batch(BatchShape(16, 2, 4), SPEC, WIDTH, slots=3).mix_SX).any()
    assert not np.any(batch.decode_chunks)
    assert not np.any(batch.prefill_chunks)
    assert set(np.asarray(batch.row_P).tolist()) == {4}
    assert (np.asarray(batch.sampling.temperature_S) == 0).all()


def test_decode_rows():
    pages, lora = Pages(), object()
    seqs = [sequence(pages, 0, 1), sequence(pages, 20, 1), sequence(pages, 128, 1, adapter=lora, scale=0.5)]
    built = build([seqs[1], seqs[2], seqs[0]], [], index={lora: 5})  # they come in order of length
    batch = built.batch
    assert built.shape == BatchShape(0, 0, 8)
    assert built.rows == [(seq, i) for i, seq in enumerate(seqs)]
    assert list(batch.token_ids_T[:3]) == [1000, 1060, 1384]
    assert list(batch.positions_T[:3]) == [0, 20, 128]
    assert list(batch.slots_T[:3]) == [seqs[0].page_ids[0] * 16, seqs[1].page_ids[1] * 16 + 4, seqs[2].page_ids[8] * 16]
    mix_SX = np.zeros((8, 6))
    mix_SX[2, 5] = 0.5
    np.testing.assert_array_equal(batch.mix_SX, mix_SX)
    assert list(batch.sampling.vocab_S[:4]) == [5000, 5000, 5000, 1]
    assert list(batch.table_SP[2, :9]) == seqs[2].page_ids
    assert list(batch.decode_chunks) == [1, 3, 0, 0]  # groups of two, 129 tokens at 64 a chunk
    assert not np.any(batch.prefill_chunks)
    assert list(batch.sampling.index_S[:3]) == [0, 1, 2]
    assert list(batch.sampling.position_S[:3]) == [1, 21, 129]


def test_proposals_of_few_sequences_are_runs():
    """Attention takes them sequence by sequence, at most eight rows at a time, where that is fewer turns than rows."""
    pages, shapes = Pages(), batch_shapes(16, 48, BLOCK)
    short, long = sequence(pages, 20, 20), sequence(pages, 120, 20)
    built = build([long, short], [], shapes, proposals={short: [7] * 3, long: [8] * 10})
    assert built.rows == [(short, 0), (long, 4)]
    assert built.shape == BatchShape(0, 0, 16)
    # Positions 20 to 23, 120 to 127 and 128 to 130: 24, 128 and 131 tokens at 64 a chunk.
    assert built.batch.runs_R3.tolist() == [[0, 4, 1], [4, 12, 2], [12, 15, 3], [0, 0, 0], [0, 0, 0]]
    assert not np.any(built.batch.decode_chunks)
    assert list(built.batch.token_ids_T[:15]) == [1060, 7, 7, 7, 1360, *[8] * 10]


def test_rows_that_runs_would_not_help_stay_groups():
    pages = Pages()
    seqs = [sequence(pages, 20, 9) for _ in range(4)]
    for decodes, prefills, proposals in (
        (seqs, [], {seqs[0]: [7] * 3}),  # seven rows of four sequences
        (seqs[:1], [], {}),
        (seqs[:1], [(seqs[1], 9)], {seqs[0]: [7] * 3}),  # beside a prompt
        (seqs[:1], [], {seqs[0]: [7]}),
    ):
        batch = build(decodes, prefills, proposals=proposals).batch
        assert not np.any(batch.runs_R3)
        assert np.any(batch.decode_chunks)


def test_prefill_chunks_are_packed_and_have_blocks_of_their_own():
    pages, lora = Pages(), object()
    whole = sequence(pages, 0, 11, adapter=lora)
    first = sequence(pages, 0, 40)  # 16 of its 40 tokens in this step
    rest = sequence(pages, 120, 10)
    decode = sequence(pages, 9, 1)
    built = build([decode], [(whole, 11), (first, 16), (rest, 10)], index={lora: 0})
    assert built.shape == BatchShape(48, 12, 8)
    assert built.chunks == [(whole, 8, 11), (first, 19, 16), (rest, 35, 10)]
    assert list(built.batch.first_N[:6]) == [0, 8, 11, 19, 27, 35]
    assert list(built.batch.row_P[:37]) == [8] * 8 + [9] * 3 + [10] * 8 + [11] * 8 + [12] * 8 + [13] * 2
    # A row samples only where the last token of its sequence runs: in the last block of each of the two.
    assert built.rows == [(decode, 0), (whole, 9), (rest, 13)]
    sampling = built.batch.sampling
    assert [int(sampling.index_S[row]) for row in (0, 9, 13)] == [0, 8 + 10, 35 + 9]
    assert [int(sampling.position_S[row]) for row in (0, 9, 13)] == [10, 11, 130]
    assert list(built.batch.decode_chunks) == [1, 0, 0, 0]
    assert list(built.batch.prefill_chunks) == [1, 3, 0, 0]  # groups of three blocks
    assert np.asarray(built.batch.mix_SX)[:, 0].tolist() == [0] * 8 + [1, 1] + [0] * 10


def test_prompts_are_cut_by_the_rank_rows_of_their_adapters():
    pages, a, b, c = Pages(), object(), object(), object()
    rows = {a: [0, 72], b: [136], c: [184, 8, 56]}
    decode, first, second = (sequence(pages, 5 * (x is a), 1 if x is a else 9, adapter=x) for x in (a, b, c))
    base, weighted = sequence(pages, 0, 9), sequence(pages, 0, 9, adapter=a, scale=0.5)
    slots = {a: 0, b: 1, c: 23}  # 24 slots: 192 rows
    pieces: Any = build(
        [decode], [(first, 9), (base, 9), (second, 9), (weighted, 9)], index=slots, rows=rows
    ).batch.pieces
    assert pieces.num_pieces == 4  # the decode's rows are not among them
    assert pieces.first_N[:4].tolist() == [0, 18, 18, 27]
    assert pieces.end_N[:4].tolist() == [9, 27, 27, 36]
    assert pieces.block_NG[:4].tolist() == [[17, 0], [23, 1], [7, 0], [0, 9]]
    assert pieces.factor_NG[:4].tolist() == [[1, 0], [1, 1], [1, 0], [0.5, 0.5]]
    pieces = build([decode], [(base, 9)], index=slots, rows=rows).batch.pieces
    assert pieces.num_pieces == 0
    assert build([decode], [], index=slots, rows=rows).batch.pieces is None
    assert build([decode], [(first, 9)], index={a: 0, b: 6}, rows=rows).batch.pieces is None  # 56 rows


def test_sampling_options_of_a_row():
    pages = Pages()
    seed = (7 << 32) + 9
    drawn = sequence(pages, 5, 1, seed=seed, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, logprobs=3)
    greedy = sequence(pages, 5, 1, seed=seed, temperature=0, top_p=0.9, top_k=4)
    built = build([drawn, greedy], [])
    s = built.batch.sampling
    assert [float(x[0]) for x in (s.temperature_S, s.top_p_S, s.min_p_S)] == pytest.approx([0.5, 0.9, 0.1])
    assert (int(s.top_k_S[0]), list(s.seed_S2[0]), int(s.num_logprobs_S[0])) == (4, [7, 9], 3)
    assert (float(s.temperature_S[1]), int(s.num_logprobs_S[1])) == (0, -1)
    assert (float(s.top_p_S[1]), int(s.top_k_S[1])) == (1, 0)


@settings(max_examples=60)
@given(
    decodes=st.lists(st.tuples(st.integers(0, 300), st.integers(-1, 3)), max_size=8),
    prefills=st.lists(
        st.tuples(st.integers(0, 200), st.integers(1, 20), st.integers(0, 20), st.integers(-1, 3)), max_size=2
    ),
)
def test_every_token_is_read_and_written_where_its_sequence_says(decodes, prefills):
    pages, loras = Pages(), [object() for _ in range(4)]
    index = {lora: i for i, lora in enumerate(loras)}

    def adapter(i):
        return None if i < 0 else loras[i]

    one = [sequence(pages, computed, 1, adapter=adapter(i)) for computed, i in decodes]
    many = [(sequence(pages, computed, n + extra, adapter=adapter(i)), n) for computed, n, extra, i in prefills]
    if not one and not many:
        return
    built = build(one, many, index=index)
    batch, expected = built.batch, {}
    rows = {}
    for row, seq in enumerate(sorted(one, key=lambda seq: seq.num_computed_tokens)):
        expected[row] = (seq, seq.num_computed_tokens, row)
    for seq, first, n in built.chunks:
        assert first >= built.shape.num_decodes
        for i in range(n):
            t = first + i
            row = int(batch.row_P[t - built.shape.num_decodes])
            start = int(batch.first_N[row - built.shape.num_decodes]) + built.shape.num_decodes
            assert start <= t < start + BLOCK
            expected[t] = (seq, seq.num_computed_tokens + i, row)
    for t in range(len(batch.token_ids_T)):
        if t not in expected:
            assert (batch.slots_T[t], batch.positions_T[t]) == (0, 0)
            continue
        seq, position, row = expected[t]
        assert batch.token_ids_T[t] == seq.token_ids[position]
        assert batch.positions_T[t] == position
        assert batch.slots_T[t] == seq.page_ids[position // 16] * 16 + position % 16
        assert batch.table_SP[row, position // 16] == seq.page_ids[position // 16]
        if batch.mix_SX is not None:
            mine = {index[adapter]: scale for adapter, scale in zip(seq.adapters, seq.adapter_scales, strict=True)}
            assert {int(x): batch.mix_SX[row, x] for x in np.flatnonzero(batch.mix_SX[row])} == mine
        else:
            assert not seq.adapters
        assert rows.setdefault(row, seq) is seq  # a row belongs to one sequence
        B, N = built.shape.num_decodes, built.shape.num_blocks
        regions = [(0, B, 2, batch.decode_chunks), (B, N, 3, batch.prefill_chunks)]
        first, count, group, chunks_G = regions[t >= B]
        seen = [
            first_row(i, count, group) <= row - first < first_row(i, count, group) + group for i in range(len(chunks_G))
        ]
        assert all(position < n * PAGE_CHUNK * 16 for n, sees in zip(chunks_G, seen, strict=True) if sees and n)
        assert any(n for n, sees in zip(chunks_G, seen, strict=True) if sees)
    assert {(seq.request_id, row) for seq, row in built.rows} == {
        (seq.request_id, row) for seq, position, row in expected.values() if position == seq.num_tokens - 1
    }
    for seq, row in built.rows:
        sampled = expected[int(batch.sampling.index_S[row])]
        assert sampled == (seq, seq.num_tokens - 1, row)
        assert int(batch.sampling.position_S[row]) == seq.num_tokens
