"""The functions that the programs of a step are compiled from: start, a group of layers, finish."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from multilora_jax.models.batch import (
    ForwardBatch,
    LayerInputs,
    LayerRows,
    LoRARows,
    SamplingBatch,
    SamplingEdits,
    UnitTable,
    VocabInputs,
    unpack,
    with_sampled,
)
from multilora_jax.models.edits import edit_logits
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.llama import begin, compute_logits, decoder_layer, final_hidden, take_tokens, vocab_inputs
from multilora_jax.models.sampler import StepOutput, sample, token_logprobs


def run_layers(
    weights: list[dict[str, jax.Array]],
    rows: list[LayerRows | None] | UnitTable,
    pool: jax.Array,
    first: jax.Array,
    x: jax.Array,
    inputs: LayerInputs,
    *,
    spec: LlamaSpec,
) -> tuple[jax.Array, jax.Array]:
    """A group of layers from index `first` on; arguments as of decoder_layer. DONATES pool and x when jitted so."""
    layer_fn = jax.jit(functools.partial(decoder_layer, spec=spec))
    for i, w in enumerate(weights):
        own = rows if isinstance(rows, UnitTable) else rows[i]
        x, pool = layer_fn(w, own, pool, first + i, x, inputs)
    return x, pool


def finish(
    top: dict[str, jax.Array],
    x: jax.Array,
    sampling: SamplingBatch,
    vocab: VocabInputs | None,
    edits: SamplingEdits | None = None,
    *,
    spec: LlamaSpec,
    max_rows: int,
    turned: bool = False,
) -> StepOutput:
    """Last norm, head and sampling of the rows that sample; the tokens are padded to `max_rows`.

    x may be `turned`, that is lie in the layout that spec does not say; StepOutput.hidden lies in that of spec.
    """
    if turned:
        x = x.T
    hidden = final_hidden(top, x, vocab, spec=spec)
    logits_SV = compute_logits(top, take_tokens(spec, hidden, sampling.index_S), spec=spec, vocab=vocab)
    layout: Any = {"columns": spec.features_first, "axis_name": spec.axis_name}
    if edits is None:
        token_S = sample(logits_SV, sampling, **layout)
    else:
        token_S = sample(edit_logits(logits_SV, edits, spec.axis_name), sampling, axis_name=spec.axis_name)
    # The same with and without edits, to the last bit: a row must not see whether its neighbours have any.
    wanted = jnp.any(sampling.num_logprobs_S >= 0)
    logprobs = token_logprobs(logits_SV, token_S, sampling.vocab_S, wanted, **layout)
    return StepOutput(jnp.pad(token_S, (0, max_rows - len(token_S))), *logprobs, hidden)


def start_step(
    top: dict[str, jax.Array],
    flat_N: jax.Array,
    sampled_S: jax.Array,
    lora: LoRARows | None,
    pool: jax.Array | None,
    *,
    spec: LlamaSpec,
    like: ForwardBatch,
) -> tuple[jax.Array, LayerInputs, SamplingBatch, tuple[jax.Array, jax.Array] | None]:
    """`begin` from a packed batch.

    Args:
        top, spec: see begin.
        flat_N: see unpack.
        sampled_S: StepOutput.token_S of the step before.
        lora: of the step, without layers.
        pool: of extended steps, else None.
        like: shapes and types of the batch.

    Returns:
        (x, inputs) of begin, then what `finish` needs of the batch: `sampling`, and of an extended step
        (mix_SX, row_P).
    """
    batch = replace(with_sampled(unpack(flat_N, like), sampled_S), lora=lora)
    vocab = None if pool is None else vocab_inputs(pool, batch)
    x, inputs = begin(top, batch, vocab, spec=spec)
    return x, inputs, batch.sampling, None if vocab is None else (vocab.mix_SX, vocab.row_P)


def block_logprobs(
    top: dict[str, jax.Array],
    hidden: jax.Array,
    target_Q: jax.Array,
    vocab_Q: jax.Array,
    vocab: VocabInputs | None,
    *,
    spec: LlamaSpec,
) -> Any:
    """token_logprobs of the positions of one prefill block; hidden in the activation layout."""
    logits_QV = compute_logits(top, hidden, spec=spec, vocab=vocab)
    return token_logprobs(logits_QV, target_Q, vocab_Q, jnp.bool_(True), axis_name=spec.axis_name)
