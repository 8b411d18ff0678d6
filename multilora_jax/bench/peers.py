"""`bench peers`: the same prompts and adapters through this engine and others, in turn within one run.

Every round gives each engine each number of adapters once, the engines right after one another and in an order that
moves on by one from round to round; an engine's ratio is taken to ours of the same round. Reported are medians.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from absl import flags as absl_flags
from absl import logging

from multilora_jax import flags
from multilora_jax.adapters.host_base import read_model_config
from multilora_jax.adapters.make import TARGETS, read_integers
from multilora_jax.bench import adapters
from multilora_jax.bench.adapter_set import adapter_set, register, size_of
from multilora_jax.bench.hf_folder import hf_folder
from multilora_jax.bench.llama_server import LlamaServer
from multilora_jax.bench.peer_engines import HF, HF_METHODS, Llama, Ours, Peer, agreement
from multilora_jax.bench.peer_process import PeerProcess
from multilora_jax.bench.report import check_outputs, cpu_count, make_report, table, write_outputs
from multilora_jax.bench.runs import (
    check_compilations,
    check_length,
    define_run_flags,
    refuse_pool_flags,
    settings_of,
)
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench peers --config configs/smollm2.yaml --dtype auto --json peers.json"
ABOUT = """New tokens per second of this engine and of others on the same prompts and adapters, with 0, 1, 8 and 32
distinct adapters, greedily and without an end before --output-len: Hugging Face transformers with PEFT, whose mixed
batches (hf-mixed: adapter_names; without adapters it is transformers alone) and whose loop over adapters (hf-loop) run
in a process of their own, and llama.cpp's server where --llama-server names one. All requests are there at the start.
ratio_to_ours is their speed over ours. Where float32 is among --peer-dtypes, our answers in float32 are held against
theirs: the share of tokens up to the first that differs.

