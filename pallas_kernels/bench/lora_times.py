"""lora_delta beside its bytes and beside plain XLA."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.alternatives import ALTERNATIVES, Alternative
from pallas_kernels.bench.loras import Batch, implementations, make_batch, tokens_of_adapters
from pallas_kernels.bench.report import Result
from pallas_kernels.bench.timing import Clock
from pallas_kernels.segmented_lora import api

SECTION = "lora, one layer"


Case = tuple[str, int, tuple[int, ...]]
"""Mix, tokens and ranks."""

CASES: tuple[Case, ...] = (
    *((mix, 64, (16,)) for mix in ("distinct", "identical", "uniform", "skewed")),
    *(("distinct", 64, ranks) for ranks in ((8, 16, 32, 64), (64,), (128,), (8,), (32,))),
    *(("distinct", tokens, (16,)) for tokens in (256, 16, 4, 1)),
)
"""The most telling first: time may run out."""


@dataclass(frozen=True)
class Size:
    """A projection 4096 to 4096 on a GPU, something tiny in the interpreter; `compared` cases run by XLA as well."""

    in_dim: int = 4096
    out_dim: int = 4096
    unit: int = 1024
    layers: int = 32
    dtype: Any = jnp.bfloat16
    cases: tuple[Case, ...] = CASES
    compared: tuple[Case, ...] = CASES[:4]


TINY = Size(64, 128, 64, 1, cases=(("distinct", 4, (16,)), ("skewed", 5, (8,))), compared=(("distinct", 4, (16,)),))


def lora_times(clock: Clock, size: Size, interpret: bool) -> Iterator[Result]:
    """Every case by every implementation; the alternatives in plain XLA take one rank only, and time."""
    names = implementations("lora_delta", api.BACKENDS, interpret)
    for mix, tokens, ranks in size.cases:
        case = f"{mix}, {tokens} tokens, rank {', '.join(map(str, ranks))}, {size.in_dim} to {size.out_dim}"
        if clock.left < 0:
            yield Result(SECTION, case, "all", note="no time left")
            continue
        batch = make_batch(
            tokens_of_adapters(mix, tokens), ranks, size.in_dim, size.out_dim, size.unit, layers=size.layers,
            dtype=size.dtype,
        )  # fmt: skip
        floor = batch.floor_bytes / clock.bandwidth * 1e6
        for name in names:
            if name == "xla" and len(names) > 1 and (mix, tokens, ranks) not in size.compared:
                continue
            yield _timed(case, name, floor, clock, size.layers, *pool_stack(batch, name, interpret and name != "xla"))
        if (mix, tokens, ranks) in size.compared:
            weights = _dense(batch, size)
            arguments = (batch.x_TI, weights, jnp.asarray(batch.adapter_T))
            for name, alternative in ALTERNATIVES.items():
                yield _timed(case, name, floor, clock, size.layers, dense_stack(alternative), arguments)


def dense_stack(alternative: Alternative) -> Any:
    """All layers by an alternative: (x, [(a, b) of each layer], adapter_T) to y."""

    def stack(x_TI: jax.Array, weights: list[tuple[jax.Array, jax.Array]], adapter_T: jax.Array) -> jax.Array:
        y_TO = jnp.float32(0)
        for a_XRI, b_XRO in weights:
            y_TO = y_TO + alternative(x_TI, a_XRI, b_XRO, adapter_T)
        return y_TO

    return stack


def pool_stack(batch: Batch, name: str, interpret: bool) -> tuple[Any, tuple[Any, ...]]:
    """All layers by lora_delta, and the arguments."""
    # A jit of its own: the kernels are traced and lowered once, not for each layer.
    delta = jax.jit(functools.partial(api.lora_delta, unit=batch.unit, implementation=name, interpret=interpret))

    def stack(x_TI: Any, pool: Any, rows: Any, plan: Any) -> jax.Array:
        y_TO = jnp.zeros((len(x_TI), batch.out_dim), jnp.float32)
        for layer in rows:
            y_TO = delta(x_TI, pool, layer, plan, y_TO)
        return y_TO

    return stack, (batch.x_TI, batch.pool, batch.rows, batch.plan)


def _dense(batch: Batch, size: Size) -> list[tuple[jax.Array, jax.Array]]:
    """Random weights of the batch's shapes, [X, R, I] and [X, R, O], of each layer."""
    X, R = len(batch.rank_X), int(batch.rank_X.max())

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        ka, kb = jax.random.split(key)
        a, b = (jax.random.normal(k, (X, R, n), size.dtype) for k, n in ((ka, size.in_dim), (kb, size.out_dim)))
        return a / np.sqrt(size.in_dim).astype(a.dtype), b / 4

    draw = jax.jit(draw)
    return [draw(jax.random.key(layer)) for layer in range(size.layers)]


def _timed(
    case: str, name: str, floor: float, clock: Clock, layers: int, stack: Any, arguments: tuple[Any, ...]
) -> Result:
    if clock.left < 0:
        return Result(SECTION, case, name, note="no time left")
    try:
        time = clock.microseconds(stack, *arguments) / layers
    except Exception as error:  # whatever a compiler or a device raises is the finding
        return Result.failed(SECTION, case, name, error, floor=floor)
    return Result(SECTION, case, name, time, floor)
