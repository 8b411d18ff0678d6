"""`bench latency`: one batch at a time through the engine, and when each of its tokens came.

Every round runs each mix once, in an order that moves on by one from round to round. Times are taken where `step`
gives a token out, so that several tokens of one step count as one gap (ITL) and as several tokens (TPOT).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from absl import flags as absl_flags
from absl import logging

from multilora_jax import flags
from multilora_jax.adapters.make import TARGETS
from multilora_jax.bench import throughput
from multilora_jax.bench.mixes import BASE, MIXES, assign, check_mixes
from multilora_jax.bench.phases import PHASES, StepPhases
from multilora_jax.bench.report import check_outputs, define_output_flags, make_report, table, write_outputs
from multilora_jax.bench.runs import check_compilations, random_prompts, settings_of
from multilora_jax.bench.step_floor import StepFloors
from multilora_jax.bench.summary import summary
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.request import LoRARequest, SamplingParams

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench latency --config configs/smollm2.yaml --batch-size 8 --mix base,distinct"
ABOUT = """Times of one batch at a time, for one or more mixes of adapters in turn: to the first token (TTFT), between
tokens (ITL), per token after the first (TPOT), to the end (E2E), as mean, median, 95th and 99th percentile over all
requests of all timed iterations. Then, in iterations of their own that wait for the device after every launch, the
median time of each phase of a step: plan (schedule, adapters), inputs (built and sent), device (the programs), output.
Of the base's decode step (its ITL) it says how many times its bare matrix products, and one reading of its weights, it
takes; both are timed between the iterations.

