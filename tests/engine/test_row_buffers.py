"""Rank rows that come to the device in slices, while other sequences run, and buffers that move to another size."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.engine.rank_rows import ROW_BLOCK, SHRINK_PATIENCE
from multilora_jax.memory.geometry import MODULES
from multilora_jax.request import LoRARequest
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_adapter, run_all, tiny_engine, tokens_of

PROMPT = "Hello there"
PEFT = "base_model.model.model."
LARGE = 64 // ROW_BLOCK
"""Blocks of an adapter of rank 64."""


@pytest.fixture(scope="module")
def served():
    """An engine with row buffers of 16, 64 and 128 rows, and what it computes."""
    engine = tiny_engine(narrow=False, max_rank_rows=128, max_lora_rank=64)
    shapes = engine.runner.shapes
    engine.runner.shapes = [[shape for shape in shapes if not shape.num_blocks][-1], shapes[-1]]
    return engine, LogitsRecorder(engine)


@pytest.fixture
def recorder(served):
    return served[1]


@pytest.fixture
def engine(served):
    engine, recorder = served
    recorder.clear()
    engine.runner.rows.reset()
    config = engine.config
    yield engine
    engine.config = config
    engine.check_integrity()
    for adapter in engine.list_loras():
        engine.remove_lora(adapter.name)


def block_bytes(engine):
    """Bytes of a block of rows of all modules and layers."""
    dims = sum(sum(engine.geometry.module_dims(module)) for module in MODULES)
    return dims * ROW_BLOCK * engine.geometry.num_layers * engine.geometry.storage_dtype.itemsize


def allow(engine, blocks):
    """Lets a step copy so many blocks of rows beside its sequences; a part of one counts as one."""
    engine.config = replace(engine.config, adapter_transfer_mib=blocks * block_bytes(engine) / 2**20)


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

        def watched_stage(*args):
            self._staging = True
            stage(*args)
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


@pytest.mark.parametrize("budget", [0.001, 1.5, 3], ids=["least", "some", "more"])
@pytest.mark.parametrize("stream_rank", [0, 8], ids=["base", "adapter"])
def test_d17_rows_arrive_in_slices_beside_the_old_buffers(engine, recorder, tmp_path, monkeypatch, stream_rank, budget):
    own = make_adapter(tmp_path / "own", engine, stream_rank, 1) if stream_rank else None
    cold = make_adapter(tmp_path / "cold", engine, 64, 2)
    want_stream, want_cold = alone(engine, recorder, 40, own), alone(engine, recorder, 6, cold)
    allow(engine, budget)
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 40, own)
    bucket = watch.steps[-1].bucket
    assert bucket == (16 if stream_rank else 0)
    old = watch.rows.layers
    engine.add_request("cold", PROMPT, greedy(6), cold)
    *before, last = watch.until(lambda: "cold" in watch.outputs)

    most, moved = math.ceil(budget), LARGE + bool(stream_rank)  # what the stream uses goes along
    copied = [step.staged for step in (*before, last) if step.staged]
    assert all(1 <= len(names) <= most for names in copied)
    assert len(copied) == math.ceil(moved / most)
    assert sorted(name for names in copied for name in names) == ["cold"] * LARGE + ["own"] * bool(stream_rank)
    assert not any(step.copied for step in watch.steps[1:])
    # A budget of less than new buffers: one step makes them. The steps before the last used the old ones.
    assert not before[0].staged
    assert [step.bucket for step in before] == [bucket] * len(before)
    assert last.bucket == (128 if stream_rank else 64)
    assert watch.rows.layers is not old
    # The stream got a token in each of them.
    assert all("stream" in step.running for step in (*before, last))
    watch.finish()
    for name, (tokens, logits) in {"stream": want_stream, "cold": want_cold}.items():
        assert watch.tokens(name) == tokens
        np.testing.assert_allclose(recorder.take_by_id(name), logits, rtol=0, atol=1e-4)


def test_rows_arrive_in_slices_in_buffers_that_are_large_enough(engine, recorder, tmp_path, monkeypatch):
    own, warm, cold = (
        make_adapter(tmp_path / name, engine, rank, rank) for name, rank in (("own", 8), ("warm", 63), ("cold", 64))
    )
    (want_own, _), (want_cold, _) = alone(engine, recorder, 40, own), alone(engine, recorder, 6, cold)
    run_all(engine, [Request(PROMPT, greedy(2), lora) for lora in (own, warm)])
    recorder.clear()
    layers = engine.runner.rows.layers
    allow(engine, 2)
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 40, own)
    engine.add_request("cold", PROMPT, greedy(6), cold)
    steps = watch.until(lambda: "cold" in watch.outputs)
    assert [step.staged for step in steps] == [["cold"] * 2] * (LARGE // 2)
    assert {step.bucket for step in watch.steps} == {128}
    assert not any(step.copied for step in watch.steps)
    assert engine.runner.rows.layers is layers
    assert not watch.rows.holds(engine.adapters.registry.get("warm"))  # warm, which nobody runs, gave its rows
    watch.finish()
    assert (watch.tokens("stream"), watch.tokens("cold")) == (want_own, want_cold)


def test_the_most_urgent_adapter_comes_first_and_need_not_wait_for_the_next(engine, tmp_path, monkeypatch):
    own, one, two = (make_adapter(tmp_path / name, engine, 32, i) for i, name in enumerate(("own", "one", "two")))
    run_all(engine, [Request(PROMPT, greedy(4), lora) for lora in (own, one, two)])
    for adapter in engine.list_loras()[1:]:
        engine.runner.rows.forget(adapter)
    allow(engine, 1)
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 30, own)
    for name, lora in (("two", two), ("one", one)):
        engine.add_request(name, PROMPT, greedy(2), lora)
    watch.until(lambda: len(watch.outputs) == 3)
    assert [name for step in watch.steps for name in step.staged] == ["two"] * 4 + ["one"] * 4
    assert next(i for i, step in enumerate(watch.steps) if "two" in step.running) <= 5
    watch.finish()


def test_buffers_shrink_with_patience_and_in_slices(engine, recorder, tmp_path, monkeypatch):
    own, more, large = (
        make_adapter(tmp_path / name, engine, rank, rank) for name, rank in (("own", 9), ("more", 17), ("large", 64))
    )
    want, logits = alone(engine, recorder, 110, own)
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 110, own)
    watch.start("large", 2, large)
    assert watch.steps[-1].bucket == 128
    watch.until(lambda: watch.outputs["large"].finished)
    allow(engine, 1)
    waited = watch.until(lambda: watch.steps[-1].staged)
    assert SHRINK_PATIENCE <= len(waited) <= SHRINK_PATIENCE + 3
    assert {step.bucket for step in waited} == {128}
    assert waited[-1].staged == ["own"]
    moved = watch.step()
    assert (moved.staged, moved.copied, moved.bucket) == (["own"], [], 16)
    # And grow again.
    watch.start("more", 2, more)
    assert watch.steps[-1].bucket == 64
    watch.finish()
    assert not any(step.copied for step in watch.steps[1:])
    assert watch.tokens("stream") == want
    np.testing.assert_allclose(recorder.take_by_id("stream"), logits, rtol=0, atol=1e-4)


def test_an_adapter_of_the_vocabulary_arrives_in_slices_too(engine, recorder, tmp_path, monkeypatch):
    """It runs in the largest buffers only, and its tables say where it lies in them."""
    own, plain = (make_adapter(tmp_path / name, engine, 8, i) for i, name in enumerate(("own", "plain")))
    arrays, rng = load_file(tmp_path / "plain" / "adapter_model.safetensors"), np.random.default_rng(0)
    dims = {"embed_tokens.lora_embedding_A": (8, 260), "embed_tokens.lora_embedding_B": (64, 8)}
    config = {"r": 8, "lora_alpha": 8, "modules_to_save": ["model.norm", "model.layers.1.input_layernorm"]}
    dims |= {"norm.weight": (64,), "layers.1.input_layernorm.weight": (64,)}
    arrays |= {PEFT + name: rng.standard_normal(shape, np.float32) for name, shape in dims.items()}
    engine.add_adapter("vocab", arrays, config, int_id=7)
    vocab = LoRARequest("vocab", 7)
    (want_own, own_logits), (want, logits) = alone(engine, recorder, 30, own), alone(engine, recorder, 6, vocab)
    assert want != alone(engine, recorder, 6, plain)[0]
    allow(engine, 1)
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 30, own)
    assert watch.steps[-1].bucket == 16
    steps = watch.start("vocab", 6, vocab)
    assert [name for step in steps for name in step.staged] == ["own", "vocab", "vocab"]
    assert steps[-1].bucket == 128
    assert not any(step.copied for step in steps)
    watch.finish()
    assert (watch.tokens("stream"), watch.tokens("vocab")) == (want_own, want)
    for name, expected in (("stream", own_logits), ("vocab", logits)):
        np.testing.assert_allclose(recorder.take_by_id(name), expected, rtol=0, atol=1e-4)


def test_a_move_to_smaller_buffers_ends_when_they_would_be_too_small(engine, tmp_path, monkeypatch):
    own, large = (make_adapter(tmp_path / name, engine, rank, rank) for name, rank in (("own", 9), ("large", 64)))
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 100, own)
    watch.start("large", 2, large)
    watch.until(lambda: watch.outputs["large"].finished)
    allow(engine, 1)
    watch.until(lambda: watch.steps[-1].staged)
    assert watch.rows._next is not None
    steps = watch.start("again", 2, large)
    assert watch.rows._next is None
    assert not any(step.staged or step.copied for step in steps)  # its rows never left the large ones
    watch.finish()
    assert watch.tokens("again") == watch.tokens("large")


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside-another"])
def test_an_adapter_that_is_unloaded_during_the_move(engine, recorder, tmp_path, monkeypatch, other):
    own, gone, stays = (
        make_adapter(tmp_path / name, engine, rank, rank) for name, rank in (("own", 8), ("gone", 48), ("stays", 64))
    )
    (want_own, _), (want_stays, _) = alone(engine, recorder, 40, own), alone(engine, recorder, 4, stays)
    adapter = engine.add_lora(gone)
    allow(engine, 1)
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 40, own)
    engine.add_request("gone", PROMPT, greedy(4), gone)
    if other:
        engine.add_request("stays", PROMPT, greedy(4), stays)
    watch.until(lambda: "gone" in watch.steps[-1].staged)
    moving = watch.rows._next
    assert moving is not None
    assert adapter in moving.rank_rows._blocks
    assert not watch.rows.holds(adapter)
    engine.abort_request("gone")
    engine.remove_lora("gone")
    for side in (watch.rows._now, moving):
        assert adapter not in side.rank_rows._blocks
        with pytest.raises(KeyError):
            side.rank_rows.index_of(adapter)
    seen = len(watch.steps)
    watch.finish()
    rest = watch.steps[seen:]
    assert "gone" not in {name for step in rest for name in (*step.staged, *step.copied)}
    assert not any(step.copied for step in rest)
    assert watch.rows._next is None
    assert max(step.bucket for step in rest) == (128 if other else 16)
    assert watch.tokens("stream") == want_own
    if other:
        assert watch.tokens("stays") == want_stays


def test_a_stream_of_the_base_stages_nothing(engine, tmp_path, monkeypatch):
    engine.add_lora(make_adapter(tmp_path / "idle", engine, 64, 1))
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 8)
    used, get = set(), watch.rows._programs.get
    monkeypatch.setattr(watch.rows._programs, "get", lambda *key: used.add(key[0]) or get(*key))
    watch.finish()
    assert used == {"begin", "layers", "finish"}
    assert not any(step.staged or step.copied or step.bucket for step in watch.steps)
    assert watch.rows._next is None
    assert watch.rows.layers == []
