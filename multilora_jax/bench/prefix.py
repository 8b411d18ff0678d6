"""`bench prefix`: time to the first token of prompts that begin alike, one after the other.

Each round draws a new text and asks five times, each time with a question of its own behind it: with adapter A, the
same again, with adapter B, with the base alone, and with adapter A under another salt. Only the second may be answered
from the prefix cache. Each ratio is to the first request of the same round.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from absl import flags as absl_flags
from absl import logging

from multilora_jax import flags
from multilora_jax.adapters.make import make_adapters
from multilora_jax.bench.report import check_writable, make_report, table, write_json
from multilora_jax.bench.runs import check_compilations, check_length, settings_of
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError
from multilora_jax.memory.geometry import MODULES
from multilora_jax.request import LoRARequest, RequestOutput, SamplingParams

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

COLUMNS = {"request": "", "ttft_s": ".4f", "ratio_to_first": ".3f", "cached_tokens": "d", "prompt_tokens": "d"}

# request: (its adapter, or None for the base; its salt)
REQUESTS: dict[str, tuple[int | None, str]] = {
    "first": (0, "a"), "second": (0, "a"), "other adapter": (1, "a"), "base": (None, "a"), "other salt": (0, "b"),
}  # fmt: skip

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench prefix --config configs/smollm2.yaml --shared_len 512"
ABOUT = """Time to the first token of a prompt whose start was computed before, against that of the first such prompt,
and what of it is found with another adapter, without one and under another salt, which must be nothing.

Two random adapters are made for it. Prints a table, writes JSON where --json says."""


@dataclass(frozen=True)
class Workload:
    """What is measured.

    Attributes:
        shared_len: tokens that the prompts of a round begin with; question_len: tokens of each prompt's own.
        output_len: tokens of each answer.
        rank: of the adapters, on all seven projections.
        rounds: timed rounds.
    """

    shared_len: int = 512
    question_len: int = 16
    output_len: int = 4
    rank: int = 16
    rounds: int = 5


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags: those of the configuration and its own."""
    flags.define_flags(flag_values)
    absl_flags.DEFINE_string("json", None, "File to write the figures to.", flag_values=flag_values)
    for name, default, doc in (
        ("shared_len", 512, "Tokens that the prompts of a round begin with."),
        ("question_len", 16, "Tokens of each prompt behind them."),
        ("output_len", 4, "Tokens of each answer."),
        ("rank", 16, "Rank of the two random adapters, which have all seven projections."),
        ("rounds", 5, "Timed rounds, each with a new text; the figures are medians over them."),
    ):
        absl_flags.DEFINE_integer(name, default, doc, lower_bound=1, flag_values=flag_values)


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    f = flag_values
    if f.json is not None:
        check_writable(f.json)
    work = Workload(f.shared_len, f.question_len, f.output_len, f.rank, f.rounds)
    report = measure(flags.config_from_flags(f), work)
    print(table(report["rows"], COLUMNS))
    if f.json is not None:
        write_json(f.json, report)
    return 0


def measure(config: EngineConfig, work: Workload) -> dict[str, Any]:
    """Runs the workload; returns the report (see bench.report).

    Raises:
        ConfigError, UserError: the engine cannot serve this.
        RuntimeError: something was compiled after warm-up, or found where it must not be, so that the figures mean
            nothing.
    """
    if not (config.enable_lora and config.enable_prefix_caching):
        key = "enable_prefix_caching" if config.enable_lora else "enable_lora"
        raise ConfigError(f"{key} is false: there is nothing to measure", reason="conflicting_keys", param=key)
    check_length(config, work.shared_len + work.question_len, work.output_len)
    config = dataclasses.replace(
        config, max_lora_rank=max(config.max_lora_rank, work.rank), lora_modules={}, adapter_roots=()
    )
    engine = LLMEngine(config)
    engine.warm_up()
    with tempfile.TemporaryDirectory(prefix="multilora_bench_") as folder:
        paths = make_adapters(engine.model_config, folder, 2, ranks=[work.rank], modules=MODULES, seed=config.seed)
        loras = [LoRARequest(f"random-{i}", i + 1, path) for i, path in enumerate(paths)]
        for lora in loras:
            engine.add_lora(lora)
        outputs = _rounds(engine, work, loras)
    check_compilations(engine)
    engine.check_integrity()
    rows = [_row(name, outputs) for name in REQUESTS]
    return make_report("prefix", settings_of(engine, dataclasses.asdict(work)), rows)


def _rounds(engine: LLMEngine, work: Workload, loras: list[LoRARequest]) -> list[dict[str, RequestOutput]]:
    """The outputs of each timed round, by request; one round before them is not timed."""
    rng = np.random.default_rng(engine.config.seed)
    ids = (f"prefix-{n}" for n in itertools.count())

    def tokens(count: int) -> list[int]:
        return rng.integers(engine.model_config.vocab_size, size=count).tolist()

    rounds = []
    for number in range(work.rounds + 1):
        shared, outputs = tokens(work.shared_len), {}
        for name, (which, salt) in REQUESTS.items():
            lora = None if which is None else loras[which]
            _answer(engine, tokens(work.question_len), lora, salt, 1, ids)  # brings the adapter's rank rows in
            outputs[name] = _answer(engine, shared + tokens(work.question_len), lora, salt, work.output_len, ids)
            found, page = outputs[name].num_cached_tokens, engine.geometry.page_tokens
            expected = work.shared_len // page * page if name == "second" else 0
            # Chance may make the questions begin alike too.
            if not expected <= found <= (expected + work.question_len if expected else 0):
                raise RuntimeError(f"request {name!r} found {found} cached tokens, {expected} were expected")
        if number:
            rounds.append(outputs)
            ratio = ttft(outputs["second"]) / ttft(outputs["first"])
            logging.info("round %d of %d: second to first %.3f", number, work.rounds, ratio)
    return rounds


def _answer(
    engine: LLMEngine, prompt: list[int], lora: LoRARequest | None, salt: str, output_len: int, ids: Iterator[str]
) -> RequestOutput:
    """One request alone, to its end."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    engine.add_request(next(ids), prompt, params, lora, cache_salt=salt)
    while True:
        for output in engine.step():
            if output.error is not None:
                raise output.error
            if output.finished:
                return output


def ttft(output: RequestOutput) -> float:
    """Seconds from the arrival of a finished request to its first token."""
    times = output.metrics
    assert times is not None
    assert times.first_token_time is not None
    return times.first_token_time - times.arrival_time


def _row(name: str, rounds: list[dict[str, RequestOutput]]) -> dict[str, Any]:
    seconds = [ttft(outputs[name]) for outputs in rounds]
    ratios = [mine / ttft(outputs["first"]) for mine, outputs in zip(seconds, rounds, strict=True)]
    return {
        "request": name,
        "ttft_s": statistics.median(seconds),
        "ratio_to_first": statistics.median(ratios),
        "cached_tokens": max(outputs[name].num_cached_tokens for outputs in rounds),
        "prompt_tokens": len(rounds[0][name].prompt_token_ids),
        "ttft_s_by_round": seconds,
        "ratio_to_first_by_round": ratios,
    }
