"""Choosing the next token on the device, row by row.

In this order: what the row's SamplingEdits say (masks, then bans, biases and penalties), temperature, min_p, top_k,
top_p, the draw. Log-probabilities are of the model's own distribution, before all of these.

Each row draws with its own key, folded with the position of the token it draws, so a seed gives the same text in any
batch. Work that no row of a step asked for is skipped by `lax.cond`; no option ever recompiles.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from multilora_jax.models.batch import SamplingBatch
from multilora_jax.models.shards import best_over, first_token, max_over, num_shards, sum_over

_BLOCK = 64  # of logits that are compared together

NUM_TOP = 20
"""Alternatives that a step returns for rows that ask for log-probabilities."""


@jax.tree_util.register_dataclass
@dataclass
class StepOutput:
    """What a step gives back for each of its S rows."""

    token_S: jax.Array  # int32[S], the sampled token; as many rows as the largest step has
    logprob_S: jax.Array  # float32[S], ln p of that token before temperature; 0 where no row asked
    rank_S: jax.Array  # int32[S], 1 for the most likely token
    top_ids_SK: jax.Array  # int32[S, NUM_TOP], most likely tokens
    top_logprobs_SK: jax.Array  # float32[S, NUM_TOP]
    hidden: jax.Array  # activation layout over all T tokens, for prompt log-probabilities


def mask_vocabulary(logits_SV: jax.Array, vocab_S: jax.Array) -> jax.Array:
    """-inf for the token ids that a row does not have: those from vocab_S (int32[S]) on."""
    return jnp.where(jnp.arange(logits_SV.shape[1]) < vocab_S[:, None], logits_SV, -jnp.inf)


def sample(
    logits_SV: jax.Array, sampling: SamplingBatch, *, columns: bool = False, axis_name: str | None = None
) -> jax.Array:
    """int32[S]: the most likely token where temperature is 0, else a draw after temperature, min-p, top-k and top-p.

    Args:
        logits_SV: float32[S, V]; those of tokens that a row does not have may be anything.
        columns: they were computed as [V, S], so that a step of greedy rows had better not transpose them.
        axis_name: mesh axis over which the vocabulary is split: the logits are this shard's part of it, and the result
            is the same on all.
    """
    operand, S = logits_SV.T if columns else logits_SV, len(logits_SV)
    start = first_token(logits_SV.shape[1], axis_name)
    own_S = sampling.vocab_S - start
    if columns:
        best_S = most_likely_of_columns(operand, own_S)
    else:
        best_S = jnp.argmax(mask_vocabulary(logits_SV, own_S), -1).astype(jnp.int32)
    if axis_name is not None:
        value_S = operand[best_S, jnp.arange(S)] if columns else operand[jnp.arange(S), best_S]
        best_S = best_over(jnp.where(best_S < own_S, value_S, -jnp.inf), best_S + start, axis_name)

    def draw(operand: jax.Array) -> jax.Array:
        return _draw(mask_vocabulary(operand.T if columns else operand, own_S), sampling, start, axis_name)

    drawn_S = jax.lax.cond(jnp.any(sampling.temperature_S > 0), draw, lambda _: best_S, operand)
    return jnp.where(sampling.temperature_S > 0, drawn_S, best_S)


def most_likely_of_columns(logits_VS: jax.Array, vocab_S: jax.Array) -> jax.Array:
    """int32[S]: index of each column's largest value before vocab_S, the first of equal ones; any where one is NaN.

    The maximum of each block first, then the block: XLA:CPU does vectors for a maximum over rows, but takes an arg-max
    value by value (with the transposition it saves, 17 ms for 8 columns of 49,152 become 0.3). What is masked is
    never written down, which of 32 columns takes a millisecond and a half.
    """
    V, S = logits_VS.shape
    size = math.gcd(V, _BLOCK)
    blocks_NBS, token_NB1 = logits_VS.reshape(V // size, size, S), jnp.arange(V).reshape(V // size, size, 1)
    block_S = jnp.argmax(jnp.where(token_NB1 < vocab_S, blocks_NBS, -jnp.inf).max(1), 0)
    token_SB = block_S[:, None] * size + jnp.arange(size)
    inside_SB = jnp.where(token_SB < vocab_S[:, None], blocks_NBS[block_S, :, jnp.arange(S)], -jnp.inf)
    return (block_S * size + jnp.argmax(inside_SB, 1)).astype(jnp.int32)


def _draw(logits_SV: jax.Array, sampling: SamplingBatch, start: jax.Array | int, axis_name: str | None) -> jax.Array:
    scaled_SV = logits_SV / jnp.where(sampling.temperature_S > 0, sampling.temperature_S, 1.0)[:, None]
    truncates = (sampling.top_k_S > 0) | (sampling.top_p_S < 1) | (sampling.min_p_S > 0)
    truncate = functools.partial(_truncate, axis_name=axis_name)
    kept_SV = jax.lax.cond(jnp.any(truncates), truncate, lambda x, _: x, scaled_SV, sampling)

    def noise(seed_2: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), position)
        return token_noise(key, start, logits_SV.shape[1])

    noisy_SV = kept_SV + jax.vmap(noise)(sampling.seed_S2, sampling.position_S)
    best_S = jnp.argmax(noisy_SV, -1).astype(jnp.int32)
    if axis_name is None:
        return best_S
    value_S = jnp.take_along_axis(noisy_SV, best_S[:, None], 1)[:, 0]
    return best_over(value_S, best_S + start, axis_name)


def token_noise(key: jax.Array, start: jax.Array | int, count: int) -> jax.Array:
    """float32[count], Gumbel noise of the tokens from `start` on: a token's depends on the key and on it alone.

    So however the vocabulary is split, or padded, the same key draws the same token.
    """
    token_V = jnp.uint32(start) + jnp.arange(count, dtype=jnp.uint32)
    words = threefry_2x32(jax.random.key_data(key), jnp.concatenate([jnp.zeros_like(token_V), token_V]))
    bits_V = words[:count] ^ words[count:]
    # 23 bits as the mantissa of a number in [1, 2), then down to (0, 1).
    unit_V = jax.lax.bitcast_convert_type(bits_V >> 9 | jnp.uint32(0x3F800000), jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(unit_V, jnp.finfo(jnp.float32).tiny)))


def _truncate(logits_SV: jax.Array, sampling: SamplingBatch, *, axis_name: str | None = None) -> jax.Array:
    """-inf below each row's threshold: min_p of the best, its top_k-th logit, then the top_p mass of what is left.

    Thresholds come from bisecting the ordered bit patterns of float32, 32 exact halvings instead of a sort over the
    vocabulary; of a split one counts and masses are summed over the shards. Tokens tied with the last one kept are kept
    too.
    """
    V = logits_SV.shape[1] * num_shards(axis_name)
    order_SV = _ordered(logits_SV)
    want_S = jnp.where(sampling.top_k_S > 0, jnp.minimum(sampling.top_k_S, V), V)
    kth_S = _largest(order_SV, lambda kept_SV: sum_over(jnp.sum(kept_SV, -1), axis_name) >= want_S)
    kept_SV = order_SV >= kth_S[:, None]
    best_S1 = max_over(logits_SV.max(-1, keepdims=True), axis_name)
    kept_SV &= logits_SV >= best_S1 + jnp.log(sampling.min_p_S)[:, None]
    p_SV = jnp.where(kept_SV, jnp.exp(logits_SV - best_S1), 0)
    p_SV = p_SV / sum_over(jnp.sum(p_SV, -1, keepdims=True), axis_name)
    # Sums round: a top_p of 1 keeps everything rather than losing the smallest probabilities.
    mass_S = jnp.where(sampling.top_p_S < 1, sampling.top_p_S, 0.0)

    def enough(some_SV: jax.Array) -> jax.Array:
        return sum_over(jnp.sum(jnp.where(some_SV, p_SV, 0), -1), axis_name) >= mass_S

    pth_S = _largest(order_SV, enough)
    kept_SV &= (order_SV >= pth_S[:, None]) | (sampling.top_p_S >= 1)[:, None]
    return jnp.where(kept_SV, logits_SV, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """float32 to uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0.0 equals 0.0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest(order_SV: jax.Array, enough) -> jax.Array:
    """Per row the largest threshold t for which `enough(order >= t)` holds; it must hold at 0."""

    def body(i: jax.Array, t_S: jax.Array) -> jax.Array:
        higher_S = t_S | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(enough(order_SV >= higher_S[:, None]), higher_S, t_S)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros(order_SV.shape[0], jnp.uint32))


