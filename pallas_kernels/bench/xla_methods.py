"""The XLA path of lora_delta beside the three ways to write it, on the default device: a table over sizes.

    python -m pallas_kernels.bench.xla_methods --rounds 7

Every method starts from the pool and the page tables. Active rows: dense products of all tokens with all rows, masked.
Chunks: tokens sorted by adapter, each chunk of 16 of one adapter multiplied by that adapter's rows. Ragged: the same
sorting, then lax.ragged_dot. Methods run in turn, some layers with weights of their own in a program; the best counts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.loras import Batch, make_batch
from pallas_kernels.segmented_lora import RankRows, SegmentShape, make_plan, xla_pool

SIZES = ((1, 1), (1, 8), (8, 8), (1, 32), (8, 32), (32, 32), (1, 256), (8, 256), (32, 256))
"""Adapters and tokens."""

Method = Callable[[Any, Any, RankRows, Any, Any], Any]
"""(x_TI, pool, rows, plan, y_TO) to y_TO, of one projection and rank."""


def _methods(batch: Batch) -> dict[str, Method]:
    unit, sizes_X, rank = batch.unit, np.bincount(batch.adapter_T), int(batch.rank_X[0])

    def by(fn: Any) -> Method:
        return lambda x, pool, rows, plan, y: fn(x, (pool, pool), rows, plan, y, units=(unit, unit))

    def ragged(x: Any, pool: Any, rows: RankRows, plan: Any, y: Any) -> Any:
        X = len(sizes_X)
        a_XRI = xla_pool.gather_rows(pool, rows.units_a_MRU[0], unit, x.dtype).reshape(X, rank, -1)
        b_XRO = xla_pool.gather_rows(pool, rows.units_b_RV, unit, x.dtype).reshape(X, rank, -1)
        order_T = jnp.argsort(jnp.asarray(batch.adapter_T))
        dot: Any = {"preferred_element_type": jnp.float32}
        s_TR = jax.lax.ragged_dot(x[order_T], a_XRI.swapaxes(1, 2), jnp.asarray(sizes_X, jnp.int32), **dot)
        out_TO = jax.lax.ragged_dot(s_TR.astype(x.dtype), b_XRO, jnp.asarray(sizes_X, jnp.int32), **dot)
        return y.at[order_T].add(out_TO)

    return {
        "lora_delta": by(xla_pool.delta), "active rows": by(xla_pool.delta_of_all_rows),
        "chunks": by(xla_pool.delta_by_tiles), "ragged_dot": ragged,
    }  # fmt: skip


def measure(
    adapters: int, tokens: int, *, rank: int, in_dim: int, out_dim: int, dtype: str, layers: int, rounds: int
) -> dict[str, float]:
    """Microseconds of a layer by method.

    Raises:
        AssertionError: a method gives something else than the first.
    """
    adapter_T = np.random.default_rng(0).permutation(np.arange(tokens) % adapters)
    unit = math.gcd(in_dim, out_dim)
    batch = make_batch(adapter_T, (rank,), in_dim, out_dim, unit, layers=layers, dtype=jnp.dtype(dtype))
    blocks = int(sum(-(-n // 16) for n in np.bincount(adapter_T)))
    shape = SegmentShape(blocks, blocks * -(-rank // 16))
    first_X = np.arange(adapters) * rank
    plan = jax.tree.map(jnp.asarray, make_plan(first_X, np.full(adapters, rank), (shape,), adapter_T=adapter_T))
    y_TO = jnp.zeros((tokens, out_dim))

    def stack(method: Method) -> Callable[..., Any]:
        def run(x: Any, pool: Any, rows: list[RankRows], y: Any) -> Any:
            for layer in rows:
                y = method(x, pool, layer, plan, y)
            return y

        return jax.jit(run)

    programs = {name: stack(method) for name, method in _methods(batch).items()}
    arguments = (batch.x_TI, batch.pool, batch.rows, y_TO)
    wanted, best = None, dict.fromkeys(programs, math.inf)
    for round_number in range(rounds + 1):
        for name, program in programs.items():
            begin = time.perf_counter()
            got = jax.block_until_ready(program(*arguments))
            took = time.perf_counter() - begin
            if round_number:  # the first compiles
                best[name] = min(best[name], took / layers * 1e6)
            elif wanted is None:
                wanted = np.asarray(got)
            else:
                error = np.abs(np.asarray(got) - wanted).max()
                assert error <= 2e-2 * np.abs(wanted).max(), f"{name} is off by {error}"
    return best


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench.xla_methods", description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--in-dim", type=int, default=576)
    parser.add_argument("--out-dim", type=int, default=1536)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default=",".join(f"{x}/{t}" for x, t in SIZES), help="adapters/tokens, by commas")
    args = parser.parse_args(arguments)
    print(f"{args.in_dim} to {args.out_dim}, rank {args.rank}, microseconds a layer, best of {args.rounds}\n")
    header = None
    for dtype in args.dtypes.split(","):
        for size in args.sizes.split(","):
            adapters, tokens = map(int, size.split("/"))
            found = measure(
                adapters, tokens, rank=args.rank, in_dim=args.in_dim, out_dim=args.out_dim, dtype=dtype,
                layers=args.layers, rounds=args.rounds,
            )  # fmt: skip
            if header is None:
                header = list(found)
                print(f"| type | adapters / tokens | {' | '.join(header)} |\n|{'---|' * (len(header) + 2)}")
            print(f"| {dtype} | {size} | {' | '.join(f'{found[name]:.0f}' for name in header)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
