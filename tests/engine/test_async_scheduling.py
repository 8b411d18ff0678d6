"""Steps that are launched before the one before is read: the same answers, in the order promised."""

from __future__ import annotations

import numpy as np
import pytest

from multilora_jax.request import SamplingParams
from tests.tiny_engine import Request, greedy, make_adapter, run_all, tiny_engine, tokens_of

PROMPT, LONG = "Hello there", list(range(40, 110))


@pytest.fixture(scope="module")
def engines():
    """One that reads each step before it plans the next, and one that does not."""
    return tiny_engine(async_scheduling=False), tiny_engine(async_scheduling=True)


@pytest.fixture(scope="module")
def loras(engines, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / f"a{i}", engines[0], rank, i, delta_std=0.15) for i, rank in enumerate((4, 8, 16))]


def sampled(seed, **options):
    return SamplingParams(temperature=0.9, top_p=0.9, seed=seed, max_tokens=12, ignore_eos=True, **options)


def facts(output):
    """What an answer says, log-probabilities rounded."""
    return [
        (c.text, list(c.token_ids), c.finish_reason, c.stop_reason, c.logprobs and [
            {token: round(entry.logprob, 3) for token, entry in entries.items()} for entries in c.logprobs
        ])
        for c in output.outputs
    ]  # fmt: skip


def watched(engine, monkeypatch):
    """Notes "launch" and "read" as they happen."""
    events = []
    execute, read = engine.runner.execute, engine._results.read

    def noted_execute(plan, pages_of):
        events.append("launch")
        result = execute(plan, pages_of)
        events[-1] = ("launch", np.asarray(result[0].batch.token_ids_T).min() < 0)
        return result

    def noted_read(step):
        events.append(("read", False))
        return read(step)

    monkeypatch.setattr(engine.runner, "execute", noted_execute)
    monkeypatch.setattr(engine._results, "read", noted_read)
    return events


def test_every_kind_of_request_is_answered_as_without(engines, loras):
    stop = engines[0].tokenizer.decode(tokens_of(run_all(engines[0], [Request(PROMPT, greedy(8))]))[0][4:6])
    assert stop
    jobs = [
        Request(PROMPT, greedy(9), loras[0]),
        Request(LONG, greedy(20), loras[1]),
        Request(LONG, greedy(1)),
        Request(PROMPT, SamplingParams(temperature=0, max_tokens=30, stop=[stop], ignore_eos=True)),
        Request(PROMPT, sampled(1, logprobs=2), loras[2]),
        Request(PROMPT, sampled(2, n=3), loras[1]),
        Request(LONG, sampled(3), [loras[0], loras[2]]),
        Request(PROMPT, SamplingParams(temperature=0.8, seed=5, max_tokens=25)),
    ]
    held_up = [
        Request(PROMPT, greedy(12, repetition_penalty=1.3), loras[0]),
        Request([1, 2, 3, 1, 2, 3, 1, 2], greedy(16, prompt_lookup_tokens=4)),
        Request(LONG, greedy(4, prompt_logprobs=1), loras[1]),
    ]
    for together in (jobs, held_up, jobs + held_up):
        expected, found = (list(map(facts, run_all(engine, together))) for engine in engines)
        assert found == expected


def test_the_next_step_is_launched_before_one_is_read_and_takes_its_tokens_on_the_device(engines, monkeypatch):
    engine = engines[1]
    events = watched(engine, monkeypatch)
    run_all(engine, [Request(PROMPT, greedy(5))])
    launch, fed, read = ("launch", False), ("launch", True), ("read", False)
    # The last token's length is known, so nothing is launched in vain.
    assert events == [launch, fed, read, fed, read, fed, read, fed, read, read]


@pytest.mark.parametrize(
    "options", [{"frequency_penalty": 0.5}, {"prompt_lookup_tokens": 2}, {"logit_bias": {5: 1.0}}], ids=str
)
def test_a_row_whose_token_the_host_must_see_is_waited_for(engines, monkeypatch, options):
    engine = engines[1]
    events = watched(engine, monkeypatch)
    run_all(engine, [Request([7, 8, 9, 7, 8], greedy(3, **options)), Request(PROMPT, greedy(3))])
    assert [kind for kind, _ in events] == ["launch", "read"] * (len(events) // 2)
    assert not any(fed for _, fed in events)


def test_a_sequence_that_stops_unforeseen_leaves_nothing_behind(engines, monkeypatch):
    engine = engines[1]
    (full,) = tokens_of(run_all(engine, [Request(PROMPT, greedy(6))]))
    events = watched(engine, monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, stop_token_ids=[full[3]])
    (output,) = run_all(engine, [Request(PROMPT, params)])
    assert list(output.outputs[0].token_ids) == full[:4]
    assert output.outputs[0].finish_reason == "stop"
    # One step was launched in vain, and nobody waits for it.
    assert [kind for kind, _ in events].count("launch") == [kind for kind, _ in events].count("read") + 1
    assert engine._launched is None
    assert engine.stats().pages_kv == 0


def test_an_id_may_be_used_again_while_its_old_step_is_under_way(engines, loras):
    engine = engines[1]
    (expected,) = tokens_of(run_all(engine, [Request(LONG, greedy(7), loras[2])]))
    engine.add_request("x", PROMPT, greedy(30), loras[0])
    engine.add_request("other", PROMPT, greedy(30))
    for _ in range(4):
        engine.step()
    assert engine._launched is not None
    assert engine.abort_request("x")
    engine.check_integrity()
    engine.add_request("x", LONG, greedy(7), loras[2])
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id == "other" or len(output.prompt_token_ids) == len(LONG)
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        engine.check_integrity()
    assert done["x"] == expected
    assert len(done["other"]) == 30


def test_a_seat_is_given_on_before_the_last_token_is_read(engines):
    engine = tiny_engine(async_scheduling=True, max_num_seqs=2)
    expected = tokens_of(run_all(engines[0], [Request(PROMPT, greedy(3)), Request(LONG[:8], greedy(3))]))
    engine.add_request("long", PROMPT, greedy(30))
    engine.add_request("short", PROMPT, greedy(3))
    engine.add_request("next", LONG[:8], greedy(3))
    seen, steps = {}, []
    while "next" not in seen:
        outputs = engine.step()
        steps.append({output.request_id for output in outputs})
        seen |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs if output.finished}
    assert (seen["short"], seen["next"]) == tuple(expected)
    # It gets its first token in the step after the last one of the sequence whose seat it took.
    assert next(i for i, ids in enumerate(steps) if "next" in ids) == max(
        i for i, ids in enumerate(steps) if "short" in ids
    ) + 1  # fmt: skip
    assert engine.abort_request("long")
    engine.check_integrity()


def test_it_is_off_on_cpus_unless_asked_for(engines):
    assert [engine._runs_ahead for engine in (*engines, tiny_engine())] == [False, True, False]
