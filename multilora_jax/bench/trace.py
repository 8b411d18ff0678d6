"""`bench trace`: S-LoRA's workloads against the engine in real time, or against the scheduler in simulated time.

Against the engine, every round runs each case once, in an order that moves on by one from round to round: a machine
that slows down for a while slows all of them. Reported are medians over rounds and over the traces of several seeds. In
simulated time rounds do not vary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.adapters.make import read_integers
from multilora_jax.bench import trace_cases, trace_dummy, trace_engine
from multilora_jax.bench.report import check_outputs, define_output_flags, write_outputs
from multilora_jax.bench.runs import rank_rows_of
from multilora_jax.bench.trace_load import SETTINGS
from multilora_jax.bench.trace_report import lines_of
from multilora_jax.config import EngineConfig

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

ARGUMENTS = ""
EXAMPLE = (
    "python -m multilora_jax.bench trace --dummy --setting S2 --policy fcfs,lcfs,abort --sweep cv=1,2,4,6,8 --rate 3"
)
ABOUT = """S-LoRA's synthetic workloads: adapters by a power law, arrivals in gaps of a gamma distribution, lengths
uniform in ranges. Requests are sent when they are due, whatever became of those before. Reported are throughput;
attainment, the share of all requests whose first token came within --first-token-objective-s; satisfaction, S-LoRA's
mean of 1 - (t / objective)^2 over all; goodput, requests a second that were answered in full and whose first token came
in time; percentiles of the time to the first token (TTFT), between tokens (ITL) and to the end (E2E); Jain's index over
the adapters; page-ins and evictions of adapters, and preemptions. With --sweep flood=0,RATE also what one adapter that
floods the server does to the others: the 95th percentile of their TTFT beside it over that without.

Several --policy, several --pool and a --sweep make the cases of one run, with one table and one picture. With --dummy
there is no model: the engine's scheduler and pool run in simulated time, each step as long as the --step flags say, and
a study takes seconds. Without it a configuration is needed, and the lengths and the objective of S-LoRA's machines
should be scaled to this one: --input-range, --output-range, --ranks, --first-token-objective-s.

--pool unified,split:25%,split:50% compares the unified pool with fixed splits of the same bytes: a quarter or a half of
the pool's pages is set apart for adapters, as a server without a unified pool does, and keys and values never enter it.
capped lets adapters have no more, but keys and values what those leave. Without a percentage it is --max-adapter-pages.
Set --pool-pages so that memory is what limits: in a pool that holds all of it nothing differs."""

DEFAULT_OBJECTIVE_S = 6.0


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags: those of the configuration and its own."""
    flags.define_flags(flag_values)
    trace_cases.define_flags(flag_values)
    trace_engine.define_flags(flag_values)
    trace_dummy.define_flags(flag_values)
    define_output_flags(flag_values)


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    f = flag_values
    check_outputs(f)
    swept, cases = trace_cases.cases_of(f)
    ranks = read_integers("ranks", f.ranks) if f.ranks else SETTINGS[f.setting]
    config = trace_dummy.config_of(f) if f.dummy else flags.config_from_flags(f)
    objective_s = config.first_token_objective_s or DEFAULT_OBJECTIVE_S
    config = dataclasses.replace(config, first_token_objective_s=objective_s)
    trace_cases.check_pools(config, cases)
    num = max(case.spec.all_adapters for case in cases)
    rank_of = [ranks[number % len(ranks)] for number in range(num)]
    if not f["max_rank_rows"].present:
        config = with_rank_rows(config, rank_of)
    settings = {
        "setting": f.setting, "ranks": list(ranks), "dummy": f.dummy, "first_token_objective_s": objective_s,
        "sweep": swept, "trace": dataclasses.asdict(cases[0].spec), "rounds": 1 if f.dummy else f.rounds,
        "seeds": f.seeds,
    }  # fmt: skip
    if f.dummy:
        report = trace_dummy.measure(config, trace_dummy.machine_of(f), rank_of, cases, settings)
    else:
        report = trace_engine.measure(config, ranks, num, cases, settings, targets=f.targets, folder=f.adapters_dir)
    print("\n".join(lines_of(report)))
    write_outputs(f, report)
    return 0


def with_rank_rows(config: EngineConfig, ranks: Sequence[int]) -> EngineConfig:
    """The configuration with the rank rows that a full batch of these adapters can need, and max_lora_rank raised."""
    largest = max(ranks)
    max_lora_rank = max(config.max_lora_rank, largest)
    rows = rank_rows_of(min(config.max_num_seqs, len(ranks)), largest, max_lora_rank)
    return dataclasses.replace(config, max_rank_rows=rows, max_lora_rank=max_lora_rank)
