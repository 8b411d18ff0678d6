"""The XLA path of lora_delta beside the three ways to write it, on the default device: a table over sizes.

    python -m pallas_kernels.bench.xla_methods --rounds 9

Every method starts from the pool and the page tables. Active rows: dense products of all tokens with all rows, masked.
Chunks: tokens sorted by adapter, each chunk of 16 of one adapter multiplied by that adapter's rows. Ragged: the same
sorting, then lax.ragged_dot. Some layers with weights of their own make a program; programs run in turn, in another
order each round and twice each time, so that none always meets the caches and the free memory that the same other one
leaves. Where the path traces to the very program of a method it is not timed a second time: two runs of one program
differ by more than many a pair of methods. Exit status 1: the path is slower than a method somewhere, in the best
round, in the median, and in more of the paired rounds than chance would have it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.loras import Batch, make_batch
from pallas_kernels.segmented_lora import RankRows, SegmentShape, make_plan, xla_pool

SIZES = ((1, 1), (1, 8), (8, 8), (1, 32), (8, 32), (32, 32), (8, 64), (1, 256), (8, 256), (32, 256))
"""Adapters and tokens."""

PATH = "lora_delta"

SIGNIFICANT = 0.01
"""Of a sign test over paired rounds."""

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
        PATH: by(xla_pool.delta), "active rows": by(xla_pool.delta_of_all_rows),
        "chunks": by(xla_pool.delta_by_tiles), "ragged_dot": ragged,
    }  # fmt: skip


@dataclass(frozen=True)
class Times:
    """Microseconds of a layer at one size.

    Attributes:
        rounds: by method, in the order of the rounds; the path's are those of the method that it is, where it is one.
        same_as: the method whose program the path traces to, if any.
    """

    rounds: dict[str, list[float]]
    same_as: str | None

    def shown(self, name: str) -> str:
        """The best and the median."""
        return f"{min(self.rounds[name]):.0f} ({statistics.median(self.rounds[name]):.0f})"

    @property
    def slower_than(self) -> list[str]:
        """Methods that beat the path: in their best round, in the median, and in more rounds than chance would have."""
        ours, found = self.rounds[PATH], []
        for name, theirs in self.rounds.items():
            won = sum(a < b for a, b in zip(theirs, ours, strict=True))
            n = len(ours)
            by_chance = sum(math.comb(n, k) for k in range(won, n + 1)) / 2**n
            beaten = min(theirs) < min(ours) and statistics.median(theirs) < statistics.median(ours)
            if beaten and by_chance < SIGNIFICANT:
                found.append(name)
        return found


def measure(
    adapters: int, tokens: int, *, rank: int, in_dim: int, out_dim: int, dtype: str, layers: int, rounds: int
) -> Times:
    """Times of the path and of the methods.

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
    arguments = (batch.x_TI, batch.pool, batch.rows, jnp.zeros((tokens, out_dim)))

    def stack(method: Method) -> Any:
        def run(x: Any, pool: Any, rows: list[RankRows], y: Any) -> Any:
            for layer in rows:
                y = method(x, pool, layer, plan, y)
            return y

        return jax.jit(run).lower(*arguments)

    lowered = {name: stack(method) for name, method in _methods(batch).items()}
    text = {name: program.as_text() for name, program in lowered.items()}
    same_as = next((name for name in text if name != PATH and text[name] == text[PATH]), None)
    programs = {name: program.compile() for name, program in lowered.items() if name != PATH or same_as is None}
    _check_results({name: np.asarray(program(*arguments)) for name, program in programs.items()})
    took: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for _ in range(2):
                begin = time.perf_counter()
                jax.block_until_ready(programs[name](*arguments))
                last = time.perf_counter() - begin
            took[name].append(last / layers * 1e6)
    if same_as is not None:
        took = {PATH: took[same_as]} | took
    return Times(took, same_as)


def _check_results(found: dict[str, np.ndarray]) -> None:
    wanted = next(iter(found.values()))
    for name, got in found.items():
        error = np.abs(got - wanted).max()
        assert error <= 2e-2 * np.abs(wanted).max(), f"{name} is off by {error}"


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench.xla_methods", description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--in-dim", type=int, default=576)
    parser.add_argument("--out-dim", type=int, default=1536)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default=",".join(f"{x}/{t}" for x, t in SIZES), help="adapters/tokens, by commas")
    args = parser.parse_args(arguments)
    print(f"{args.in_dim} to {args.out_dim}, rank {args.rank}, microseconds a layer, best (median) of {args.rounds}\n")
    header, slower = None, []
    for dtype in args.dtypes.split(","):
        for size in args.sizes.split(","):
            adapters, tokens = map(int, size.split("/"))
            found = measure(
                adapters, tokens, rank=args.rank, in_dim=args.in_dim, out_dim=args.out_dim, dtype=dtype,
                layers=args.layers, rounds=args.rounds,
            )  # fmt: skip
            if header is None:
                header = list(found.rounds)
                print(
                    f"| type | adapters / tokens | {' | '.join(header)} | the path is |\n|{'---|' * (len(header) + 3)}"
                )
            cells = [found.shown(name) for name in header]
            print(f"| {dtype} | {size} | {' | '.join(cells)} | {found.same_as or 'its own'} |", flush=True)
            slower += [f"{dtype}, {size}: slower than {name}" for name in found.slower_than]
    print("\n" + ("\n".join(slower) or "lora_delta is at least as fast as every method at every size"))
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
