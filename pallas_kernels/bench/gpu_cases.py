"""The benchmark's own programs compiled for an H200 with no GPU present, so that its first run on one is no first try.

The stacks are of two layers here. The decode step is whole: its pool is donated and must not be copied.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.bench import attention_times, decode_step, lora_times
from pallas_kernels.bench.alternatives import ALTERNATIVES
from pallas_kernels.bench.loras import make_batch, tokens_of_adapters
from pallas_kernels.bench.timing import flushed
from pallas_kernels.gpu_check import Case, shaped

_BUFFER = shaped(1 << 28, dtype=jnp.float32)


def _specs(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _timed(stack: Any, *arguments: Any, expect: tuple[str, ...] = ()) -> Case:
    fn = flushed(lambda first, *rest: (first, stack(first, *rest)), donate=False)
    return Case(fn, [_BUFFER, *_specs(arguments)], donate=(0,), expect=expect, check_limits=False)


def _lora() -> dict[str, Case]:
    batch = make_batch(tokens_of_adapters("distinct", 64), (16,), 4096, 4096, 1024, layers=2, dtype=jnp.bfloat16)
    found = {}
    for name in ("triton", "mosaic_gpu"):
        stack, arguments = lora_times.pool_stack(batch, name, interpret=False)
        found[f"lora_delta, {name}"] = _timed(stack, *arguments, expect=("custom-call",))
    weights = [(shaped(64, 16, 4096), shaped(64, 16, 4096))] * 2
    for name, alternative in ALTERNATIVES.items():
        stack = lora_times.dense_stack(alternative)
        found[name] = _timed(stack, batch.x_TI, weights, shaped(64, dtype=jnp.int32))
    return found


def _attention() -> dict[str, Case]:
    size, found = attention_times.Size(layers=2), {}
    pool = jax.eval_shape(functools.partial(attention_times.make_pool, size, 4096))
    for (rows, queries, context), name in itertools.product(((64, 1, 1024), (8, 32, 1024)), ("triton", "mosaic_gpu")):
        stack, arguments = attention_times.pool_stack(size, name, rows, queries, context, interpret=False)
        q = shaped(rows * queries, *size.heads[::2])
        found[f"attention of {queries}, {name}"] = _timed(stack, q, pool, *arguments, expect=("custom-call",))
    return found


def _step(mix: str | None, implementation: str | None = None) -> Case:
    model = decode_step.LLAMA_3_8B
    kv_pages, num_pages = 2048, 4800
    adapters = None
    if mix is not None:
        adapters = decode_step.make_adapters(model, mix, tuple(model.groups), num_pages, 1 + kv_pages)
    fn = functools.partial(decode_step.decode_step, model=model, implementation=implementation, interpret=False)
    pool = jax.eval_shape(functools.partial(decode_step.make_pool, model, num_pages))
    arguments = [
        _BUFFER, pool, jax.eval_shape(functools.partial(decode_step.make_weights, model)),
        decode_step.make_inputs(model, kv_pages), adapters and adapters.rows, adapters and adapters.plan,
    ]  # fmt: skip
    return Case(
        flushed(fn, donate=True), _specs(arguments), donate=(0, 1), expect=("custom-call",), check_limits=False,
        min_alias_bytes=pool.size * 2 + _BUFFER.size * 4, max_temp_bytes=512 << 20,
    )  # fmt: skip


def cases() -> dict[str, Case]:
    """LoRA and attention with what they are compared to, and the step with and without adapters."""
    steps = {"step, base": _step(None), "step, 64 adapters": _step("distinct")}
    steps["step, 64 adapters, mosaic_gpu"] = _step("distinct", "mosaic_gpu")
    return {**_lora(), **_attention(), **steps}
