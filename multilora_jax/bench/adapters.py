"""`bench adapters`: speed by the number of registered adapters, in a pool that holds some of them.

Every round runs each count once, in an order that moves on by one from round to round, and a count's ratio is taken to
the run of one adapter of the same round: a machine that slows down for a while slows both. Reported are medians over
rounds. A count's run begins with its adapters as they are after a long time: a random choice of them fills the pool.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from absl import flags as absl_flags
from absl import logging

from multilora_jax import flags
from multilora_jax.adapters.host_base import read_model_config
from multilora_jax.adapters.make import TARGETS, define_content_flags, read_integers
from multilora_jax.bench import cold
from multilora_jax.bench.adapter_set import Size, adapter_set, pages_of, register, size_of
from multilora_jax.bench.floors import adapter_bytes, byte_floor_ratio, expected_distinct, weight_bytes
from multilora_jax.bench.pool_use import PoolUse
from multilora_jax.bench.report import check_outputs, make_report, table, write_outputs
from multilora_jax.bench.runs import (
    Run,
    check_compilations,
    check_length,
    define_run_flags,
    random_prompts,
    rank_rows_of,
    refuse_pool_flags,
    run_once,
    settings_of,
    with_room,
)
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError
from multilora_jax.models.config import ModelConfig
from multilora_jax.request import LoRARequest

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

ARGUMENTS = ""
EXAMPLE = (
    "python -m multilora_jax.bench adapters --config configs/smollm2.yaml --dtype bfloat16 --adapters-dir /tmp/set"
)
ABOUT = """Throughput and time to the first token for several numbers of registered adapters, which each request chooses
among uniformly, under saturating load: a full batch, and --backlog requests waiting behind it. The pool is fixed so
that it holds --resident adapters, and beside them the keys and values of a full batch: those are never the limit.
Beside each ratio to one adapter stands the ratio that the bytes of the weights and of the batch's distinct adapters
would allow. Several --ranks make a mixed set. Misses and page-ins are part of the figures; the first reading of the
adapters is not.

With --cold it measures adapters that must be read from disk while the queue is busy instead, with prefetch and
without: the time to their first token, and what the reading does to a running stream. The disk's speed is emulated.

