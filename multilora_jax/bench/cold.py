"""`bench adapters --cold`: adapters that must be read from disk while the engine is busy.

Two engines, with prefetch and without, take turns in one process. Each round gives an engine

- a closed loop of requests for adapters in the pool, a full batch and a backlog behind it, with a few requests for cold
  adapters in it: the time to the first token of those, against that of the requests just before them;
- with prefetch only, streams that do not end on all seats but one, and a request for a cold adapter that takes the
  last: the gaps between the streams' tokens from its arrival to its first token, while the adapter is read, copied to
  the pool and to the row buffers, against those before and after.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import flags as absl_flags
from absl import logging

from multilora_jax.adapters.make import make_adapters
from multilora_jax.bench.adapter_set import FILE_DTYPE, pages_of, size_of
from multilora_jax.bench.cold_bench import ColdBench, Results, Workload
from multilora_jax.bench.report import make_report, table
from multilora_jax.bench.runs import check_compilations, check_length, rank_rows_of, settings_of, with_room
from multilora_jax.config import EngineConfig
from multilora_jax.memory.geometry import MODULES
from multilora_jax.models.config import ModelConfig

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

COLUMNS = {
    "prefetch": "", "cold_ttft_p50_s": ".3f", "warm_ttft_p50_s": ".3f", "cold_minus_warm_s": ".3f", "gap_p50_s": ".4f",
    "gap_largest_s": ".4f", "gap_ratio": ".2f", "quiet_gap_ratio": ".2f", "load_s": ".3f",
}  # fmt: skip


def define_flags(flag_values: absl_flags.FlagValues) -> None:
    """Defines the flags of --cold."""
    f = flag_values
    absl_flags.DEFINE_boolean("cold", False, "Measure adapters that must be read from disk.", flag_values=f)
    absl_flags.DEFINE_integer(
        "cold_requests", 4, "--cold: requests for cold adapters in a run.", lower_bound=1, flag_values=f
    )
    absl_flags.DEFINE_integer(
        "cold_rank", None, "--cold: rank of the cold adapters, on all seven projections; by default max_lora_rank.",
        lower_bound=1, flag_values=f,
    )  # fmt: skip
    absl_flags.DEFINE_integer(
        "gap_steps", 50, "--cold: steps measured before and after a load that running streams meet; the load may take "
        "twice as many.", lower_bound=1, flag_values=f,
    )  # fmt: skip
    absl_flags.DEFINE_float(
        "disk_mib_per_s", 100.0, "--cold: speed of the emulated disk, all reads together; 0 for this machine's own.",
        lower_bound=0, flag_values=f,
    )  # fmt: skip
    absl_flags.DEFINE_float(
        "disk_latency_ms", 10.0, "--cold: what the emulated disk takes for every adapter on top.",
        lower_bound=0, flag_values=f,
    )  # fmt: skip


def run_command(
    config: EngineConfig,
    model: ModelConfig,
    f: absl_flags.FlagValues,
    ranks: Sequence[int],
    modules: Sequence[str],
    backlog: int,
    *,
    keep_rank_rows: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Makes the adapters and measures; see `measure`.

    Args:
        config: with max_num_seqs as it shall be.
        model: the base.
        f: parsed flags.
        ranks, modules: of the adapters in the pool.
        backlog: see Workload.
        keep_rank_rows: leave max_rank_rows alone.
    """
    work = Workload(
        f.cold_requests, f.cold_rank or config.max_lora_rank, f.gap_steps, f.disk_mib_per_s, f.disk_latency_ms,
        backlog, max(f.num_prompts, config.max_num_seqs + 2 * f.cold_requests), f.input_len, f.output_len, f.rounds,
    )  # fmt: skip
    check_length(config, work.input_len, work.stream_len - work.input_len)
    with tempfile.TemporaryDirectory(prefix="multilora_bench_") as folder:
        warm = make_adapters(
            model, f"{folder}/warm", config.max_num_seqs, ranks=ranks, modules=modules, seed=config.seed,
            dtype=FILE_DTYPE,
        )  # fmt: skip
        # Under names of their own, since names are folders'.
        cold = make_adapters(
            model, f"{folder}/cold", work.cold_requests, ranks=[work.cold_rank], modules=MODULES,
            seed=config.seed + 1, dtype=FILE_DTYPE, prefix="cold",
        )  # fmt: skip
        return measure(fit_config(config, model, work, warm, cold, keep_rank_rows=keep_rank_rows), work, warm, cold)


