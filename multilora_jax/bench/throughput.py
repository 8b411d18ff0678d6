"""`bench throughput`: new tokens per second of an offline batch, per mix of adapters.

Every round runs each mix once, in an order that moves on by one from round to round, and a mix's ratio is taken to
the base's run of the same round: a machine that slows down for a while slows both. Reported are medians over rounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from absl import flags as absl_flags
from absl import logging

from multilora_jax import flags
from multilora_jax.adapters.make import TARGETS
from multilora_jax.bench.floors import adapter_bytes, weight_bytes
from multilora_jax.bench.mixes import BASE, MIXES, assign, check_mixes
from multilora_jax.bench.report import check_outputs, make_report, table, write_outputs
from multilora_jax.bench.runs import (
    Run,
    check_compilations,
    check_length,
    define_run_flags,
    random_prompts,
    rank_rows_of,
    run_loop,
    run_once,
    settings_of,
)
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.synthetic import random_adapter_weights, save_peft
from multilora_jax.request import LoRARequest

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

COLUMNS = {
    "mix": "", "num_adapters": "d", "adapters_per_step": ".1f", "new_tokens": "d", "tokens_per_second": ".1f",
    "ratio_to_base": ".3f", "byte_floor_ratio": ".3f",
}  # fmt: skip
LOOP_COLUMNS = {"ratio_to_loop": ".2f", "loop_floor_ratio": ".2f"}

LOOP = "loop"
"""The case beside the mixes: `distinct`, but each adapter's requests as a batch of their own, one after another."""

DEFAULT_NUM_SEQS = 8

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench throughput --config configs/smollm2.yaml --mix base,identical,distinct"
ABOUT = """New tokens per second of a batch of random prompts, for one or more mixes of adapters, which take turns in
one process and one engine; beside each mix's ratio to the base alone stands the ratio that the bytes read would allow.
The case `loop` answers the requests of `distinct` adapter by adapter, as servers do that cannot mix adapters in a
batch; with it, every case's ratio to it is shown, beside the ratio of the bytes read.

max_num_seqs is 8 here, whatever the file says, unless --max_num_seqs gives another, and max_rank_rows what that many
sequences with adapters of their own need, unless --max_rank_rows is given. --num_adapters is max_num_seqs by default.
Prints a table; --json and --plot write files."""


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        mixes: names from bench.mixes, or LOOP, each run once per round.
        num_adapters: N, adapters that the mixes are drawn over.
        rank: of each random adapter.
        given_adapters: use the configuration's adapters first and random ones only beyond them; otherwise all are
            random, so that figures of different configurations compare.
        num_prompts: requests of one run; input_len, output_len: tokens of each prompt and of each answer.
        rounds: timed runs of each mix.
        targets: projections of the random adapters, a key of TARGETS.
    """

    mixes: tuple[str, ...]
    num_adapters: int
    rank: int = 16
    given_adapters: bool = False
    num_prompts: int = 32
    input_len: int = 48
    output_len: int = 32
    rounds: int = 3
    targets: str = "all"

    @property
    def uses_adapters(self) -> bool:
        return set(self.mixes) != {"base"}


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags: those of the configuration and its own."""
    flags.define_flags(flag_values)
    absl_flags.DEFINE_list(
        "mix", ["base", "identical", "distinct"], f"Mixes to run in turn, of {', '.join((*MIXES, LOOP))}.",
        flag_values=flag_values,
    )  # fmt: skip
    absl_flags.DEFINE_boolean(
        "given_adapters", False, "Use the configuration's adapters first and random ones beyond them; by default all "
        "are random, so that figures of different configurations compare.", flag_values=flag_values,
    )  # fmt: skip
    for name, default, doc in (
        ("num_adapters", None, "Adapters that the mixes are drawn over; by default as many as max_num_seqs."),
        ("rank", 16, "Rank of the random adapters."),
    ):
        absl_flags.DEFINE_integer(name, default, doc, lower_bound=1, flag_values=flag_values)
    absl_flags.DEFINE_enum(
        "targets", "all", tuple(TARGETS), "Projections of the random adapters: all seven, the attention's four or two.",
        flag_values=flag_values,
    )  # fmt: skip
    define_run_flags(flag_values, num_prompts=32, input_len=48, output_len=32, rounds=3)


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    f = flag_values
    mixes = check_mixes(f.mix, (*MIXES, LOOP))
    check_outputs(f)
    config = flags.config_from_flags(f)
    # The figures are of a stated batch, not of whatever the server of this configuration allows.
    num_seqs = config.max_num_seqs if f["max_num_seqs"].present else DEFAULT_NUM_SEQS
    work = Workload(
        tuple(mixes), f.num_adapters or num_seqs, f.rank, f.given_adapters, f.num_prompts, f.input_len, f.output_len,
        f.rounds, f.targets,
    )  # fmt: skip
    report = measure(fit_config(config, work, num_seqs, keep_rank_rows=bool(f["max_rank_rows"].present)), work)
    print(table(report["rows"], COLUMNS | LOOP_COLUMNS if LOOP in work.mixes else COLUMNS))
    write_outputs(f, report)
    return 0


