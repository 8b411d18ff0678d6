"""Rank rows that come to the device in slices, while other sequences run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.engine.rank_rows import SHRINK_PATIENCE
from multilora_jax.engine.row_buffers import MOST_STAGE_SHARE, STAGE_SHARE
from multilora_jax.request import LoRARequest
from tests.engine.row_watch import LARGE, PROMPT, Watch, allow, alone, as_new, take, three_sizes
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_adapter, run_all

PEFT = "base_model.model.model."


@pytest.fixture(scope="module")
def served():
    engine = three_sizes()
    return engine, LogitsRecorder(engine)


@pytest.fixture
def recorder(served):
    served[1].clear()
    return served[1]


@pytest.fixture
def engine(served):
    yield from as_new(served[0])


@pytest.mark.parametrize("budget", [0.001, 1.5, 3, 100], ids=["least", "some", "more", "plenty"])
@pytest.mark.parametrize("stream_rank", [0, 8], ids=["base", "adapter"])
def test_d17_rows_arrive_in_slices_beside_the_old_buffers(engine, recorder, tmp_path, monkeypatch, stream_rank, budget):
    own = make_adapter(tmp_path / "own", engine, stream_rank, 1) if stream_rank else None
    cold = make_adapter(tmp_path / "cold", engine, 64, 2)
    want_stream, want_cold = alone(engine, recorder, 40, own), alone(engine, recorder, 6, cold)
    allow(engine, monkeypatch, budget)
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 40, own)
    bucket = watch.steps[-1].bucket
    assert bucket == (16 if stream_rank else 0)
    old = watch.rows.layers
    engine.add_request("cold", PROMPT, greedy(6), cold)
    steps = watch.until(lambda: "cold" in watch.outputs)

    most, moved = max(1, math.floor(budget)), LARGE + bool(stream_rank)  # what the stream uses goes along
    copied = [step.staged for step in steps if step.staged]
    assert all(1 <= len(names) <= most for names in copied)
    assert len(copied) == math.ceil(moved / most)
    assert sorted(name for names in copied for name in names) == ["cold"] * LARGE + ["own"] * bool(stream_rank)
    assert not any(step.copied for step in watch.steps[1:])
    # Where the budget is less than new buffers take, one step makes them. Until all is there the old ones are used.
    arrived = max(i for i, step in enumerate(steps) if step.staged)
    assert arrived == len(copied) - (budget == 100)
    new = 128 if stream_rank else 64
    assert [step.bucket for step in steps] == [bucket] * arrived + [new] * (len(steps) - arrived)
    assert watch.rows.layers is not old
    # A step that copies much does not begin the newcomer's prompt too; and the stream got a token in each of them.
    assert len(steps) - 1 - arrived == (budget != 100)
    assert all("stream" in step.running for step in steps)
    watch.finish()
    for name, (tokens, logits) in {"stream": want_stream, "cold": want_cold}.items():
        assert watch.tokens(name) == tokens
        np.testing.assert_allclose(recorder.take_by_id(name), logits, rtol=0, atol=1e-4)


def test_a_newcomer_beside_few_streams_has_its_rows_soon(engine, tmp_path, monkeypatch):
    """Staging goes by the empty seats, however few wait: 15 of 16."""
    own, cold = make_adapter(tmp_path / "own", engine, 8, 1), make_adapter(tmp_path / "cold", engine, 64, 2)
    run_all(engine, [Request(PROMPT, greedy(2), lora) for lora in (own, cold)])  # both are in the pool
    engine.runner.rows.reset()
    allow(engine, monkeypatch, 1, full=False)
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 40, own)
    engine.add_request("cold", PROMPT, greedy(6), cold)
    steps = watch.until(lambda: "cold" in watch.outputs)
    assert max(len(step.staged) for step in steps) == int(MOST_STAGE_SHARE / STAGE_SHARE)
    watch.finish()


def test_rows_arrive_in_slices_in_buffers_that_are_large_enough(engine, recorder, tmp_path, monkeypatch):
    own, warm, cold = (
        make_adapter(tmp_path / name, engine, rank, rank) for name, rank in (("own", 8), ("warm", 63), ("cold", 64))
    )
    (want_own, _), (want_cold, _) = alone(engine, recorder, 40, own), alone(engine, recorder, 6, cold)
    allow(engine, monkeypatch, 100)
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 40, own)
    watch.start("warm", 2, warm)
    watch.until(lambda: watch.outputs["warm"].finished)
    layers, before = engine.runner.rows.layers, len(watch.steps)
    allow(engine, monkeypatch, 2)
    engine.add_request("cold", PROMPT, greedy(6), cold)
    steps = watch.until(lambda: "cold" in watch.outputs)
    assert [step.staged for step in steps] == [["cold"] * 2] * (LARGE // 2) + [[]]
    assert {step.bucket for step in watch.steps[before:]} == {128}
    assert not any(step.copied for step in watch.steps[before:])
    assert engine.runner.rows.layers is layers
    assert not watch.rows.holds(engine.adapters.registry.get("warm"))  # warm, which nobody runs, gave its rows
    watch.finish()
    assert (watch.tokens("stream"), watch.tokens("cold")) == (want_own, want_cold)


def test_the_most_urgent_adapter_comes_first_and_need_not_wait_for_the_next(engine, tmp_path, monkeypatch):
    own, one, two = (make_adapter(tmp_path / name, engine, 32, i) for i, name in enumerate(("own", "one", "two")))
    allow(engine, monkeypatch, 100)
    watch = Watch(engine, monkeypatch)
    watch.start("stream", 40, own)
    for name, lora in (("before one", one), ("before two", two)):
        engine.add_request(name, PROMPT, greedy(2), lora)
    watch.until(lambda: len(watch.outputs) == 3 and engine.stats().num_running == 1)
    for adapter in engine.list_loras()[1:]:
        engine.runner.rows.forget(adapter)
    allow(engine, monkeypatch, 1)
    before = len(watch.steps)
    for name, lora in (("two", two), ("one", one)):
        engine.add_request(name, PROMPT, greedy(2), lora)
    watch.until(lambda: len(watch.outputs) == 5)
    steps = watch.steps[before:]
    assert [name for step in steps for name in step.staged] == ["two"] * 4 + ["one"] * 4
    assert next(i for i, step in enumerate(steps) if "two" in step.running) <= 5
    watch.finish()


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
    allow(engine, monkeypatch, 1)
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


def test_a_slice_takes_a_share_of_the_time_of_a_step(engine, tmp_path, monkeypatch):
    rows, copied = engine.runner.rows, []
    adapters = [engine.add_lora(make_adapter(tmp_path / "large", engine, 64, 1))]
    rows.reset()
    rows.rank_rows.reset(64)
    rows._now.layers += rows._programs.get("rows", 64)()
    monkeypatch.setattr(rows, "_insert", lambda *args: copied.append(args))
    take(engine, monkeypatch, STAGE_SHARE * (1 - 1e-9))  # a block in a step of a second
    rows._prompt_token_s = 0.0
    for seconds, spent, blocks in (
        (0.0, 0.0, 1),
        (2.0, 0.0, 2),
        (2.9, 0.0, 2),
        (3.0, 1.0, 2),
        (3.0, 4.0, 1),
        (0.5, 0.0, 1),
    ):
        rows._step_s = 0.0
        rows.saw_step(seconds)
        rows.rank_rows.reset(64)
        copied.clear()
        # What pages written before the step took is of the same share.
        rows.stage([], adapters, engine.runner.pool, lambda adapter: [], spent_s=spent * STAGE_SHARE)
        assert len(copied) == blocks
    # And more of it where seats stand empty, within bounds.
    rows._step_s = 0.0
    rows.saw_step(1.0)
    for empty, blocks in ((0.1, 1), (6 * STAGE_SHARE, 3), (0.9, math.floor(MOST_STAGE_SHARE / STAGE_SHARE))):
        copied.clear()
        rows.rank_rows.reset(64)
        rows.stage([], adapters, engine.runner.pool, lambda adapter: [], empty_seats=empty)
        assert len(copied) == blocks
    # A step that follows one with prompts is taken to be as long as that one.
    rows.saw_step(2.0, 10)
    for num_tokens, blocks in ((0, 1), (10, 2), (25, 3)):
        rows._prompt_tokens = num_tokens
        copied.clear()
        rows.rank_rows.reset(64)
        rows.stage([], adapters, engine.runner.pool, lambda adapter: [])
        assert len(copied) == blocks
    rows._step_s = 1.0
    rows.saw_step(9.0)
    assert 0.5 < rows._step_s < 2  # one slow step says little
    for _ in range(100):
        rows.saw_step(9.0)
    assert rows._step_s == pytest.approx(9.0, rel=1e-3)


def test_speed_is_measured_without_touching_the_buffers(engine, tmp_path, monkeypatch):
    run_all(engine, [Request(PROMPT, greedy(1), make_adapter(tmp_path / "a", engine, 8, 1))])
    rows = engine.runner.rows
    assert rows._step_s > 0
    before = [np.asarray(layer.a_qkv) for layer in rows.layers]
    take(engine, monkeypatch, 0.0)
    rows.time_copies(engine.runner.pool)
    assert all(1e-7 < seconds < 10 for seconds in rows._copy_s.values())
    assert 1e-13 < rows._make_s_per_byte < 1e-3
    for layer, a_qkv in zip(rows.layers, before, strict=True):
        np.testing.assert_array_equal(layer.a_qkv, a_qkv)


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


def test_buffers_shrink_with_patience_and_in_slices(engine, recorder, tmp_path, monkeypatch):
    own, more, large = (
        make_adapter(tmp_path / name, engine, rank, rank) for name, rank in (("own", 9), ("more", 17), ("large", 64))
    )
    want, logits = alone(engine, recorder, 110, own)
    watch = Watch(engine, monkeypatch)
    allow(engine, monkeypatch, 100)
    watch.start("stream", 110, own)
    watch.start("large", 2, large)
    assert watch.steps[-1].bucket == 128
    watch.until(lambda: watch.outputs["large"].finished)
    allow(engine, monkeypatch, 1)
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


def test_a_move_to_smaller_buffers_ends_when_they_would_be_too_small(engine, tmp_path, monkeypatch):
    own, large = (make_adapter(tmp_path / name, engine, rank, rank) for name, rank in (("own", 9), ("large", 64)))
    watch = Watch(engine, monkeypatch)
    allow(engine, monkeypatch, 100)
    watch.start("stream", 100, own)
    watch.start("large", 2, large)
    watch.until(lambda: watch.outputs["large"].finished)
    allow(engine, monkeypatch, 1)
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
    allow(engine, monkeypatch, 1)
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


@pytest.mark.parametrize("rank", [8, 64], ids=["free-rows", "larger-buffers"])
def test_d16_an_adapter_gets_its_rows_though_others_take_every_seat(tmp_path, monkeypatch, rank):
    """Requests of an adapter whose rows are there pass it, but only while its rows arrive."""
    engine = three_sizes(max_num_seqs=2)
    hot, cold = (make_adapter(tmp_path / name, engine, r, r) for name, r in (("hot", 7), ("cold", rank)))
    engine.add_lora(cold)
    allow(engine, monkeypatch, 0.001)
    watch, asked = Watch(engine, monkeypatch), 0
    for tokens in (10, *[20] * 6):  # the seats never come free at the same time
        engine.add_request(f"hot{asked}", PROMPT, greedy(tokens), hot)
        asked += 1
    watch.until(lambda: len(watch.outputs) == 2)
    engine.add_request("cold", PROMPT, greedy(2), cold, priority=-1)  # next in the queue

    def goes_on() -> bool:
        nonlocal asked
        while engine.stats().num_waiting < 5:
            engine.add_request(f"hot{asked}", PROMPT, greedy(20), hot)
            asked += 1
        return "cold" in watch.outputs

    steps = watch.until(goes_on)
    assert len(steps) <= 2 * 20
    assert not any(step.copied for step in steps)
    assert all(any(name.startswith("hot") for name in step.running) for step in steps)
    for request_id in list(engine._requests):
        engine.abort_request(request_id)


def test_where_nothing_runs_nobody_waits_for_slices(engine, tmp_path, monkeypatch):
    """All that a step can begin with begin: their rows come before it, in the order of the queue."""
    loras = [make_adapter(tmp_path / name, engine, rank, rank) for name, rank in (("one", 24), ("two", 64))]
    allow(engine, monkeypatch, 0.001)
    watch = Watch(engine, monkeypatch)
    for name, lora in (("first", loras[0]), ("second", loras[1]), ("third", loras[0])):
        engine.add_request(name, PROMPT, greedy(4), lora)
    step = watch.step()
    assert step.running == {"first", "second"}  # two prompts fill a step
    assert (step.staged, step.copied) == ([], ["one"] * 3 + ["two"] * LARGE)
    watch.finish()
