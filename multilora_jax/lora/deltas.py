"""What an adapter adds to the base as it is served: every feature of PEFT as a delta, worked out once at load.

Several adapters in one request are the sum of their deltas times the request's factors w_i (1 for a single one):

    y = (W x) (1 + sum w_i gain_i) + sum w_i (scale_i B_i A_i x + bias_i) + base bias       of a projection
    norm weight = base + sum w_i norm_i
    e = E[id] (1 + sum w_i gain_i) + sum w_i (scale_i B_i A_i[:, id] + rows_i[id])          of the embedding
    logits = (W h) (1 + sum w_i gain_i) + sum w_i (scale_i B_i A_i h + bias_i + rows_i h)   of the head

DoRA (arXiv 2402.09353) computes `m / |W + s B A| (W x + s B A x)`: its gain is `m / |W + s B A| - 1`, folded into B and
into replaced rows as well, so that nothing but `W x` is multiplied by it. The base's bias is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from multilora_jax.errors import AdapterError
from multilora_jax.lora.layout import COMPUTE_DTYPES
from multilora_jax.lora.tensor_names import projection_path

if TYPE_CHECKING:
    from multilora_jax.lora.weights import AdapterWeights, ModuleKey, VocabWeights
    from multilora_jax.models.config import ModelConfig

_Key = TypeVar("_Key")

_BLOCK_ELEMENTS = 2**20
"""Rows of a vocabulary are gone through in blocks of about so many elements: memory stays small, numpy stays fast."""


_ROUNDING = 1e-5
"""Gains up to here are what float32 leaves of the norm of a row that was not trained."""


class BaseTensors(Protocol):
    """The base's parameters as they are served."""

    def tensor(self, name: str) -> np.ndarray | None:
        """float32 copy by Hugging Face's name (`lm_head.weight` of a tied model is the embedding), None if absent."""
        ...


@dataclass(frozen=True, eq=False)
class VocabDelta:
    """What an adapter adds to the embedding or to the head.

    Attributes:
        a: [r, vocab_rows] of the embedding, [r, D] of the head; None where it has no LoRA.
        b: [D, r] of the embedding, [vocab_rows, r] of the head; the gain is folded in.
        scale: factor on `B A`.
        gain: [D] of the embedding, [vocab_rows] of the head; None where there is none.
        bias: [vocab_rows] of the head; None where there is none.
        row_ids: int32[n], ascending ids of the tokens whose rows change beyond LoRA and gain.
        rows: [n, D], what is added to those rows.
    """

    a: np.ndarray | None = field(default=None, repr=False)
    b: np.ndarray | None = field(default=None, repr=False)
    scale: float = 0.0
    gain: np.ndarray | None = field(default=None, repr=False)
    bias: np.ndarray | None = field(default=None, repr=False)
    row_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32), repr=False)
    rows: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32), repr=False)


@dataclass(frozen=True, eq=False)
class AdapterDeltas:
    """An adapter as deltas against one base; what is absent adds nothing.

    Attributes:
        a: [r, in] of each module.
        b: [out, r] of each module, the gain folded in.
        scale: factor on `B A x` of each module.
        bias: [out], added to the output.
        gain: [out], `W x` is multiplied by 1 plus it.
        norms: [D], added to a layer's norm weights ("input" or "post").
        final_norm: [D], added to the last norm's weight.
        embed, head: of the vocabulary.
        extra_tokens: rows of the vocabulary past the base's.
    """

    a: dict[ModuleKey, np.ndarray] = field(default_factory=dict, repr=False)
    b: dict[ModuleKey, np.ndarray] = field(default_factory=dict, repr=False)
    scale: dict[ModuleKey, float] = field(default_factory=dict, repr=False)
    bias: dict[ModuleKey, np.ndarray] = field(default_factory=dict, repr=False)
    gain: dict[ModuleKey, np.ndarray] = field(default_factory=dict, repr=False)
    norms: dict[tuple[int, str], np.ndarray] = field(default_factory=dict, repr=False)
    final_norm: np.ndarray | None = field(default=None, repr=False)
    embed: VocabDelta | None = None
    head: VocabDelta | None = None
    extra_tokens: int = 0

    @property
    def adds_nothing(self) -> bool:
        """Whether nothing changes beyond the rounding of float32, as under an adapter that was never trained."""
        vocab = [part for part in (self.embed, self.head) if part is not None]
        pairs = [(self.scale[key], self.a[key], b) for key, b in self.b.items()]
        pairs += [(part.scale, part.a, part.b) for part in vocab if part.a is not None and part.b is not None]
        added = [*self.bias.values(), *self.norms.values(), self.final_norm, *(part.rows for part in vocab)]
        added += [part.bias for part in vocab]
        gains = [*self.gain.values(), *(part.gain for part in vocab)]
        return (
            not self.extra_tokens
            and not any(scale and a.any() and b.any() for scale, a, b in pairs)
            and not any(array is not None and array.any() for array in added)
            and all(gain is None or np.abs(gain).max(initial=0.0) <= _ROUNDING for gain in gains)
        )


