"""A batch of prompts through the engine, and what came of it: the measurement that every benchmark command shares."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from absl import flags as absl_flags

from multilora_jax.bench.answers import greedy, step
from multilora_jax.bench.report import define_output_flags
from multilora_jax.config import POOL_SIZE_KEYS, EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.engine.rank_rows import ROW_BLOCK
from multilora_jax.errors import ConfigError
from multilora_jax.request import LoRARequest

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()


@dataclass
class Run:
    """One timed run.

    Attributes:
        seconds: from the first request to the last answer; new_tokens: generated in that time.
        loads, preemptions: adapters copied into the pool and sequences put back, both 0 when the pool is large enough.
        step_adapters: the names of the adapters of each step that gave tokens.
        hits, misses: requests that found their adapter in the pool, and loads that requests caused.
        first_token_s: of each request, in order, seconds from its arrival to its first token.
    """

    seconds: float
    new_tokens: int
    loads: int
    preemptions: int
    step_adapters: list[frozenset[str]]
    hits: int = 0
    misses: int = 0
    first_token_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds


def define_run_flags(
    flag_values: absl_flags.FlagValues, *, num_prompts: int, input_len: int, output_len: int, rounds: int
) -> None:
    """Defines the flags that every command has, with a command's own defaults."""
    define_output_flags(flag_values)
    for name, default, doc in (
        ("num_prompts", num_prompts, "Requests of one run."),
        ("input_len", input_len, "Tokens of each prompt."),
        ("output_len", output_len, "Tokens of each answer."),
        ("rounds", rounds, "Timed runs of each case, which take turns; the figures are medians over them."),
    ):
        absl_flags.DEFINE_integer(name, default, doc, lower_bound=1, flag_values=flag_values)


def refuse_pool_flags(flag_values: absl_flags.FlagValues, instead: str) -> None:
    """Raises ConfigError where a flag gives the pool's size to a command that sets it.

    Args:
        flag_values: parsed flags.
        instead: what it is set to.
    """
    given = next((key for key in (*POOL_SIZE_KEYS, "max_adapter_pages") if flag_values[key].present), None)
    if given is not None:
        raise ConfigError(f"{given} is set by this command, to {instead}", reason="conflicting_keys", param=given)


def check_length(config: EngineConfig, input_len: int, output_len: int) -> None:
    """Raises ConfigError where prompt and answer do not fit max_model_len."""
    if config.max_model_len is not None and input_len + output_len > config.max_model_len:
        raise ConfigError(
            f"input_len {input_len} + output_len {output_len} exceed max_model_len {config.max_model_len}: "
            "shorten them or raise it",
            reason="conflicting_keys", param="max_model_len",
        )  # fmt: skip


def with_room(
    config: EngineConfig, rank_rows: int, max_lora_rank: int, adapter_pages: int, kv_pages: int
) -> EngineConfig:
    """The configuration with a pool of exactly these pages, these limits, no prefix cache, no adapters of its own."""
    return dataclasses.replace(
        config,
        max_rank_rows=rank_rows,
        max_lora_rank=max_lora_rank,
        max_adapter_pages=adapter_pages,
        pool_pages=1 + adapter_pages + kv_pages,
        pool_memory_gib=None,
        gpu_memory_utilization=None,
        enable_prefix_caching=False,
        lora_modules={},
        adapter_roots=(),
    )


