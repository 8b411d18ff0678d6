"""`bench quality`: what fewer bits for the base cost and save, against float32 on the same prompts.

Engines in one process answer the same requests: the reference in float32, the others with smaller weights. Each scores
parts of a fixed text, token by token, and continues them greedily; then all run a timed batch in turn.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from absl import logging

from multilora_jax.bench.answers import Request, answer
from multilora_jax.bench.floors import weight_bytes
from multilora_jax.bench.report import make_report, table
from multilora_jax.bench.runs import (
    build_engine,
    check_length,
    check_sound,
    random_prompts,
    rank_rows_of,
    run_once,
    settings_of,
)
from multilora_jax.bench.texts import text_pieces
from multilora_jax.bench.workload import command, option
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError
from multilora_jax.lora.synthetic import random_adapter_weights, save_peft
from multilora_jax.request import LoRARequest, SamplingParams

COLUMNS = {
    "weights": "", "dtype": "", "adapter": "", "weight_mib": ".1f", "perplexity": ".3f", "perplexity_ratio": ".4f",
    "same_next_token": ".4f", "same_prefix": ".1f", "tokens_per_second": ".1f", "ratio_to_float32": ".3f",
}  # fmt: skip

WEIGHTS: dict[str, dict[str, str | None]] = {
    "float32": {"dtype": "float32", "quantization": None},
    "bfloat16": {"dtype": "bfloat16", "quantization": None},
    "float16": {"dtype": "float16", "quantization": None},
    "int8": {"quantization": "int8"},
}
"""What --weights names, as configuration keys."""

DEFAULT_NUM_SEQS = 8

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench quality --config configs/smollm2.yaml"
ABOUT = """Quality, size and speed of smaller weights against float32. For each: perplexity of --num_parts parts of a
fixed text and its ratio to float32's; the share of the text's positions at which both find the same token most likely;
how many tokens of greedy continuations of the parts are the same before the first difference, on average; bytes of the
weights; tokens per second of random prompts, the engines taking turns. How many tokens stand behind each figure is
printed too. With --adapter all that again under an adapter, which is never rounded.

max_num_seqs is 8 here, whatever the file says, unless --max_num_seqs gives another; `int8` computes in the
configuration's dtype. Prints a table; --json and --plot write files."""


@dataclass(frozen=True)
class Workload:
    """What is measured."""

    weights: tuple[str, ...] = option(("bfloat16", "int8"), f"What is held against float32, of {', '.join(WEIGHTS)}.")
    adapter: bool = option(
        default=False, doc="Again under an adapter: the configuration's first, or a random one of rank 16."
    )
    num_parts: int = option(8, "Parts of the text.")
    part_len: int = option(128, "Tokens of each part; all but the first are scored.", 2)
    output_len: int = option(32, "Tokens of each answer: each part's continuation, and those of timed runs.")
    num_prompts: int = option(8, "Requests of a timed run.")
    input_len: int = option(48, "Tokens of each of their prompts.")
    rounds: int = option(3, "Timed runs of each engine, which take turns; the figures are medians over them.")


