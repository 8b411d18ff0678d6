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
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from absl import flags as absl_flags
from absl import logging

from multilora_jax import flags
from multilora_jax.bench.report import check_writable, make_report, table, write_json
from multilora_jax.bench.runs import check_compilations, settings_of
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError
from multilora_jax.request import FinishReason, RequestOutput, SamplingParams

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

COLUMNS = {
    "case": "", "answers": "d", "structured_answers": "d", "parsed_share": ".3f", "new_tokens": "d",
    "ms_per_step": ".2f", "ratio_to_plain": ".3f", "neighbour_ratio": ".3f",
}  # fmt: skip

CASES = ("plain", "structured", "half")
DEFAULT_NUM_SEQS = 8
MAX_TOKENS = 256

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench structured --config configs/smollm2.yaml --num-answers 200"
ABOUT = """Answers that must follow a JSON schema: the share that parses, and the time of a decoding step in which all
rows or every other row has a schema, to that of the same batch without; `neighbour_ratio` is the time between tokens
of the answers that ask for nothing beside those that do.

max_num_seqs is 8 here, whatever the file says, unless --max_num_seqs gives another. Prints a table, writes JSON where
--json says."""

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
    """What is measured.

    Attributes:
        num_answers: answers that are checked.
        num_timed: the first so many of them are timed.
        temperature: of all answers; the seed of each is its number.
        rounds: timed runs of each case.
    """

    num_answers: int = 200
    num_timed: int = 32
    temperature: float = 1.0
    rounds: int = 3


