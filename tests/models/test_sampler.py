"""Sampling against sorts and softmaxes in numpy, and the independence of rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from multilora_jax.models.batch import SamplingBatch
from multilora_jax.models.sampler import (
    NUM_TOP,
    _truncate,
    most_likely_of_columns,
    sample,
    token_logprobs,
    token_noise,
    top_of_blocks,
)

sample_jit, truncate_jit, logprobs_jit = jax.jit(sample), jax.jit(_truncate), jax.jit(token_logprobs)


def sampling(rows: int, *, seeds: Any = 0, positions: Any = 0, **options: Any) -> SamplingBatch:
    """Equal options for all rows, or one each; the seed is the low word of the key."""
    values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0} | options

    def spread(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), rows))

    seeds = np.broadcast_to(np.asarray(seeds, np.uint32), rows)
    return SamplingBatch(
        index_S=spread(0, np.int32),
        position_S=spread(positions, np.int32),
        temperature_S=spread(values["temperature"], np.float32),
        top_p_S=spread(values["top_p"], np.float32),
        min_p_S=spread(values["min_p"], np.float32),
        top_k_S=spread(values["top_k"], np.int32),
        seed_S2=jnp.asarray(np.stack([np.zeros(rows, np.uint32), seeds], 1)),
        num_logprobs_S=spread(-1, np.int32),
        vocab_S=spread(2**31 - 1, np.int32),
    )


@pytest.mark.parametrize("vocab", [1, 64, 97, 640, 1000])
def test_most_likely_of_columns_is_the_first_of_the_largest(vocab):
    logits_VS = np.random.default_rng(vocab).integers(-3, 3, (vocab, 9)).astype(np.float32)  # many ties
    logits_VS[:, 1], logits_VS[:, 2], logits_VS[-1, 3], logits_VS[vocab // 2, 4] = -np.inf, 0, 9, np.nan
    token_S = np.asarray(jax.jit(most_likely_of_columns)(logits_VS, np.full(9, vocab)))
    assert 0 <= token_S[4] < vocab
    np.testing.assert_array_equal(np.delete(token_S, 4), np.delete(logits_VS.argmax(0), 4))


@pytest.mark.parametrize("vocab", [5, 97, 640, 1280, 2560, 4096 + 32])
def test_top_of_blocks_is_top_k_to_the_order_of_equal_values(vocab):
    logits_SV = np.random.default_rng(vocab).integers(-40, 40, (12, vocab)).astype(np.float32)
    logits_SV[0], logits_SV[1], logits_SV[2, 3:] = -np.inf, 7, -np.inf
    logits_SV[3] = np.arange(vocab)
    k = min(NUM_TOP, vocab)
    got, wanted = jax.jit(top_of_blocks, static_argnums=1)(logits_SV, k), jax.lax.top_k(logits_SV, k)
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])


def test_noise_belongs_to_a_token_and_not_to_its_place():
    key = jax.random.key(7)
    whole = np.asarray(token_noise(key, 0, 4000))
    np.testing.assert_array_equal(token_noise(key, 1000, 500), whole[1000:1500])
    assert not np.array_equal(token_noise(jax.random.key(8), 0, 4000), whole)
    # Gumbel's mean and standard deviation.
    assert whole.mean() == pytest.approx(0.5772, abs=0.08)
    assert whole.std() == pytest.approx(np.pi / 6**0.5, abs=0.08)


def test_columns_change_nothing_but_the_layout():
    logits_SV = jax.random.normal(jax.random.key(4), (6, 640)) * 3
    options = sampling(6, seeds=np.arange(6), temperature=[0, 1, 0, 0.7, 2, 0], top_k=[0, 0, 5, 5, 0, 0])
    token_S = sample_jit(logits_SV, options)
    np.testing.assert_array_equal(jax.jit(functools.partial(sample, columns=True))(logits_SV, options), token_S)
    for wanted in (True, False):
        rows = logprobs_jit(logits_SV, token_S, options.vocab_S, jnp.bool_(wanted))
        transposed = jax.jit(functools.partial(token_logprobs, columns=True))
        columns = transposed(logits_SV, token_S, options.vocab_S, jnp.bool_(wanted))
        jax.tree.map(np.testing.assert_array_equal, columns, rows)


def softmax(x):
    e = np.exp(np.asarray(x, np.float64) - np.max(x, -1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kept_by_sorting(logits_V, top_k, top_p, min_p):
    """The set that may be drawn, by its definition; None where rounding decides it."""
    x = np.asarray(logits_V, np.float64)
    kept = x >= (np.sort(x)[-min(top_k, len(x))] if top_k else -np.inf)
    if min_p and np.abs(softmax(x) - min_p * softmax(x).max()).min() < 1e-6:
        return None
    kept &= softmax(x) >= min_p * softmax(x).max()
    p = softmax(np.where(kept, x, -np.inf))
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        mass = np.cumsum(p[order])
        if np.abs(mass - top_p).min() < 1e-5:
            return None
        kept &= p >= p[order[np.argmax(mass >= top_p)]] * (1 - 1e-9)
    return kept


def test_greedy_takes_the_first_of_the_best():
    logits_SV = jnp.array([[1.0, 3.0, 2.0], [5.0, 5.0, 5.0], [-1.0, -3.0, -0.5]])
    assert sample_jit(logits_SV, sampling(3, temperature=0)).tolist() == [1, 0, 2]
    assert sample_jit(logits_SV, sampling(3, temperature=0, top_k=2, top_p=0.1, min_p=0.5)).tolist() == [1, 0, 2]


def test_greedy_rows_beside_sampled_ones():
    logits_SV = jnp.asarray(np.random.default_rng(0).standard_normal((64, 50)), jnp.float32)
    temperature = np.where(np.arange(64) % 2, 0.0, 5.0)
    tokens = np.asarray(sample_jit(logits_SV, sampling(64, temperature=temperature, positions=np.arange(64))))
    best = np.asarray(logits_SV).argmax(-1)
    assert (tokens[1::2] == best[1::2]).all()
    assert (tokens[::2] != best[::2]).sum() > 20


@pytest.mark.parametrize("vary", ["positions", "seeds"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature, vary):
    """Chi-square over 8000 draws of one key at many positions, or of many keys at one."""
    n, logits_V = 8000, np.array([2.0, 1.5, 1.0, 0.0, -0.5, 0.3, 1.9, -1.0], np.float32)
    options = {"seeds": 7, "positions": 3} | {vary: np.arange(n)}
    tokens = sample_jit(jnp.tile(logits_V, (n, 1)), sampling(n, temperature=temperature, **options))
    expected = n * softmax(logits_V / temperature)
    chi2 = ((np.bincount(tokens, minlength=8) - expected) ** 2 / expected).sum()
    assert chi2 < 24.3  # 7 degrees of freedom, p = 0.001
    # One draw tells nothing of the next.
    pairs = np.zeros((8, 8))
    np.add.at(pairs, (tokens[:-1:2], tokens[1::2]), 1)
    expected = n / 2 * np.outer(softmax(logits_V / temperature), softmax(logits_V / temperature))
    likely = expected > 20
    assert ((pairs - expected) ** 2 / expected)[likely].sum() < likely.sum() + 4 * np.sqrt(2 * likely.sum())


def test_truncated_draws_follow_the_rest_of_the_softmax():
    n, logits_V = 4000, np.array([2.0, 1.5, 1.0, 0.0, -0.5, 0.3], np.float32)
    for options in ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.5}, {"top_k": 4, "top_p": 0.9, "min_p": 0.2}):
        kept = kept_by_sorting(logits_V, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **options})
        assert kept is not None
        assert 1 < kept.sum() < 6
        p = softmax(np.where(kept, logits_V, -np.inf))
        tokens = sample_jit(jnp.tile(logits_V, (n, 1)), sampling(n, positions=np.arange(n), **options))
        counts = np.bincount(tokens, minlength=6)
        assert (counts[~kept] == 0).all()
        assert ((counts - n * p)[kept] ** 2 / (n * p)[kept]).sum() < 13.9 + 2 * kept.sum()


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    coarse=st.booleans(),
    top_k=st.integers(0, 45),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_kept_sets_equal_those_of_a_sort(seed, coarse, top_k, top_p, min_p, scale):
    """With `coarse` the logits have many ties; tokens tied with the last one kept are kept."""
    rng = np.random.default_rng(seed)
    logits_SV = rng.standard_normal((3, 40)) * scale
    logits_SV = np.round(logits_SV * 2) / 2 if coarse else logits_SV
    logits_SV = logits_SV.astype(np.float32)
    top_p, min_p = float(np.float32(top_p)), float(np.float32(min_p))
    got = np.asarray(truncate_jit(jnp.asarray(logits_SV), sampling(3, top_k=top_k, top_p=top_p, min_p=min_p)))
    for row, logits_V in zip(got, logits_SV, strict=True):
        wanted = kept_by_sorting(logits_V, top_k, top_p, min_p)
        assume(wanted is not None)
        assert (np.isfinite(row) == wanted).all()
        assert (row[wanted] == logits_V[wanted]).all()


def test_rows_have_their_own_options():
    logits_SV = np.tile(np.array([4.0, 3.0, 2.0, 1.0], np.float32), (4, 1))
    options = {"top_k": [1, 0, 0, 0], "top_p": [1.0, 0.8, 1.0, 1.0], "min_p": [0.0, 0.0, 0.3, 0.0]}
    kept = np.isfinite(truncate_jit(jnp.asarray(logits_SV), sampling(4, **options))).sum(-1)
    assert kept.tolist() == [1, 2, 2, 4]


def test_a_top_p_of_one_keeps_the_least_likely_token():
    logits_SV = jnp.asarray([[20.0] + [0.0] * 99], jnp.float32)
    assert np.isfinite(truncate_jit(logits_SV, sampling(1, top_k=100))).all()
    assert np.isfinite(truncate_jit(logits_SV, sampling(1, top_p=0.5))).sum() == 1


def test_a_row_draws_the_same_in_any_batch():
    rng = np.random.default_rng(0)
    logits_SV = rng.standard_normal((9, 300)).astype(np.float32)
    seeds, positions = np.arange(9) * 5, np.arange(9) % 4
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.9}
    together = np.asarray(sample_jit(logits_SV, sampling(9, seeds=seeds, positions=positions, **options)))
    order = rng.permutation(9)
    moved = sample_jit(logits_SV[order], sampling(9, seeds=seeds[order], positions=positions[order], **options))
    assert (np.asarray(moved) == together[order]).all()
    for i in range(9):
        alone = sample_jit(logits_SV[[i]], sampling(1, seeds=seeds[i], positions=positions[i], **options))
        assert int(alone[0]) == together[i]
    # Untruncated neighbours do not change how a row is drawn either.
    mixed = sampling(9, seeds=seeds, positions=positions, temperature=np.where(np.arange(9) == 4, 0.9, 0.0))
    lone = sampling(1, seeds=seeds[4], positions=positions[4], temperature=0.9)
    assert int(sample_jit(logits_SV, mixed)[4]) == int(sample_jit(logits_SV[[4]], lone)[0])


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"temperature": 5.0, "top_k": 40, "top_p": 0.99}])
def test_token_ids_that_a_row_does_not_have_are_never_drawn(options):
    n, vocab_S = 300, np.repeat([1, 7, 50], 100)
    logits_SV = np.zeros((n, 50), np.float32)
    logits_SV[:, 7:] = 30  # the rows that lack these tokens would draw nothing else
    asked = dataclasses.replace(sampling(n, positions=np.arange(n), **options), vocab_S=jnp.asarray(vocab_S))
    tokens = np.asarray(sample_jit(logits_SV, asked))
    columns = jax.jit(functools.partial(sample, columns=True))(logits_SV, asked)
    np.testing.assert_array_equal(columns, tokens)
    assert (tokens < vocab_S).all()
    assert (tokens[200:] >= 7).all()
    if not options:
        assert set(tokens[100:200].tolist()) == set(range(7))


def test_token_ids_that_a_row_does_not_have_do_not_count_in_logprobs():
    rng = np.random.default_rng(5)
    logits_SV = rng.standard_normal((3, 40)).astype(np.float32)
    vocab_S, token_S = np.array([25, 10, 40]), np.array([24, 0, 39])
    for row, vocab in enumerate(vocab_S):
        logits_SV[row, vocab:] = 50
    values = [np.asarray(x) for x in logprobs_jit(logits_SV, token_S.astype(np.int32), vocab_S, jnp.bool_(True))]
    for row, vocab in enumerate(vocab_S):
        own, rank, top_ids, top = (x[row] for x in values)
        wanted = np.log(softmax(logits_SV[row, :vocab]))
        k = min(vocab, NUM_TOP)
        np.testing.assert_allclose(own, wanted[token_S[row]], rtol=0, atol=2e-6)
        assert rank == 1 + (wanted > wanted[token_S[row]]).sum()
        np.testing.assert_array_equal(top_ids[:k], np.argsort(-wanted)[:k])
        np.testing.assert_allclose(top[:k], np.sort(wanted)[::-1][:k], rtol=0, atol=2e-6)
        assert (top[k:] == -np.inf).all()


def test_both_words_of_a_key_count():
    logits_SV = jnp.zeros((1, 1000))
    tokens = set()
    for key in ([0, 1], [1, 0], [1, 1], [0, 0]):
        batch = sampling(1)
        batch.seed_S2 = jnp.array([key], jnp.uint32)
        tokens.add(int(sample_jit(logits_SV, batch)[0]))
    assert len(tokens) == 4


@pytest.mark.parametrize("vocab", [8, 260])
def test_logprobs_equal_a_log_softmax(vocab):
    rng = np.random.default_rng(vocab)
    logits_SV = (3 * rng.standard_normal((5, vocab))).astype(np.float32)
    token_S = rng.integers(0, vocab, 5).astype(np.int32)
    own, rank, top_ids, top = (
        np.asarray(x)
        for x in logprobs_jit(logits_SV, token_S, np.full(len(token_S), logits_SV.shape[1]), jnp.bool_(True))
    )
    wanted = np.log(softmax(logits_SV))
    k = min(vocab, NUM_TOP)
    order = np.argsort(-wanted, -1)[:, :k]
    np.testing.assert_allclose(own, wanted[np.arange(5), token_S], rtol=0, atol=2e-6)
    np.testing.assert_array_equal(rank, 1 + (wanted > wanted[np.arange(5), token_S, None]).sum(-1))
    np.testing.assert_array_equal(top_ids[:, :k], order)
    np.testing.assert_allclose(top[:, :k], np.take_along_axis(wanted, order, -1), rtol=0, atol=2e-6)
    assert top.shape == top_ids.shape == (5, NUM_TOP)
    assert (top[:, k:] == -np.inf).all()


def test_unwanted_logprobs_are_skipped():
    values = logprobs_jit(np.ones((3, 30), np.float32), np.zeros(3, np.int32), np.full(3, 30), jnp.bool_(False))
    assert [x.shape for x in values] == [(3,), (3,), (3, NUM_TOP), (3, NUM_TOP)]
    assert all((np.asarray(x) == 0).all() for x in values)
