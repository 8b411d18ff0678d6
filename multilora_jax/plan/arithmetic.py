"""What a model, its adapters and its step take of each device, by arithmetic alone (host only, no jax).

Sizes are bytes on one device. What is shared out exactly (weights, pool, rank rows) is exact; temporaries are the
widest activations of a layer, counted by `temporary_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from multilora_jax.engine.step_plan import max_blocks
from multilora_jax.errors import ConfigError
from multilora_jax.memory.geometry import MODULES, PoolGeometry
from multilora_jax.models.config import ModelConfig

_F32 = _I32 = 4
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""Modules whose rank rows are summed over the devices together."""


@dataclass(frozen=True)
class Sizes:
    """The largest step of an engine; keys of the configuration but for the last.

    Attributes:
        max_num_seqs, max_num_batched_tokens, max_model_len, max_rank_rows, prefill_block: see EngineConfig.
        next_rank_rows: rows of the buffers that may be filled beside those in use; 0 where there is one size only.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 256
    max_model_len: int = 4096
    max_rank_rows: int = 512
    next_rank_rows: int = 256

    prefill_block: int = 32

    @property
    def num_tokens(self) -> int:
        """T of the largest step."""
        return self.max_num_seqs + self.max_num_batched_tokens

    @property
    def num_rows(self) -> int:
        """S of the largest step: rows that may sample."""
        return self.max_num_seqs + max_blocks(self.max_num_batched_tokens, self.prefill_block)


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in a step.

    Attributes:
        what: what they are for.
        count: in a step.
        nbytes: bytes of each one's result.
        sent: bytes that each device sends in a step, in a ring.
    """

    what: str
    count: int
    nbytes: int
    sent: float


@dataclass(frozen=True)
class Plan:
    """Bytes on each device, and what fits.

    Attributes:
        weights, pool, rows, temporaries: bytes; rows are the buffers of rank rows, all that may exist at once, or the
            table of where they lie in the pool.
        page_bytes: of one page on all devices.
        num_pages: of the pool.
        adapter_pages: of one adapter.
        num_adapters: as asked for.
        kv_tokens: tokens of KV in the pages that these adapters leave.
        exchanges: what the devices send each other in a step of max_num_seqs decodes.
        in_place: see make_plan.
    """

    weights: int
    pool: int
    rows: int
    temporaries: int
    page_bytes: int
    num_pages: int
    adapter_pages: int
    num_adapters: int
    kv_tokens: int
    exchanges: tuple[Exchange, ...]
    in_place: bool = False

    @property
    def peak(self) -> int:
        """Bytes of each device in use during a step."""
        return self.weights + self.pool + self.rows + self.temporaries