Every engine has as many threads as this process has cores (taskset gives it fewer). hf-* needs torch, transformers
and peft: pip install 'multilora_jax[peers]', or --peer-python names an interpreter that has them. The pool is set to
hold everything, max_num_seqs is --num-prompts, unless --max_num_seqs gives another, and max_rank_rows what that many
distinct adapters need, unless --max_rank_rows is given. Prints a table; --json and --plot write files."""

COLUMNS = {
    "engine": "", "dtype": "", "num_adapters": "d", "tokens_per_second": ".1f", "ratio_to_ours": ".3f",
    "tokens_agree": ".3f",
}  # fmt: skip

HF_DTYPES = ("float32", "bfloat16", "float16")
WORKER = os.path.join(os.path.dirname(__file__), "hf_worker.py")

SPREAD = 0.2
"""Prompts are from 0.8 to 1.2 times as long as --input-len, so that there is padding where an engine needs it."""

PAUSE_S = 0.3
"""Between two engines: threads of the one before may spin for a while after its last product."""


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        counts: numbers of distinct adapters, 0 for the base alone.
        rank, targets: of the random adapters.
        num_prompts: requests, all at once; input_len: tokens of a prompt, about; output_len: of each answer.
        rounds: timed runs of each engine with each count.
        peer_dtypes: types that the Hugging Face engines run in.
        loop: run hf-loop too.
    """

    counts: tuple[int, ...] = (0, 1, 8, 32)
    rank: int = 16
    targets: str = "all"
    num_prompts: int = 32
    input_len: int = 50
    output_len: int = 32
    rounds: int = 3
    peer_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    loop: bool = True

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return round(self.input_len * (1 + SPREAD))

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Prompts of random tokens."""
        rng = np.random.default_rng(seed)
        lengths = rng.integers(max(1, round(self.input_len * (1 - SPREAD))), self.longest + 1, size=self.num_prompts)
        return [rng.integers(vocab_size, size=length).tolist() for length in lengths]

    def adapters(self, count: int) -> list[int | None]:
        """The adapter's number of each request: in turn, None for the base."""
        return [i % count if count else None for i in range(self.num_prompts)]


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags: those of the configuration and its own."""
    f = flag_values
    flags.define_flags(f)
    default = Workload()
    absl_flags.DEFINE_list("counts", [*map(str, default.counts)], "Numbers of distinct adapters.", flag_values=f)
    absl_flags.DEFINE_integer("rank", default.rank, "Rank of the random adapters.", lower_bound=1, flag_values=f)
    absl_flags.DEFINE_enum(
        "targets", default.targets, tuple(TARGETS), "Projections of the random adapters.", flag_values=f
    )
    absl_flags.DEFINE_list(
        "peer_dtypes", [*default.peer_dtypes], f"Types that hf-* runs in, of {', '.join(HF_DTYPES)}; none to leave it "
        "out.", flag_values=f,
    )  # fmt: skip
    absl_flags.DEFINE_boolean("loop", True, "Run PEFT's loop over adapters too.", flag_values=f)
    absl_flags.DEFINE_string("peer_python", sys.executable, "Interpreter of hf-*.", flag_values=f)
    absl_flags.DEFINE_string(
        "hf_model", None, "Hugging Face folder of the same model; by default written from ours.", flag_values=f
    )
    absl_flags.DEFINE_string("llama_server", None, "llama.cpp's server, a binary.", flag_values=f)
    absl_flags.DEFINE_string("llama_gguf", None, "GGUF file of the model for it.", flag_values=f)
    absl_flags.DEFINE_list(
        "llama_adapters", [], "GGUF files of adapters for it; it runs the counts that they reach.", flag_values=f
    )
    absl_flags.DEFINE_integer("llama_slots", 8, "Sequences that it runs at once.", lower_bound=1, flag_values=f)
    define_run_flags(
        f, num_prompts=default.num_prompts, input_len=default.input_len, output_len=default.output_len,
        rounds=default.rounds,
    )  # fmt: skip


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    f = flag_values
    check_outputs(f)
    counts = tuple(0 if word.strip() == "0" else read_integers("counts", [word])[0] for word in f.counts)
    dtypes = tuple(word for word in f.peer_dtypes if word)
    if wrong := next((word for word in dtypes if word not in HF_DTYPES), None):
        raise ConfigError(
            f"peer_dtypes must be of {', '.join(HF_DTYPES)}, got {wrong!r}", reason="bad_value", param="peer_dtypes"
        )
    if f.llama_server is not None and f.llama_gguf is None:
        raise ConfigError("llama_server needs --llama-gguf FILE", reason="missing_key", param="llama_gguf")
    config = flags.config_from_flags(f)
    refuse_pool_flags(f, "what the adapters and a full batch need")
    if config.load_format == "dummy":
        raise ConfigError(
            "load_format dummy makes up weights that no other engine has: give a model with weights",
            reason="conflicting_keys", param="load_format",
        )  # fmt: skip
    if not config.enable_lora and any(counts):
        raise ConfigError("enable_lora is false: --counts 0 is all that can be measured", reason="conflicting_keys")
    work = Workload(
        tuple(dict.fromkeys(counts)), f.rank, f.targets, f.num_prompts, f.input_len, f.output_len, f.rounds, dtypes,
        f.loop,
    )  # fmt: skip
    check_length(config, work.longest, work.output_len)
    num_seqs = config.max_num_seqs if f["max_num_seqs"].present else work.num_prompts
    config = dataclasses.replace(config, max_num_seqs=num_seqs)
    report = _run(f, config, work, keep_rank_rows=bool(f["max_rank_rows"].present))
    print("\n".join([table(report["rows"], COLUMNS), *report["notes"]]))
    write_outputs(f, report)
    return 0


def _run(f: absl_flags.FlagValues, config: EngineConfig, work: Workload, *, keep_rank_rows: bool) -> dict[str, Any]:
    """Starts the engines and measures."""
    model, threads = read_model_config(config.model), cpu_count()
    notes = [f"threads: {threads} for every engine", f"pauses of {PAUSE_S:g} s between engines are not counted"]
    with ExitStack() as stack:
        # One adapter at least, whose size the pool is set by.
        made = adapter_set(
            model, max(1, *work.counts), folder=None, ranks=[work.rank], modules=TARGETS[work.targets], seed=config.seed
        )
        paths = stack.enter_context(made)
        sized = adapters.Workload((1,), len(paths), 0, work.num_prompts, work.longest, work.output_len)
        config = adapters.fit_config(
            config, model, sized, [size_of(path) for path in paths], keep_rank_rows=keep_rank_rows
        )
        peers: list[Peer] = []
        if work.peer_dtypes:
            folder = f.hf_model or hf_folder(config.model, stack.enter_context(tempfile.TemporaryDirectory()))
            hf, versions = start_hf(f.peer_python, folder, paths[: max(work.counts)], work.peer_dtypes, threads)
            stack.enter_context(hf)
            notes.append("hf-*: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
            methods = HF_METHODS if work.loop else HF_METHODS[:1]
            peers += [HF(hf, dtype, method) for method in methods for dtype in work.peer_dtypes]
        else:
            notes.append("hf-*: skipped, --peer-dtypes names none")
        if f.llama_server is None:
            notes.append("llama.cpp: skipped, --llama-server names no binary")
        else:
            server = LlamaServer(
                f.llama_server, f.llama_gguf, f.llama_adapters, slots=f.llama_slots,
                context=work.longest + work.output_len, threads=threads,
            )  # fmt: skip
            peers.append(Llama(stack.enter_context(server)))
            notes.append(f"llama.cpp: {f.llama_slots} slots, {len(f.llama_adapters)} adapters")
        return measure(config, work, paths, peers, notes)


def start_hf(
    python: str, model: str, paths: Sequence[str], dtypes: Sequence[str], threads: int
) -> tuple[PeerProcess, dict[str, str]]:
    """Starts transformers and PEFT; the process, and the versions of its packages.

    Args:
        python: interpreter; model: Hugging Face folder; paths: folders of adapters.
        dtypes: types that the model is loaded in.
        threads: of its computation.

    Raises:
        ConfigError, UserError: see PeerProcess.
    """
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
    process = PeerProcess(f"hf-* ({python})", [python, WORKER], env)
    try:
        answer = process.ask(
            {"cmd": "load", "model": model, "adapters": list(paths), "dtypes": list(dtypes), "threads": threads}
        )
    except BaseException:
        process.close()
        raise
    return process, answer["versions"]


def measure(
    config: EngineConfig, work: Workload, paths: Sequence[str], peers: Sequence[Peer], notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs the workload.

    Args:
        config: of our engine, with room for everything.
        work: the workload.
        paths: folders of the adapters.
        peers: the other engines, loaded.
        notes: what is to be said under the table.

    Returns:
        the report (see bench.report), with "notes" besides.

    Raises:
        ConfigError, UserError: an engine cannot run this.
        RuntimeError: something was compiled after warm-up, so the figures mean nothing.
    """
    engine = LLMEngine(config)
    engine.warm_up()
    ids = (f"bench-{n}" for n in itertools.count())
    ours = Ours(engine, register(engine, paths), ids)
    prompts = work.prompts(engine.model_config.vocab_size, config.seed)
    speeds = _rounds(work, prompts, [ours, *peers])
    check_compilations(engine)
    agree = {}
    exact = [peer for peer in peers if peer.dtype == "float32" and peer.tokens]
    if exact:
        if ours.dtype != "float32":
            # Not warmed up: it runs once, and is not timed.
            engine = LLMEngine(dataclasses.replace(config, dtype="float32", warm_up=False))
            ours = Ours(engine, register(engine, paths), ids)
        for count in work.counts:
            own = ours.answer(prompts, work.adapters(count), work.output_len)
            agree |= {(peer, count): agreement(own, peer.tokens[count]) for peer in exact if count in peer.tokens}
    rows = []
    for (peer, count), values in speeds.items():
        ratios = [mine / its for mine, its in zip(values, speeds[next(iter(speeds))[0], count], strict=True)]
        rows.append({
            "engine": peer.name, "dtype": peer.dtype, "num_adapters": count,
            "tokens_per_second": statistics.median(values), "ratio_to_ours": statistics.median(ratios),
            "tokens_agree": agree.get((peer, count)),
            "tokens_per_second_by_round": values, "ratio_to_ours_by_round": ratios,
        })  # fmt: skip
    rows.sort(key=lambda row: row["num_adapters"])
    settings = {**dataclasses.asdict(work), "counts": list(work.counts), "peer_dtypes": list(work.peer_dtypes)}
    report = make_report("peers", settings_of(engine, settings), rows)
    report["config"]["dtype"] = next(row["dtype"] for row in rows if row["engine"] == Ours.name)
    return {**report, "notes": [*notes, *_verdicts(rows)]}