@np.errstate(over="ignore", invalid="ignore")  # `pack` finds what is not finite, and names it
def to_deltas(
    weights: AdapterWeights, model_config: ModelConfig, base: BaseTensors, vocab_rows: int, dtype: str = "float32"
) -> AdapterDeltas:
    """Works out what an adapter adds to the base.

    Replacements that are the base's own values, once rounded to the type it is served in, add nothing: the frozen
    copies of the vocabulary that PEFT saves cost nothing. LoRA pairs are kept even if they are zero.

    Args:
        weights: checked against `model_config`.
        model_config: the base.
        base: its tensors.
        vocab_rows: rows of the embedding and the head as they are kept (PoolGeometry.vocab_rows).
        dtype: the compute type that the base is served in.

    Returns:
        float32 deltas; arrays of `weights` are used as they are where nothing changes them.

    Raises:
        AdapterError: more tokens than `vocab_rows` (`vocab_too_large`), or a DoRA magnitude on a row of zeros, whose
            direction is undefined (`nan_weights`).
    """
    if weights.vocab_size > vocab_rows:
        raise AdapterError(
            f"the adapter has {weights.vocab_size} tokens, above the {vocab_rows} that there is room for: start the "
            f"server with max_extra_vocab of at least {weights.vocab_size - model_config.vocab_size}",
            reason="vocab_too_large", param="lora_path",
        )  # fmt: skip
    rounding = COMPUTE_DTYPES[dtype]
    gain, b, bias = {}, dict(weights.b), {}
    for key, magnitude in weights.magnitude.items():
        name = f"{projection_path(*key)}.weight"
        a, b_OR, scale = weights.a[key], weights.b[key], weights.scale[key]
        norm = np.sqrt(_row_squares(_need(base, name), a, b_OR, scale))
        gain[key] = _gain(magnitude, norm, name)
        b[key] = b_OR * (1 + gain[key])[:, None]
    for key in sorted(weights.bias.keys() | weights.lora_bias.keys()):
        total = np.zeros(model_config.module_dims(key[1])[1], np.float32)
        if key in weights.bias:
            total += _replaced(weights.bias[key], base.tensor(f"{projection_path(*key)}.bias"), rounding)
        if key in weights.lora_bias:
            total += np.float32(weights.scale[key]) * weights.lora_bias[key]
        bias[key] = total
    norms = {
        (layer, kind): _replaced(norm, _need(base, f"model.layers.{layer}.{_NORM_NAMES[kind]}.weight"), rounding)
        for (layer, kind), norm in weights.norms.items()
    }
    final_norm = None
    if weights.final_norm is not None:
        final_norm = _replaced(weights.final_norm, _need(base, "model.norm.weight"), rounding)
    embed = head = None
    if weights.embed is not None:
        table = _VocabTable(weights.embed, base, "model.embed_tokens.weight", weights.vocab_size)
        embed = _embed_delta(weights.embed, table, vocab_rows, rounding)
    if weights.head is not None:
        table = _VocabTable(weights.head, base, "lm_head.weight", weights.vocab_size)
        head = _head_delta(weights.head, table, vocab_rows, rounding)
    return AdapterDeltas(
        weights.a, b, weights.scale, _unless_zero(bias), _unless_zero(gain), _unless_zero(norms),
        final_norm if final_norm is not None and final_norm.any() else None,
        embed, head, weights.vocab_size - model_config.vocab_size,
    )  # fmt: skip


_NORM_NAMES = {"input": "input_layernorm", "post": "post_attention_layernorm"}


def _need(base: BaseTensors, name: str) -> np.ndarray:
    tensor = base.tensor(name)
    assert tensor is not None, f"the base has no {name}"
    return tensor


def _same(new: np.ndarray, old: np.ndarray, rounding: np.dtype) -> np.ndarray:
    """bool[...]: whether the last axis of `new` is that of `old`, as it is or once rounded as `old` was."""
    same = (new == old).all(-1)
    if same.all():
        return same
    with np.errstate(over="ignore"):  # infinite is just another value that differs
        return (new.astype(rounding).astype(np.float32) == old).all(-1)


def _replaced(new: np.ndarray, old: np.ndarray | None, rounding: np.dtype) -> np.ndarray:
    """[n], what turns `old` (absent: zeros) into `new`; zeros where they are the same."""
    if old is None:
        return new
    return np.zeros_like(new) if _same(new, old, rounding) else new - old


def _unless_zero(deltas: dict[_Key, np.ndarray]) -> dict[_Key, np.ndarray]:
    return {key: delta for key, delta in deltas.items() if delta.any()}


