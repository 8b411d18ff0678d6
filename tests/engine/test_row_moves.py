"""Row buffers that move to another size, and whose turn it is, while sequences run and adapters go."""

from __future__ import annotations

import numpy as np
import pytest

from multilora_jax.engine.rank_rows import SHRINK_PATIENCE
from tests.engine.row_watch import LARGE, PROMPT, Watch, allow, alone, as_new, three_sizes
from tests.tiny_engine import LogitsRecorder, greedy, make_adapter


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