def top_of_blocks(x_SV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k`, the same to the order of equal values, sorting far fewer: the k blocks of the largest maxima.

    A sort of a whole vocabulary takes minutes to compile for a GPU and most of a step's time on a CPU.
    """
    S, V = x_SV.shape
    size = math.gcd(V, _BLOCK)
    if V // size <= k or size == 1:
        return jax.lax.top_k(x_SV, k)
    blocks_SNB = x_SV.reshape(S, V // size, size)
    _, block_SK = jax.lax.top_k(blocks_SNB.max(2), k)
    block_SK = jnp.sort(block_SK, 1)  # so that of equal values the first token comes first
    inside_SC = jnp.take_along_axis(blocks_SNB, block_SK[:, :, None], 1).reshape(S, k * size)
    token_SC = (block_SK[:, :, None] * size + jnp.arange(size)).reshape(S, k * size)
    top_SK, place_SK = jax.lax.top_k(inside_SC, k)
    return top_SK, jnp.take_along_axis(token_SC, place_SK, 1)


def token_logprobs(
    logits_SV: jax.Array,
    token_S: jax.Array,
    vocab_S: jax.Array,
    wanted: jax.Array,
    *,
    columns: bool = False,
    axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits_SV: float32[S, V], before temperature.
        token_S: int32[S].
        vocab_S: int32[S], a row has the tokens before this one.
        wanted: bool scalar; False skips the work and returns zeros.
        columns, axis_name: see sample.

    Returns:
        (logprob_S, rank_S, top_ids_SK, top_logprobs_SK) as in StepOutput.
    """
    S, V = logits_SV.shape
    start, k = first_token(V, axis_name), min(NUM_TOP, V)
    own_S = token_S - start

    def compute(operand: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        masked_SV = mask_vocabulary(operand.T if columns else operand, vocab_S - start)
        shifted_SV = masked_SV - max_over(masked_SV.max(-1, keepdims=True), axis_name)
        logprob_SV = shifted_SV - jnp.log(sum_over(jnp.sum(jnp.exp(shifted_SV), -1, keepdims=True), axis_name))
        value_S = jnp.take_along_axis(logprob_SV, own_S[:, None], 1, mode="clip")[:, 0]
        if axis_name is not None:
            value_S = jax.lax.psum(jnp.where((own_S >= 0) & (own_S < V), value_S, 0), axis_name)
        rank_S = sum_over(jnp.sum(logprob_SV > value_S[:, None], -1, dtype=jnp.int32), axis_name) + 1
        top_SK, ids_SK = top_of_blocks(logprob_SV, k)
        if axis_name is not None:
            top_SK, ids_SK = jax.lax.all_gather((top_SK, ids_SK + start), axis_name, axis=1, tiled=True)
            top_SK, place_SK = jax.lax.top_k(top_SK, min(NUM_TOP, top_SK.shape[1]))
            ids_SK = jnp.take_along_axis(ids_SK, place_SK, 1)
        pad = ((0, 0), (0, NUM_TOP - top_SK.shape[1]))
        return value_S, rank_S, jnp.pad(ids_SK, pad), jnp.pad(top_SK, pad, constant_values=-jnp.inf)

    def skip(_: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        return (
            jnp.zeros(S, jnp.float32),
            jnp.zeros(S, jnp.int32),
            jnp.zeros((S, NUM_TOP), jnp.int32),
            jnp.zeros((S, NUM_TOP), jnp.float32),
        )

    return jax.lax.cond(wanted, compute, skip, logits_SV.T if columns else logits_SV)
