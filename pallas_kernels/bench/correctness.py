"""Every kernel that the device can run against the float32 oracle, before anything is timed."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.alternatives import ALTERNATIVES
from pallas_kernels.bench.loras import MIXES, implementations, make_batch, tokens_of_adapters
from pallas_kernels.bench.report import Result
from pallas_kernels.paged_attention import api as attention_api
from pallas_kernels.paged_attention.arg_specs import HEADS, random_arguments
from pallas_kernels.segmented_lora import api as lora_api

LIMITS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 8e-3}
"""Largest error of values of order 1; float32 has the sums' order, the others the rounding of inputs and result."""

_ROWS = [(1, 1), (1, 16), (0, 0), (1, 1000), (1, 257), (0, 0), (17, 17), (32, 700), (1, 40), (0, 0)]
_NUM_DECODES = 5


_Check = tuple[str, str, Callable[[], jax.Array], Callable[[], np.ndarray]]
"""Case, implementation, what it gives and what is right."""


def all_checks(dtypes: tuple[str, ...], small: bool, interpret: bool, deadline: float) -> Iterator[Result]:
    """One result after the other, those of the first type before the others.

    Args:
        small: leaves out most shapes, for the interpreter.
        deadline: time.monotonic() after which nothing more is begun.
    """
    for number, dtype in enumerate(dtypes):
        checks = (_attention_checks(dtype, small, interpret), _lora_checks(dtype, small, interpret, number == 0))
        for case, name, run, wanted in itertools.chain(*checks):
            if time.monotonic() > deadline:
                yield Result("correct", case, name, note="no time left")
            else:
                yield _compare(case, name, dtype, run, wanted())


def _attention_checks(dtype: str, small: bool, interpret: bool) -> Iterator[_Check]:
    """Decodes, chunks and empty rows by model and type, and a sliding window."""
    names = implementations("paged_attention", attention_api.IMPLEMENTATIONS, interpret)
    cases = [(model, heads, None) for model, heads in HEADS.items()] + [("window 100", (8, 2, 64), 100)]
    for model, heads, window in cases[:1] if small else cases:
        arguments = random_arguments(_ROWS, heads, dtype=dtype)
        arrays, oracle = [jnp.asarray(x) for x in arguments.arrays], functools.cache(arguments.oracle)
        for name in names:
            fn = functools.partial(
                attention_api.ragged_paged_attention, num_decodes=_NUM_DECODES, most_queries=32,
                num_kv_heads=heads[1], page_tokens=16, window=window, implementation=name,
                interpret=interpret and name != "xla",
            )  # fmt: skip
            case = f"attention, {model}, {dtype}"
            yield case, name, functools.partial(jax.jit(fn), *arrays), functools.partial(oracle, window)


def _lora_checks(dtype: str, small: bool, interpret: bool, with_others: bool) -> Iterator[_Check]:
    """Mixes of adapters and ranks by type, prompts, and (with_others) what they are compared with for speed."""
    names = implementations("lora_delta", lora_api.BACKENDS, interpret)
    in_dim, out_dim, unit = (128, 192, 64) if small else (4096, 4096, 1024)
    mixes = [("distinct", 1, (16,), 16), ("distinct", 7 if small else 64, (1, 8, 64, 5, 16, 128), 16)]
    if not small:
        mixes += [(mix, 64, (16,), 16) for mix in ("base", *MIXES)] + [("uniform", 200, (16, 5, 128), 64)]
    for mix, tokens, ranks, block_tokens in mixes:
        batch = make_batch(
            tokens_of_adapters(mix, tokens), ranks, in_dim, out_dim, unit, layers=1, dtype=jnp.dtype(dtype),
            block_tokens=block_tokens,
        )  # fmt: skip
        oracle = functools.partial(functools.cache(batch.oracle), 0)
        where = f" in blocks of {block_tokens}" if block_tokens > 16 else ""
        case = f"lora_delta, {mix}, {tokens} tokens{where}, ranks {', '.join(map(str, ranks))}, {dtype}"
        for name in names:
            fn = functools.partial(
                lora_api.lora_delta, unit=unit, implementation=name, interpret=interpret and name != "xla"
            )
            arrays = (batch.x_TI, batch.pool, batch.rows[0], batch.plan)
            yield case, name, functools.partial(jax.jit(fn), *arrays), oracle
        if with_others and len(ranks) == 1 and mix != "base":
            a, b = (jnp.asarray(np.stack(rows), batch.x_TI.dtype) for rows in batch.dense(0))
            arrays = (batch.x_TI, a, b.swapaxes(1, 2), jnp.asarray(batch.adapter_T))
            for name, fn in ALTERNATIVES.items():
                yield case, name, functools.partial(jax.jit(fn), *arrays), oracle


def _compare(case: str, name: str, dtype: str, run: Callable[[], jax.Array], wanted: np.ndarray) -> Result:
    try:
        got = np.asarray(run(), np.float32)
    except Exception as error:  # whatever a compiler or a device raises is the finding
        return Result.failed("correct", case, name, error)
    difference = np.abs(got - wanted)
    error = float(difference.max(initial=0.0)) if np.all(np.isfinite(difference)) else float("nan")
    return Result("correct", case, name, error=error, limit=LIMITS[dtype])
