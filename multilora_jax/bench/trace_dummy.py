"""`bench trace --dummy`: the scheduler and the pool's books in simulated time, for studies of policies (no jax).

The defaults are those of S-LoRA's setting S2 on its smallest machine: a pool of 14,500 tokens, an adapter of rank r in
as much of it as 4 r tokens, and a step of 40 ms and 0.4 ms for each token, which give its throughput within 4 % with
1, 20 and 200 adapters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from absl import flags as absl_flags
from absl import logging

from multilora_jax import flags
from multilora_jax.bench.report import make_report
from multilora_jax.bench.trace_cases import ORACLE, Case, PoolCap, notes_of
from multilora_jax.bench.trace_load import TraceRequest, make_trace
from multilora_jax.bench.trace_oracle import Oracle
from multilora_jax.bench.trace_report import median_row, row_of
from multilora_jax.bench.trace_run import SimulatedServer, TraceRun, replay
from multilora_jax.config import EngineConfig
from multilora_jax.engine.policies import Policy, PolicyConfig, make_policy
from multilora_jax.engine.simulation import SimulatedAdapter, SimulatedEngine, SimulatedPool, StepCost
from multilora_jax.engine.step_plan import SchedulerConfig, prompt_sizes
from multilora_jax.errors import ConfigError

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

DEFAULTS = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "pool_pages": 907}
"""Of keys that are given neither by a flag nor by a file."""


@dataclass(frozen=True)
class DummyMachine:
    """What stands for the device.

    Attributes:
        cost: of a step.
        tokens_per_rank: a rank of an adapter takes as many pages as so many tokens.
        transfer_pages: see SimulatedEngine.
        max_tokens: see SimulatedServer.
    """

    cost: StepCost
    tokens_per_rank: float
    transfer_pages: int
    max_tokens: int | None = None


def define_flags(flag_values: absl_flags.FlagValues) -> None:
    """Defines --dummy and the flags of its machine."""
    f = flag_values
    absl_flags.DEFINE_boolean(
        "dummy", False, "Simulate: the scheduler and the pool's books under a given step time, without a model.",
        flag_values=f,
    )  # fmt: skip
    default = StepCost()
    for name, value, doc in (
        ("step_base_ms", default.base_s, "Milliseconds of any step of --dummy."),
        ("step_token_ms", default.token_s, "Milliseconds more for each token of a step of --dummy."),
        ("step_page_ms", default.page_s, "Milliseconds more for each page of an adapter copied before it."),
        ("step_row_ms", default.row_s, "Milliseconds more for each rank row of its distinct adapters."),
    ):
        absl_flags.DEFINE_float(name, 1000 * value, doc, lower_bound=0, flag_values=f)
    absl_flags.DEFINE_float(
        "tokens_per_rank", 4.0, "Pages that a rank of an adapter takes with --dummy, as tokens of keys and values.",
        lower_bound=0, flag_values=f,
    )  # fmt: skip
    absl_flags.DEFINE_integer(
        "transfer_pages", 16, "Most pages of adapters that --dummy copies before a step.", lower_bound=1, flag_values=f
    )
    absl_flags.DEFINE_integer(
        "max_tokens", None, "Tokens that every request of --dummy allows, whatever its answer takes, as where answers "
        "end by themselves. By default just those, as in S-LoRA's runs.", lower_bound=1, flag_values=f,
    )  # fmt: skip


def machine_of(flag_values: absl_flags.FlagValues) -> DummyMachine:
    """What the flags ask for."""
    f = flag_values
    cost = StepCost(*(ms / 1000 for ms in (f.step_base_ms, f.step_token_ms, f.step_page_ms, f.step_row_ms)))
    if not cost.base_s:
        raise ConfigError("step_base_ms must be above 0", reason="bad_value", param="step_base_ms")
    return DummyMachine(cost, f.tokens_per_rank, f.transfer_pages, f.max_tokens)


def config_of(flag_values: absl_flags.FlagValues) -> EngineConfig:
    """The configuration from parsed flags; a model need not be given, since none is read."""
    given = flag_values["config"].value is not None
    if not given and not flag_values["model"].present:
        flag_values["model"].parse("simulated")
    config = flags.config_from_flags(flag_values)
    if given and config.pool_pages is None:
        raise ConfigError("give --pool-pages with --dummy", reason="missing_key", param="pool_pages")
    missing = {key: value for key, value in DEFAULTS.items() if not given and not flag_values[key].present}
    return dataclasses.replace(config, **missing)


def measure(
    config: EngineConfig,
    machine: DummyMachine,
    ranks: Sequence[int],
    cases: Sequence[Case],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Simulates all cases; returns the report (see bench.report).

    Args:
        config: see simulate.
        machine: what stands for the device.
        ranks: of the adapters.
        cases: what is simulated.
        settings: of the report; "seeds" is used.
    """
    rows = []
    for case in cases:
        assert config.first_token_objective_s is not None
        assert config.pool_pages is not None
        cap = case.cap(config, config.pool_pages - 1)
        found: list[dict[str, Any]] = []
        for number in range(settings["seeds"]):
            run = simulate(config, machine, ranks, make_trace(case.spec_of(number)), case.policy, cap)
            others = case.spec.num_adapters if settings["sweep"] == "flood" else None
            found.append(row_of(run, config.first_token_objective_s, others))
        rows.append({**case.row(settings["sweep"]), **median_row(found)})
        logging.info("%s: attainment %.3f", case.row(settings["sweep"]), rows[-1]["attainment"])
    whole = {**config.to_dict(), **settings, "machine": dataclasses.asdict(machine), "model": "simulated"}
    cost = machine.cost
    note = (
        f"simulated: a step takes {1000 * cost.base_s:g} ms, {1000 * cost.token_s:g} for each token, "
        f"{1000 * cost.page_s:g} for each page copied, {1000 * cost.row_s:g} for each rank row; a pool of "
        f"{(config.pool_pages or 1) - 1} pages of {config.page_tokens} tokens, a rank takes "
        f"{machine.tokens_per_rank:g} tokens of it; at most {config.max_num_seqs} sequences run"
    )
    notes = notes_of(settings, config, cases, (config.pool_pages or 1) - 1)
    return make_report("trace", whole | {"notes": [note, *notes]}, rows)


