"""`bench structured`: how many answers follow their schema, and what a step with such answers costs.

Three cases take turns in one engine on the same prompts: `plain` asks for nothing, `structured` gives every answer a
schema, `half` every other one. Answers are as long in one case as in the others, so that every step of a case has the
same rows as that step of the others, and only steps of decoding alone are timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

from absl import logging

from multilora_jax.bench.answers import Answers, Request, answer
from multilora_jax.bench.report import make_report, table
from multilora_jax.bench.runs import build_engine, check_sound, settings_of
from multilora_jax.bench.workload import command, option
from multilora_jax.config import EngineConfig
from multilora_jax.request import FinishReason, RequestOutput, SamplingParams

COLUMNS = {
    "case": "", "answers": "d", "structured_answers": "d", "parsed_share": ".3f", "new_tokens": "d",
    "ms_per_step": ".2f", "ratio_to_plain": ".3f", "neighbour_ratio": ".3f",
}  # fmt: skip

CASES = ("plain", "structured", "half")
AIM = 1.15
"""What a step in which all rows have a schema shall take at most, in those of the same batch without."""

DEFAULT_NUM_SEQS = 8
MAX_TOKENS = 256

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench structured --config configs/smollm2.yaml --num-answers 200"
ABOUT = """Answers that must follow a JSON schema: the share that parses, and the time of a decoding step in which all
rows or every other row has a schema, to that of the same batch without; `neighbour_ratio` is the time between tokens
of the answers that ask for nothing beside those that do.

