"""`bench trace` against the engine: requests arrive in real time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags as absl_flags
from absl import logging

from multilora_jax.adapters.host_base import read_model_config
from multilora_jax.adapters.make import TARGETS
from multilora_jax.bench.adapter_set import adapter_set, register
from multilora_jax.bench.answers import greedy
from multilora_jax.bench.report import make_report
from multilora_jax.bench.runs import check_length, check_sound, settings_of
from multilora_jax.bench.trace_cases import Case, notes_of
from multilora_jax.bench.trace_load import TraceRequest, make_trace
from multilora_jax.bench.trace_report import median_row, row_of
from multilora_jax.bench.trace_run import Counts, Event, replay
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.engine.policies import PolicyConfig, make_policy
from multilora_jax.errors import ConfigError, UserError
from multilora_jax.request import LoRARequest, RequestOutput

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()


def define_flags(flag_values: absl_flags.FlagValues) -> None:
    """Defines the flags of runs against the engine."""
    f = flag_values
    absl_flags.DEFINE_integer(
        "rounds", 1, "Runs of each case against the engine, which take turns.", lower_bound=1, flag_values=f
    )
    absl_flags.DEFINE_enum(
        "targets", "qkvo", tuple(TARGETS), "Projections of the adapters: the attention's four, two or all seven.",
        flag_values=f,
    )  # fmt: skip
    absl_flags.DEFINE_string(
        "adapters_dir", None, "Folder of adapters, such as `adapters make` makes, of the ranks in turn; made and kept "
        "if there are none. By default they are made for this run.", flag_values=f,
    )  # fmt: skip


def measure(
    config: EngineConfig,
    ranks: Sequence[int],
    num_adapters: int,
    cases: Sequence[Case],
    settings: dict[str, Any],
    *,
    targets: str = "qkvo",
    folder: str | None = None,
) -> dict[str, Any]:
    """Runs all cases on one engine, in turns; returns the report (see bench.report).

    Args:
        config: its max_adapter_pages is the cap of the cases with a capped or split pool that name no percentage.
        ranks: of the adapters, in turn.
        num_adapters: the most that a case has.
        cases: what is run.
        settings: of the report; "rounds" and "seeds" are used.
        targets: projections of the adapters, a key of TARGETS.
        folder: of the adapters, see adapter_set.

    Raises:
        ConfigError, UserError: the engine cannot serve this.
        RuntimeError: something was compiled after warm-up, so the figures mean nothing.
    """
    if not config.enable_lora:
        raise ConfigError("enable_lora is false: a trace is of adapters", reason="conflicting_keys")
    for case in cases:
        check_length(config, case.spec.input_range[1] - 1, case.spec.output_range[1] - 1)
    model, objective_s = read_model_config(config.model), config.first_token_objective_s
    assert objective_s is not None
    bare = dataclasses.replace(
        config, max_adapter_pages=None, enable_prefix_caching=False, lora_modules={}, adapter_roots=()
    )
    with adapter_set(model, num_adapters, folder=folder, ranks=ranks, modules=TARGETS[targets], seed=config.seed) as at:
        engine = LLMEngine(bare)
        server = EngineServer(engine, register(engine, at))
        for case in cases:  # a pool that cannot be is told before the wait
            server.prepare(config, case)
        engine.warm_up()
        rows: list[list[dict[str, Any]]] = [[] for _ in cases]
        for number in range(settings["rounds"] * settings["seeds"]):
            order = [(number + i) % len(cases) for i in range(len(cases))]
            for place in order:
                case = cases[place]
                server.prepare(config, case)
                trace = make_trace(case.spec_of(number % settings["seeds"]))
                others = case.spec.num_adapters if settings["sweep"] == "flood" else None
                rows[place].append(row_of(replay(server, trace), objective_s, others))
                shown = case.row(settings["sweep"])
                logging.info("round %d, %s: attainment %.3f", number + 1, shown, rows[place][-1]["attainment"])
        check_sound(engine)
    whole = settings_of(engine, {**settings, "targets": targets, "max_adapter_pages": config.max_adapter_pages})
    found = [{**case.row(settings["sweep"]), **median_row(mine)} for case, mine in zip(cases, rows, strict=True)]
    return make_report("trace", whole | {"notes": notes_of(settings, config, cases, engine.allocator.num_total)}, found)


class EngineServer:
    """An LLMEngine as a trace_run.Server; may serve one trace after another.

    Args:
        engine: idle, and warmed up.
        adapters: of the trace's numbers.
    """

    def __init__(self, engine: LLMEngine, adapters: Sequence[LoRARequest]):
        self.engine = engine
        self._adapters = adapters
        self._rng = np.random.default_rng(engine.config.seed)
        self._start = 0.0
        self._runs = 0
        self._had: dict[str, int] = {}  # tokens so far of the live requests

    def prepare(self, config: EngineConfig, case: Case) -> None:
        """Sets the policy and the pool of a case, and empties the pool of adapters: each run begins like the first."""
        engine = self.engine
        policy = make_policy(PolicyConfig.of(dataclasses.replace(config, scheduling_policy=case.policy)))
        engine.scheduler.use_policy(policy)
        engine.cache.order.evict(list(engine.cache.order))
        cap = case.cap(config, engine.allocator.num_total)
        engine.cache.set_cap(cap.max_adapter_pages, split=cap.split)

    def start(self) -> None:
        # Buffers as large as the run before needed them would slow this one down for a while.
        self.engine.runner.rows.reset()
        self._runs += 1
        self._start = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._start

    def wait_until(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds - self.now()))

    def is_busy(self) -> bool:
        return bool(self._had)

    def add(self, number: int, request: TraceRequest) -> None:
        request_id = f"trace-{self._runs}-{number}"
        prompt = self._rng.integers(self.engine.model_config.vocab_size, size=request.prompt_tokens).tolist()
        lora = self._adapters[request.adapter]
        due = self._start + request.arrival_s  # what an objective counts from
        self.engine.add_request(request_id, prompt, greedy(request.new_tokens), lora, arrival_time=due)
        self._had[request_id] = 0

    def step(self) -> list[Event]:
        return [self._event(output) for output in self.engine.step()]

    def counts(self) -> Counts:
        stats = self.engine.stats()
        return Counts(stats.adapter_loads, stats.adapter_evictions, stats.num_preemptions, stats.steps)

    def _event(self, output: RequestOutput) -> Event:
        request_id, count = output.request_id, len(output.outputs[0].token_ids)
        new, self._had[request_id] = count - self._had[request_id], count
        if output.finished:
            del self._had[request_id]
        error = output.error
        reason = None if error is None else error.reason if isinstance(error, UserError) else type(error).__name__
        return Event(int(request_id.rpartition("-")[2]), new, output.finished, reason)
