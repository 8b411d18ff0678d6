"""Engines on tiny models for tests, with few compiled shapes, and what they computed on the way."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.llm import LLM
from multilora_jax.lora.synthetic import random_adapter_weights, save_peft
from multilora_jax.models.batch import VocabInputs
from multilora_jax.models.llama import compute_logits, rows_to_tokens
from multilora_jax.request import LoRARequest, RequestOutput, SamplingParams

TINY_MODEL = str(Path(__file__).parent.parent / "configs" / "tiny_model")

# One set of sizes for most engines: programs of equal shapes come from the compilation cache.
SIZES: dict[str, Any] = {
    "dtype": "float32", "pool_pages": 512, "max_num_seqs": 16, "max_num_batched_tokens": 32, "prefill_block": 16,
    "max_model_len": 256, "max_rank_rows": 256, "warm_up": False,
}  # fmt: skip


def narrowed(engine: LLMEngine) -> LLMEngine:
    """Leaves an engine the largest decode shape, the largest shape with prefill and the largest row buffers."""
    runner = engine.runner
    decode_shapes = [shape for shape in runner.shapes if not shape.num_blocks]
    runner.shapes = [decode_shapes[-1], runner.shapes[-1]]
    runner.rows.keep_largest()
    return engine


def make_engine(
    model: str | Path, *, narrow: bool = True, throttle: Any = None, replica: int = -1, **options: Any
) -> LLMEngine:
    """An engine of SIZES, narrowed unless told otherwise."""
    config = EngineConfig.from_dict({"model": str(model), **SIZES, **options})
    engine = LLMEngine(config, progress=False, throttle=throttle, replica=replica)
    return narrowed(engine) if narrow else engine


def tiny_engine(**options: Any) -> LLMEngine:
    """An engine on configs/tiny_model: random weights, byte-level tokenizer, chat template."""
    return make_engine(TINY_MODEL, load_format="dummy", **options)


def make_llm(model: str | Path, **options: Any) -> LLM:
    """The same as an LLM, with random weights."""
    llm = LLM(str(model), progress=False, **{**SIZES, "load_format": "dummy", **options})
    narrowed(llm.engine)
    return llm


class Request(NamedTuple):
    """Arguments of add_request without its id."""

    prompt: Any
    params: SamplingParams
    lora: LoRARequest | list[LoRARequest] | None = None


def greedy(max_tokens: int | None, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def run_all(engine: LLMEngine, requests: Iterable[Request]) -> list[Any]:
    """Runs requests together to their ends; RequestOutputs in their order. Leaves the engine empty and sound."""
    ids = []
    for number, request in enumerate(requests):
        engine.add_request(f"run-{number}", *request)
        ids.append(f"run-{number}")
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    engine.check_integrity()
    assert engine.stats().pages_kv == 0
    return [done[request_id] for request_id in ids]


def tokens_of(outputs: Iterable[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


class LogitsRecorder:
    """Keeps the logits of every position that an engine runs, prompt and answer, by request id.

    Requests without a salt get one of their own, so that every position is run and none is found in the prefix cache.
    """

    def __init__(self, engine: LLMEngine):
        self._rows: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
        runner, execute, add, salts = engine.runner, engine.runner.execute, engine.add_request, itertools.count()

        def add_salted(
            request_id: str,
            prompt: Any,
            params: Any,
            lora_request: Any = None,
            priority: int = 0,
            cache_salt: str | None = None,
            tenant: str | None = None,
            arrival_time: float | None = None,
        ) -> None:
            if cache_salt is None and not (isinstance(prompt, dict) and "cache_salt" in prompt):
                cache_salt = f"recorded {next(salts)}"
            add(request_id, prompt, params, lora_request, priority, cache_salt, tenant, arrival_time)

        engine.add_request = add_salted
        spec, programs = runner.spec, runner.programs

        @functools.cache
        def logits_of(extended: bool) -> Any:
            def head(top: Any, hidden: Any, vocab: Any) -> Any:
                return compute_logits(top, hidden, spec=spec, vocab=vocab)

            specs = (programs._specs["top"], P(), programs._vocab_specs(extended))
            return programs._jit(head, specs, P(None, "model"))

        def recorded(step: Any, pages_of: Any) -> Any:
            built, output = execute(step, pages_of)
            vocab = None
            if any(adapter.layout.extended for adapter in step.adapters):
                assert runner.rows.extra is not None
                assert built.batch.mix_SX is not None
                row_P = jnp.asarray(built.batch.row_P)
                mix_TX = rows_to_tokens(jnp.asarray(built.batch.mix_SX), row_P, built.shape.num_tokens)
                vocab = VocabInputs(runner.pool, runner.rows.extra.vocab, mix_TX, row_P)
            logits_TV = np.asarray(logits_of(vocab is not None)(runner.params["top"], output.hidden, vocab))
            row_of = dict(built.rows)
            for seq in step.decodes:
                row = row_of[seq]
                self._rows[seq.request_id][seq.num_computed_tokens] = logits_TV[row, : seq.vocab_size]
            for seq, first, count in built.chunks:
                for i in range(count):
                    self._rows[seq.request_id][seq.num_computed_tokens + i] = logits_TV[first + i, : seq.vocab_size]
            return built, output

        runner.execute = recorded

    def clear(self) -> None:
        """Forgets everything."""
        self._rows.clear()

    def take(self, number: int) -> np.ndarray:
        """float32[positions, V] of request `number` of the last run_all; forgets it."""
        return self.take_by_id(f"run-{number}")

    def take_rows(self, request_id: str) -> dict[int, np.ndarray]:
        """float32[V] of each position that was run for a request; forgets it."""
        return self._rows.pop(request_id)

    def take_by_id(self, request_id: str) -> np.ndarray:
        """The same of a request by its id."""
        rows = self._rows.pop(request_id)
        return np.stack([rows[position] for position in range(len(rows))])


def make_adapter(folder: Path, engine: LLMEngine, rank: Any, seed: int, **options: Any) -> LoRARequest:
    """Writes a random adapter strong enough to change greedy text; its LoRARequest is named after the folder."""
    weights = random_adapter_weights(engine.model_config, rank, seed=seed, **{"delta_std": 0.1, **options})
    save_peft(weights, str(folder))
    return LoRARequest(folder.name, 1000 + seed, str(folder))