@dataclass
class Seen:
    """What one engine made of the text.

    Attributes:
        logprobs: ln p of every scored token; best: the most likely token at each of these positions.
        answers: token ids of the greedy answers.
    """

    logprobs: list[float]
    best: list[int]
    answers: list[list[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(-statistics.fmean(self.logprobs))


def measure(config: EngineConfig, work: Workload) -> dict[str, Any]:
    """Runs the workload.

    Args:
        config: what the engines share; they differ in dtype and quantization alone.
        work: the workload.

    Returns:
        the report (see bench.report): a row for float32 and for each of `weights`, without an adapter, then with one.

    Raises:
        ConfigError, UserError: the engine cannot serve this, or the model has no tokenizer.
        RuntimeError: something was compiled after warm-up, so the figures mean nothing.
    """
    unknown = next((name for name in work.weights if name not in WEIGHTS), None)
    if unknown is not None:
        raise ConfigError(f"unknown weights {unknown!r}: give some of {', '.join(WEIGHTS)}", reason="bad_value",
                          param="weights")  # fmt: skip
    if work.adapter and not config.enable_lora:
        raise ConfigError("enable_lora is false: leave --adapter out", reason="conflicting_keys", param="adapter")
    check_length(config, max(work.input_len, work.part_len), work.output_len)
    # Programs for more adapters than one would take longer to compile than all else takes.
    changes: dict[str, Any] = {"enable_lora": work.adapter}
    if work.adapter:
        changes["max_rank_rows"] = rank_rows_of(1, config.max_lora_rank, config.max_lora_rank)
    engines = {
        name: build_engine(config, texts=True, **changes, **WEIGHTS[name])
        for name in dict.fromkeys(("float32", *work.weights))
    }
    for engine in engines.values():
        engine.warm_up()
    rows: list[dict[str, Any]] = []
    with _adapters([*engines.values()], config, work) as loras:
        for lora in loras:
            seen = {name: look(engine, lora, work) for name, engine in engines.items()}
            speeds = _speeds(engines, lora, work)
            rows += [_row(name, engine, lora, seen, speeds) for name, engine in engines.items()]
    for engine in engines.values():
        check_sound(engine)
    settings = settings_of(engines["float32"], {**dataclasses.asdict(work), "weights": [*engines]})
    return make_report("quality", settings, rows)


def look(engine: LLMEngine, lora: LoRARequest | None, work: Workload) -> Seen:
    """Scores the parts of the text and continues them."""
    tokenizer = engine.tokenizer_for(lora)
    assert tokenizer is not None
    # Each continuation is of one batch with the scoring, so that the parts are read once.
    params = SamplingParams(
        temperature=0, max_tokens=work.output_len, ignore_eos=True, detokenize=False, prompt_logprobs=1
    )
    parts = text_pieces(tokenizer, work.num_parts, work.part_len)
    answers = answer(engine, [Request(part, params, lora) for part in parts])
    logprobs, best = [], []
    for part, output in zip(parts, answers.outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(part[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            logprobs.append(entry[token].logprob)
            best.append(next(other for other, value in entry.items() if value.rank == 1))
    return Seen(logprobs, best, answers.token_ids)


def same_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True)))


def _speeds(engines: dict[str, LLMEngine], lora: LoRARequest | None, work: Workload) -> dict[str, list[float]]:
    """Tokens per second of each round of each engine, after an untimed run of each."""
    ids = (f"speed-{n}" for n in itertools.count())
    prompts = random_prompts(engines["float32"], work.num_prompts, work.input_len)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(work.rounds + 1):
        for name in engines if number % 2 else reversed(engines):
            run = run_once(engines[name], prompts, [lora] * len(prompts), work.output_len, ids)
            if number:
                speeds[name].append(run.tokens_per_second)
                logging.info("round %d of %d: %s %.1f tokens/s", number, work.rounds, name, run.tokens_per_second)
    return speeds


@contextmanager
def _adapters(engines: list[LLMEngine], config: EngineConfig, work: Workload) -> Iterator[list[LoRARequest | None]]:
    """No adapter, and where one is asked for one that all engines have loaded."""
    with tempfile.TemporaryDirectory(prefix="multilora_bench_") as folder:
        name, path = next(iter(config.lora_modules.items()), ("random", f"{folder}/random"))
        loras: list[LoRARequest | None] = [None]
        if work.adapter:
            if not config.lora_modules:
                rank = min(16, config.max_lora_rank)
                save_peft(random_adapter_weights(engines[0].model_config, rank, seed=config.seed), path)
            for engine in engines:
                engine.add_lora(LoRARequest(name, 1, path))
            loras.append(LoRARequest(name, 1, path))
        yield loras


def _row(
    name: str, engine: LLMEngine, lora: LoRARequest | None, seen: dict[str, Seen], speeds: dict[str, list[float]]
) -> dict[str, Any]:
    """A row of the report."""
    mine, reference = seen[name], seen["float32"]
    prefixes = [same_prefix(*pair) for pair in zip(mine.answers, reference.answers, strict=True)]
    same = [a == b for a, b in zip(mine.best, reference.best, strict=True)]
    return {
        "weights": name,
        "dtype": engine.geometry.dtype,
        "adapter": "-" if lora is None else lora.lora_name,
        "weight_mib": weight_bytes(engine.model_config, engine.geometry, engine.runner.spec.quantization) / 2**20,
        "scored_tokens": len(mine.logprobs),
        "perplexity": mine.perplexity,
        "perplexity_ratio": mine.perplexity / reference.perplexity,
        "same_next_token": statistics.fmean(same),
        "greedy_tokens": sum(map(len, mine.answers)),
        "same_prefix": statistics.fmean(prefixes),
        "same_prefix_by_prompt": prefixes,
        "tokens_per_second": statistics.median(speeds[name]),
        "ratio_to_float32": statistics.median(a / b for a, b in zip(speeds[name], speeds["float32"], strict=True)),
        "tokens_per_second_by_round": speeds[name],
    }


def show(report: dict[str, Any]) -> str:
    """The table, and how many tokens stand behind its figures."""
    config, row = report["config"], report["rows"][0]
    parts, length, rounds = config["num_parts"], config["output_len"], config["rounds"]
    return "\n".join([
        table(report["rows"], COLUMNS),
        f"perplexity, same_next_token: {row['scored_tokens']} tokens, in {parts} parts of a text",
        f"same_prefix: {row['greedy_tokens']} tokens, in {parts} greedy answers; {length} if all are the same",
        f"tokens_per_second: {rounds} x {config['num_prompts'] * length} tokens, the median of {rounds} rounds",
    ])  # fmt: skip


define_flags, main = command(Workload, measure, show, num_seqs=DEFAULT_NUM_SEQS)
"""What flags.run_command calls; see bench.workload."""
