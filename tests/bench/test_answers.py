"""Requests through an engine: their order, how many at once, and what counts as decoding alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from multilora_jax.bench import answers
from multilora_jax.bench.answers import Request, answer, greedy
from multilora_jax.errors import UserError
from multilora_jax.request import CompletionOutput, RequestOutput


class Steps:
    """An engine whose requests take a step a prompt token, 1 s each, and a step of 0.25 s for each two tokens.

    A step is as long as its longest part. The prompt of a request is its first token, its answer counts on from it.
    """

    def __init__(self, fails: int | None = None):
        self.config = SimpleNamespace(max_num_seqs=3)
        self.now, self.most, self.fails = 0.0, 0, fails
        self.live: dict[str, tuple[list[int], int, list[int]]] = {}

    def add_request(self, request_id: str, prompt: list[int], params: Any, lora: Any, cache_salt: Any) -> None:
        assert (lora, cache_salt) == (None, "salt")
        self.live[request_id] = (prompt, len(prompt), [])
        self.lengths = params.max_tokens
        self.most = max(self.most, len(self.live))

    def step(self) -> list[RequestOutput]:
        outputs, seconds = [], 0.25
        for request_id, (prompt, missing, tokens) in list(self.live.items()):
            if missing:
                seconds = 1.0
                self.live[request_id] = (prompt, missing - 1, tokens)
            if missing <= 1:
                wanted = 1 if missing else 2
                tokens += [prompt[0] + len(tokens) + n for n in range(wanted)]
                del tokens[self.lengths :]
                done = len(tokens) == self.lengths
                error = UserError("given up", reason="x") if prompt[0] == self.fails else None
                outputs.append(RequestOutput(request_id, None, prompt, None, [CompletionOutput(0, "", [*tokens])], done,
                                             error=error))  # fmt: skip
                if done:
                    del self.live[request_id]
        self.now += seconds
        return outputs


def answered(engine: Any, monkeypatch: Any, lengths: list[int], **options: Any) -> answers.Answers:
    monkeypatch.setattr(answers.time, "perf_counter", lambda: engine.now)
    requests = [Request([100 * n] * length, greedy(5), salt="salt") for n, length in enumerate(lengths)]
    return answer(engine, requests, **options)


def test_one_at_a_time_decoding_is_from_the_first_token_to_the_last(monkeypatch):
    engine = Steps()
    got = answered(engine, monkeypatch, [3, 1], at_once=1)
    assert got.token_ids == [[0, 1, 2, 3, 4], [100, 101, 102, 103, 104]]
    assert (engine.most, got.new_tokens) == (1, 10)
    assert got.seconds == 3 + 0.5 + 1 + 0.5
    assert (got.decode_s, got.decode_tokens) == ([0.25] * 4, 8)


def test_steps_beside_a_prompt_are_not_of_decoding_alone(monkeypatch):
    engine = Steps()
    got = answered(engine, monkeypatch, [4, 2, 1, 1])
    # The second and the third end while the first reads its prompt; the fourth comes then.
    assert [tokens[0] for tokens in got.token_ids] == [0, 100, 200, 300]
    assert engine.most == 3
    assert got.decode_s == [0.25, 0.25]
    assert got.decode_tokens == 2 * 2 * 2
    assert got.seconds == 4 + 0.5


def test_why_a_request_was_given_up_is_raised(monkeypatch):
    with pytest.raises(UserError, match="given up"):
        answered(Steps(fails=100), monkeypatch, [1, 1])