def simulate(
    config: EngineConfig,
    machine: DummyMachine,
    ranks: Sequence[int],
    trace: Sequence[TraceRequest],
    policy: str,
    cap: PoolCap,
) -> TraceRun:
    """One trace through a fresh simulated engine.

    Args:
        config: its pool_pages, policies' parameters and budgets.
        machine: what stands for the device.
        ranks: of the adapters, in order.
        trace: requests for these.
        policy: its name.
        cap: what adapters may have of the pool.
    """
    pages = [-(-round(machine.tokens_per_rank * rank) // config.page_tokens) for rank in ranks]
    adapters = [
        SimulatedAdapter(f"adapter-{number:04d}", rank, max(1, num))
        for number, (rank, num) in enumerate(zip(ranks, pages, strict=True))
    ]
    assert config.pool_pages is not None
    paced = config.target_step_ms is not None
    sizes = prompt_sizes(config.max_num_batched_tokens, config.prefill_block, paced=paced)
    engine = SimulatedEngine(
        SchedulerConfig.of(config, sizes),
        SimulatedPool(config.pool_pages - 1, config.page_tokens, *cap),
        machine.cost,
        policy_of(config, policy, machine.cost, trace),
        transfer_pages=machine.transfer_pages,
        lookahead=config.prefetch_lookahead,
        prefetch=config.adapter_prefetch,
    )
    run = replay(SimulatedServer(engine, adapters, machine.max_tokens), trace)
    engine.check_integrity()
    return run


def policy_of(config: EngineConfig, name: str, cost: StepCost, trace: Sequence[TraceRequest]) -> Policy:
    """A fresh policy; what the oracle knows is the trace."""
    if name == ORACLE:
        assert config.first_token_objective_s is not None
        return Oracle(config.first_token_objective_s, cost, {str(n): r.new_tokens for n, r in enumerate(trace)})
    return make_policy(PolicyConfig.of(dataclasses.replace(config, scheduling_policy=name)))