def rank_rows_of(num_adapters: int, rank: int, max_lora_rank: int) -> int:
    """max_rank_rows for a step of `num_adapters` adapters of a rank, and for one of the largest rank allowed."""
    return max(num_adapters * -(-rank // ROW_BLOCK), -(-max_lora_rank // ROW_BLOCK)) * ROW_BLOCK


def build_engine(config: EngineConfig, *, texts: bool = False, **changes: Any) -> LLMEngine:
    """An engine, not warmed up yet.

    Args:
        config: its adapters are left out.
        texts: whether a tokenizer is needed.
        changes: other values of configuration keys.

    Raises:
        ConfigError: see LLMEngine; or the model has no tokenizer.
    """
    engine = LLMEngine(dataclasses.replace(config, lora_modules={}, adapter_roots=(), **changes))
    if texts and engine.tokenizer is None:
        raise ConfigError("the model has no tokenizer, which the texts need: set tokenizer", reason="no_tokenizer",
                          param="tokenizer")  # fmt: skip
    return engine


def random_prompts(engine: LLMEngine, num_prompts: int, input_len: int) -> list[list[int]]:
    """Prompts of random tokens, drawn from the configuration's seed."""
    rng = np.random.default_rng(engine.config.seed)
    return rng.integers(engine.model_config.vocab_size, size=(num_prompts, input_len)).tolist()


def settings_of(engine: LLMEngine, work: dict[str, Any]) -> dict[str, Any]:
    """The configuration as it came out, and the workload's own fields, for a report."""
    settings = {**engine.config.to_dict(), "dtype": engine.geometry.dtype, "max_model_len": engine.max_model_len}
    # A benchmark warms up whatever the configuration says.
    return settings | {"warm_up": True, "pool_pages": engine.geometry.num_pages} | work


def check_sound(engine: LLMEngine) -> None:
    """check_compilations, and that the engine's books of its pool agree (engine.check_integrity)."""
    check_compilations(engine)
    engine.check_integrity()


def check_compilations(engine: LLMEngine) -> None:
    """Raises RuntimeError where something was compiled after warm-up, so that the figures mean nothing."""
    compilations = engine.stats().compilations
    if compilations:
        raise RuntimeError(f"{compilations} programs were compiled after warm-up: these figures are not valid")


def run_once(
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    loras: Sequence[LoRARequest | None],
    output_len: int,
    ids: Iterator[str],
    *,
    backlog: int | None = None,
    after_step: Callable[[LLMEngine], None] | None = None,
) -> Run:
    """Answers all prompts greedily, with `output_len` tokens each.

    Args:
        engine: idle.
        prompts: token ids of each.
        loras: adapter of each.
        output_len: tokens of each answer.
        ids: request ids.
        backlog: requests kept waiting behind a full batch; None queues all prompts at once.
        after_step: called after every step.
    """
    # Buffers as large as the run before needed them would slow this one down for a while.
    engine.runner.rows.reset()
    before = engine.stats()
    params = greedy(output_len)
    queue = deque(zip(prompts, loras, strict=True))
    most_live = len(prompts) if backlog is None else engine.config.max_num_seqs + backlog
    first_token_s: dict[str, float] = {}
    num_live, new_tokens, steps = 0, 0, []
    start = time.perf_counter()
    while queue or num_live:
        while queue and num_live < most_live:
            prompt, lora = queue.popleft()
            request_id = next(ids)
            first_token_s[request_id] = 0.0
            # Under a salt of its own, so that no prompt is found that an earlier run computed.
            engine.add_request(request_id, prompt, params, lora, cache_salt=request_id)
            num_live += 1
        outputs = step(engine)
        if outputs:
            steps.append(frozenset(_name(output.lora_request) for output in outputs if output.lora_request is not None))
        for output in outputs:
            if output.finished:
                num_live -= 1
                new_tokens += len(output.outputs[0].token_ids)
                times = output.metrics
                assert times is not None
                assert times.first_token_time is not None
                first_token_s[output.request_id] = times.first_token_time - times.arrival_time
        if after_step is not None:
            after_step(engine)
    seconds = time.perf_counter() - start
    after = engine.stats()
    return Run(
        seconds,
        new_tokens,
        after.adapter_loads - before.adapter_loads,
        after.num_preemptions - before.num_preemptions,
        steps,
        after.adapter_hits - before.adapter_hits,
        after.adapter_misses - before.adapter_misses,
        list(first_token_s.values()),
    )


def run_loop(
    engine: LLMEngine,
    prompts: Sequence[list[int]],
    loras: Sequence[LoRARequest | None],
    output_len: int,
    ids: Iterator[str],
) -> Run:
    """`run_once` adapter by adapter: the requests of each are a batch of their own, one after another.

    That is what a server does that cannot mix adapters in a batch. All requests arrive at the start, so that the time
    to a first token holds the batches before its own.
    """
    groups: dict[str | None, list[int]] = {}
    for number, lora in enumerate(loras):
        groups.setdefault(None if lora is None else _name(lora), []).append(number)
    whole = Run(0.0, 0, 0, 0, [])
    first_token_s: dict[int, float] = {}
    for numbers in groups.values():
        run = run_once(engine, [prompts[i] for i in numbers], [loras[i] for i in numbers], output_len, ids)
        first_token_s |= {i: whole.seconds + s for i, s in zip(numbers, run.first_token_s, strict=True)}
        for key in ("seconds", "new_tokens", "loads", "preemptions", "step_adapters", "hits", "misses"):
            setattr(whole, key, getattr(whole, key) + getattr(run, key))
    whole.first_token_s = [first_token_s[i] for i in range(len(prompts))]
    return whole


def _name(lora: Any) -> str:
    """Of a request that names one adapter, as all of a benchmark do."""
    return lora.lora_name