max_num_seqs is 16 here, whatever the file says, unless --max_num_seqs gives another, and max_rank_rows what that many
distinct adapters need, unless --max_rank_rows is given. Prints a table; --json and --plot write files."""

COLUMNS = {
    "num_adapters": "d", "tokens_per_second": ".1f", "ttft_p50_s": ".3f", "ratio_to_one": ".3f",
    "byte_floor_ratio": ".3f", "ratio_to_floor": ".3f", "adapters_per_step": ".1f", "hits": "d", "misses": "d",
}  # fmt: skip

DEFAULT_NUM_SEQS = 16


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        counts: numbers of adapters, each run once per round.
        resident: adapters that the pool holds.
        backlog: requests that wait behind a full batch.
        num_prompts: requests of one run; input_len, output_len: tokens of each prompt and of each answer.
        rounds: timed runs of each count.
    """

    counts: tuple[int, ...]
    resident: int = 100
    backlog: int = 16
    num_prompts: int = 64
    input_len: int = 48
    output_len: int = 64
    rounds: int = 5


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags: those of the configuration and its own."""
    flags.define_flags(flag_values)
    f = flag_values
    absl_flags.DEFINE_list(
        "counts", ["1", "10", "100", "1000", "2000"], "Numbers of registered adapters.", flag_values=f
    )
    define_content_flags(f)
    absl_flags.DEFINE_integer("resident", 100, "Adapters that the pool holds.", lower_bound=1, flag_values=f)
    absl_flags.DEFINE_integer(
        "backlog", None, "Requests that wait behind a full batch; by default as many as max_num_seqs.",
        lower_bound=0, flag_values=f,
    )  # fmt: skip
    absl_flags.DEFINE_string(
        "adapters_dir", None, "Folder of adapters, such as `adapters make` makes, to use for --ranks and --targets; "
        "made and kept if there are none. By default they are made for this run.", flag_values=f,
    )  # fmt: skip
    define_run_flags(f, num_prompts=64, input_len=48, output_len=64, rounds=5)
    cold.define_flags(f)


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    f = flag_values
    check_outputs(f)
    ranks, modules = read_integers("ranks", f.ranks), TARGETS[f.targets]
    counts = sorted(set(read_integers("counts", f.counts)))
    config = flags.config_from_flags(f)
    refuse_pool_flags(f, "what --resident adapters need: give --resident instead")
    if not config.enable_lora:
        raise ConfigError("enable_lora is false: there is nothing to measure", reason="conflicting_keys")
    check_length(config, f.input_len, f.output_len)
    num_seqs = config.max_num_seqs if f["max_num_seqs"].present else DEFAULT_NUM_SEQS
    config = dataclasses.replace(config, max_num_seqs=num_seqs)
    backlog = num_seqs if f.backlog is None else f.backlog
    keep_rank_rows = bool(f["max_rank_rows"].present)
    model = read_model_config(config.model)
    if f.cold:
        report, lines = cold.run_command(config, model, f, ranks, modules, backlog, keep_rank_rows=keep_rank_rows)
    else:
        work = Workload(tuple(counts), f.resident, backlog, f.num_prompts, f.input_len, f.output_len, f.rounds)
        with adapter_set(
            model, counts[-1], folder=f.adapters_dir, ranks=ranks, modules=modules, seed=config.seed
        ) as paths:
            sizes = [size_of(path) for path in paths]
            fitted = fit_config(config, model, work, sizes, keep_rank_rows=keep_rank_rows)
            report, lines = measure(fitted, work, paths)
    print("\n".join(lines))
    write_outputs(f, report)
    return 0


def fit_config(
    config: EngineConfig, model: ModelConfig, work: Workload, sizes: Sequence[Size], *, keep_rank_rows: bool = False
) -> EngineConfig:
    """The configuration with its pool and the budgets of a step set to the workload.

    Changed are max_adapter_pages (to what the first `resident` adapters take); the pool's size (to that and the keys
    and values of a full batch, a page more for each sequence); max_rank_rows, unless `keep_rank_rows`; max_lora_rank
    where the adapters need more; lora_modules and adapter_roots.

    Args:
        config: with max_num_seqs as it shall be.
        model: the base.
        work: the workload.
        sizes: of all adapters.
        keep_rank_rows: leave max_rank_rows alone.
    """
    num_seqs, largest = config.max_num_seqs, max(size.rank for size in sizes)
    max_lora_rank = max(config.max_lora_rank, largest)
    rows = rank_rows_of(min(num_seqs, len(sizes)), largest, max_lora_rank)
    pages = sum(pages_of(sizes[: work.resident], model, config.page_tokens))
    kv = num_seqs * -(-(work.input_len + work.output_len) // config.page_tokens)
    rows = config.max_rank_rows if keep_rank_rows else rows
    return with_room(config, rows, max_lora_rank, pages, kv + num_seqs)


def measure(config: EngineConfig, work: Workload, paths: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Runs the workload.

    Args:
        config: see fit_config.
        work: the workload.
        paths: folders of the adapters; count n takes the first n.

    Returns:
        the report (see bench.report), and the lines to print.

    Raises:
        ConfigError, UserError: the engine cannot serve this.
        RuntimeError: something was compiled after warm-up, so the figures mean nothing.
    """
    engine = LLMEngine(config)
    engine.warm_up()
    requests = register(engine, paths)
    runs, use = _rounds(engine, work, requests)
    check_compilations(engine)
    geometry = engine.geometry
    sizes = [adapter_bytes(adapter, geometry) for adapter in engine.list_loras()]
    weights = weight_bytes(engine.model_config, geometry)
    one = [run.tokens_per_second for run in runs[1]] if 1 in runs else None
    batch = min(config.max_num_seqs, work.num_prompts)
    rows = [
        {**_row(runs[count], one, weights, sizes[:count], sizes[0], batch), **use[count].row()} for count in work.counts
    ]
    lines = [table(rows, COLUMNS), *_notes(engine, work, rows[-1], batch), use[work.counts[-1]].line()]
    settings = settings_of(engine, {**dataclasses.asdict(work), "counts": list(work.counts)})
    return make_report("adapters", settings, rows), lines