max_num_seqs is 8 here, whatever the file says, unless --max_num_seqs gives another; the base alone is served. Prints a
table; --json and --plot write files."""

_NAME = {"type": "string", "minLength": 1, "maxLength": 24}


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": (
        "Describe a person as JSON with name, age and city.\n",
        _object(name=_NAME, age={"type": "integer", "minimum": 0, "maximum": 120}, city=_NAME),
    ),
    "review": (
        "Rate the book in JSON: stars, mood and reasons.\n",
        _object(
            stars={"type": "integer", "minimum": 1, "maximum": 5},
            mood={"enum": ["good", "bad", "mixed"]},
            reasons={"type": "array", "items": _NAME, "minItems": 1, "maxItems": 3},
        ),
    ),
    "order": (
        "Write an order as JSON with its items and whether it was paid.\n",
        _object(
            id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            items={
                "type": "array", "minItems": 1, "maxItems": 2,
                "items": _object(sku=_NAME, count={"type": "integer", "minimum": 1, "maximum": 99}),
            },
            paid={"type": "boolean"},
        ),
    ),
}  # fmt: skip
"""Name to prompt and schema; each bounds the length of an answer."""


@dataclass(frozen=True)
class Workload:
    """What is measured; the seed of each answer is its number."""

    num_answers: int = option(200, "Answers with a schema that are checked.")
    num_timed: int = option(32, "Of those, the first so many are timed, in runs of their own.")
    temperature: float = option(1.0, "Of all answers.", 0)
    rounds: int = option(3, "Timed runs of each case, which take turns; the figures are medians over them.")


def measure(config: EngineConfig, work: Workload) -> dict[str, Any]:
    """Runs the workload; returns the report (see bench.report).

    Raises:
        ConfigError, UserError: the engine cannot serve this.
        RuntimeError: something was compiled after warm-up, so the figures mean nothing.
    """
    work = dataclasses.replace(work, num_timed=min(work.num_timed, work.num_answers))
    engine = build_engine(config, texts=True, enable_lora=False)
    engine.warm_up()
    names = [name for name, _ in zip(itertools.cycle(SCHEMAS), range(work.num_answers), strict=False)]
    checked = answer(engine, [_request(work, n, name) for n, name in enumerate(names)])
    parsed = [_parses(output, SCHEMAS[name][1]) for output, name in zip(checked.outputs, names, strict=True)]
    logging.info("%d of %d answers parse", sum(parsed), work.num_answers)
    lengths = [len(tokens) for tokens in checked.token_ids[: work.num_timed]]
    runs: dict[str, list[Answers]] = {case: [] for case in CASES}
    for number in range(work.rounds + 1):
        shift = number % len(CASES)
        for case in CASES[shift:] + CASES[:shift]:
            run = answer(engine, [
                _request(work, n, names[n], length, structured=_is_structured(case, n))
                for n, length in enumerate(lengths)
            ])  # fmt: skip
            if number:
                runs[case].append(run)
            step = f"round {number} of {work.rounds}" if number else "warm run"
            logging.info("%s: %s %.2f ms per step", step, case, 1e3 * _step_s(run))
    check_sound(engine)
    rows = [_row(case, runs, parsed, names, lengths) for case in CASES]
    return make_report("structured", settings_of(engine, dataclasses.asdict(work)), rows)


def _is_structured(case: str, number: int) -> bool:
    return case == "structured" or (case == "half" and number % 2 == 0)


def _request(work: Workload, number: int, name: str, length: int | None = None, *, structured: bool = True) -> Request:
    """The prompt of a schema; without the schema the answer has exactly `length` tokens, as the one with it had."""
    prompt, schema = SCHEMAS[name]
    options: dict[str, Any] = {"temperature": work.temperature, "seed": number, "max_tokens": length or MAX_TOKENS}
    options |= {"structured_outputs": {"json": schema}} if structured else {"ignore_eos": True}
    return Request(prompt, SamplingParams(**options))


def _step_s(run: Answers) -> float:
    """Of decoding alone; the median, which other work on the machine moves least."""
    return statistics.median(run.decode_s)


def _token_gap_s(run: Answers, numbers: range) -> float:
    """Mean time between two tokens of these answers."""
    gaps, tokens = 0.0, 0
    for number in numbers:
        times = run.outputs[number].metrics
        assert times is not None
        assert times.first_token_time is not None
        assert times.finished_time is not None
        gaps += times.finished_time - times.first_token_time
        tokens += len(run.token_ids[number]) - 1
    return gaps / max(tokens, 1)


def _parses(output: RequestOutput, schema: dict[str, Any]) -> bool:
    """Whether an answer is complete, is JSON and has the fields that its schema asks for."""
    completion = output.outputs[0]
    try:
        value = json.loads(completion.text)
    except ValueError:
        return False
    return completion.finish_reason == FinishReason.STOP.value and list(value) == schema["required"]


def _row(
    case: str, runs: dict[str, list[Answers]], parsed: list[bool], names: list[str], lengths: list[int]
) -> dict[str, Any]:
    """A row of the report: medians over rounds, ratios to the plain run of the same round."""
    count = len(lengths)
    mine, plain = runs[case], runs["plain"]
    ratios = [_step_s(run) / _step_s(its) for run, its in zip(mine, plain, strict=True)]
    neighbours = range(1, count, 2) if case == "half" else range(0)
    beside = [_token_gap_s(run, neighbours) / _token_gap_s(its, neighbours)
              for run, its in zip(mine, plain, strict=True) if neighbours]  # fmt: skip
    by_schema = Counter(names), Counter(name for name, good in zip(names, parsed, strict=True) if good)
    structured = case == "structured"
    return {
        "case": case,
        "answers": count,
        "structured_answers": sum(_is_structured(case, n) for n in range(count)),
        "parsed_share": sum(parsed) / len(parsed) if structured else None,
        "new_tokens": sum(lengths),
        "ms_per_step": 1e3 * statistics.median(map(_step_s, mine)),
        "ratio_to_plain": statistics.median(ratios),
        "neighbour_ratio": statistics.median(beside) if beside else None,
        "aim_ratio": AIM if structured else None,
        "ratio_to_plain_by_round": ratios,
        "neighbour_ratio_by_round": beside or None,
        "checked_answers": len(parsed) if structured else None,
        "parsed_by_schema": {n: by_schema[1][n] / by_schema[0][n] for n in by_schema[0]} if structured else None,
    }


define_flags, main = command(
    Workload, measure, lambda report: table(report["rows"], COLUMNS), num_seqs=DEFAULT_NUM_SEQS
)  # fmt: skip
"""What flags.run_command calls; see bench.workload."""
