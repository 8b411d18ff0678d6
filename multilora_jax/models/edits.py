"""What rows ask to change in their logits: masks of tokens, bans, biases and penalties.

In vLLM's order: the mask (structured output, allowed tokens), then bans (bad words, tokens that would end an answer
too early), logit_bias, repetition, frequency and presence penalties; those on one token come as one entry.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from multilora_jax.models.batch import SamplingEdits
from multilora_jax.models.shards import first_token

ENTRY_CHUNK = 1024
"""Entries of one turn of the loop; the number of entries that an array has room for is a multiple of it."""


def edit_logits(logits_SV: jax.Array, edits: SamplingEdits, axis_name: str | None = None) -> jax.Array:
    """float32[S, V] with the edits; rows that have none come out as they are, bit for bit.

    The work goes with the number of entries; that of masks is skipped where no row has one. Inside shard_map over
    axis_name the logits are this shard's part of the vocabulary.
    """
    num_rows, width = logits_SV.shape
    start = first_token(width, axis_name)
    masked_SV = jax.lax.cond(
        jnp.any(edits.masked_S), functools.partial(_mask, start=start), lambda x_SV, _: x_SV, logits_SV, edits
    )

    def turn(index: jax.Array, x_SV: jax.Array) -> jax.Array:
        first = index * ENTRY_CHUNK

        def part(array_E: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(array_E, (first,), (ENTRY_CHUNK,))

        counts = first + jnp.arange(ENTRY_CHUNK) < edits.num_entries
        row = jnp.where(counts, part(edits.row_E), num_rows)  # a row that does not exist
        token, factor = part(edits.token_E) - start, part(edits.factor_E)
        token = jnp.where(token < 0, width, token)  # another shard's: likewise
        x = x_SV.at[row, token].get(mode="fill", fill_value=0) + part(edits.bias_E)
        x = jnp.where(x > 0, x / factor, x * factor) - part(edits.penalty_E)
        return x_SV.at[row, token].set(x, mode="drop")

    return jax.lax.fori_loop(0, -(-edits.num_entries // ENTRY_CHUNK), turn, masked_SV)


def _mask(logits_SV: jax.Array, edits: SamplingEdits, *, start: jax.Array | int) -> jax.Array:
    """-inf for the tokens that a row's mask leaves out; the first column is token `start`."""
    S, V = logits_SV.shape
    bits = edits.mask_SW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    bits_SV = bits.reshape(S, -1)
    own_SV = bits_SV[:, :V] if isinstance(start, int) else jax.lax.dynamic_slice_in_dim(bits_SV, start, V, 1)
    allowed_SV = own_SV != 0
    return jnp.where(allowed_SV | ~edits.masked_S[:, None], logits_SV, -jnp.inf)
