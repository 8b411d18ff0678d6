"""`bench lookup`: prompt lookup decoding, against the same engine without it, on answers that quote and on prose.

A prompt of `extraction` lists records of made-up people and begins a second list that names some fields of each; the
model goes on. One of `prose` is a piece of a text; what can be guessed of its continuation is what the model repeats.
Both ways answer the same prompts in turn, greedily, and must give the same tokens.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from absl import logging

from multilora_jax.bench.answers import Answers, Request, answer, greedy
from multilora_jax.bench.report import make_report, table
from multilora_jax.bench.runs import build_engine, check_length, check_sound, settings_of
from multilora_jax.bench.texts import text_pieces
from multilora_jax.bench.workload import command, option
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError

COLUMNS = {
    "task": "", "lookup": "", "prompt_tokens": "d", "new_tokens": "d", "tokens_per_second": ".1f",
    "ratio_to_plain": ".2f", "decode_tokens_per_second": ".1f", "decode_ratio_to_plain": ".2f",
    "tokens_per_step": ".2f", "accepted_share": ".2f",
}  # fmt: skip

AIM = 1.5
"""What the speed of an extraction shall be at least, in that without lookup."""

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench lookup --config configs/smollm2.yaml --num_prompts 8 --plot out.png"
ABOUT = """Speed with prompt lookup and without, of answers that quote their prompts (`extraction`) and of texts that go
on freely (`prose`), which quote as much as the model repeats itself; the texts must be identical. For each task: tokens
of all its prompts and of all its answers; new tokens per second of the whole run, prompts included, and of its steps of
decoding alone, each with its ratio to the run without lookup of the same round; tokens that such a step gave; and the
share of guesses that the model chose.

