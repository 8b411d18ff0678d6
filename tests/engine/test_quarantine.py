"""Who is to blame for failed steps: exactly the poisoned are found, in few steps, whatever order they come in."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from multilora_jax.engine.quarantine import MAX_FAILURES, Quarantine
from multilora_jax.request import FinishReason, SamplingParams, Sequence, SequenceStatus


def sequences(number: int) -> list[Sequence]:
    return [Sequence(str(i), [1], 1, SamplingParams()) for i in range(number)]


def end(seq: Sequence) -> None:
    seq.status, seq.finish_reason = SequenceStatus.FINISHED, FinishReason.ERROR


def serve(seqs: list[Sequence], poisoned: set[Sequence], seats: int, need: int = 1) -> tuple[list[Sequence], int, int]:
    """Runs all to their first `need` tokens as the engine does; (ended, failed steps, steps)."""
    quarantine, waiting, tokens = Quarantine(), list(seqs), dict.fromkeys(seqs, 0)
    running: list[Sequence] = []
    ended: list[Sequence] = []
    failures = steps = 0
    while waiting or running:
        steps += 1
        assert steps < 20 * (len(seqs) + 2)
        trial = set(quarantine.on_trial)
        start = [seq for seq in waiting if not trial or seq in trial][: seats - len(running)]
        running += start
        waiting = [seq for seq in waiting if seq not in start]
        assert running, "nobody may run though somebody waits"
        if poisoned.intersection(running):
            failures += 1
            culprits = quarantine.failed(running)
            ended += culprits
            for seq in culprits:
                end(seq)
            waiting, running = [seq for seq in running if seq not in culprits] + waiting, []
            continue
        quarantine.passed(running)
        for seq in running:
            tokens[seq] += 1
        for seq in [seq for seq in running if tokens[seq] == need]:
            end(seq)
            running.remove(seq)
    return ended, failures, steps


@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.integers(1, 16), st.integers(1, 4))
def test_exactly_the_poisoned_are_ended(number, which, seats, need):
    seqs = sequences(number)
    poisoned = {seq for i, seq in enumerate(seqs) if i in which}
    ended, failures, _ = serve(seqs, poisoned, seats, need)
    assert set(ended) == poisoned
    assert len(ended) == len(poisoned)
    # The whole batch, one for each halving until it is alone, and once more alone.
    assert failures <= len(poisoned) * (math.ceil(math.log2(max(2, seats))) + 2)


def test_one_of_a_large_batch_takes_a_step_for_each_halving():
    seqs = sequences(256)
    ended, failures, _ = serve(seqs, {seqs[200]}, 256)
    assert ended == [seqs[200]]
    assert failures == 9


def test_whoever_fails_once_alone_is_tried_again():
    quarantine, [seq] = Quarantine(), sequences(1)
    assert quarantine.failed([seq]) == []
    assert quarantine.on_trial == [seq]
    assert quarantine.failed([seq]) == [seq]


def test_one_beside_others_is_not_alone():
    """A device that has memory for one sequence at a time serves them one at a time."""
    quarantine, [first, second] = Quarantine(), sequences(2)
    assert quarantine.failed([first, second]) == []
    quarantine.passed([first])
    assert quarantine.on_trial == [second]
    assert quarantine.failed([first, second]) == []
    assert quarantine.on_trial == [second]
    assert quarantine.failed([second]) == [second]


def test_what_fails_together_and_never_alone_costs_nobody_an_answer():
    quarantine, seqs = Quarantine(), sequences(4)
    assert quarantine.failed(seqs) == []
    for _ in range(2):
        group = quarantine.on_trial
        assert len(group) == 2
        quarantine.passed(group)
    assert quarantine.on_trial == []


def test_those_that_left_are_nobody_s_suspects():
    quarantine, seqs = Quarantine(), sequences(4)
    quarantine.failed(seqs)
    for seq in seqs[:3]:
        end(seq)
    assert quarantine.on_trial == [seqs[3]]
    end(seqs[3])
    assert quarantine.on_trial == []


def test_others_than_those_on_trial_may_be_to_blame():
    quarantine, seqs = Quarantine(), sequences(5)
    quarantine.failed(seqs[:4])
    quarantine.passed(seqs[:2])
    assert quarantine.on_trial == seqs[2:4]
    assert quarantine.failed([seqs[0], seqs[4]]) == []  # cleared, or never suspected: now they are
    assert quarantine.on_trial == [seqs[0]]


def test_nobody_fails_for_ever():
    quarantine, seqs = Quarantine(), sequences(2)
    quarantine.failed([*seqs, *sequences(2)])
    for _ in range(MAX_FAILURES + 2):
        for seq in quarantine.failed([seq for seq in seqs if not seq.finished]):
            end(seq)
    assert all(seq.finished for seq in seqs)


def test_a_failure_with_nobody_to_blame_ends_nobody():
    assert Quarantine().failed([]) == []
