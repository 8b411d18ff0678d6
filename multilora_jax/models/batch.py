"""The device-side description of one step: what the host planned, as arrays of fixed bucket sizes.

A step runs two regions of tokens, flattened on T: B decode rows of one token each, then P tokens of prompts, packed.
Those lie in N blocks of up to `prefill_block` consecutive tokens of one sequence. S = B + N is the number of rows; each
row has a page table and may sample one token. Padding tokens have position 0, write to page 0 (never allocated) and are
not sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.segmented_lora import BlockUsers, Plan, PromptPieces


@jax.tree_util.register_dataclass
@dataclass
class LayerRows:
    """Active rank rows of one layer, copied out of the pool when the set of active adapters changes.

    A is kept as rows `[M, R, in]`, the M modules that share an input together; B as `[out, R]`. Where there are many
    rows on a CPU they lie in N blocks of K instead: A as `[N, in, M * K]`, B as `[N, K, out]`. Besides the rows of A
    and B an adapter may own a row with its biases, one with its gains and one with its norm deltas (the input norm's
    in `b_o`, the other's in `b_down`): the tables in LoRARows say which row is which. Steps whose adapters all leave
    the MLP alone run without its rows.
    """

    a_qkv: jax.Array  # [3, R, D]
    a_o: jax.Array  # [1, R, N*H]
    a_gate_up: jax.Array | None  # [2, R, D]
    a_down: jax.Array | None  # [1, R, F]
    b_q: jax.Array  # [N*H, R]
    b_k: jax.Array  # [K*H, R]
    b_v: jax.Array  # [K*H, R]
    b_o: jax.Array  # [D, R]
    b_gate: jax.Array | None  # [F, R]
    b_up: jax.Array | None  # [F, R]
    b_down: jax.Array | None  # [D, R]


@jax.tree_util.register_dataclass
@dataclass
class UnitTable:
    """Where the active rank rows of all layers lie, for kernels that read them in place; instead of LayerRows."""

    units_LRU: jax.Array  # int32[L, R, U], rows of the pool as a matrix of units; -1 where a row has nothing


@jax.tree_util.register_dataclass
@dataclass
class VocabTables:
    """Where the active adapters keep what they change outside the layers; read in place from their pages.

    The columns of layout_XF are `models.vocab_rows.FIELDS`; X counts adapter slots.
    """

    pages_P: jax.Array  # int32[P], page ids of the active adapters, one adapter after the other
    first_X: jax.Array  # int32[X], where an adapter's pages begin in pages_P
    layout_XF: jax.Array  # int32[X, F], first units and counts
    scale_X2: jax.Array  # float32[X, 2], alpha / r of the embedding's and of the head's rank rows
    slots_X: jax.Array  # int32[X], the slots that have anything here, in front
    num_slots: jax.Array  # int32[], how many those are


@jax.tree_util.register_dataclass
@dataclass
class VocabInputs:
    """What embedding, last norm and head read where an adapter of the step changes them."""

    pool: jax.Array  # uint[L, P, E]
    tables: VocabTables
    mix_SX: jax.Array  # float32[S, X], factor of row s on the adapter in slot x
    row_P: jax.Array  # int32[P], row of each prompt token


@jax.tree_util.register_dataclass
@dataclass
class ExtraTables:
    """Tables that only steps with an extended adapter (gains, norms, vocabulary) carry."""

    gain_LMR: jax.Array  # float32[L, 7, R], 1 where row r of the module's B is a gain (DoRA)
    norm_L2R: jax.Array  # float32[L, 2, R], 1 where row r holds deltas of the input norm and of the other
    vocab: VocabTables


@jax.tree_util.register_dataclass
@dataclass
class LoRARows:
    """Rank rows of all active adapters (R is a bucket) and what they are."""

    layers: list[LayerRows] | UnitTable
    owner_R: jax.Array  # int32[R], slot of the adapter; -2 where the row is free
    scale_LMR: jax.Array  # float32[L, 7, R], alpha / r of the row's adapter; 0 where its module has no such row
    const_LMR: jax.Array  # float32[L, 7, R], 1 where row r of the module's B is a bias
    extra: ExtraTables | None  # None: no adapter of this step needs it


@jax.tree_util.register_dataclass
@dataclass
class SamplingBatch:
    """Which tokens are sampled and how, read on the device so that no option recompiles."""

    index_S: jax.Array  # int32[S], index into T of the token whose successor row s samples
    position_S: jax.Array  # int32[S], position of that successor
    vocab_S: jax.Array  # int32[S], token ids below this one exist for the row
    temperature_S: jax.Array  # float32[S], 0 is greedy
    top_p_S: jax.Array  # float32[S]
    min_p_S: jax.Array  # float32[S]
    top_k_S: jax.Array  # int32[S], 0 is off
    seed_S2: jax.Array  # uint32[S, 2], the request's key
    num_logprobs_S: jax.Array  # int32[S], -1 is off


@jax.tree_util.register_dataclass
@dataclass
class SamplingEdits:
    """What rows ask to change in their logits before temperature; only steps with such a row carry it.

    An entry turns logit x of one row's token into x + bias, divides that by factor where it is positive and multiplies
    it where it is not, and takes penalty off. The first num_entries count; no row has two for one token.
    """

    row_E: jax.Array  # int32[E]
    token_E: jax.Array  # int32[E]
    bias_E: jax.Array  # float32[E], -inf bans the token
    factor_E: jax.Array  # float32[E], positive
    penalty_E: jax.Array  # float32[E]
    num_entries: jax.Array  # int32[]
    masked_S: jax.Array  # bool[S], rows whose tokens mask_SW limits
    mask_SW: jax.Array  # uint32[S, W], bit t % 32 of word t // 32 is set where token t may come


@jax.tree_util.register_dataclass
@dataclass
class ForwardBatch:
    """Everything one step reads besides parameters and pool."""

    token_ids_T: jax.Array  # int32[T]; -1 - s is what row s of the step before sampled
    positions_T: jax.Array  # int32[T]
    slots_T: jax.Array  # int32[T], page * page_tokens + offset of the token's K and V
    table_SP: jax.Array  # int32[S, pages], page table of each row
    row_P: jax.Array  # int32[P], row of each prompt token, in [B, S)
    first_N: jax.Array  # int32[N], where in P each block begins
    decode_chunks: jax.Array  # int32[G], page chunks that each group of decode rows needs
    prefill_chunks: jax.Array  # int32[G'], the same of the prefill blocks
    runs_R3: jax.Array  # int32[R, 3], runs of decode rows of one sequence each, instead of groups; see attend_runs
    sampling: SamplingBatch
    mix_SX: jax.Array | None  # float32[S, X], factor of row s on the adapter in slot x; None: nothing reads it
    pieces: PromptPieces | None  # the prompts by the rank rows of their adapters; None: few enough rows to take all
    lora: LoRARows | None  # None: no adapter in this step
    plan: Plan | None = None  # where adapters are read in place: which tokens meet which rank rows


def unpack(flat_N: jax.Array, like: ForwardBatch) -> ForwardBatch:
    """The arrays of a batch out of one int32[N], in which they lie one after another, 32 bits per element.

    Args:
        flat_N: from `engine.batch.pack`.
        like: anything with the shapes and types of the batch.
    """
    leaves, tree = jax.tree.flatten(like)
    arrays: list[Any] = []
    start = 0
    for leaf in leaves:
        end = start + math.prod(leaf.shape)
        part = flat_N[start:end].reshape(leaf.shape)
        arrays.append(part if leaf.dtype == jnp.int32 else jax.lax.bitcast_convert_type(part, leaf.dtype))
        start = end
    return jax.tree.unflatten(tree, arrays)


def with_sampled(batch: ForwardBatch, sampled_S: jax.Array) -> ForwardBatch:
    """The batch with the tokens that the step before sampled (int32[S], at least its rows) in their places."""
    ids_T = batch.token_ids_T
    before_T = jnp.take(sampled_S, jnp.clip(-1 - ids_T, 0, len(sampled_S) - 1))
    return replace(batch, token_ids_T=jnp.where(ids_T < 0, before_T, ids_T))


@jax.tree_util.register_dataclass
@dataclass
class LayerInputs:
    """What every layer of a step reads besides its weights, rank rows and the pool."""

    positions_T: jax.Array  # int32[T]
    slots_T: jax.Array  # int32[T]
    table_SP: jax.Array  # int32[S, pages]
    row_P: jax.Array  # int32[P]
    first_N: jax.Array  # int32[N]
    decode_chunks: jax.Array  # int32[G]
    prefill_chunks: jax.Array  # int32[G']
    runs_R3: jax.Array  # int32[R, 3]
    cos_TH2: jax.Array  # float32[T, H/2]
    sin_TH2: jax.Array  # float32[T, H/2]
    mix_RT: jax.Array | None  # float32[R, T], factor of token t on the adapter that owns rank row r
    pieces: PromptPieces | None  # see ForwardBatch
    users: BlockUsers | None  # of the decode rows, where rank rows lie in blocks
    scale_LMR: jax.Array | None  # float32[L, 7, R]
    const_LMR: jax.Array | None  # float32[L, 7, R]
    gain_LMR: jax.Array | None  # float32[L, 7, R]
    norm_L2R: jax.Array | None  # float32[L, 2, R]
    plan: Plan | None = None  # see ForwardBatch
