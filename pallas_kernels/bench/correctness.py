"""Every kernel that the device can run against the float32 oracle, before anything is timed."""

from __future__ import annotations

import functools
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


def all_checks(dtypes: tuple[str, ...], small: bool, interpret: bool) -> Iterator[Result]:
    """One result after the other; `small` leaves out most shapes, for the interpreter."""
    yield from attention_checks(dtypes, small, interpret)
    yield from lora_checks(dtypes, small, interpret)


def attention_checks(dtypes: tuple[str, ...], small: bool, interpret: bool) -> Iterator[Result]:
    """Decodes, chunks and empty rows by model and type, and a sliding window."""
    names = implementations("paged_attention", attention_api.IMPLEMENTATIONS, interpret)
    cases = [(model, heads, None) for model, heads in HEADS.items()] + [("window 100", (8, 2, 64), 100)]
    for model, heads, window in cases[:1] if small else cases:
        for dtype in dtypes:
            arguments = random_arguments(_ROWS, heads, dtype=dtype)
            for name in names:
                fn = functools.partial(
                    attention_api.ragged_paged_attention, num_decodes=_NUM_DECODES, most_queries=32,
                    num_kv_heads=heads[1], page_tokens=16, window=window, implementation=name,
                    interpret=interpret and name != "xla",
                )  # fmt: skip
                arrays = [jnp.asarray(x) for x in arguments.arrays]
                case = f"attention, {model}, {dtype}"
                yield _compare(case, name, dtype, lambda f=fn, a=arrays: jax.jit(f)(*a), arguments.oracle(window))


def lora_checks(dtypes: tuple[str, ...], small: bool, interpret: bool) -> Iterator[Result]:
    """Mixes of adapters and ranks by type, and what they are compared with for speed."""
    names = implementations("lora_delta", lora_api.BACKENDS, interpret)
    in_dim, out_dim, unit = (128, 192, 64) if small else (4096, 4096, 1024)
    mixes = [(mix, tokens, (16,)) for tokens in (8 if small else 64,) for mix in ("base", *MIXES)]
    mixes += [("distinct", 1, (16,)), ("distinct", 7 if small else 64, (1, 8, 64, 5, 16, 128))]
    for mix, tokens, ranks in mixes[-2:] if small else mixes:
        for dtype in dtypes:
            batch = make_batch(
                tokens_of_adapters(mix, tokens), ranks, in_dim, out_dim, unit, layers=1, dtype=jnp.dtype(dtype)
            )
            wanted = batch.oracle(0)
            case = f"lora_delta, {mix}, {tokens} tokens, ranks {', '.join(map(str, ranks))}, {dtype}"
            for name in names:
                fn = functools.partial(
                    lora_api.lora_delta, unit=unit, implementation=name, interpret=interpret and name != "xla"
                )
                arrays = (batch.x_TI, batch.pool, batch.rows[0], batch.plan)
                yield _compare(case, name, dtype, lambda f=fn, a=arrays: jax.jit(f)(*a), wanted)
            if len(ranks) == 1 and mix != "base":
                a, b = (jnp.asarray(np.stack(rows), batch.x_TI.dtype) for rows in batch.dense(0))
                for name, fn in ALTERNATIVES.items():
                    arrays = (batch.x_TI, a, b.swapaxes(1, 2), jnp.asarray(batch.adapter_T))
                    yield _compare(case, name, dtype, lambda f=fn, a=arrays: jax.jit(f)(*a), wanted)


def _compare(case: str, name: str, dtype: str, run: Callable[[], jax.Array], wanted: np.ndarray) -> Result:
    try:
        got = np.asarray(run(), np.float32)
    except NotImplementedError as error:
        return Result("correct", case, name, note=f"not implemented: {error}")
    difference = np.abs(got - wanted)
    error = float(difference.max(initial=0.0)) if np.all(np.isfinite(difference)) else float("nan")
    return Result("correct", case, name, error=error, limit=LIMITS[dtype])
