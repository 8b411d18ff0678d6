"""Measures tile sizes of paged attention; see tune, whose command runs it."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.paged_attention.arg_specs import HEADS, random_arguments
from pallas_kernels.paged_attention.pallas_triton import paged_attention_triton
from pallas_kernels.paged_attention.triton_config import LEAST_DOT, TritonConfig, heuristic_config, tuning_key

OP = "paged_attention"
_PAGE_TOKENS = 16


def candidates(default: TritonConfig, queries: int, group: int, most_slots: int) -> list[TritonConfig]:
    """Tiles to measure, the heuristic's own first: of more lanes than there are queries none but the least."""
    parts = sorted({1, max(1, default.parts // 2), default.parts, min(2 * default.parts, max(1, most_slots // 64))})
    found = [
        TritonConfig(lanes, slots, count, num_warps, num_stages)
        for lanes in (16, 32, 64, 128)
        for slots in (16, 32, 64, 128)
        for count in parts
        for num_warps in (4, 8)
        for num_stages in (2, 3)
        if lanes <= max(LEAST_DOT, 2 * queries * group)
    ]
    return [default, *(config for config in found if config != default)]


def tune_attention(
    model: str, rows: int, queries: int, context: int, most_slots: int, dtype: str, *, layers: int,
    seconds: Callable[..., float], repeats: int, interpret: bool, most: int | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The entry for rows of so many queries, each at the end of a context of so many slots.

    Args:
        model: of HEADS.
        most_slots: slots of a page table, those of the longest context that is served: a part of the entry's key.
        layers: whose pages are read in one program; seconds: measures fn(*args) in `repeats` runs.
        most: candidates, None for all.

    Returns:
        one entry, or none where no candidate ran.
    """
    N, K, H = HEADS[model]
    width = most_slots // _PAGE_TOKENS
    arguments = random_arguments([(queries, context)] * rows, (N, K, H), dtype=dtype, layers=layers, width=width)
    q, pool, _, *ragged = (jnp.asarray(x) for x in arguments.arrays)
    sizes: dict[str, Any] = {
        "num_decodes": rows if queries == 1 else 0, "most_queries": queries, "num_kv_heads": K,
        "page_tokens": _PAGE_TOKENS,
    }  # fmt: skip

    def program(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def run(q: jax.Array, pool: jax.Array, *ragged: jax.Array) -> jax.Array:
            outs = [attend(q, pool, layer, *ragged, **sizes) for layer in range(layers)]
            return functools.reduce(jnp.add, [out.astype(jnp.float32) for out in outs])

        return jax.jit(run)

    wanted = np.asarray(program(functools.partial(ragged_paged_attention, implementation="xla"))(q, pool, *ragged))
    tolerance = (1e-4 if dtype == "float32" else 3e-2) * layers
    default = heuristic_config(rows, queries, K, N // K, H, jnp.dtype(dtype).itemsize, most_slots)
    best: tuple[float, TritonConfig] | None = None
    for config in candidates(default, queries, N // K, most_slots)[:most]:
        configs = (config, None) if queries == 1 else (None, config)
        fn = program(functools.partial(paged_attention_triton, configs=configs, interpret=interpret))
        try:
            error = float(np.abs(np.asarray(fn(q, pool, *ragged)) - wanted).max())
            took = seconds(fn, (q, pool, *ragged), repeats) / layers
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as failure:
            print(f"  left out {config}: {str(failure).splitlines()[0][:120]}", file=sys.stderr)
            continue
        if not error <= tolerance:
            print(f"  left out {config}: wrong by {error:.3g}", file=sys.stderr)
        elif best is None or took < best[0]:
            best = took, config
    if best is None:
        return []
    key = tuning_key(rows, queries, K, N // K, H, dtype, most_slots)
    entry = {"key": key, "config": dataclasses.asdict(best[1]), "us": round(best[0] * 1e6, 2)}
    print(f"{model} attention: {entry}", flush=True)
    return [entry]
