"""`bench prefix`: time to the first token of prompts that begin alike, one after the other.

Each round draws a new text and asks five times, each time with a question of its own behind it: with adapter A, the
same again, with adapter B, with the base alone, and with adapter A under another salt. Only the second may be answered
from the prefix cache. Each ratio is to the first request of the same round.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
from absl import logging

from multilora_jax.adapters.make import make_adapters
from multilora_jax.bench.answers import Request, answer, greedy
from multilora_jax.bench.report import make_report, table
from multilora_jax.bench.runs import build_engine, check_length, check_sound, settings_of
from multilora_jax.bench.workload import command, option
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError
from multilora_jax.memory.geometry import MODULES
from multilora_jax.request import LoRARequest, RequestOutput

COLUMNS = {"request": "", "ttft_s": ".4f", "ratio_to_first": ".3f", "cached_tokens": "d", "prompt_tokens": "d"}

# request: (its adapter, or None for the base; its salt)
REQUESTS: dict[str, tuple[int | None, str]] = {
    "first": (0, "a"), "second": (0, "a"), "other adapter": (1, "a"), "base": (None, "a"), "other salt": (0, "b"),
}  # fmt: skip

AIM = 0.25
"""What the second request's time to the first token shall be at most, in those of the first."""

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.bench prefix --config configs/smollm2.yaml --shared_len 512"
ABOUT = """Time to the first token of a prompt whose start was computed before, against that of the first such prompt,
and what of it is found with another adapter, without one and under another salt, which must be nothing.

Two random adapters are made for it. Prints a table; --json and --plot write files."""


@dataclass(frozen=True)
class Workload:
    """What is measured."""

    shared_len: int = option(512, "Tokens that the prompts of a round begin with.")
    question_len: int = option(16, "Tokens of each prompt behind them.")
    output_len: int = option(4, "Tokens of each answer.")
    rank: int = option(16, "Rank of the two random adapters, which have all seven projections.")
    rounds: int = option(5, "Timed rounds, each with a new text; the figures are medians over them.")


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
    engine = build_engine(config, max_lora_rank=max(config.max_lora_rank, work.rank))
    engine.warm_up()
    with tempfile.TemporaryDirectory(prefix="multilora_bench_") as folder:
        paths = make_adapters(engine.model_config, folder, 2, ranks=[work.rank], modules=MODULES, seed=config.seed)
        loras = [LoRARequest(f"random-{i}", i + 1, path) for i, path in enumerate(paths)]
        for lora in loras:
            engine.add_lora(lora)
        outputs = _rounds(engine, work, loras)
    check_sound(engine)
    rows = [_row(name, outputs) for name in REQUESTS]
    return make_report("prefix", settings_of(engine, dataclasses.asdict(work)), rows)


def _rounds(engine: LLMEngine, work: Workload, loras: list[LoRARequest]) -> list[dict[str, RequestOutput]]:
    """The outputs of each timed round, by request; one round before them is not timed."""
    rng = np.random.default_rng(engine.config.seed)

    def prompt(start: list[int], count: int) -> list[int]:
        return start + rng.integers(engine.model_config.vocab_size, size=count).tolist()

    rounds = []
    for number in range(work.rounds + 1):
        shared, outputs = prompt([], work.shared_len), {}
        for name, (which, salt) in REQUESTS.items():
            lora = None if which is None else loras[which]
            # The first brings the adapter's rank rows in.
            for start, output_len in (([], 1), (shared, work.output_len)):
                request = Request(prompt(start, work.question_len), greedy(output_len), lora, salt)
                outputs[name] = answer(engine, [request]).outputs[0]
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
        "aim_ratio": AIM if name == "second" else None,
        "cached_tokens": max(outputs[name].num_cached_tokens for outputs in rounds),
        "prompt_tokens": len(rounds[0][name].prompt_token_ids),
        "ttft_s_by_round": seconds,
        "ratio_to_first_by_round": ratios,
    }


define_flags, main = command(Workload, measure, lambda report: table(report["rows"], COLUMNS))
"""What flags.run_command calls; see bench.workload."""
