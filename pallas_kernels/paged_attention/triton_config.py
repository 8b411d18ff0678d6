"""Tile sizes of the Triton kernels of paged attention: a heuristic, and what was measured where there is a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import tuning

LEAST_DOT = 16
"""Least size of each side of a product on tensor cores."""

PROGRAMS_WANTED = 2048
"""Programs of decode rows below which contexts are split: several for each place on a device of 132 multiprocessors,
so that the last wave is short."""

PROGRAMS_WANTED_OF_PROMPTS = 528
"""The same of prompts, whose programs are long, and whose parts take as much memory as there are queries."""

LEAST_PART = 256
"""Least slots of a part of a context: a part's result, float32, is then a percent of the keys and values it read."""

MOST_PART = 8192
"""Most slots of a part, where the page table allows longer contexts: one long row must not hold up a whole step."""

MOST_PARTS = 64

MOST_PARTIAL_BYTES = 256 << 20
"""Most memory of the results of parts: 2,000 prompt tokens of 32 heads in contexts of 131,072 would take 550 MB."""


@dataclass(frozen=True)
class TritonConfig:
    """How one region of rows is computed.

    Attributes:
        lanes: M, queries times heads of a tile; a power of two.
        slots: context slots of an iteration; a power of two.
        parts: most parts of a context.
        num_warps, num_stages: of Triton.
    """

    lanes: int
    slots: int
    parts: int
    num_warps: int
    num_stages: int


def heuristic_config(
    num_rows: int, most_queries: int, num_kv_heads: int, group: int, head_dim: int, itemsize: int, most_slots: int
) -> TritonConfig:
    """The default for rows of up to so many queries: bytes in flight for decodes, tensor cores for prompts.

    Args:
        group: query heads of a KV head; itemsize: bytes of an element; most_slots: the longest context of a table.
    """
    # float32 products run outside of tensor cores and hold their operands in registers.
    most_lanes, most_slots_of_turn = (16, 16) if itemsize == 4 else (64, 64)
    lanes = max(LEAST_DOT, pl.next_power_of_2(min(most_queries * group, most_lanes)))
    # Keys and values of a turn take at most 32 KB.
    slots = max(LEAST_DOT, min(most_slots_of_turn, 16384 // (head_dim * itemsize)))
    programs = num_rows * pl.cdiv(most_queries * group, lanes) * num_kv_heads
    wanted = PROGRAMS_WANTED if most_queries == 1 else PROGRAMS_WANTED_OF_PROMPTS
    parts = max(pl.cdiv(wanted, programs), pl.cdiv(most_slots, MOST_PART))
    parts = max(1, min(parts, pl.cdiv(most_slots, LEAST_PART), MOST_PARTS))
    return TritonConfig(lanes, slots, parts, num_warps=8 if itemsize == 4 else 4, num_stages=3)


def pick_config(
    num_rows: int, most_queries: int, num_kv_heads: int, group: int, head_dim: int, dtype: Any, most_slots: int
) -> TritonConfig:
    """What was measured on this device for such sizes, else the heuristic; arguments as of heuristic_config."""
    default = heuristic_config(
        num_rows, most_queries, num_kv_heads, group, head_dim, jnp.dtype(dtype).itemsize, most_slots
    )
    key = tuning_key(num_rows, most_queries, num_kv_heads, group, head_dim, dtype, most_slots)
    return tuning.lookup("paged_attention", key, default)


def tuning_key(
    num_rows: int, most_queries: int, num_kv_heads: int, group: int, head_dim: int, dtype: Any, most_slots: int
) -> dict[str, int | str]:
    """What the best configuration depends on."""
    return {
        "rows": tuning.bucket(num_rows), "queries": tuning.bucket(most_queries), "kv_heads": num_kv_heads,
        "group": group, "head_dim": head_dim, "dtype": jnp.dtype(dtype).name, "slots": tuning.bucket(most_slots),
    }  # fmt: skip


def check_supported(head_dim: int, dtype: Any) -> None:
    """Raises NotImplementedError for what other implementations can and this one cannot."""
    if head_dim < LEAST_DOT or head_dim & (head_dim - 1):
        raise NotImplementedError(f"head_dim must be a power of two from {LEAST_DOT} on, not {head_dim}")
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"queries of {jnp.dtype(dtype)}")
