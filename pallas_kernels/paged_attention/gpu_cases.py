"""Every kernel of paged attention at the shapes of models, to be compiled for an H200 with no GPU present."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from pallas_kernels.gpu_check import Case, shaped
from pallas_kernels.paged_attention.api import ragged_paged_attention
from pallas_kernels.paged_attention.arg_specs import HEADS

_DECODES, _BLOCKS, _QUERIES, _PAGE_TOKENS = 64, 8, 32, 16


def _case(
    heads: tuple[int, int, int],
    implementation: str,
    dtype: str,
    slots: int,
    window: int | None = None,
    layers: int = 32,
) -> Case:
    N, K, H = heads
    kind = jnp.dtype(dtype)
    rows, tokens, i32 = _DECODES + _BLOCKS, _DECODES + _BLOCKS * _QUERIES, jnp.int32
    pool = shaped(layers, 4096, 2 * K * _PAGE_TOKENS * H, dtype=jnp.dtype(f"uint{8 * kind.itemsize}"))
    per_row = [shaped(rows, dtype=i32)] * 3
    return Case(
        functools.partial(
            ragged_paged_attention, num_decodes=_DECODES, most_queries=_QUERIES, num_kv_heads=K,
            page_tokens=_PAGE_TOKENS, window=window, implementation=implementation,
        ),
        [shaped(tokens, N, H, dtype=kind), pool, shaped(dtype=i32), shaped(rows, slots // 16, dtype=i32), *per_row],
        # The pool is gigabytes: whatever copied or converted it would be seen here.
        max_temp_bytes=100 << 20, kernels="^paged_attention",
    )  # fmt: skip


def cases() -> dict[str, Case]:
    """By model, type and context: short tables need no second kernel that puts parts together."""
    found = {}
    for dtype in ("bfloat16", "float16", "float32"):
        for model, heads in HEADS.items():
            found[f"triton/{model}/{dtype}"] = _case(heads, "triton", dtype, 8192)
    llama = HEADS["llama-3-8b"]
    found["triton/llama-3-8b/bfloat16/256 slots"] = _case(llama, "triton", "bfloat16", 256)
    found["triton/llama-3-8b/bfloat16/131072 slots"] = _case(llama, "triton", "bfloat16", 131072)
    found["triton/llama-3-8b/bfloat16/window 4096"] = _case(llama, "triton", "bfloat16", 8192, window=4096)
    for dtype in ("bfloat16", "float16"):
        for model, heads in HEADS.items():
            found[f"mosaic_gpu/{model}/{dtype}"] = _case(heads, "mosaic_gpu", dtype, 8192)
    found["mosaic_gpu/llama-3-8b/bfloat16/window 4096"] = _case(llama, "mosaic_gpu", "bfloat16", 8192, window=4096)
    return found
