"""`bench quality`: what quantisation of the base costs and saves, against float32 on the same prompts.

Two engines in one process answer the same requests: the reference in float32, the other quantised. Both score a fixed
text, token by token, and continue the starts of its parts greedily; then both run a timed batch in turn.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags as absl_flags
from absl import logging

from multilora_jax import flags
from multilora_jax.bench.floors import weight_bytes
from multilora_jax.bench.report import check_writable, make_report, table, write_json
from multilora_jax.bench.runs import (
    check_compilations,
    check_length,
    define_run_flags,
    random_prompts,
    run_once,
    settings_of,
)
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError
from multilora_jax.lora.synthetic import random_adapter_weights, save_peft
from multilora_jax.request import LoRARequest, RequestOutput, SamplingParams

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

COLUMNS = {
    "weights": "", "dtype": "", "adapter": "", "weight_mib": ".1f", "perplexity": ".3f", "perplexity_ratio": ".4f",
    "same_next_token": ".4f", "same_prefix": ".1f", "tokens_per_second": ".1f", "ratio_to_float32": ".3f",
}  # fmt: skip

TEXT = Path(__file__).parent / "data" / "quality_text.txt"
"""Some 2,600 tokens of prose, dialogue, explanation and code, written for this command."""

DEFAULT_NUM_SEQS = 8

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench quality --config configs/smollm2.yaml"
ABOUT = """Quality, size and speed of the quantised base against float32, alone and under one adapter (the first of the
configuration, or a random one of rank 16). For each: perplexity of a fixed text in parts of --part_len tokens and its
ratio to float32's; the share of the text's positions at which both find the same token most likely; how many tokens of
greedy answers of --output_len are the same before the first difference, on average over --num_prompts pieces of
the text; bytes of the weights; tokens per second of random prompts, the two engines taking turns.

quantization is int8 here unless the configuration names another; max_num_seqs is 8 unless --max_num_seqs is given.
Prints a table, writes JSON where --json says."""


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        part_len: tokens of each part of the text.
        num_prompts: greedy answers, and requests of one timed run.
        input_len: tokens of each prompt, a part of the text or random.
        output_len: tokens of each answer.
        rounds: timed runs of each engine.
    """

    part_len: int = 256
    num_prompts: int = 16
    input_len: int = 48
    output_len: int = 32
    rounds: int = 3


