"""What a decode step must read: the floor that the figures are held against (host arithmetic, no jax).

Decoding is bound by the bytes that a step reads: the base's weights once, and each distinct adapter of the batch once.
With B requests that choose among n adapters uniformly and independently, adapter i is in the batch with probability
1 - (1 - 1/n)^B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from multilora_jax.memory.geometry import MODULES, PoolGeometry

if TYPE_CHECKING:
    from multilora_jax.lora.adapter import Adapter
    from multilora_jax.models.config import ModelConfig


def weight_bytes(model: ModelConfig, geometry: PoolGeometry, quantization: str | None = None) -> int:
    """Bytes of base weights that a step reads: all, but of an untied embedding table only a few rows."""
    unread = 0 if model.tie_word_embeddings else model.vocab_size
    return model.weight_bytes(geometry.storage_dtype.itemsize, quantization, unread)


def adapter_bytes(adapter: Adapter, geometry: PoolGeometry) -> int:
    """Bytes of a loaded adapter's own rank rows."""
    dims_M = np.asarray([sum(geometry.module_dims(module)) for module in MODULES])
    return int((adapter.layout.ranks_LM @ dims_M).sum()) * geometry.storage_dtype.itemsize


def expected_distinct(num_adapters: int, batch: int) -> float:
    """Distinct adapters of `batch` requests that choose among `num_adapters` uniformly: n (1 - (1 - 1/n)^B)."""
    return num_adapters * (1 - (1 - 1 / num_adapters) ** batch)


def expected_bytes(sizes: Sequence[int], batch: int) -> float:
    """Bytes of the distinct adapters of such a batch; `sizes` are those of all adapters."""
    return sum(sizes) / len(sizes) * expected_distinct(len(sizes), batch)


def byte_floor_ratio(weights: int, sizes: Sequence[int], one: int, batch: int) -> float:
    """The speed that the bytes allow a choice among adapters, as a ratio to a batch of one adapter alone.

    Args:
        weights: bytes of the base.
        sizes: bytes of each adapter.
        one: bytes of the adapter of the batch that it is held against.
        batch: requests in a step.
    """
    return (weights + one) / (weights + expected_bytes(sizes, batch))
