"""The entries and masks of one answer, against dictionaries that are worked out anew for every token."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from multilora_jax.engine.sampling_state import SamplingPlan, bad_word_ids, bitmask
from multilora_jax.sampling_params import MAX_EDITED_TOKENS, SamplingParams
from multilora_jax.tokenizer import Tokenizer
from tests.server.fake_engine import byte_tokenizer

VOCAB = 200


def as_dict(state: Any, mask_W: np.ndarray | None = None) -> dict[int, tuple[float, float, float]]:
    """Token to (bias, factor, penalty), entries that change nothing left out."""
    token_E, *values = state.entries(mask_W)
    assert len(set(token_E.tolist())) == len(token_E)
    table: dict[int, Any] = {int(t): tuple(map(float, row)) for t, *row in zip(token_E, *values, strict=True)}
    return {token: row for token, row in table.items() if row != (0.0, 1.0, 0.0)}


def by_definition(params, prompt, output, stop_ids, bad_words):
    counts, table = Counter(output), {}
    for token in set(prompt) | set(output) | set(params.logit_bias or {}) | stop_ids | {w[-1] for w in bad_words}:
        bias = (params.logit_bias or {}).get(token, 0.0)
        if len(output) < params.min_tokens and token in stop_ids:
            bias = -np.inf
        if any(w[-1] == token and output[len(output) - len(w) + 1 :] == list(w[:-1]) for w in bad_words):
            bias = -np.inf
        factor = params.repetition_penalty if token in prompt or token in output else 1.0
        penalty = params.frequency_penalty * counts[token] + params.presence_penalty * (counts[token] > 0)
        if (bias, factor, penalty) != (0.0, 1.0, 0.0):
            table[token] = (np.float32(bias), np.float32(factor), np.float32(penalty))
    return table


@pytest.mark.parametrize("seed", range(30))
def test_entries_equal_their_definition(seed):
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(VOCAB, size=rng.integers(1, 60)).tolist(), []
    few = 5 if seed % 2 else VOCAB  # few tokens repeat and spell bad words often
    params = SamplingParams(
        presence_penalty=rng.choice([0.0, 0.5, -1.5]), frequency_penalty=rng.choice([0.0, 0.25, 2.0]),
        repetition_penalty=rng.choice([1.0, 1.5, 0.75]), min_tokens=int(rng.choice([0, 3, 40])), max_tokens=100,
        logit_bias={int(t): float(rng.normal()) for t in rng.permutation(VOCAB)[: rng.integers(0, 20)]},
    )  # fmt: skip
    stop_ids = frozenset(rng.permutation(VOCAB)[:3].tolist())
    bad_words = tuple(tuple(rng.integers(few, size=n).tolist()) for n in (1, 2, 2, 3, 4))
    state = SamplingPlan(params, VOCAB, stop_ids, bad_words).start(prompt)
    for token in rng.integers(few, size=80).tolist():
        assert as_dict(state) == by_definition(params, prompt, output, stop_ids, bad_words)
        state.observe(token)
        output.append(token)


def test_a_mask_wins_over_bans_that_would_leave_nothing():
    params = SamplingParams(min_tokens=2, allowed_token_ids=[7, 64])
    state = SamplingPlan(params, VOCAB, frozenset({64}), ((7,),), bitmask([7, 64], VOCAB)).start([1])
    mask_W = np.zeros(8, np.uint32)
    assert state.fill_mask(mask_W)
    assert np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist() == [7, 64]
    assert as_dict(state, mask_W) == {}
    state = SamplingPlan(params, VOCAB, frozenset({64}), (), bitmask([7, 64], VOCAB)).start([1])
    assert as_dict(state, mask_W) == {64: (-np.inf, 1.0, 0.0)}


def test_extreme_repetition_penalties_stay_finite():
    state = SamplingPlan(SamplingParams(repetition_penalty=1e-300), VOCAB).start([3])
    assert as_dict(state) == {3: (0.0, float(np.float32(1e-6)), 0.0)}


def test_as_many_biases_as_anybody_may_ask_for():
    bias = {token: float(token % 7 + 1) for token in range(MAX_EDITED_TOKENS)}
    state = SamplingPlan(SamplingParams(logit_bias=bias), MAX_EDITED_TOKENS).start([3])
    assert as_dict(state) == {token: (value, 1.0, 0.0) for token, value in bias.items()}


def test_nobody_masks_without_being_asked():
    mask_W = np.zeros(8, np.uint32)
    assert not SamplingPlan(SamplingParams(min_tokens=1), VOCAB).start([1]).fill_mask(mask_W)
    assert not mask_W.any()


def test_bad_words_are_spelled_with_and_without_a_space():
    tokenizer = byte_tokenizer()
    assert bad_word_ids(["no", " on"], tokenizer) == [(110, 111), (111, 110)]
    assert bad_word_ids(["no", "no"], tokenizer) == [(110, 111)]


def test_bad_words_of_one_token_with_a_space_and_several_without():
    """Most rare words are so in vocabularies of BPE: " elephant" beside "ele" and "phant"."""
    pieces, merges = ["n", "o", "Ġ", "Ġn", "Ġno"], [("Ġ", "n"), ("Ġn", "o")]
    backend = tokenizers.Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    assert bad_word_ids(["no", "on"], Tokenizer(backend)) == [(0, 1), (4,), (1, 0)]
