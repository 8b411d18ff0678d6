"""`bench lookup`: prompt lookup decoding on an extraction task, against the same engine without it.

Each prompt lists records of made-up people and begins a second list that names some fields of each; the model goes on.
Both ways answer the same prompts in turn, greedily, and must give the same tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from absl import flags as absl_flags
from absl import logging

from multilora_jax import flags
from multilora_jax.bench.report import check_writable, make_report, table, write_json
from multilora_jax.bench.runs import check_compilations, check_length, settings_of
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError
from multilora_jax.request import SamplingParams

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

COLUMNS = {
    "lookup": "", "tokens_per_second": ".1f", "ratio_to_plain": ".2f", "accepted_share": ".2f",
    "tokens_per_step": ".2f",
}  # fmt: skip

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench lookup --config configs/smollm2.yaml --num_prompts 8"
ABOUT = """Tokens per second of an extraction task with prompt lookup and without; the texts must be identical.

Prints a table, writes JSON where --json says."""

_FIRST = ("Ada", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leon")
_LAST = ("Brown", "Carter", "Diaz", "Evans", "Fischer", "Garcia", "Hansen", "Ivanov", "Jensen", "Keller", "Lopez")
_CITIES = ("Oslo", "Lisbon", "Vienna", "Dublin", "Prague", "Athens", "Madrid", "Warsaw")


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        num_prompts: texts to extract from; at_once: of them under way together; num_records: people in each.
        output_len: tokens of each answer.
        lookup_tokens: see EngineConfig.prompt_lookup_tokens.
        rounds: timed rounds of both ways.
    """

    num_prompts: int = 8
    at_once: int = 1
    num_records: int = 10
    output_len: int = 96
    lookup_tokens: int = 8
    rounds: int = 3


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags: those of the configuration and its own."""
    flags.define_flags(flag_values)
    absl_flags.DEFINE_string("json", None, "File to write the figures to.", flag_values=flag_values)
    for name, default, doc in (
        ("num_prompts", 8, "Texts to extract from."),
        ("at_once", 1, "Of them under way together."),
        ("num_records", 10, "Records of each text."),
        ("output_len", 96, "Tokens of each answer."),
        ("lookup_tokens", 8, "Tokens that a step may guess."),
        ("rounds", 3, "Timed runs of each way, which take turns; the figures are medians over them."),
    ):
        absl_flags.DEFINE_integer(name, default, doc, lower_bound=1, flag_values=flag_values)


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    f = flag_values
    if f.json is not None:
        check_writable(f.json)
    work = Workload(f.num_prompts, f.at_once, f.num_records, f.output_len, f.lookup_tokens, f.rounds)
    report = measure(flags.config_from_flags(f), work)
    print(table(report["rows"], COLUMNS))
    if f.json is not None:
        write_json(f.json, report)
    return 0


def extraction_prompt(rng: np.random.Generator, num_records: int) -> str:
    """A text whose continuation quotes it."""
    records, extracted = [], []
    for number in range(1, num_records + 1):
        first, last, city = (str(rng.choice(names)) for names in (_FIRST, _LAST, _CITIES))
        order, mail = int(rng.integers(10000, 99999)), f"{first}.{last}@example.org".lower()
        records.append(f"{number}. {first} {last} of {city} ordered item {order} and can be reached at {mail}.")
        extracted.append(f"{number}. Name: {first} {last}; City: {city}; Item: {order}; E-mail: {mail}")
    return "\n".join(["Records:", *records, "", "The same as a list of fields:", *extracted[:2], "3. Name:"])


def measure(config: EngineConfig, work: Workload) -> dict[str, Any]:
    """Runs the workload; returns the report (see bench.report).

    Raises:
        ConfigError, UserError: the engine cannot serve this.
        RuntimeError: the texts differ, or something was compiled after warm-up, so that the figures mean nothing.
    """
    config = dataclasses.replace(config, enable_prefix_caching=False, lora_modules={}, adapter_roots=())
    engine = LLMEngine(config)
    if engine.tokenizer is None:
        raise ConfigError("the model has no tokenizer: texts cannot be extracted from", reason="no_tokenizer")
    rng = np.random.default_rng(config.seed)
    prompts = [engine.tokenizer.encode(extraction_prompt(rng, work.num_records)) for _ in range(work.num_prompts)]
    check_length(
        dataclasses.replace(config, max_model_len=engine.max_model_len), max(map(len, prompts)), work.output_len
    )
    engine.warm_up()
    ids = (f"lookup-{n}" for n in itertools.count())
    runs: dict[int, list[_Run]] = {0: [], work.lookup_tokens: []}
    for number in range(work.rounds + 1):
        for lookup in (0, work.lookup_tokens) if number % 2 else (work.lookup_tokens, 0):
            run = _run(engine, prompts, work, lookup, ids)
            if number:
                runs[lookup].append(run)
        if number:
            plain, guessed = runs[0][-1], runs[work.lookup_tokens][-1]
            if plain.tokens != guessed.tokens:
                raise RuntimeError("the texts differ with prompt lookup and without: these figures are not valid")
            logging.info("round %d of %d: %.2f", number, work.rounds, plain.seconds / guessed.seconds)
    check_compilations(engine)
    engine.check_integrity()
    rows = [_row(lookup, mine, runs[0]) for lookup, mine in runs.items()]
    return make_report("lookup", settings_of(engine, dataclasses.asdict(work)), rows)


@dataclass(frozen=True)
class _Run:
    seconds: float
    tokens: list[list[int]]
    steps: int
    proposed: int
    accepted: int


def _run(engine: LLMEngine, prompts: list[list[int]], work: Workload, lookup: int, ids: Iterator[str]) -> _Run:
    """Answers all prompts, a new one whenever one ends."""
    params = SamplingParams(
        temperature=0, max_tokens=work.output_len, ignore_eos=True, detokenize=False, prompt_lookup_tokens=lookup
    )
    waiting, live, done = deque(prompts), dict[str, int](), [list[int]() for _ in prompts]
    before, start = engine.stats(), time.perf_counter()
    while waiting or live:
        while waiting and len(live) < work.at_once:
            request_id = next(ids)
            live[request_id] = len(prompts) - len(waiting)
            engine.add_request(request_id, waiting.popleft(), params)
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.finished:
                done[live.pop(output.request_id)] = list(output.outputs[0].token_ids)
    seconds, after = time.perf_counter() - start, engine.stats()
    return _Run(
        seconds, done, after.steps - before.steps, after.proposed_tokens - before.proposed_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )  # fmt: skip


def _row(lookup: int, runs: list[_Run], plain: list[_Run]) -> dict[str, Any]:
    new_tokens = sum(map(len, runs[0].tokens))
    return {
        "lookup": str(lookup) if lookup else "off",
        "tokens_per_second": statistics.median(new_tokens / run.seconds for run in runs),
        "ratio_to_plain": statistics.median(p.seconds / run.seconds for p, run in zip(plain, runs, strict=True)),
        "accepted_share": sum(run.accepted for run in runs) / max(1, sum(run.proposed for run in runs)),
        "tokens_per_step": new_tokens / runs[0].steps,
    }
