"""Shape of the unified pool: pages, units and their addresses (host arithmetic, no jax).

Glossary: a *page* holds `E` elements in each of `L` layers under one id; a *unit* is `u` consecutive elements
of one page in one layer. KV of `page_tokens` tokens of one layer fills a page exactly; adapters fill units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from multilora_jax.errors import ConfigError

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The seven projections of a Llama layer; the order of the module axis `M` everywhere."""

KV_MODULES = ("k_proj", "v_proj")
"""Those whose outputs are KV heads."""

NUM_ATTENTION = 4
"""The first of MODULES, those of the attention."""

INT_BITS = 14
"""Bits of an integer in each of two 16-bit words of the pool. A word below 2^14 is infinite or NaN in neither 16-bit
float: a freed page becomes somebody's keys and values, of which those not yet written are multiplied by 0."""


def module_dims(module: str, *, hidden: int, q_dim: int, kv_dim: int, ffn: int) -> tuple[int, int]:
    """(in_dim, out_dim) of one of MODULES in a model of these widths."""
    return {
        "q_proj": (hidden, q_dim), "k_proj": (hidden, kv_dim), "v_proj": (hidden, kv_dim), "o_proj": (q_dim, hidden),
        "gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden),
    }[module]  # fmt: skip


@dataclass(frozen=True)
class PoolGeometry:
    """Sizes of `pool[L, P, E]` (E laid out `[TP, E/TP]`) and of everything addressed inside it.

    Attributes:
        num_layers: L.
        num_pages: P, page 0 included: it is never allocated, padded tokens write to it.
        page_tokens: tokens whose K and V fill one page of one layer.
        hidden, q_dim, kv_dim, ffn: widths of the model (q_dim = N*H, kv_dim = K*H).
        num_kv_heads: K as it is held, at least one for each shard; head_dim: H.
        tp: shards of the element axis.
        dtype: compute type, "float32", "bfloat16" or "float16"; the pool stores its bits as unsigned integers.
        vocab_rows: rows of the embedding and of the head as they are kept, a whole number of units: the model's
            vocabulary and room for tokens that adapters add. 0 where no adapter is ever served.
        kv_repeat: neighbouring shards that hold the same KV head, where the model has fewer heads than there are
            shards: kv_dim and num_kv_heads count it once for each.
    """

    num_layers: int
    num_pages: int
    page_tokens: int
    hidden: int
    q_dim: int
    kv_dim: int
    ffn: int
    num_kv_heads: int
    head_dim: int
    tp: int = 1
    dtype: str = "float32"
    vocab_rows: int = 0
    kv_repeat: int = 1

    def __post_init__(self) -> None:
        for name, value in (("num_kv_heads", self.num_kv_heads), ("unit width", self.unit)):
            if value % self.tp:
                raise ConfigError(
                    f"tensor_parallel_size {self.tp} does not divide the model's {name} {value}",
                    reason="tensor_parallel_size", param="tensor_parallel_size",
                )  # fmt: skip

    @property
    def page_elements(self) -> int:
        """E: elements of one page in one layer."""
        return self.page_tokens * 2 * self.kv_dim

    @property
    def unit(self) -> int:
        """u: the widest vector that every module's input and output is a whole number of."""
        return math.gcd(self.hidden, self.q_dim, self.kv_dim, self.ffn)

    @property
    def units_per_page(self) -> int:
        """Units of one page in one layer."""
        return self.page_elements // self.unit

    @property
    def units_per_page_all_layers(self) -> int:
        """Units that one page id stands for."""
        return self.units_per_page * self.num_layers

    @property
    def storage_dtype(self) -> np.dtype:
        """Unsigned integer of the compute type's width."""
        return np.dtype(np.uint32 if self.dtype == "float32" else np.uint16)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page id over all layers."""
        return self.num_layers * self.page_elements * self.storage_dtype.itemsize

    @property
    def rank_row_bytes(self) -> int:
        """Bytes of one rank row of every module in every layer, over all shards."""
        per_layer = sum(sum(self.module_dims(module)) for module in MODULES)
        return self.num_layers * per_layer * self.storage_dtype.itemsize

    def module_dims(self, module: str) -> tuple[int, int]:
        """(in_dim, out_dim) of one of MODULES."""
        return module_dims(module, hidden=self.hidden, q_dim=self.q_dim, kv_dim=self.kv_dim, ffn=self.ffn)

    def repeat_heads(self, module: str, rows: np.ndarray) -> np.ndarray:
        """Rows of a module's outputs [..., out] as they are held: KV heads once for each shard that has them."""
        if self.kv_repeat == 1 or module not in KV_MODULES:
            return rows
        heads = rows.reshape(*rows.shape[:-1], -1, self.head_dim)
        return np.repeat(heads, self.kv_repeat, axis=-2).reshape(*rows.shape[:-1], -1)

    def single_heads(self, module: str, rows: np.ndarray) -> np.ndarray:
        """The inverse of repeat_heads."""
        if self.kv_repeat == 1 or module not in KV_MODULES:
            return rows
        heads = rows.reshape(*rows.shape[:-1], -1, self.kv_repeat, self.head_dim)
        return np.ascontiguousarray(heads[..., 0, :]).reshape(*rows.shape[:-1], -1)

    def pages_for_tokens(self, num_tokens: int) -> int:
        """Pages that the KV of `num_tokens` tokens takes."""
        return -(-num_tokens // self.page_tokens)

    def pages_for_units(self, num_units: int) -> int:
        """Pages that `num_units` adapter units take."""
        return -(-num_units // self.units_per_page_all_layers)

    def unit_addresses(self, page_ids: np.ndarray, unit_ids: np.ndarray) -> np.ndarray:
        """Rows of the pool seen as a matrix of units `[L*P*units_per_page, u]`.

        Args:
            page_ids: int[n], the pages that an adapter holds, in order.
            unit_ids: int[...], the adapter's own unit numbers; -1 stays -1.

        Returns:
            int32[...]: flat unit rows (the same in every shard).

        An adapter's unit j lies in page `j // units_per_page_all_layers`, then layer by layer inside that page.
        """
        per_layer, per_page = self.units_per_page, self.units_per_page_all_layers
        page, rest = np.divmod(np.maximum(unit_ids, 0), per_page)
        layer, offset = np.divmod(rest, per_layer)
        flat = (layer * self.num_pages + np.asarray(page_ids)[page]) * per_layer + offset
        return np.where(unit_ids < 0, -1, flat).astype(np.int32)