@dataclass
class _Run:
    """The answers by number, and the seconds of each step of decoding alone."""

    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)

    @property
    def typical_step_s(self) -> float:
        """The median, which other work on the machine moves least."""
        return statistics.median(self.step_s)

    def token_gap_s(self, numbers: range) -> float:
        """Mean time between two tokens of these answers."""
        gaps, tokens = 0.0, 0
        for number in numbers:
            output = self.outputs[number]
            times = output.metrics
            assert times is not None
            assert times.first_token_time is not None
            assert times.finished_time is not None
            gaps += times.finished_time - times.first_token_time
            tokens += len(output.outputs[0].token_ids) - 1
        return gaps / max(tokens, 1)


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags: those of the configuration and its own."""
    flags.define_flags(flag_values)
    absl_flags.DEFINE_string("json", None, "File to write the figures to.", flag_values=flag_values)
    work = Workload()
    for name, default, doc in (
        ("num_answers", work.num_answers, "Answers with a schema that are checked."),
        ("num_timed", work.num_timed, "Answers of one timed run, at most num_answers."),
        ("rounds", work.rounds, "Timed runs of each case, which take turns; the figures are medians over them."),
    ):
        absl_flags.DEFINE_integer(name, default, doc, lower_bound=1, flag_values=flag_values)
    absl_flags.DEFINE_float(
        "temperature", work.temperature, "Of all answers.", lower_bound=0.0, flag_values=flag_values
    )


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    f = flag_values
    if f.json is not None:
        check_writable(f.json)
    config = flags.config_from_flags(f)
    if not f["max_num_seqs"].present:
        config = dataclasses.replace(config, max_num_seqs=DEFAULT_NUM_SEQS)
    work = Workload(f.num_answers, min(f.num_timed, f.num_answers), f.temperature, f.rounds)
    report = measure(config, work)
    print(table(report["rows"], COLUMNS))
    if f.json is not None:
        write_json(f.json, report)
    return 0


def measure(config: EngineConfig, work: Workload) -> dict[str, Any]:
    """Runs the workload; returns the report (see bench.report).

    Raises:
        ConfigError, UserError: the engine cannot serve this.
        RuntimeError: something was compiled after warm-up, so the figures mean nothing.
    """
    config = dataclasses.replace(config, lora_modules={}, adapter_roots=())
    engine = LLMEngine(config)
    if engine.tokenizer is None:
        raise ConfigError("structured output needs a model with a tokenizer", reason="no_tokenizer", param="model")
    engine.warm_up()
    ids = (f"bench-{n}" for n in itertools.count())
    names = [name for name, _ in zip(itertools.cycle(SCHEMAS), range(work.num_answers), strict=False)]
    checked = _run(engine, names, [_params(work, n, names[n]) for n in range(work.num_answers)], ids)
    parsed = [_parses(checked.outputs[n], SCHEMAS[names[n]][1]) for n in range(work.num_answers)]
    logging.info("%d of %d answers parse", sum(parsed), work.num_answers)
    lengths = [len(checked.outputs[n].outputs[0].token_ids) for n in range(work.num_timed)]
    runs: dict[str, list[_Run]] = {case: [] for case in CASES}
    for number in range(work.rounds + 1):
        shift = number % len(CASES)
        for case in CASES[shift:] + CASES[:shift]:
            params = [
                _params(work, n, names[n] if _is_structured(case, n) else None, lengths[n])
                for n in range(work.num_timed)
            ]
            run = _run(engine, names[: work.num_timed], params, ids)
            if number:
                runs[case].append(run)
            step = f"round {number} of {work.rounds}" if number else "warm run"
            logging.info("%s: %s %.2f ms per step", step, case, 1e3 * run.typical_step_s)
    check_compilations(engine)
    rows = [_row(case, runs, parsed, names, lengths) for case in CASES]
    return make_report("structured", settings_of(engine, dataclasses.asdict(work)), rows)


def _is_structured(case: str, number: int) -> bool:
    return case == "structured" or (case == "half" and number % 2 == 0)


def _params(work: Workload, number: int, schema: str | None, length: int | None = None) -> SamplingParams:
    """Of one answer; without a schema it has exactly `length` tokens, as the one with a schema had."""
    options: dict[str, Any] = {"temperature": work.temperature, "seed": number, "max_tokens": length or MAX_TOKENS}
    if schema is None:
        return SamplingParams(ignore_eos=True, **options)
    return SamplingParams(structured_outputs={"json": SCHEMAS[schema][1]}, **options)


def _run(engine: LLMEngine, names: list[str], params: list[SamplingParams], ids: Iterator[str]) -> _Run:
    """Answers the prompts of these schemas."""
    run, numbers, started = _Run(), {}, set()
    for number, name in enumerate(names):
        request_id = next(ids)
        numbers[request_id] = number
        engine.add_request(request_id, SCHEMAS[name][0], params[number])
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - start
        if outputs and all(output.request_id in started for output in outputs):
            run.step_s.append(seconds)
        for output in outputs:
            if output.error is not None:
                raise output.error
            started.add(output.request_id)
            if output.finished:
                run.outputs[numbers[output.request_id]] = output
    return run


def _parses(output: RequestOutput, schema: dict[str, Any]) -> bool:
    """Whether an answer is complete, is JSON and has the fields that its schema asks for."""
    completion = output.outputs[0]
    try:
        value = json.loads(completion.text)
    except ValueError:
        return False
    return completion.finish_reason == FinishReason.STOP.value and list(value) == schema["required"]


def _row(
    case: str, runs: dict[str, list[_Run]], parsed: list[bool], names: list[str], lengths: list[int]
) -> dict[str, Any]:
    """A row of the report: medians over rounds, ratios to the plain run of the same round."""
    count = len(lengths)
    mine, plain = runs[case], runs["plain"]
    ratios = [run.typical_step_s / its.typical_step_s for run, its in zip(mine, plain, strict=True)]
    neighbours = range(1, count, 2) if case == "half" else range(0)
    beside = [run.token_gap_s(neighbours) / its.token_gap_s(neighbours) for run, its in zip(mine, plain, strict=True)
              if neighbours]  # fmt: skip
    by_schema = Counter(names), Counter(name for name, good in zip(names, parsed, strict=True) if good)
    structured = case == "structured"
    return {
        "case": case,
        "answers": count,
        "structured_answers": sum(_is_structured(case, n) for n in range(count)),
        "parsed_share": sum(parsed) / len(parsed) if structured else None,
        "new_tokens": sum(lengths),
        "ms_per_step": 1e3 * statistics.median(run.typical_step_s for run in mine),
        "ratio_to_plain": statistics.median(ratios),
        "neighbour_ratio": statistics.median(beside) if beside else None,
        "ratio_to_plain_by_round": ratios,
        "neighbour_ratio_by_round": beside or None,
        "checked_answers": len(parsed) if structured else None,
        "parsed_by_schema": {n: by_schema[1][n] / by_schema[0][n] for n in by_schema[0]} if structured else None,
    }
