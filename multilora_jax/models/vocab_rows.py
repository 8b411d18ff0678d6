"""What adapters change outside the layers: embedding, last norm and head, read in place from their pages.

These deltas are rare and long (a row may cover the vocabulary), so they are not copied to buffers: a loop over the
adapters that have any gathers the units that a step needs. Every token or row `t` puts the factor `w_tx` on the
adapter in slot x:

    embedding  e = E[id] * (1 + sum w g) + sum w (scale B A[:, id] + rows[id])
    last norm  weight + sum w n
    head       z = (W h) * (1 + sum w g) + sum w (scale B (A h) + c + rows h)

where `rows` are full replacement rows less the base's own: trained tokens, tokens that an adapter adds, whole matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from multilora_jax.memory.geometry import INT_BITS
from multilora_jax.models.batch import VocabTables
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.shards import first_token, own_slice

FIELDS = (
    "embed_rank", "embed_a", "embed_b", "embed_gain", "embed_map", "embed_rows", "final_norm",
    "head_rank", "head_a", "head_b", "head_gain", "head_bias", "head_ids", "head_rows", "num_head_rows",
)  # fmt: skip
"""Columns of VocabTables.layout_XF, as named in lora.layout.VocabLayout: first units (-1 where absent) and counts."""

_RANK_CHUNK = 8  # rank rows that one turn of a loop multiplies by
_ROW_CHUNK = 128  # rows of a head that one turn multiplies by

_F32 = jnp.float32


class _Slot:
    """The pages of one adapter, read as rows. Rows come whole, from all shards."""

    def __init__(self, spec: LlamaSpec, pool: jax.Array, tables: VocabTables, slot: jax.Array):
        self.spec, self.geometry, self.slot = spec, spec.geometry, slot
        self._units = pool.reshape(-1, spec.geometry.unit // spec.geometry.tp)
        self._pages_P, self._first = tables.pages_P, tables.first_X[slot]
        self._fields = tables.layout_XF[slot]
        self.scales_2 = tables.scale_X2[slot]

    def __getattr__(self, name: str) -> jax.Array:
        return self._fields[FIELDS.index(name)]

    def _address(self, unit: jax.Array) -> jax.Array:
        """The adapter's own unit numbers to rows of `_units`."""
        g = self.geometry
        page, rest = jnp.divmod(unit, g.units_per_page_all_layers)
        layer, offset = jnp.divmod(rest, g.units_per_page)
        page_id = jnp.take(self._pages_P, self._first + page, mode="clip")
        return (layer * g.num_pages + page_id) * g.units_per_page + offset

    def rows(self, start: jax.Array, index_N: jax.Array, length: int) -> jax.Array:
        """Rows number index_N of those from unit `start` on: float32[N, length]."""
        local = self.slices(start, index_N, length)
        if self.spec.axis_name is None:
            return local
        return jax.lax.all_gather(local, self.spec.axis_name, axis=1, tiled=True)

    def slices(self, start: jax.Array, index_N: jax.Array, length: int) -> jax.Array:
        """This shard's part of the same rows: float32[N, length / TP]."""
        per_row = length // self.geometry.unit
        unit_NU = start + index_N[:, None] * per_row + jnp.arange(per_row)
        bits = self._units.at[self._address(unit_NU)].get(mode="clip")
        return jax.lax.bitcast_convert_type(bits, self.spec.dtype).reshape(len(index_N), -1).astype(_F32)

    def products(self, x_SD: jax.Array, rows_ND: jax.Array) -> jax.Array:
        """x rows^T over all features, from this shard's slices of both: float32[S, N]."""
        return self._sum(_dot(x_SD, rows_ND.T))

    def _bits(self, start: jax.Array, index: jax.Array, length: jax.Array | int) -> jax.Array:
        """Bits of single elements of a row of `length` elements from unit `start` on; 0 on shards without them."""
        g = self.geometry
        width, local = g.unit // g.tp, index
        if self.spec.axis_name is not None:
            local = index - jax.lax.axis_index(self.spec.axis_name) * (length // g.tp)
        unit, offset = jnp.divmod(local, width)
        bits = self._units.at[self._address(start + unit), offset].get(mode="clip")
        if self.spec.axis_name is None:
            return bits
        return jnp.where((local >= 0) & (local < length // g.tp), bits, 0)

    def _sum(self, x: jax.Array) -> jax.Array:
        return x if self.spec.axis_name is None else jax.lax.psum(x, self.spec.axis_name)

    def elements(self, start: jax.Array, index: jax.Array, length: int) -> jax.Array:
        """float32 elements `index` of the row at `start` (broadcast against each other)."""
        bits = self._bits(start, index, length)
        return self._sum(jax.lax.bitcast_convert_type(bits, self.spec.dtype).astype(_F32))

    def integers(self, start: jax.Array, index: jax.Array, length: jax.Array | int) -> jax.Array:
        """int32 elements `index` of the integer row at `start`."""
        low = self._bits(start, index, length).astype(jnp.int32)
        if self.geometry.storage_dtype.itemsize == 4:
            return self._sum(low)
        high = self._bits(start + length // self.geometry.unit, index, length).astype(jnp.int32)
        return self._sum(low | (high << INT_BITS))


def _each_slot(
    spec: LlamaSpec,
    pool: jax.Array,
    tables: VocabTables,
    add: Callable[[_Slot, jax.Array], jax.Array],
    start: jax.Array,
) -> jax.Array:
    """Folds `add(slot, total)` over the slots that have anything."""

    def turn(i: jax.Array, total: jax.Array) -> jax.Array:
        return add(_Slot(spec, pool, tables, tables.slots_X[i]), total)

    return jax.lax.fori_loop(0, tables.num_slots, turn, start)


def _where_present(start: jax.Array, then: Callable[[jax.Array], jax.Array], total: jax.Array) -> jax.Array:
    return jax.lax.cond(start >= 0, then, lambda x: x, total)


def embedding_deltas(
    spec: LlamaSpec,
    pool: jax.Array,
    tables: VocabTables,
    embedded_TD: jax.Array,
    token_ids_T: jax.Array,
    mix_TX: jax.Array,
) -> jax.Array:
    """Embeddings with each token's own adapters: float32[T, D], from the base's float32[T, D].

    Args:
        pool: uint[L, P, E] (this shard's).
        mix_TX: float32[T, X], factor of token t on the adapter in slot x.
    """
    vocab, width = spec.geometry.vocab_rows, embedded_TD.shape[1]

    def add(slot: _Slot, total_TD: jax.Array) -> jax.Array:
        w_T1 = mix_TX[:, slot.slot][:, None]

        def rows(total_TD: jax.Array) -> jax.Array:
            row_T = slot.integers(slot.embed_map, token_ids_T, vocab) - 1
            rows_TD = slot.rows(slot.embed_rows, jnp.maximum(row_T, 0), width)
            return total_TD + _scaled(w_T1, jnp.where((row_T >= 0)[:, None], rows_TD, 0))

        def gain(total_TD: jax.Array) -> jax.Array:
            gain_1D = slot.rows(slot.embed_gain, jnp.zeros(1, jnp.int32), width)
            return total_TD + _scaled(w_T1, embedded_TD * gain_1D)

        def ranks(j: jax.Array, total_TD: jax.Array) -> jax.Array:
            rank_R = j * _RANK_CHUNK + jnp.arange(_RANK_CHUNK)
            live_R1 = (rank_R < slot.embed_rank)[:, None]
            starts_R1 = slot.embed_a + rank_R[:, None] * (vocab // spec.geometry.unit)
            a_RT = jnp.where(live_R1, slot.elements(starts_R1, token_ids_T[None], vocab), 0)
            b_RD = jnp.where(live_R1, slot.rows(slot.embed_b, rank_R, width), 0)
            return total_TD + _scaled(w_T1, slot.scales_2[0] * _dot(a_RT.T, b_RD))

        total_TD = _where_present(slot.embed_map, rows, total_TD)
        total_TD = _where_present(slot.embed_gain, gain, total_TD)
        return jax.lax.fori_loop(0, -(-slot.embed_rank // _RANK_CHUNK), ranks, total_TD)

    return _each_slot(spec, pool, tables, add, embedded_TD)


def final_norm_deltas(spec: LlamaSpec, pool: jax.Array, tables: VocabTables, mix_TX: jax.Array) -> jax.Array:
    """What to add to the last norm's weight for each token: float32[T, D]."""
    width = spec.config.hidden_size

    def add(slot: _Slot, total_TD: jax.Array) -> jax.Array:
        def norm(total_TD: jax.Array) -> jax.Array:
            norm_1D = slot.rows(slot.final_norm, jnp.zeros(1, jnp.int32), width)
            return total_TD + _scaled(mix_TX[:, slot.slot][:, None], norm_1D)

        return _where_present(slot.final_norm, norm, total_TD)

    return _each_slot(spec, pool, tables, add, jnp.zeros((len(mix_TX), width), _F32))


def head_deltas(
    spec: LlamaSpec,
    pool: jax.Array,
    tables: VocabTables,
    logits_SV: jax.Array,
    hidden_SD: jax.Array,
    mix_SX: jax.Array,
) -> jax.Array:
    """Logits with each row's own adapters, from the base's: float32[S, vocab_rows] (this shard's columns).

    Args:
        pool: uint[L, P, E] (this shard's).
        logits_SV: float32[S, vocab_rows] of the base (this shard's columns).
        hidden_SD: normed hidden states, compute type.
        mix_SX: float32[S, X], factor of row s on the adapter in slot x.
    """
    vocab, width, unit = spec.geometry.vocab_rows, hidden_SD.shape[1], spec.geometry.unit
    columns = logits_SV.shape[1]
    start = first_token(columns, spec.axis_name)
    own_SD = own_slice(hidden_SD.astype(_F32), 1, spec.axis_name, spec.geometry.tp)
    first = jnp.zeros(1, jnp.int32)

    def add(slot: _Slot, total_SV: jax.Array) -> jax.Array:
        w_S1 = mix_SX[:, slot.slot][:, None]

        def gain(total_SV: jax.Array) -> jax.Array:
            return total_SV + _scaled(w_S1, logits_SV * slot.slices(slot.head_gain, first, vocab))

        def bias(total_SV: jax.Array) -> jax.Array:
            return total_SV + _scaled(w_S1, slot.slices(slot.head_bias, first, vocab))

        def ranks(j: jax.Array, total_SV: jax.Array) -> jax.Array:
            rank_R = j * _RANK_CHUNK + jnp.arange(_RANK_CHUNK)
            live_R1 = (rank_R < slot.head_rank)[:, None]
            a_RD = jnp.where(live_R1, slot.slices(slot.head_a, rank_R, width), 0)
            b_RV = jnp.where(live_R1, slot.slices(slot.head_b, rank_R, vocab), 0)
            return total_SV + _dot(_scaled(w_S1, slot.products(own_SD, a_RD) * slot.scales_2[1]), b_RV)

        def rows(j: jax.Array, total_SV: jax.Array) -> jax.Array:
            index_C = j * _ROW_CHUNK + jnp.arange(_ROW_CHUNK)
            live_C = index_C < slot.num_head_rows
            padded = -(-slot.num_head_rows // unit) * unit
            ids_C = slot.integers(slot.head_ids, index_C, padded) - start
            ids_C = jnp.where(live_C & (ids_C >= 0), ids_C, columns)  # those of other shards are dropped
            rows_CD = jnp.where(live_C[:, None], slot.slices(slot.head_rows, index_C, width), 0)
            return total_SV.at[:, ids_C].add(_scaled(w_S1, slot.products(own_SD, rows_CD)), mode="drop")

        total_SV = _where_present(slot.head_gain, gain, total_SV)
        total_SV = _where_present(slot.head_bias, bias, total_SV)
        total_SV = jax.lax.fori_loop(0, -(-slot.head_rank // _RANK_CHUNK), ranks, total_SV)
        return jax.lax.fori_loop(0, -(-slot.num_head_rows // _ROW_CHUNK), rows, total_SV)

    return _each_slot(spec, pool, tables, add, logits_SV)


def _scaled(weight: jax.Array, x: jax.Array) -> jax.Array:
    """weight * x, and 0 where the weight is 0 whatever x is: an adapter that overflows is nobody else's business."""
    return jnp.where(weight != 0, weight * x, 0)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=_F32)
