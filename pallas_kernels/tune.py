"""Measures block sizes of the kernels on this device and writes the best to tuned/<device>/<op>.json.

    python -m pallas_kernels.tune --models llama-3-8b --tokens 16,64 --ranks 16 --slots 8192

A candidate runs over several layers with weights of their own in one program, so that no cache holds them and no launch
is timed alone; the least of some runs counts. Every candidate is compared with the XLA implementation before it is
measured: what is wrong, or does not compile, is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, tune_attention, tuning
from pallas_kernels.paged_attention.arg_specs import HEADS
from pallas_kernels.segmented_lora import blocks as lora_blocks
from pallas_kernels.segmented_lora import pallas_triton, xla_pool
from pallas_kernels.segmented_lora.arg_specs import GROUPS, MODELS, Arguments, draw
from pallas_kernels.segmented_lora.plan import MIN_BLOCK, SegmentShape


@dataclasses.dataclass(frozen=True)
class Options:
    """How candidates are measured.

    Attributes:
        layers: sets of weights that a program reads; repeats: runs of it.
        interpret: the interpreter instead of the device, for a test of this module.
        most: candidates of a key, None for all.
    """

    layers: int = 8
    repeats: int = 10
    interpret: bool = False
    most: int | None = None


def seconds(fn: Callable[..., Any], args: Sequence[Any], repeats: int) -> float:
    """The least time of a run, after one that compiles."""
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(fn(*args))
        times.append(time.perf_counter() - start)
    return min(times)


def _launches(args: Arguments, shrink: Any, expand: Any, options: Options) -> Callable[..., jax.Array]:
    """A program of as many shrinks and expands as there are layers."""
    [part] = args.plan

    def run(x_TI: jax.Array, pools: tuple[jax.Array, ...], y_TO: jax.Array) -> jax.Array:
        for pool in pools:
            s = pallas_triton.shrink(
                x_TI, pool, args.rows, part, unit=args.unit, interpret=options.interpret, blocks=shrink
            )
            y_TO = pallas_triton.expand(
                s, pool, args.rows, part, y_TO, unit=args.unit, dtype=x_TI.dtype, interpret=options.interpret,
                blocks=expand,
            )  # fmt: skip
        return y_TO

    return jax.jit(run)


def best(
    args: Arguments, candidates: Sequence[tuple[Any, Any]], options: Options
) -> tuple[tuple[Any, Any], float] | None:
    """The fastest right pair of blocks (shrink, expand; None is the one in use) and its seconds for a layer."""
    pools = tuple(jnp.roll(args.pool, layer, 0) for layer in range(options.layers))
    wanted = args.y_TO
    for pool in pools:
        wanted = xla_pool.delta(args.x_TI, (pool, pool), args.rows, args.plan, wanted, units=(args.unit, args.unit))
    scale = float(jnp.abs(wanted).max())
    tolerance = (1e-4 if args.x_TI.dtype == jnp.float32 else 2e-2) * scale
    found = None
    for pair in candidates[: options.most]:
        fn = _launches(args, *pair, options)
        try:
            got = fn(args.x_TI, pools, args.y_TO)
            error = float(jnp.abs(got - wanted).max())
            took = seconds(fn, (args.x_TI, pools, args.y_TO), options.repeats) / options.layers
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as failure:
            print(f"  left out {pair}: {str(failure).splitlines()[0][:120]}", file=sys.stderr)
            continue
        if not error <= tolerance:
            print(f"  left out {pair}: wrong by {error:.3g} of {scale:.3g}", file=sys.stderr)
        elif found is None or took < found[1]:
            found = pair, took
    return found


def tune_lora(model: str, group: str, tokens: int, rank: int, dtype: str, options: Options) -> list[dict[str, Any]]:
    """Entries for one batch of `tokens` tokens with an adapter each."""
    shape = SegmentShape(tokens, tokens * -(-rank // MIN_BLOCK))
    args = draw(MODELS[model], group, np.arange(tokens), [rank] * tokens, (shape,), jnp.dtype(dtype))
    [part], in_dim, out_dims = args.plan, args.x_TI.shape[1], args.rows.out_dims
    entries = []
    jobs = (
        (lora_blocks.shrink_key(part, in_dim, len(out_dims), args.unit, dtype), 0,
         lora_blocks.shrink_candidates(part, in_dim, args.unit)),
        (lora_blocks.expand_key(part, out_dims, args.unit, dtype), 1,
         lora_blocks.expand_candidates(part, out_dims, args.unit)),
    )  # fmt: skip
    chosen: list[Any] = [None, None]
    for key, place, configs in jobs:
        pairs = []
        for config in configs:
            pair = list(chosen)
            pair[place] = config
            pairs.append((pair[0], pair[1]))
        result = best(args, pairs, options)
        if result is not None:
            chosen[place] = result[0][place]
            entries.append({"key": key, "config": dataclasses.asdict(chosen[place]), "us": round(result[1] * 1e6, 2)})
            print(f"{model} {group}: {entries[-1]}", flush=True)
    return entries


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__)
    parser.add_argument("--models", default="llama-3-8b", help=f"of {', '.join(MODELS)}, separated by commas")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--tokens", default="16,64")
    parser.add_argument("--ranks", default="16")
    parser.add_argument("--ops", default="lora,attention", help="what to measure")
    parser.add_argument("--slots", type=int, default=8192, help="attention: slots of a page table, max_model_len")
    parser.add_argument("--contexts", default="1024", help="attention: slots that each row has filled")
    parser.add_argument("--queries", default="1,32", help="attention: of a row; 1 for decodes, of which --tokens run")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--out", type=Path, default=tuning.TUNED, help="folder of the tuned files")
    parser.add_argument("--most", type=int, help="measure no more than so many candidates of a key")
    parser.add_argument("--interpret", action="store_true", help="without a GPU: tries this command, measures nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measures and writes; returns the exit status."""
    args = parse(arguments)
    device = dispatch.current_device()
    reason = dispatch.unsupported("triton", device)
    if reason and not args.interpret:
        print(f"nothing to tune: {reason}", file=sys.stderr)
        return 2
    models = args.models.split(",")
    if unknown := [name for name in models if name not in MODELS]:
        print(f"unknown model {unknown[0]!r}: name some of {', '.join(MODELS)}", file=sys.stderr)
        return 2
    ops = args.ops.split(",")
    if unknown := set(ops) - {"lora", "attention"}:
        print(f"nothing to tune in {', '.join(sorted(unknown))}: name lora, attention or both", file=sys.stderr)
        return 2
    options = Options(1, 1, True, args.most) if args.interpret else Options(most=args.most)
    tokens_of = list(map(int, args.tokens.split(",")))
    sizes = [(model, dtype, tokens) for model in models for dtype in args.dtypes.split(",") for tokens in tokens_of]
    entries: dict[str, list[dict[str, Any]]] = {lora_blocks.OP: [], tune_attention.OP: []}
    for model, dtype, tokens in sizes if "lora" in ops else ():
        for group in args.groups.split(","):
            for rank in map(int, args.ranks.split(",")):
                entries[lora_blocks.OP] += tune_lora(model, group, tokens, rank, dtype, options)
    for model, dtype, tokens in sizes if "attention" in ops else ():
        if model not in HEADS:
            continue  # of Llama-2-70B's shards they go by another name
        for queries, context in itertools.product(
            map(int, args.queries.split(",")), map(int, args.contexts.split(","))
        ):
            rows = tokens if queries == 1 else 8
            entries[tune_attention.OP] += tune_attention.tune_attention(
                model, rows, queries, context, args.slots, dtype, layers=options.layers, seconds=seconds,
                repeats=options.repeats, interpret=options.interpret, most=options.most,
            )  # fmt: skip
    for op, found in entries.items():
        if found:
            print(tuning.save(op, device.kind, jax.__version__, found, args.out))
    if not any(entries.values()):
        print("no candidate ran", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