How much a prompt weighs is set by --num_records (extraction) or --input_len (prose) against --output_len. The base
alone is served. Prints a table; --json and --plot write files."""

_FIRST = ("Ada", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leon")
_LAST = ("Brown", "Carter", "Diaz", "Evans", "Fischer", "Garcia", "Hansen", "Ivanov", "Jensen", "Keller", "Lopez")
_CITIES = ("Oslo", "Lisbon", "Vienna", "Dublin", "Prague", "Athens", "Madrid", "Warsaw")


@dataclass(frozen=True)
class Workload:
    """What is measured."""

    tasks: tuple[str, ...] = option(("extraction", "prose"), "What is answered, of extraction and prose.")
    num_prompts: int = option(4, "Prompts of each task.")
    at_once: int = option(1, "Of them under way together.")
    num_records: int = option(10, "Records in each prompt of extraction, two of which it extracts itself.", 3)
    input_len: int = option(64, "Tokens of each prompt of prose.")
    output_len: int = option(96, "Tokens of each answer.", 2)
    lookup_tokens: int = option(8, "Tokens that a step may guess.")
    rounds: int = option(3, "Timed runs of each way, which take turns; the figures are medians over them.")


def extraction(rng: np.random.Generator, num_records: int) -> tuple[str, str]:
    """A text, and how it goes on: by quoting itself."""
    records, extracted = [], []
    for number in range(1, num_records + 1):
        first, last, city = (str(rng.choice(names)) for names in (_FIRST, _LAST, _CITIES))
        order, mail = int(rng.integers(10000, 99999)), f"{first}.{last}@example.org".lower()
        records.append(f"{number}. {first} {last} of {city} ordered item {order} and can be reached at {mail}.")
        extracted.append(f"{number}. Name: {first} {last}; City: {city}; Item: {order}; E-mail: {mail}")
    begun = "\n".join(["Records:", *records, "", "The same as a list of fields:", *extracted[:2], "3. Name:"])
    return begun, "\n".join(extracted[2:]).removeprefix("3. Name:")


def _extraction_prompts(engine: LLMEngine, work: Workload) -> list[list[int]]:
    rng = np.random.default_rng(engine.config.seed)
    assert engine.tokenizer is not None
    texts = [extraction(rng, work.num_records) for _ in range(work.num_prompts)]
    quoted = min(len(engine.tokenizer.encode(rest)) for _, rest in texts)
    if quoted < work.output_len:
        logging.warning(
            "answers of %d tokens go on after the %d that there are to extract: raise --num_records or lower "
            "--output_len", work.output_len, quoted,
        )  # fmt: skip
    return [engine.tokenizer.encode(text) for text, _ in texts]


def _prose_prompts(engine: LLMEngine, work: Workload) -> list[list[int]]:
    assert engine.tokenizer is not None
    return text_pieces(engine.tokenizer, work.num_prompts, work.input_len)


TASKS: dict[str, Callable[[LLMEngine, Workload], list[list[int]]]] = {
    "extraction": _extraction_prompts, "prose": _prose_prompts,
}  # fmt: skip


def measure(config: EngineConfig, work: Workload) -> dict[str, Any]:
    """Runs the workload; returns the report (see bench.report).

    Raises:
        ConfigError, UserError: the engine cannot serve this.
        RuntimeError: the texts differ, or something was compiled after warm-up, so that the figures mean nothing.
    """
    unknown = next((task for task in work.tasks if task not in TASKS), None)
    if unknown is not None or not work.tasks:
        raise ConfigError(f"unknown task {unknown or ''!r}: give some of {', '.join(TASKS)}", reason="bad_value",
                          param="tasks")  # fmt: skip
    engine = build_engine(config, texts=True, enable_lora=False, enable_prefix_caching=False)
    prompts = {task: TASKS[task](engine, work) for task in work.tasks}
    longest = max(len(prompt) for its in prompts.values() for prompt in its)
    check_length(dataclasses.replace(config, max_model_len=engine.max_model_len), longest, work.output_len)
    engine.warm_up()
    rows = [row for task in work.tasks for row in _rows(engine, task, prompts[task], work)]
    check_sound(engine)
    return make_report("lookup", settings_of(engine, {**dataclasses.asdict(work), "tasks": list(work.tasks)}), rows)


@dataclass(frozen=True)
class _Run:
    """Answers of one way, with the tokens that were proposed and accepted for them."""

    answers: Answers
    proposed: int
    accepted: int

    @property
    def speeds(self) -> tuple[float, float | None]:
        """Tokens per second of the whole run, and of its steps of decoding alone, None where it had none."""
        answers, decode_s = self.answers, sum(self.answers.decode_s)
        return answers.new_tokens / answers.seconds, answers.decode_tokens / decode_s if decode_s else None


def _rows(engine: LLMEngine, task: str, prompts: list[list[int]], work: Workload) -> list[dict[str, Any]]:
    """An untimed run of each way, then the timed ones in turn; the rows of both."""
    runs: dict[int, list[_Run]] = {0: [], work.lookup_tokens: []}
    for number in range(work.rounds + 1):
        ways = [*runs] if number % 2 else [*reversed(runs)]
        mine = {lookup: _run(engine, prompts, work, lookup) for lookup in ways}
        if mine[0].answers.token_ids != mine[work.lookup_tokens].answers.token_ids:
            raise RuntimeError(f"{task}: the texts differ with prompt lookup and without: no figure is valid")
        if number:
            for lookup, run in mine.items():
                runs[lookup].append(run)
            ratio = mine[0].answers.seconds / mine[work.lookup_tokens].answers.seconds
            logging.info("%s, round %d of %d: %.2f", task, number, work.rounds, ratio)
    return [_row(task, lookup, runs[lookup], runs[0]) for lookup in runs]


def _run(engine: LLMEngine, prompts: list[list[int]], work: Workload, lookup: int) -> _Run:
    params, before = greedy(work.output_len, prompt_lookup_tokens=lookup), engine.stats()
    answers = answer(engine, [Request(prompt, params) for prompt in prompts], at_once=work.at_once)
    after = engine.stats()
    return _Run(
        answers, after.proposed_tokens - before.proposed_tokens, after.accepted_tokens - before.accepted_tokens
    )  # fmt: skip


def _row(task: str, lookup: int, runs: list[_Run], plain: list[_Run]) -> dict[str, Any]:
    """Medians over rounds; ratios are to the plain run of the same round."""
    whole, decode = zip(*(run.speeds for run in runs), strict=True)
    plain_whole, plain_decode = zip(*(run.speeds for run in plain), strict=True)
    answers = [run.answers for run in runs]
    ratios = [mine / its for mine, its in zip(whole, plain_whole, strict=True)]
    decoded = None not in decode + plain_decode
    decode_ratios = [mine / its for mine, its in zip(decode, plain_decode, strict=True)] if decoded else None
    return {
        "task": task,
        "lookup": str(lookup) if lookup else "off",
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in answers[0].outputs),
        "new_tokens": answers[0].new_tokens,
        "tokens_per_second": statistics.median(whole),
        "ratio_to_plain": statistics.median(ratios),
        "decode_tokens_per_second": statistics.median(decode) if decoded else None,
        "decode_ratio_to_plain": statistics.median(decode_ratios) if decode_ratios else None,
        "tokens_per_step": answers[0].decode_tokens / len(answers[0].decode_s) if decoded else None,
        "accepted_share": sum(run.accepted for run in runs) / max(1, sum(run.proposed for run in runs)),
        "aim_ratio": AIM if lookup and task == "extraction" else None,
        "tokens_per_second_by_round": whole,
        "ratio_to_plain_by_round": ratios,
        "decode_ratio_to_plain_by_round": decode_ratios,
    }


define_flags, main = command(Workload, measure, lambda report: table(report["rows"], COLUMNS))
"""What flags.run_command calls; see bench.workload."""