def _gain(magnitude: np.ndarray, norm: np.ndarray, name: str) -> np.ndarray:
    """float32 `magnitude / norm - 1`, in the precision of float64; 0 where both are zero."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        gain = (magnitude / norm - 1).astype(np.float32)
    gain[(magnitude == 0) & (norm == 0)] = 0
    if not np.isfinite(gain).all():
        row = int(np.argmin(np.isfinite(gain)))
        raise AdapterError(
            f"{name} with the adapter's LoRA has norm {norm[row]:g} in row {row}, and DoRA divides its magnitude "
            f"{magnitude[row]:g} by that",
            reason="nan_weights", param="lora_path",
        )  # fmt: skip
    return gain


def _blocks(num_rows: int, row_length: int) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // row_length)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _row_squares(weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """float64[out]: squared norms of the rows of `weight + scale * b @ a`, a block of rows at a time.

    (Expanding the square to save the product saves nothing, `weight @ a.T` being as large, and cancels where the
    adapter undoes the base.)
    """
    result = np.empty(len(weight))
    for rows in _blocks(*weight.shape):
        changed = b[rows] @ a
        changed *= np.float32(scale)
        changed += weight[rows]
        result[rows] = np.square(changed, out=changed).sum(1, dtype=np.float64)
    return result


class _VocabTable:
    """The embedding or the head of the base with an adapter's replacements, gone through in blocks."""

    def __init__(self, part: VocabWeights, base: BaseTensors, name: str, vocab_size: int):
        self.name, self.vocab_size = name, vocab_size
        needed = part.rows is not None or part.magnitude is not None
        self.base_VD = _need(base, name) if needed else np.zeros((0, 1), np.float32)
        self.row_ids = np.zeros(0, np.int32) if part.row_ids is None else part.row_ids
        self.rows = np.zeros((0, self.base_VD.shape[1]), np.float32) if part.rows is None else part.rows

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """(range of tokens, their rows [n, D], which the caller may change)."""
        for block in _blocks(self.vocab_size, self.base_VD.shape[1]):
            rows = np.zeros((block.stop - block.start, self.base_VD.shape[1]), np.float32)
            known = self.base_VD[block]
            rows[: len(known)] = known
            first, last = np.searchsorted(self.row_ids, (block.start, block.stop))
            rows[self.row_ids[first:last] - block.start] = self.rows[first:last]
            yield block, rows

    def changes(self, rounding: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32[n], replacement minus base float32[n, D]) of the rows that differ."""

        def base_of(ids: np.ndarray) -> np.ndarray:
            old = np.zeros((len(ids), self.rows.shape[1]), np.float32)
            known = np.searchsorted(ids, len(self.base_VD))
            old[:known] = self.base_VD[ids[:known]]
            return old

        differs = np.zeros(len(self.row_ids), bool)
        for block in _blocks(*self.rows.shape):
            differs[block] = ~_same(self.rows[block], base_of(self.row_ids[block]), rounding)
        kept = np.flatnonzero(differs)
        deltas = np.empty((len(kept), self.rows.shape[1]), np.float32)
        for block in _blocks(*deltas.shape):
            np.subtract(self.rows[kept[block]], base_of(self.row_ids[kept[block]]), out=deltas[block])
        return self.row_ids[kept], deltas


def _padded(array: np.ndarray, length: int, axis: int = 0) -> np.ndarray:
    missing = length - array.shape[axis]
    return np.pad(array, [(0, missing if axis == n else 0) for n in range(array.ndim)]) if missing else array


def _embed_delta(part: VocabWeights, table: _VocabTable, vocab_rows: int, rounding: np.dtype) -> VocabDelta | None:
    row_ids, rows = table.changes(rounding)
    a, b, gain = part.a, part.b, None
    if part.magnitude is not None:
        assert a is not None
        assert b is not None
        # Of the embedding, DoRA norms each of the D columns over all tokens.
        squares = np.zeros(len(b))
        for block, changed in table.blocks():
            changed += np.float32(part.scale) * (a[:, block].T @ b.T)
            squares += np.square(changed, out=changed).sum(0, dtype=np.float64)
        gain = _gain(part.magnitude, np.sqrt(squares), table.name)
        b = b * (1 + gain)[:, None]
        rows = rows * (1 + gain)
    if a is None and not len(row_ids):
        return None
    a = None if a is None else _padded(a, vocab_rows, axis=1)
    gain = gain if gain is not None and gain.any() else None
    return VocabDelta(a, b, part.scale, gain, None, row_ids, rows)


def _head_delta(part: VocabWeights, table: _VocabTable, vocab_rows: int, rounding: np.dtype) -> VocabDelta | None:
    row_ids, rows = table.changes(rounding)
    a, b, gain, bias = part.a, part.b, None, None
    if part.magnitude is not None:
        assert a is not None
        assert b is not None
        squares = np.empty(table.vocab_size)
        for block, changed in table.blocks():
            squares[block] = _row_squares(changed, a, b[block], part.scale)
        gain = _gain(part.magnitude, np.sqrt(squares), table.name)
        b = b * (1 + gain)[:, None]
        rows = rows * (1 + gain)[row_ids, None]
        gain = _padded(gain, vocab_rows) if gain.any() else None
    if part.lora_bias is not None and part.lora_bias.any():
        bias = _padded(np.float32(part.scale) * part.lora_bias, vocab_rows)
    if a is None and bias is None and not len(row_ids):
        return None
    b = None if b is None else _padded(b, vocab_rows)
    return VocabDelta(a, b, part.scale, gain, bias, row_ids, rows)
