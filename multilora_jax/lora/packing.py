"""Adapters in the shape of pool pages: rows laid end to end as units (see lora.layout), ready to be copied."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from multilora_jax.errors import AdapterError
from multilora_jax.lora.deltas import AdapterDeltas, VocabDelta
from multilora_jax.lora.layout import COMPUTE_DTYPES, NORMS, AdapterLayout, VocabLayout
from multilora_jax.lora.pacing import pause_point
from multilora_jax.memory.geometry import INT_BITS, MODULES, PoolGeometry

_BLOCK_ELEMENTS = 2**20
"""Rows are converted in blocks of about so many elements, so that no second copy of a large adapter is ever held."""


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter in host memory, ready to be copied page by page; compared by identity.

    Attributes:
        layout: where everything lies.
        pages: [num_pages, L, TP, E/TP] of the pool's storage type; zero past the last unit; not writable.
    """

    layout: AdapterLayout
    pages: np.ndarray = field(repr=False)


@dataclass
class _Part:
    """Rows to be written from unit `start` on: floats of the adapter, or the bits of an int row."""

    start: int
    rows_RN: np.ndarray
    what: str


class _Planner:
    """Hands out units in order and remembers what goes there."""

    def __init__(self, geometry: PoolGeometry, next_unit: int):
        self.geometry = geometry
        self.next_unit = next_unit
        self.parts: list[_Part] = []

    def rows(self, rows: np.ndarray | None, what: str) -> int:
        """First unit of a vector or of the rows of a matrix; -1 where there is nothing."""
        if rows is None or not len(rows):
            return -1
        start, rows_RN = self.next_unit, np.atleast_2d(rows)
        self.parts.append(_Part(start, rows_RN, what))
        self.next_unit += rows_RN.size // self.geometry.unit
        return start

    def ints(self, values: np.ndarray, what: str) -> int:
        """First unit of an int row, padded with zeros to whole units."""
        words = np.zeros(-(-len(values) // self.geometry.unit) * self.geometry.unit, np.uint32)
        words[: len(values)] = values
        if self.geometry.storage_dtype.itemsize == 2:
            words = np.stack([words & ((1 << INT_BITS) - 1), words >> INT_BITS]).astype(np.uint16)
        return self.rows(words, what)


def _plan(deltas: AdapterDeltas, geometry: PoolGeometry) -> tuple[AdapterLayout, list[_Part]]:
    shape_LM = (geometry.num_layers, len(MODULES))
    ranks_LM, scale_LM = np.zeros(shape_LM, np.int32), np.zeros(shape_LM, np.float32)
    for (layer, module), a in deltas.a.items():
        ranks_LM[layer, MODULES.index(module)] = len(a)
        scale_LM[layer, MODULES.index(module)] = deltas.scale[layer, module]
    dims_M2 = np.array([geometry.module_dims(module) for module in MODULES], np.int32) // geometry.unit
    units_a_M, units_b_M = dims_M2[:, 0], dims_M2[:, 1]
    a_LM, b_LM = ranks_LM * units_a_M, ranks_LM * units_b_M
    ends_LM = np.cumsum(a_LM + b_LM, dtype=np.int64).reshape(shape_LM)
    start_b_LM = np.where(ranks_LM > 0, ends_LM - b_LM, 0).astype(np.int32)
    start_a_LM = np.where(ranks_LM > 0, ends_LM - b_LM - a_LM, 0).astype(np.int32)
    parts = []
    for (layer, module), a in deltas.a.items():
        m, what = MODULES.index(module), f"layer {layer} {module}"
        parts.append(_Part(int(start_a_LM[layer, m]), a, what))
        b_RO = geometry.repeat_heads(module, deltas.b[layer, module].T)
        parts.append(_Part(int(start_b_LM[layer, m]), b_RO, what))

    planner = _Planner(geometry, int(ends_LM[-1, -1]))
    start_bias_LM, start_gain_LM = np.full(shape_LM, -1, np.int32), np.full(shape_LM, -1, np.int32)
    start_norm_L2 = np.full((geometry.num_layers, len(NORMS)), -1, np.int32)
    for start, vectors, order, what in (
        (start_bias_LM, deltas.bias, MODULES, "bias"),
        (start_gain_LM, deltas.gain, MODULES, "DoRA gain"),
        (start_norm_L2, deltas.norms, NORMS, "norm"),
    ):
        for layer, kind in sorted(vectors, key=lambda key: (key[0], order.index(key[1]))):
            place = layer, order.index(kind)
            vector = geometry.repeat_heads(kind, vectors[layer, kind])
            start[place] = planner.rows(vector, f"layer {layer} {kind} {what}")
    vocab = _plan_vocab(deltas, planner)

    row, special = int(ranks_LM.max()), []
    for vectors in (deltas.bias, deltas.gain, deltas.norms):
        special.append(row if vectors else -1)
        row += bool(vectors)
    rank = max(int(ranks_LM.max()), vocab.embed_rank if vocab else 0, vocab.head_rank if vocab else 0)
    num_units = planner.next_unit
    tables = (
        ranks_LM, scale_LM, start_a_LM, start_b_LM, units_a_M, units_b_M, start_bias_LM, start_gain_LM, start_norm_L2,
    )  # fmt: skip
    for table in tables:
        table.flags.writeable = False
    num_pages = max(1, geometry.pages_for_units(num_units))
    bias_row, gain_row, norm_row = special
    layout = AdapterLayout(
        rank, max(1, row), num_pages, num_units, *tables, bias_row=bias_row, gain_row=gain_row, norm_row=norm_row,
        vocab=vocab,
    )  # fmt: skip
    return layout, parts + planner.parts


def _plan_vocab(deltas: AdapterDeltas, planner: _Planner) -> VocabLayout | None:
    embed, head, words = deltas.embed, deltas.head, {}
    if embed is not None:
        words |= {
            "embed_rank": 0 if embed.a is None else len(embed.a),
            "embed_a": planner.rows(embed.a, "embed_tokens"),
            "embed_b": planner.rows(None if embed.b is None else embed.b.T, "embed_tokens"),
            "embed_scale": embed.scale,
            "embed_gain": planner.rows(embed.gain, "embed_tokens DoRA gain"),
        }
        if len(embed.row_ids):
            index_V = np.zeros(planner.geometry.vocab_rows, np.uint32)
            index_V[embed.row_ids] = np.arange(1, len(embed.row_ids) + 1)
            words["embed_map"] = planner.ints(index_V, "embed_tokens rows")
            words["embed_rows"] = planner.rows(embed.rows, "embed_tokens rows")
    words["final_norm"] = planner.rows(deltas.final_norm, "final norm")
    if head is not None:
        words |= {
            "head_rank": 0 if head.a is None else len(head.a),
            "head_a": planner.rows(head.a, "lm_head"),
            "head_b": planner.rows(None if head.b is None else head.b.T, "lm_head"),
            "head_scale": head.scale,
            "head_gain": planner.rows(head.gain, "lm_head DoRA gain"),
            "head_bias": planner.rows(head.bias, "lm_head bias"),
            "num_head_rows": len(head.row_ids),
        }
        if len(head.row_ids):
            words["head_ids"] = planner.ints(head.row_ids, "lm_head rows")
            shared = embed is not None and (embed.rows is head.rows or np.array_equal(embed.rows, head.rows))
            words["head_rows"] = words["embed_rows"] if shared else planner.rows(head.rows, "lm_head rows")
    vocab = VocabLayout(**words, extra_tokens=deltas.extra_tokens)
    return None if vocab == VocabLayout() else vocab


def pack(deltas: AdapterDeltas, geometry: PoolGeometry) -> PackedAdapter:
    """Rounds an adapter to the pool's compute type and lays it out in pages.

    A row of length n is cut per shard first, so that shard t holds its contiguous n/TP elements, and then in units of
    u/TP: unit k of shard t is `row[t*n/TP + k*u/TP :][: u/TP]`.

    Raises:
        AdapterError: a finite value becomes infinite in the compute type (`weights_overflow`).
    """
    layout, parts = _plan(deltas, geometry)
    # Zeroed by the system, so that only the tail of the last page costs anything.
    pages = np.zeros((layout.num_pages, *_page_shape(geometry)), geometry.storage_dtype)
    slots_STKW = pages.reshape(-1, geometry.tp, geometry.units_per_page, geometry.unit // geometry.tp)
    for part in parts:
        length = part.rows_RN.shape[1]
        step = max(1, _BLOCK_ELEMENTS // length)
        for row in range(0, len(part.rows_RN), step):
            pause_point()
            bits_RN = _bits(part.rows_RN[row : row + step], geometry, part.what)
            shards_RTKW = bits_RN.reshape(len(bits_RN), geometry.tp, -1, slots_STKW.shape[-1])
            units_UTW = shards_RTKW.transpose(0, 2, 1, 3).reshape(-1, geometry.tp, slots_STKW.shape[-1])
            _write(slots_STKW, part.start + row * (length // geometry.unit), units_UTW)
    pages.flags.writeable = False
    return PackedAdapter(layout, pages)


def _page_shape(geometry: PoolGeometry) -> tuple[int, int, int]:
    return geometry.num_layers, geometry.tp, geometry.page_elements // geometry.tp


def _bits(rows_RN: np.ndarray, geometry: PoolGeometry, what: str) -> np.ndarray:
    """The rows in the compute type, as the pool stores them; C-contiguous."""
    if rows_RN.dtype == geometry.storage_dtype:
        return rows_RN
    with np.errstate(over="ignore"):  # found by isfinite, and named
        cast_RN = rows_RN.astype(COMPUTE_DTYPES[geometry.dtype], order="C", copy=False)
    if not np.isfinite(cast_RN).all():
        raise AdapterError(
            f"{what} has values up to {np.abs(rows_RN).max():g}, beyond the range of {geometry.dtype}: serve it with "
            "dtype bfloat16 or float32",
            reason="weights_overflow", param="lora_path",
        )  # fmt: skip
    return cast_RN.view(geometry.storage_dtype)


def _write(slots_STKW: np.ndarray, start: int, units_UTW: np.ndarray) -> None:
    """Copies units to their places, whole layer slots at once."""
    num_units, per_slot = len(units_UTW), slots_STKW.shape[2]
    slot, offset = divmod(start, per_slot)
    done = 0
    if offset:
        done = min(per_slot - offset, num_units)
        slots_STKW[slot, :, offset : offset + done] = units_UTW[:done].swapaxes(0, 1)
        slot += 1
    whole = (num_units - done) // per_slot
    body_SKTW = units_UTW[done : done + whole * per_slot].reshape(whole, per_slot, *units_UTW.shape[1:])
    slots_STKW[slot : slot + whole] = body_SKTW.swapaxes(1, 2)
    done += whole * per_slot
    if done < num_units:
        slots_STKW[slot + whole, :, : num_units - done] = units_UTW[done:].swapaxes(0, 1)


def unpack(packed: PackedAdapter, geometry: PoolGeometry) -> AdapterDeltas:
    """The inverse of `pack`; arrays in the compute type, ids int32."""
    layout = packed.layout
    slots_STKW = packed.pages.reshape(-1, geometry.tp, geometry.units_per_page, geometry.unit // geometry.tp)
    units_UTW = slots_STKW.swapaxes(1, 2).reshape(-1, geometry.tp, geometry.unit // geometry.tp)
    dims = {module: geometry.module_dims(module) for module in MODULES}

    def bits(start: int, num_rows: int, length: int) -> np.ndarray:
        per_row = length // geometry.unit
        rows_RKTW = units_UTW[start : start + num_rows * per_row].reshape(num_rows, per_row, *units_UTW.shape[1:])
        return np.ascontiguousarray(rows_RKTW.swapaxes(1, 2)).reshape(num_rows, length)

    def rows(start: int, num_rows: int, length: int) -> np.ndarray:
        return bits(start, num_rows, length).view(COMPUTE_DTYPES[geometry.dtype])

    def vector(start: int, length: int) -> np.ndarray | None:
        return rows(start, 1, length)[0] if start >= 0 else None

    def ints(start: int, num: int) -> np.ndarray:
        length = -(-num // geometry.unit) * geometry.unit
        if geometry.storage_dtype.itemsize == 4:
            return bits(start, 1, length)[0, :num].astype(np.int32)
        low, high = bits(start, 2, length)[:, :num].astype(np.int32)
        return low | high << INT_BITS

    a, b, scale = {}, {}, {}
    for layer, m in np.argwhere(layout.ranks_LM):
        key, rank = (int(layer), MODULES[m]), int(layout.ranks_LM[layer, m])
        a[key] = rows(int(layout.start_a_LM[layer, m]), rank, dims[key[1]][0])
        b[key] = geometry.single_heads(key[1], rows(int(layout.start_b_LM[layer, m]), rank, dims[key[1]][1])).T
        scale[key] = float(layout.scale_LM[layer, m])

    def vectors(start: np.ndarray, order: tuple[str, ...]) -> dict[tuple[int, str], np.ndarray]:
        length = {module: out for module, (_, out) in dims.items()} | dict.fromkeys(NORMS, geometry.hidden)
        return {
            (int(layer), order[n]): geometry.single_heads(order[n], rows(int(start[layer, n]), 1, length[order[n]])[0])
            for layer, n in np.argwhere(start >= 0)
        }

    vocab, V, D = layout.vocab or VocabLayout(), geometry.vocab_rows, geometry.hidden
    embed = head = None
    if max(vocab.embed_a, vocab.embed_map) >= 0:
        index_V = ints(vocab.embed_map, V) if vocab.embed_map >= 0 else np.zeros(V, np.int32)
        embed = VocabDelta(
            rows(vocab.embed_a, vocab.embed_rank, V) if vocab.embed_rank else None,
            rows(vocab.embed_b, vocab.embed_rank, D).T if vocab.embed_rank else None,
            vocab.embed_scale, vector(vocab.embed_gain, D), None,
            np.flatnonzero(index_V).astype(np.int32), rows(vocab.embed_rows, int(index_V.max()), D),
        )  # fmt: skip
    if max(vocab.head_a, vocab.head_ids, vocab.head_bias) >= 0:
        head = VocabDelta(
            rows(vocab.head_a, vocab.head_rank, D) if vocab.head_rank else None,
            rows(vocab.head_b, vocab.head_rank, V).T if vocab.head_rank else None,
            vocab.head_scale, vector(vocab.head_gain, V), vector(vocab.head_bias, V),
            ints(vocab.head_ids, vocab.num_head_rows), rows(vocab.head_rows, vocab.num_head_rows, D),
        )  # fmt: skip
    return AdapterDeltas(
        a, b, scale, vectors(layout.start_bias_LM, MODULES), vectors(layout.start_gain_LM, MODULES),
        vectors(layout.start_norm_L2, NORMS), vector(vocab.final_norm, D), embed, head, vocab.extra_tokens,
    )  # fmt: skip