def fit_config(config: EngineConfig, work: Workload, num_seqs: int, *, keep_rank_rows: bool = False) -> EngineConfig:
    """The configuration with the budgets of a step set to the workload.

    Changed are max_num_seqs; max_rank_rows (to what `num_seqs` distinct adapters need, unless `keep_rank_rows`);
    max_lora_rank where `rank` is above it; enable_prefix_caching (off); lora_modules and adapter_roots.

    Raises:
        ConfigError: the prompts and answers do not fit max_model_len, or adapters are asked for and switched off.
    """
    if work.uses_adapters and not config.enable_lora:
        raise ConfigError(
            "enable_lora is false: --mix base is all that can be measured", reason="conflicting_keys", param="mix"
        )
    check_length(config, work.input_len, work.output_len)
    modules = dict(list(config.lora_modules.items())[: work.num_adapters]) if work.given_adapters else {}
    max_lora_rank = max(config.max_lora_rank, work.rank) if work.uses_adapters else config.max_lora_rank
    # A given adapter may be of any rank up to the limit.
    largest = max_lora_rank if modules else work.rank
    rows = rank_rows_of(min(num_seqs, work.num_adapters), largest, max_lora_rank)
    return dataclasses.replace(
        config,
        max_num_seqs=num_seqs,
        max_rank_rows=config.max_rank_rows if keep_rank_rows else rows,
        max_lora_rank=max_lora_rank,
        enable_prefix_caching=False,
        lora_modules=modules,
        adapter_roots=(),
    )


def measure(config: EngineConfig, work: Workload) -> dict[str, Any]:
    """Runs the workload; returns the report (see bench.report).

    Raises:
        ConfigError, UserError: the engine cannot serve this.
        RuntimeError: something was compiled after warm-up, so the figures mean nothing.
    """
    logging.info("max_num_seqs %d, max_rank_rows %d", config.max_num_seqs, config.max_rank_rows)
    engine = LLMEngine(config)
    engine.warm_up()
    with random_adapters(engine, work) as adapters:
        _check_pool(engine, work, adapters)
        runs = _rounds(engine, work, adapters)
    check_compilations(engine)
    sizes = {adapter.name: adapter_bytes(adapter, engine.geometry) for adapter in adapters}
    weights = weight_bytes(engine.model_config, engine.geometry)
    rows = [_row(mix, runs, sizes, weights) for mix in work.mixes]
    settings = settings_of(engine, {**dataclasses.asdict(work), "mixes": list(work.mixes)})
    return make_report("throughput", settings, rows)


def _row(mix: str, all_runs: Mapping[str, list[Run]], sizes: Mapping[str, int], weights: int) -> dict[str, Any]:
    """A row of the report; the typical step is the median one.

    Args:
        mix: which one; all_runs: of every mix, round by round.
        sizes: bytes of each adapter by name; weights: bytes of the base.
    """
    runs = all_runs[mix]
    steps = [step for run in runs for step in run.step_adapters]
    read = statistics.median(_bytes_of(step, sizes) for step in steps)
    to_base, to_loop = _ratios(runs, all_runs.get("base")), _ratios(runs, all_runs.get(LOOP))
    # Batches of the loop are smaller, so that it is all bytes of a run that compare, not those of a step.
    moved = {name: _run_bytes(all_runs[name], sizes, weights) for name in {mix, "base", LOOP} & all_runs.keys()}
    floor = weights / (weights + read) if mix != LOOP else moved["base"] / moved[LOOP] if "base" in moved else None
    return {
        "mix": mix,
        "num_adapters": len(frozenset().union(*steps)),
        "adapters_per_step": float(statistics.median(len(step) for step in steps)),
        "new_tokens": runs[0].new_tokens,
        "tokens_per_second": statistics.median(run.tokens_per_second for run in runs),
        "ratio_to_base": None if to_base is None else statistics.median(to_base),
        "byte_floor_ratio": floor,
        "ratio_to_loop": None if to_loop is None else statistics.median(to_loop),
        "loop_floor_ratio": moved[LOOP] / moved[mix] if LOOP in moved else None,
        "tokens_per_second_by_round": [run.tokens_per_second for run in runs],
        "ratio_to_base_by_round": to_base,
        "ratio_to_loop_by_round": to_loop,
        "adapter_bytes_per_step": int(read),
        "weight_bytes_per_step": weights,
        "adapter_loads": sum(run.loads for run in runs),
        "preemptions": sum(run.preemptions for run in runs),
    }