def _notes(engine: LLMEngine, work: Workload, row: dict[str, Any], batch: int) -> list[str]:
    """What must be known to read the table; `row` is that of the largest count."""
    stats, geometry, num_adapters = engine.stats(), engine.geometry, len(engine.list_loras())
    pages = engine.cache.max_adapter_pages
    floor = f"{row['floor_adapter_bytes_per_step'] / 2**20:.1f} MiB of {row['floor_adapters_per_step']:.1f} distinct"
    return [
        f"pool: {pages} pages of {geometry.page_bytes / 1024:.0f} KiB for adapters, room for about "
        f"{min(work.resident, num_adapters)} of them; {geometry.num_pages - 1 - pages} more for keys and values, which "
        "a full batch does not fill",
        f"host memory: {stats.host_adapters} of {num_adapters} adapters ({stats.host_adapter_bytes / 2**20:.0f} MiB); "
        "what is not there is read from disk at a miss",
        f"byte floor: a step of {batch} reads {row['weight_bytes_per_step'] / 2**20:.1f} MiB of weights and, with "
        f"{row['num_adapters']} adapters, {floor} ones",
    ]


def _row(
    runs: Sequence[Run], one: Sequence[float] | None, weights: int, sizes: Sequence[int], size_of_one: int, batch: int
) -> dict[str, Any]:
    """A row of the report, but for the pool's use; `one` are the speeds with one adapter, None without such a run."""
    speeds = [run.tokens_per_second for run in runs]
    ratios = None if one is None else [mine / its for mine, its in zip(speeds, one, strict=True)]
    ratio = None if ratios is None else statistics.median(ratios)
    floor = byte_floor_ratio(weights, sizes, size_of_one, batch)
    distinct = expected_distinct(len(sizes), batch)
    return {
        "num_adapters": len(sizes),
        "tokens_per_second": statistics.median(speeds),
        "ttft_p50_s": statistics.median(seconds for run in runs for seconds in run.first_token_s),
        "ratio_to_one": ratio,
        "byte_floor_ratio": floor,
        "hits": sum(run.hits for run in runs),
        "misses": sum(run.misses for run in runs),
        "ratio_to_floor": None if ratio is None else ratio / floor,
        "adapters_per_step": statistics.mean(len(step) for run in runs for step in run.step_adapters),
        "floor_adapters_per_step": distinct,
        "floor_adapter_bytes_per_step": int(sum(sizes) / len(sizes) * distinct),
        "weight_bytes_per_step": weights,
        "tokens_per_second_by_round": speeds,
        "ratio_to_one_by_round": ratios,
        "adapter_loads": sum(run.loads for run in runs),
        "preemptions": sum(run.preemptions for run in runs),
    }


def _rounds(
    engine: LLMEngine, work: Workload, requests: Sequence[LoRARequest]
) -> tuple[dict[int, list[Run]], dict[int, PoolUse]]:
    """An untimed run of each count, then `rounds` timed ones in turn; and what the timed ones took of the pool."""
    ids = (f"bench-{n}" for n in itertools.count())
    prompts = random_prompts(engine, work.num_prompts, work.input_len)
    largest_rank = max(adapter.rank for adapter in engine.list_loras())
    runs: dict[int, list[Run]] = {count: [] for count in work.counts}
    use = {count: PoolUse(largest_rank) for count in work.counts}
    for number in range(work.rounds + 1):
        shift = number % len(work.counts)
        for count in work.counts[shift:] + work.counts[:shift]:
            rng = np.random.default_rng([engine.config.seed, number, count])
            settled = rng.choice(count, min(count, work.resident), replace=False)
            run_once(engine, [[0]] * len(settled), [requests[i] for i in settled], 1, ids)
            chosen = [requests[i] for i in rng.integers(count, size=work.num_prompts)]
            watch = use[count].update if number else None
            run = run_once(engine, prompts, chosen, work.output_len, ids, backlog=work.backlog, after_step=watch)
            if number:
                runs[count].append(run)
            name = f"round {number} of {work.rounds}" if number else "warm run"
            logging.info("%s: %d adapters %.1f tokens/s", name, count, run.tokens_per_second)
    return runs, use