max_num_seqs is --batch-size here, unless --max_num_seqs gives another, and max_rank_rows what that many sequences with
adapters of their own need, unless --max_rank_rows is given. Prints tables; --json and --plot write files."""

METRICS = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2el_ms": "E2E"}
COLUMNS = {"mix": "", "metric": "", "mean": ".2f", "median": ".2f", "p95": ".2f", "p99": ".2f", "max": ".2f"}
PHASE_COLUMNS = {"mix": "", "step": "", **{f"{phase}_ms": ".2f" for phase in PHASES}, "total_ms": ".2f"}
FLOOR_COLUMNS = {"floor": "", "floor_ms": ".2f", "step_ms": ".2f", "ratio": ".2f"}


@dataclass
class Times:
    """Milliseconds of the requests of several iterations: one value per request, of `itl_ms` one per gap."""

    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    e2el_ms: list[float] = field(default_factory=list)

    def add(self, start: float, came: Sequence[float], num_tokens: int) -> None:
        """Counts one request.

        Args:
            start: when it was sent; came: when its tokens came, at least once. Both in seconds of one clock.
            num_tokens: that came in all.
        """
        self.ttft_ms.append((came[0] - start) * 1000)
        self.e2el_ms.append((came[-1] - start) * 1000)
        self.itl_ms += [(after - before) * 1000 for before, after in itertools.pairwise(came)]
        if num_tokens > 1:
            self.tpot_ms.append((came[-1] - came[0]) * 1000 / (num_tokens - 1))


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        mixes: names from bench.mixes.
        batch_size: requests of an iteration, all sent at once; also the number of adapters that mixes are drawn over.
        input_len, output_len: tokens of each prompt and of each answer.
        num_iters, num_iters_warmup: iterations of each mix that are timed, and before them that are not.
        num_iters_phases: iterations of each mix whose steps are broken down.
        rank, targets: of the random adapters.
    """

    mixes: tuple[str, ...]
    batch_size: int = 8
    input_len: int = 32
    output_len: int = 128
    num_iters: int = 10
    num_iters_warmup: int = 3
    num_iters_phases: int = 2
    rank: int = 16
    targets: str = "all"

    @property
    def offline(self) -> throughput.Workload:
        """The same requests as `bench throughput` names them, which sizes the engine and makes the adapters."""
        return throughput.Workload(
            self.mixes, self.batch_size, self.rank, False, self.batch_size, self.input_len, self.output_len,
            self.num_iters, self.targets,
        )  # fmt: skip


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags: those of the configuration and its own."""
    f = flag_values
    flags.define_flags(f)
    absl_flags.DEFINE_list("mix", ["base", "distinct"], f"Mixes to run in turn, of {', '.join(MIXES)}.", flag_values=f)
    default = Workload(())
    for name, doc, least in (
        ("batch_size", "Requests of an iteration, and the adapters that mixes are drawn over.", 1),
        ("input_len", "Tokens of each prompt.", 1),
        ("output_len", "Tokens of each answer.", 1),
        ("num_iters", "Iterations of each mix that are timed.", 1),
        ("num_iters_warmup", "Iterations of each mix before those, which are not timed.", 0),
        ("num_iters_phases", "Iterations of each mix whose steps are broken down by phase.", 0),
        ("rank", "Rank of the random adapters.", 1),
    ):
        absl_flags.DEFINE_integer(name, getattr(default, name), doc, lower_bound=least, flag_values=f)
    absl_flags.DEFINE_enum(
        "targets", default.targets, tuple(TARGETS), "Projections of the random adapters.", flag_values=f
    )
    define_output_flags(f)


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    f = flag_values
    mixes = tuple(check_mixes(f.mix))
    check_outputs(f)
    config = flags.config_from_flags(f)
    own: dict[str, Any] = {key.name: f[key.name].value for key in dataclasses.fields(Workload) if key.name != "mixes"}
    work = Workload(mixes, **own)
    num_seqs = config.max_num_seqs if f["max_num_seqs"].present else work.batch_size
    keep = bool(f["max_rank_rows"].present)
    report = measure(throughput.fit_config(config, work.offline, num_seqs, keep_rank_rows=keep), work)
    tables = [table(report["rows"], COLUMNS)]
    if report["phases"]:
        tables.append(table(report["phases"], PHASE_COLUMNS))
    if report["floors"]:
        tables.append(table(report["floors"], FLOOR_COLUMNS))
    print("\n\n".join(tables))
    write_outputs(f, report)
    return 0


def measure(config: EngineConfig, work: Workload) -> dict[str, Any]:
    """Runs the workload.

    Args:
        config: see throughput.fit_config.
        work: the workload.

    Returns:
        the report (see bench.report), with "phases" besides, a row for each mix and kind of step, and "floors", a row
        for each of those of the base's decode step: none without that mix, or on several devices.

    Raises:
        ConfigError, UserError: the engine cannot serve this.
        RuntimeError: something was compiled after warm-up, so the figures mean nothing.
    """
    engine = LLMEngine(config)
    engine.warm_up()
    times = {mix: Times() for mix in work.mixes}
    floors = StepFloors(engine, work.batch_size) if "base" in work.mixes and engine.geometry.tp == 1 else None
    phases = {mix: StepPhases() for mix in work.mixes}
    ids = (f"bench-{n}" for n in itertools.count())
    with throughput.random_adapters(engine, work.offline) as adapters:
        prompts = random_prompts(engine, work.batch_size, work.input_len)
        loras: dict[str, list[LoRARequest | None]] = {
            mix: [
                None if number == BASE else engine.lora_request(adapters[number].name)
                for number in assign(mix, work.batch_size, work.batch_size, engine.config.seed)
            ]
            for mix in work.mixes
        }
        for number in range(work.num_iters_warmup + work.num_iters):
            shift = number % len(work.mixes)
            for mix in work.mixes[shift:] + work.mixes[:shift]:
                timed = times[mix] if number >= work.num_iters_warmup else Times()
                run_batch(engine, prompts, loras[mix], work.output_len, ids, timed)
            if floors is not None and number >= work.num_iters_warmup:
                floors.sample()
            logging.info("iteration %d of %d", number + 1, work.num_iters_warmup + work.num_iters)
        for mix, watcher in phases.items():
            with watcher.watch(engine):
                for _ in range(work.num_iters_phases):
                    run_batch(engine, prompts, loras[mix], work.output_len, ids, Times(), step=watcher.step)
    check_compilations(engine)
    rows = [
        {"mix": mix, "metric": metric, **summary(getattr(times[mix], metric)), "values": getattr(times[mix], metric)}
        for mix in work.mixes
        for metric in METRICS
    ]
    settings = settings_of(engine, {**dataclasses.asdict(work), "mixes": list(work.mixes)})
    broken_down = [row for mix in work.mixes for row in _phase_rows(mix, phases[mix])]
    itl_ms = times["base"].itl_ms if floors is not None else []
    against = floors.rows(statistics.median(itl_ms)) if floors is not None and itl_ms else []
    return {**make_report("latency", settings, rows), "phases": broken_down, "floors": against}


def run_batch(
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    loras: Sequence[LoRARequest | None],
    output_len: int,
    ids: Iterator[str],
    times: Times,
    *,
    step: Callable[[LLMEngine], Any] = LLMEngine.step,
) -> None:
    """Sends all prompts at once and answers them greedily, with `output_len` tokens each; `times` grows.

    Args:
        engine: idle.
        prompts, loras: token ids and adapter of each request.
        output_len: tokens of each answer.
        ids: request ids.
        times: what is counted.
        step: runs a step of the engine and gives its outputs.
    """
    engine.runner.rows.reset()  # buffers as large as the mix before needed them would slow this one down
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    start = time.perf_counter()
    came: dict[str, list[float]] = {}
    for prompt, lora in zip(prompts, loras, strict=True):
        came[request_id := next(ids)] = []
        engine.add_request(request_id, prompt, params, lora)
    live = len(came)
    while live:
        outputs = step(engine)
        now = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise output.error
            came[output.request_id].append(now)
            if output.finished:
                live -= 1
                times.add(start, came[output.request_id], len(output.outputs[0].token_ids))


def _phase_rows(mix: str, phases: StepPhases) -> list[dict[str, Any]]:
    rows = []
    for kind, medians in phases.medians_ms().items():
        parts = {f"{phase}_ms": value for phase, value in medians.items()}
        steps = len(phases.seconds[kind][PHASES[0]])
        rows.append({"mix": mix, "step": kind, **parts, "total_ms": sum(medians.values()), "num_steps": steps})
    return rows
