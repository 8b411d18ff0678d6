"""The segmented kernels as gpu_check compiles them: models, types, ranks, blocks of decodes and of prompts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.gpu_check import Case
from pallas_kernels.mosaic import THREADS
from pallas_kernels.segmented_lora.api import lora_delta, lora_matmul
from pallas_kernels.segmented_lora.arg_specs import GROUPS, MODELS, Arguments, arguments
from pallas_kernels.segmented_lora.plan import SegmentShape

DECODE = (SegmentShape(64, 64),)
"""64 tokens of adapters of rank 16 at most."""
DECODE_RANKS = (SegmentShape(64, 256, tile_rows=32),)
"""64 tokens of adapters of ranks 1 to 128, a tile of 32 rows at a time."""
MIXED = (SegmentShape(64, 128), SegmentShape(32, 64, block_tokens=64, tile_rows=32))
"""64 decodes and prompts of 2048 tokens."""


def _case(args: Arguments, implementation: str) -> Case:
    fn = functools.partial(lora_delta, unit=args.unit, implementation=implementation)
    return Case(
        fn, [args.x_TI, args.pool, args.rows, args.plan, args.y_TO], donate=(4,), expect=("custom-call",),
        # The default pool is gigabytes: whatever copied or converted it would be seen here.
        max_temp_bytes=args.pool.size, kernels="^lora",
    )  # fmt: skip


def _dense(implementation: str, backward: bool, dtype: jnp.dtype) -> Case:
    spec = jax.ShapeDtypeStruct
    args = [spec((512, 4096), dtype), spec((8, 16, 4096), dtype), spec((8, 16, 4096), dtype), spec((512,), jnp.int32)]

    def forward(x, a, b, segment_T):
        return lora_matmul(x, a, b, segment_T, implementation=implementation)

    def loss(x, a, b, segment_T):
        return forward(x, a, b, segment_T).sum()

    return Case(jax.grad(loss, (0, 1, 2)) if backward else forward, args, check_limits=False)


def cases() -> dict[str, Case]:
    """A short list; `sweep` has every combination."""
    llama, bf16, f32 = MODELS["llama-3-8b"], jnp.bfloat16, jnp.float32
    uint16 = jnp.uint16
    found = {
        "triton_decode_8b_qkv_bf16": _case(
            arguments(llama, "qkv", 64, 1024, DECODE, bf16, pool_dtype=uint16), "triton"
        ),
        "triton_mixed_8b_gate_up_bf16": _case(arguments(llama, "gate_up", 2112, 2048, MIXED, bf16), "triton"),
        "triton_mixed_8b_down_f32": _case(arguments(llama, "down", 2112, 2048, MIXED, f32), "triton"),
        "triton_large_pool": _case(arguments(llama, "o", 64, 1024, DECODE, bf16, pool_units=1 << 22), "triton"),
        "triton_dense_backward": _dense("triton", True, bf16),
        "mosaic_gpu_decode_8b_qkv_bf16": _case(
            arguments(llama, "qkv", 64, 1024, DECODE, bf16, pool_dtype=uint16), "mosaic_gpu"
        ),
        "mosaic_gpu_ranks_8b_down_f32": _case(arguments(llama, "down", 64, 2048, DECODE_RANKS, f32), "mosaic_gpu"),
        "mosaic_gpu_mixed_8b_o_f16": _case(
            arguments(llama, "o", 2112, 2048, MIXED, jnp.float16, pool_dtype=uint16), "mosaic_gpu"
        ),
    }
    return found


def sweep() -> dict[str, Case]:
    """Models x groups x plans in bfloat16; the other types with the plan that has both sizes of blocks.

    The mosaic_gpu kernels take units of whole warpgroups alone, and long segments of 16-bit types.
    """
    found = {}
    plans = {"decode": (64, DECODE), "ranks": (64, DECODE_RANKS), "mixed": (2112, MIXED)}
    for model, widths in MODELS.items():
        for group in GROUPS:
            for dtype in ("bfloat16", "float16", "float32"):
                for name, (tokens, plan) in plans.items():
                    args = arguments(widths, group, tokens, 2048, plan, jnp.dtype(dtype))
                    if dtype == "bfloat16" or name == "mixed":
                        found[f"triton_{name}_{model}_{group}_{dtype}"] = _case(args, "triton")
                    if widths.unit % THREADS == 0 and (name != "mixed" or dtype != "float32"):
                        found[f"mosaic_gpu_{name}_{model}_{group}_{dtype}"] = _case(args, "mosaic_gpu")
    return found