def weight_bytes(
    model: ModelConfig, geometry: PoolGeometry, max_model_len: int, quantization: str | None = None
) -> int:
    """Bytes of the parameters on one device; the rotary tables and the norms are whole on each."""
    g, tp, size = geometry, geometry.tp, geometry.storage_dtype.itemsize
    D, F = model.hidden_size, model.ffn_size
    matrices = [((model.q_dim + 2 * g.kv_dim), D), (D, model.q_dim), (2 * F, D), (D, F)]
    vocabulary = 1 if model.tie_word_embeddings else 2
    elements = model.num_layers * sum(rows * columns for rows, columns in matrices)
    elements += vocabulary * g.vocab_rows * D
    split = elements // tp * (size if quantization is None else 1)
    if quantization is not None:  # a scale for each output; those of o and down are whole
        scales = model.num_layers * ((model.q_dim + 2 * g.kv_dim + 2 * F) // tp + 2 * D)
        split += _F32 * (scales + vocabulary * g.vocab_rows // tp)
    row_parallel = ("o_proj", "down_proj")
    vectors = 2 * D + 2 * model.head_dim * model.qk_norm
    for module in model.biased_modules:
        vectors += g.module_dims(module)[1] // (1 if module in row_parallel else tp)
    whole = size * (model.num_layers * vectors + D)
    return split + whole + _F32 * max_model_len * model.head_dim


def row_bytes(geometry: PoolGeometry, num_rows: int) -> int:
    """Bytes of a set of buffers for so many rank rows, on one device."""
    return num_rows * geometry.rank_row_bytes // geometry.tp


def table_bytes(geometry: PoolGeometry, num_rows: int) -> int:
    """Bytes of the unit addresses of so many rank rows that are read in place, whole on each device."""
    units = sum(sum(geometry.module_dims(module)) for module in MODULES) // geometry.unit
    return _I32 * geometry.num_layers * num_rows * units


def temporary_bytes(model: ModelConfig, geometry: PoolGeometry, sizes: Sizes) -> int:
    """Bytes that a step holds besides: the residual stream, the widest activations of a layer, the head's logits."""
    T, tp, size = sizes.num_tokens, geometry.tp, geometry.storage_dtype.itemsize
    D, F, V = model.hidden_size, model.ffn_size, geometry.vocab_rows
    attention = T * (_F32 + size) * (2 * model.q_dim + 2 * geometry.kv_dim) // tp
    mlp = T * (_F32 * 3 + size) * F // tp
    rank_rows = T * sizes.max_rank_rows * 3 * (_F32 + size)
    residual = T * D * (3 * _F32 + size)
    logits = 4 * _F32 * sizes.num_rows * V // tp
    return max(residual + max(attention, mlp) + rank_rows, logits + T * D * (_F32 + size))


def adapter_pages(geometry: PoolGeometry, rank: int, modules: Iterable[str]) -> int:
    """Pages of an adapter of one rank on some projections of every layer."""
    units = sum(rank * sum(geometry.module_dims(module)) // geometry.unit for module in modules)
    return geometry.pages_for_units(units * geometry.num_layers)


def exchanges(model: ModelConfig, geometry: PoolGeometry, num_tokens: int, num_rows: int) -> tuple[Exchange, ...]:
    """What the devices send each other in a step of T tokens; nothing on one device.

    Args:
        num_rows: R, rank rows that are summed for each token: those of its own adapters, or on CPUs of the whole step.
    """
    tp, T, L = geometry.tp, num_tokens, model.num_layers
    if tp == 1:
        return ()
    share = 2 * (tp - 1) / tp
    found = [("base: partial sums of o and down, [T, D]", 2 * L, _F32 * T * model.hidden_size)]
    for modules in _GROUPS if num_rows else ():
        what = f"adapters: shrunk {', '.join(m.removesuffix('_proj') for m in modules)}, [{len(modules)} R, T]"
        found.append((what, L, _F32 * T * num_rows * len(modules)))
    return tuple(Exchange(what, count, nbytes, count * nbytes * share) for what, count, nbytes in found)


def make_plan(
    model: ModelConfig,
    tp: int,
    dtype: str,
    sizes: Sizes,
    *,
    num_pages: int | None = None,
    usable_bytes: int | None = None,
    page_tokens: int = 16,
    extra_vocab: int = 256,
    quantization: str | None = None,
    num_adapters: int = 0,
    rank: int = 16,
    modules: tuple[str, ...] = MODULES,
    in_place: bool = False,
    max_lora_rank: int | None = None,
) -> Plan:
    """Plans an engine.

    Args:
        model: its sizes.
        tp: devices that share one model.
        dtype: "float32", "bfloat16" or "float16".
        sizes: of the largest step.
        num_pages: of the pool; None: as many as fit.
        usable_bytes: memory of each device; needed where num_pages is None.
        num_adapters, rank, modules: adapters that shall be in the pool together.
        in_place: whether kernels read adapters in the pool, instead of copies of their rank rows.
        max_lora_rank: most rank rows of an adapter, where the devices sum for each token those of its own adapter.

    Raises:
        ConfigError: tp does not divide the model (`tensor_parallel_size`), or the devices are too small for it
            (`device_too_small`).
    """
    one = model.geometry(2, page_tokens, tp, dtype, extra_vocab)
    weights = weight_bytes(model, one, sizes.max_model_len, quantization)
    rows = row_bytes(one, sizes.max_rank_rows + sizes.next_rank_rows)
    if in_place:
        rows = table_bytes(one, sizes.max_rank_rows)
    temporaries = temporary_bytes(model, one, sizes)
    if num_pages is None:
        assert usable_bytes is not None
        num_pages = (usable_bytes - weights - rows - temporaries) * tp // one.page_bytes
    each = adapter_pages(one, rank, modules) if num_adapters else 0
    if num_pages < 2:
        raise ConfigError(
            f"weights ({weights / 1e9:.1f} GB), rank rows ({rows / 1e9:.1f} GB) and temporaries "
            f"({temporaries / 1e9:.1f} GB) leave no room for a pool on each of {tp} devices: use more devices, "
            "quantization int8, or a smaller max_rank_rows",
            reason="device_too_small", param="tensor_parallel_size",
        )  # fmt: skip
    geometry = replace(one, num_pages=num_pages)
    summed = min(sizes.max_rank_rows, max_lora_rank or sizes.max_rank_rows)
    free = num_pages - 1 - num_adapters * each
    return Plan(
        weights, num_pages * geometry.page_bytes // tp, rows, temporaries, geometry.page_bytes, num_pages, each,
        num_adapters, max(0, free) * page_tokens if free >= 0 else -1,
        exchanges(model, geometry, sizes.max_num_seqs, summed), in_place,
    )  # fmt: skip