def _ratios(runs: list[Run], others: list[Run] | None) -> list[float] | None:
    """Speed over that of the same round's other run; None where there is no other."""
    if others is None:
        return None
    return [mine.tokens_per_second / its.tokens_per_second for mine, its in zip(runs, others, strict=True)]


def _bytes_of(step: frozenset[str], sizes: Mapping[str, int]) -> int:
    return sum(sizes[name] for name in step)


def _run_bytes(runs: list[Run], sizes: Mapping[str, int], weights: int) -> float:
    """Bytes of weights and adapters that the steps of a run read, on average."""
    return statistics.mean(sum(weights + _bytes_of(step, sizes) for step in run.step_adapters) for run in runs)


@contextmanager
def random_adapters(engine: LLMEngine, work: Workload) -> Iterator[list[Adapter]]:
    """The N adapters of the workload; random ones are loaded from PEFT folders as any other is."""
    adapters = engine.list_loras()
    engine.prepare([engine.lora_request(adapter.name) for adapter in adapters])
    missing = work.num_adapters - len(adapters) if work.uses_adapters else 0
    with tempfile.TemporaryDirectory(prefix="multilora_bench_") as folder:
        if missing:
            logging.info("making %d random adapters of rank %d", missing, work.rank)
        for number in range(missing):
            path = f"{folder}/random-{number}"
            modules = TARGETS[work.targets]
            save_peft(random_adapter_weights(engine.model_config, work.rank, modules, seed=number), path)
            adapters.append(engine.add_lora(LoRARequest(f"random-{number}", len(adapters) + 1, path)))
        yield adapters


def _check_pool(engine: LLMEngine, work: Workload, adapters: list[Adapter]) -> None:
    """Warns where the pool is too small for the workload: then loading and preemption are measured too."""
    num_seqs = min(engine.config.max_num_seqs, work.num_prompts)
    kv = num_seqs * engine.geometry.pages_for_tokens(work.input_len + work.output_len)
    needed = kv + sum(adapter.num_pages for adapter in adapters)
    if needed > engine.allocator.num_total:
        logging.warning(
            "the pool is too small: %d pages for %d sequences and %d for %d adapters, but it has %d. Adapters will be "
            "loaded, or sequences preempted, during the timed runs; --pool-pages %d avoids that",
            kv, num_seqs, needed - kv, len(adapters), engine.allocator.num_total, needed + num_seqs + 1,
        )  # fmt: skip


def _rounds(engine: LLMEngine, work: Workload, adapters: list[Adapter]) -> dict[str, list[Run]]:
    """An untimed run of each mix, then `rounds` timed ones in turn."""
    ids = (f"bench-{n}" for n in itertools.count())
    prompts = random_prompts(engine, work.num_prompts, work.input_len)
    loras = {
        mix: [
            None if number == BASE else engine.lora_request(adapters[number].name)
            for number in assign(
                "distinct" if mix == LOOP else mix, work.num_prompts, work.num_adapters, engine.config.seed
            )
        ]
        for mix in work.mixes
    }
    runs: dict[str, list[Run]] = {mix: [] for mix in work.mixes}
    for number in range(work.rounds + 1):
        shift = number % len(work.mixes)
        for mix in work.mixes[shift:] + work.mixes[:shift]:
            run = (run_loop if mix == LOOP else run_once)(engine, prompts, loras[mix], work.output_len, ids)
            if number:
                runs[mix].append(run)
            name = f"round {number} of {work.rounds}" if number else "warm run"
            logging.info("%s: %s %.1f tokens/s", name, mix, run.tokens_per_second)
    return runs
