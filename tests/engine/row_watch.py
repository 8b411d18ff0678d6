"""An engine whose row buffers have three sizes, and what becomes of them step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.engine.rank_rows import ROW_BLOCK
from multilora_jax.engine.row_buffers import STAGE_SHARE
from multilora_jax.engine.transfers import AdapterTransfers
from multilora_jax.memory.geometry import MODULES
from tests.tiny_engine import Request, greedy, run_all, tiny_engine, tokens_of

PROMPT = "Hello there"
LARGE = 64 // ROW_BLOCK
"""Blocks of an adapter of rank 64."""


def three_sizes(**options: Any) -> LLMEngine:
    """An engine with row buffers of 16, 64 and 128 rows."""
    engine = tiny_engine(narrow=False, max_rank_rows=128, max_lora_rank=64, **options)
    shapes = engine.runner.shapes
    engine.runner.shapes = [[shape for shape in shapes if not shape.num_blocks][-1], shapes[-1]]
    return engine


def as_new(engine: LLMEngine) -> Iterator[LLMEngine]:
    """The engine for one test: no rows and no adapters before it nor after it."""
    engine.runner.rows.reset()
    yield engine
    engine.check_integrity()
    for adapter in engine.list_loras():
        engine.remove_lora(adapter.name)


def take(engine, monkeypatch, seconds):
    """Lets the engine believe that copying a block of rows takes so long, and making the buffers as their bytes do."""
    rows = engine.runner.rows
    monkeypatch.setattr(rows, "_copy_s", dict.fromkeys(rows._copy_s, seconds))
    dims = sum(sum(engine.geometry.module_dims(module)) for module in MODULES)
    block_bytes = dims * ROW_BLOCK * engine.geometry.num_layers * engine.geometry.storage_dtype.itemsize
    monkeypatch.setattr(rows, "_make_s_per_byte", seconds / block_bytes)


def allow(engine, monkeypatch, blocks, *, full=True):
    """Lets a step of a full batch copy so many whole blocks of rows beside its sequences, one at least; and every step,
    unless told that it is not full."""
    rows = engine.runner.rows
    if full:
        monkeypatch.setattr(AdapterTransfers, "empty_seats", 0.0)
    monkeypatch.setattr(rows, "_step_s", 4.0)
    monkeypatch.setattr(rows, "_prompt_token_s", 0.0)
    monkeypatch.setattr(rows, "saw_step", lambda seconds, num_prompt_tokens: None)
    take(engine, monkeypatch, STAGE_SHARE * 4.0 / blocks * (1 - 1e-9))  # not one less by rounding


@dataclass
class Step:
    """What a step did to the buffers, and what it left."""

    staged: list[str] = field(default_factory=list)  # the adapter of each block copied ahead of need
    copied: list[str] = field(default_factory=list)  # of each block that the step itself had to wait for
    bucket: int = 0
    running: set[str] = field(default_factory=set)


class Watch:
    """Steps an engine and tells what became of its row buffers; outputs by request id."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.rows = engine, engine.runner.rows
        self.steps: list[Step] = []
        self.outputs: dict = {}
        self._staging = False
        insert, stage = self.rows._insert, self.rows.stage

        def watched_insert(side, copy, *args):
            step = self.steps[-1]
            (step.staged if self._staging else step.copied).append(copy[0].name)
            insert(side, copy, *args)

        def watched_stage(*args, **kwargs):
            self._staging = True
            stage(*args, **kwargs)
            self._staging = False

        monkeypatch.setattr(self.rows, "_insert", watched_insert)
        monkeypatch.setattr(self.rows, "stage", watched_stage)

    def step(self):
        self.steps.append(Step())
        outputs = {output.request_id: output for output in self.engine.step()}
        self.outputs |= outputs
        self.steps[-1].bucket = self.rows.rank_rows.bucket
        self.steps[-1].running = set(outputs)
        return self.steps[-1]

    def until(self, condition, limit=300):
        """Steps, at least once, until the condition holds; those steps."""
        first = len(self.steps)
        while len(self.steps) < first + limit:
            self.step()
            if condition():
                return self.steps[first:]
        raise AssertionError("it never came true")

    def start(self, name, tokens, lora=None):
        """Adds a request and steps until its first token."""
        self.engine.add_request(name, PROMPT, greedy(tokens), lora)
        return self.until(lambda: name in self.outputs)

    def finish(self):
        return self.until(lambda: not self.engine.has_unfinished_requests())

    def tokens(self, name):
        (tokens,) = tokens_of([self.outputs[name]])
        return tokens


def alone(engine, recorder, num_tokens, lora=None):
    """(tokens, logits) of a request beside which nothing runs; leaves no rows in the buffers."""
    (tokens,) = tokens_of(run_all(engine, [Request(PROMPT, greedy(num_tokens), lora)]))
    engine.runner.rows.reset()
    return tokens, recorder.take(0)