def _rounds(
    work: Workload, prompts: Sequence[list[int]], engines: Sequence[Peer]
) -> dict[tuple[Peer, int], list[float]]:
    """A short untimed run of each case, then `rounds` timed ones in turn; new tokens per second of each."""
    cases = {count: [engine for engine in engines if engine.takes(count)] for count in work.counts}
    speeds: dict[tuple[Peer, int], list[float]] = {(e, count): [] for e in engines for count in cases if e.takes(count)}
    for number in range(work.rounds + 1):
        for count, takers in cases.items():
            for engine in _turned(takers, number):
                time.sleep(PAUSE_S if number else 0)
                length = work.output_len if number else min(2, work.output_len)
                seconds = engine.run(prompts, count, work.adapters(count), length)
                speed = len(prompts) * length / seconds
                if number:
                    speeds[engine, count].append(speed)
                name = f"round {number} of {work.rounds}" if number else "warm run"
                logging.info("%s: %s %s, %d adapters: %.1f tokens/s", name, engine.name, engine.dtype, count, speed)
    return speeds


def _turned(engines: Sequence[Peer], number: int) -> Iterator[Peer]:
    """All engines, beginning with another one each time."""
    shift = number % len(engines)
    yield from engines[shift:]
    yield from engines[:shift]


def _verdicts(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Ours against each other engine in its faster type, a line for each number of adapters."""
    lines = []
    for count in dict.fromkeys(row["num_adapters"] for row in rows):
        best: dict[str, dict[str, Any]] = {}
        for row in rows:
            if row["num_adapters"] == count and row["engine"] != Ours.name:
                other = best.setdefault(row["engine"], row)
                best[row["engine"]] = max(row, other, key=lambda row: row["ratio_to_ours"])
        words = [f"{1 / row['ratio_to_ours']:.2f} x {name} ({row['dtype']})" for name, row in best.items()]
        if words:
            lines.append(f"{count} adapters: this engine is {', '.join(words)}")
    return lines