@dataclass
class Seen:
    """What one engine made of the text.

    Attributes:
        logprobs: ln p of every scored token; best: the most likely token at each of these positions.
        answers: token ids of the greedy answers.
    """

    logprobs: list[float]
    best: list[int]
    answers: list[tuple[int, ...]]

    @property
    def perplexity(self) -> float:
        return math.exp(-statistics.fmean(self.logprobs))


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags: those of the configuration and its own."""
    flags.define_flags(flag_values)
    defaults = dataclasses.asdict(Workload())
    absl_flags.DEFINE_integer(
        "part_len", defaults.pop("part_len"), "Tokens of each part of the text.", lower_bound=2, flag_values=flag_values
    )
    define_run_flags(flag_values, **defaults)


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    f = flag_values
    if f.json is not None:
        check_writable(f.json)
    config = flags.config_from_flags(f)
    num_seqs = config.max_num_seqs if f["max_num_seqs"].present else DEFAULT_NUM_SEQS
    config = dataclasses.replace(config, max_num_seqs=num_seqs, quantization=config.quantization or "int8")
    report = measure(config, Workload(f.part_len, f.num_prompts, f.input_len, f.output_len, f.rounds))
    print(table(report["rows"], COLUMNS))
    if f.json is not None:
        write_json(f.json, report)
    return 0


def measure(config: EngineConfig, work: Workload) -> dict[str, Any]:
    """Runs the workload; returns the report (see bench.report), two rows without an adapter, then two with one.

    Args:
        config: of the quantised engine; the reference differs in dtype and quantization alone.

    Raises:
        ConfigError, UserError: the engine cannot serve this, or the model has no tokenizer.
        RuntimeError: something was compiled after warm-up, so the figures mean nothing.
    """
    check_length(config, work.input_len, work.output_len)
    check_length(config, work.part_len, 1)
    engines = [
        LLMEngine(dataclasses.replace(config, dtype="float32", quantization=None, lora_modules={}, adapter_roots=())),
        LLMEngine(dataclasses.replace(config, lora_modules={}, adapter_roots=())),
    ]
    for engine in engines:
        engine.warm_up()
    rows: list[dict[str, Any]] = []
    with _adapters(engines, config) as loras:
        for lora in loras:
            seen = [look(engine, lora, work) for engine in engines]
            speeds = _speeds(engines, lora, work)
            rows += [
                _row(engine, lora, mine, seen[0], speed, speeds[0])
                for engine, mine, speed in zip(engines, seen, speeds, strict=True)
            ]
    for engine in engines:
        check_compilations(engine)
    return make_report("quality", settings_of(engines[1], dataclasses.asdict(work)), rows)


def look(engine: LLMEngine, lora: LoRARequest | None, work: Workload) -> Seen:
    """Scores the text and continues its parts.

    Raises:
        ConfigError: the model has no tokenizer.
    """
    tokenizer = engine.tokenizer_for(lora)
    if tokenizer is None:
        raise ConfigError("the model has no tokenizer, which the text needs: set tokenizer", reason="missing_key",
                          param="tokenizer")  # fmt: skip
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    parts = [part for first in range(0, len(ids), work.part_len) if len(part := ids[first : first + work.part_len]) > 1]
    scored = _answers(engine, parts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), lora)
    logprobs, best = [], []
    for part, output in zip(parts, scored, strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(part[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            logprobs.append(entry[token].logprob)
            best.append(next(other for other, value in entry.items() if value.rank == 1))
    stride = max(1, (len(ids) - work.input_len) // work.num_prompts)
    starts = [ids[n * stride : n * stride + work.input_len] for n in range(work.num_prompts)]
    greedy = SamplingParams(temperature=0, max_tokens=work.output_len, ignore_eos=True, detokenize=False)
    answers = [tuple(output.outputs[0].token_ids) for output in _answers(engine, starts, greedy, lora)]
    return Seen(logprobs, best, answers)


def same_prefix(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens before the first difference."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True)))


def _answers(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams, lora: LoRARequest | None
) -> list[RequestOutput]:
    """The outputs of all prompts in their order."""
    for number, prompt in enumerate(prompts):
        engine.add_request(f"quality-{number}", prompt, params, lora)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.finished:
                done[output.request_id] = output
    return [done[f"quality-{number}"] for number in range(len(prompts))]


def _speeds(engines: list[LLMEngine], lora: LoRARequest | None, work: Workload) -> list[list[float]]:
    """Tokens per second of each round of each engine, after an untimed run of each."""
    ids = (f"speed-{n}" for n in itertools.count())
    prompts = random_prompts(engines[0], work.num_prompts, work.input_len)
    speeds: list[list[float]] = [[] for _ in engines]
    for number in range(work.rounds + 1):
        order = list(enumerate(engines))
        for which, engine in order if number % 2 else reversed(order):
            run = run_once(engine, prompts, [lora] * len(prompts), work.output_len, ids)
            if number:
                speeds[which].append(run.tokens_per_second)
                logging.info("round %d of %d: %.1f tokens/s", number, work.rounds, run.tokens_per_second)
    return speeds


@contextmanager
def _adapters(engines: list[LLMEngine], config: EngineConfig) -> Iterator[list[LoRARequest | None]]:
    """No adapter, and where adapters are served one that both engines have loaded."""
    with tempfile.TemporaryDirectory(prefix="multilora_bench_") as folder:
        name, path = next(iter(config.lora_modules.items()), ("random", f"{folder}/random"))
        loras: list[LoRARequest | None] = [None]
        if config.enable_lora:
            if not config.lora_modules:
                rank = min(16, config.max_lora_rank)
                save_peft(random_adapter_weights(engines[0].model_config, rank, seed=config.seed), path)
            for engine in engines:
                engine.add_lora(LoRARequest(name, 1, path))
            loras.append(LoRARequest(name, 1, path))
        yield loras


def _row(
    engine: LLMEngine, lora: LoRARequest | None, mine: Seen, reference: Seen, speeds: list[float], base: list[float]
) -> dict[str, Any]:
    """A row of the report."""
    prefixes = [same_prefix(*pair) for pair in zip(mine.answers, reference.answers, strict=True)]
    same = [a == b for a, b in zip(mine.best, reference.best, strict=True)]
    return {
        "weights": engine.config.quantization or engine.geometry.dtype,
        "dtype": engine.geometry.dtype,
        "adapter": "-" if lora is None else lora.lora_name,
        "weight_mib": weight_bytes(engine.model_config, engine.geometry, engine.config.quantization) / 2**20,
        "scored_tokens": len(mine.logprobs),
        "perplexity": mine.perplexity,
        "perplexity_ratio": mine.perplexity / reference.perplexity,
        "same_next_token": statistics.fmean(same),
        "same_prefix": statistics.fmean(prefixes),
        "same_prefix_by_prompt": prefixes,
        "tokens_per_second": statistics.median(speeds),
        "ratio_to_float32": statistics.median(a / b for a, b in zip(speeds, base, strict=True)),
        "tokens_per_second_by_round": speeds,
    }