def fit_config(
    config: EngineConfig,
    model: ModelConfig,
    work: Workload,
    warm: Sequence[str],
    cold: Sequence[str],
    *,
    keep_rank_rows: bool = False,
) -> EngineConfig:
    """The configuration with room for all warm adapters, two cold ones and the keys and values of a full batch.

    Set besides are max_rank_rows, unless `keep_rank_rows`, max_lora_rank, lora_modules and adapter_roots.
    """
    sizes = [size_of(path) for path in (*warm, *cold[:1])]
    pages = pages_of(sizes, model, config.page_tokens)
    num_seqs, max_lora_rank = config.max_num_seqs, max(config.max_lora_rank, *(size.rank for size in sizes))
    rows = rank_rows_of(num_seqs, max(size.rank for size in sizes[:-1]), max_lora_rank)
    rows += rank_rows_of(min(2, len(cold)), sizes[-1].rank, 1)
    kv = num_seqs * -(-max(work.input_len + work.output_len, work.stream_len) // config.page_tokens)
    adapters = sum(pages) + pages[-1]
    rows = config.max_rank_rows if keep_rank_rows else rows
    return with_room(config, rows, max_lora_rank, adapters, kv + num_seqs)


def measure(
    config: EngineConfig, work: Workload, warm: Sequence[str], cold: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Runs the workload with prefetch and without.

    Args:
        config: see fit_config.
        work: the workload.
        warm, cold: folders of the adapters.

    Returns:
        the report (see bench.report), and the lines to print.

    Raises:
        ConfigError, UserError: the engine cannot serve this.
        RuntimeError: something was compiled after warm-up, so the figures mean nothing.
    """
    benches = {
        on: ColdBench(dataclasses.replace(config, adapter_prefetch=on), work, warm, cold) for on in (True, False)
    }
    for number in range(work.rounds + 1):
        for on in (True, False) if number % 2 else (False, True):
            benches[on].loop(timed=number > 0)
            if on and number:
                benches[on].stream_through_a_load(number)
        logging.info("round %d of %d (0: not timed) done", number, work.rounds)
    for bench in benches.values():
        check_compilations(bench.engine)
    rows = [_row(on, bench.results) for on, bench in benches.items()]
    engine = benches[True].engine
    size = size_of(cold[0]).num_elements * engine.geometry.storage_dtype.itemsize / 2**20
    lines = [
        table(rows, COLUMNS),
        f"cold adapters: rank {work.cold_rank} on all modules, {size:.1f} MiB each in the pool, on disk only",
        f"disk: {work.disk}",
        f"gaps: between the tokens of {config.max_num_seqs - 1} streams; the largest while an adapter comes in, "
        f"against the median without; quiet_gap_ratio is the same of as many steps without any load",
    ]
    return make_report("adapters --cold", settings_of(engine, dataclasses.asdict(work)), rows), lines


def _row(prefetch: bool, results: Results) -> dict[str, Any]:
    """A row of the report; what has several rounds is the median over them."""
    cold, warm = statistics.median(results.cold_s), statistics.median(results.warm_s)
    gaps = results.gaps
    medians = [statistics.median(gap.quiet) for gap in gaps]
    largest = [max(gap.loading) for gap in gaps]
    ratios = [most / median for most, median in zip(largest, medians, strict=True)]
    quiet = [max(gap.quiet[: len(gap.loading)]) / median for gap, median in zip(gaps, medians, strict=True)]

    def middle(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    return {
        "prefetch": "on" if prefetch else "off",
        "cold_ttft_p50_s": cold,
        "warm_ttft_p50_s": warm,
        "cold_minus_warm_s": cold - warm,
        "gap_p50_s": middle(medians),
        "gap_largest_s": middle(largest),
        "gap_ratio": middle(ratios),
        "quiet_gap_ratio": middle(quiet),
        "load_s": middle([gap.load_s for gap in gaps]),
        "load_steps": [len(gap.loading) for gap in gaps],
        "gap_ratio_by_round": ratios,
        "cold_ttft_s": results.cold_s,
        "warm_ttft_s": results.warm_s,
    }
