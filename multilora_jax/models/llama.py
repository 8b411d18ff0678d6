"""Llama with a low-rank delta of its own for every token, over the unified pool.

The Flax module is a container of weights; the computation is the pure `forward(params, pool, batch)`. Layers are
unrolled: a scan over stacked weights would copy each layer's weights at every step. All layers share one traced
function, which keeps tracing and lowering fast however many there are; a runner may also run `begin`, each
`decoder_layer` and the head as programs of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from multilora_jax.models.batch import ForwardBatch, LayerInputs, LayerRows, UnitTable, VocabInputs
from multilora_jax.models.layers import (
    LlamaSpec,
    attend,
    from_heads,
    head_norm,
    linear,
    rms_norm,
    rotate,
    to_heads,
    write_kv,
)
from multilora_jax.models.projections import column_parallel, layer_deltas, norm_weight, row_parallel
from multilora_jax.models.quantised import QuantWeight, take_rows
from multilora_jax.models.rows import lies_in_blocks
from multilora_jax.models.vocab_rows import embedding_deltas, final_norm_deltas, head_deltas
from pallas_kernels.segmented_lora import BlockUsers

_F32 = jnp.float32


class Weights(nnx.Module):
    """The weights of one layer, or of the model outside its layers, by name."""

    def __init__(self, arrays: dict[str, Any]):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))


class Llama(nnx.Module):
    """A Llama base model.

    Args:
        spec: static description.
        top: embed [V, D], final_norm [D], lm_head [V, D] (absent when tied), cos and sin [positions, H/2].
        layers: per layer input_norm [D], qkv [(N+2K)*H, D], o [D, N*H], post_norm [D], gate_up [2F, D], down [D, F],
            where the model has biases qkv_bias, o_bias, gate_up_bias, down_bias, and where it has norms of heads q_norm
            and k_norm [H]. Weights of two axes are QuantWeights where spec.quantization is set.
    """

    def __init__(self, spec: LlamaSpec, top: dict[str, Any], layers: list[dict[str, Any]]):
        self.spec = spec
        self.top = Weights(top)
        self.layers = nnx.List([Weights(layer) for layer in layers])

    def params(self) -> dict[str, Any]:
        """Plain nested containers of arrays, the form that crosses jit: {"top": {...}, "layers": [{...}, ...]}."""
        state = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        layers: dict[int, dict[str, Any]] = state["layers"]
        return {"top": state["top"], "layers": [layers[i] for i in range(len(layers))]}

    def __call__(self, pool: jax.Array, batch: ForwardBatch) -> tuple[jax.Array, jax.Array]:
        """`forward` with this model's own weights."""
        return forward(self.params(), pool, batch, spec=self.spec)


def forward(
    params: dict[str, Any], pool: jax.Array, batch: ForwardBatch, *, spec: LlamaSpec
) -> tuple[jax.Array, jax.Array]:
    """Runs T tokens of mixed sequences and adapters through all layers. DONATES pool when jitted so.

    Args:
        params: Llama.params().
        pool: uint[L, P, E] (inside shard_map this shard's [L, P, E/TP]).
        batch: the step; `batch.lora` None runs the base alone.
        spec: static.

    Returns:
        (pool, hidden): hidden is the normed output of the last layer, [D, T] if spec.features_first else [T, D].
    """
    _check(pool, batch, spec)
    x, inputs = begin(params["top"], batch, vocab_inputs(pool, batch), spec=spec)
    rows = batch.lora.layers if batch.lora is not None else [None] * len(params["layers"])
    layer_fn = jax.jit(functools.partial(decoder_layer, spec=spec))
    for index, weights in enumerate(params["layers"]):
        own = rows if isinstance(rows, UnitTable) else rows[index]
        x, pool = layer_fn(weights, own, pool, jnp.int32(index), x, inputs)
    return pool, final_hidden(params["top"], x, vocab_inputs(pool, batch), spec=spec)


def _check(pool: jax.Array, batch: ForwardBatch, spec: LlamaSpec) -> None:
    """Shapes and types at the boundary, checked while tracing."""
    g = spec.geometry
    shards = 1 if spec.axis_name is None else g.tp
    chex.assert_shape(pool, (g.num_layers, g.num_pages, g.page_elements // shards))
    chex.assert_type(pool, g.storage_dtype)
    chex.assert_equal_shape([batch.token_ids_T, batch.positions_T, batch.slots_T])
    integers = (batch.token_ids_T, batch.positions_T, batch.slots_T, batch.table_SP, batch.row_P, batch.first_N)
    chex.assert_rank([*integers, batch.decode_chunks, batch.prefill_chunks], [1, 1, 1, 2, 1, 1, 1, 1])
    chex.assert_shape(batch.runs_R3, (None, 3))
    chex.assert_type(list(integers), jnp.int32)
    tokens, rows = len(batch.token_ids_T), len(batch.table_SP)
    no_users = batch.mix_SX is None and batch.plan is None
    if (batch.lora is None) != no_users or (batch.mix_SX is not None and len(batch.mix_SX) != rows):
        raise ValueError(f"mix_SX or plan go with lora, mix_SX with a row for each of the {rows} rows of the batch")
    if tokens - len(batch.row_P) != rows - len(batch.first_N):
        raise ValueError(
            f"a batch of {rows} rows, {len(batch.first_N)} of them blocks, with {len(batch.row_P)} prompt tokens "
            f"cannot have {tokens} tokens: it has one for each other row besides"
        )


def vocab_inputs(pool: jax.Array, batch: ForwardBatch) -> VocabInputs | None:
    """What the parts outside the layers read of a step; None where no adapter changes them."""
    if batch.lora is None or batch.lora.extra is None or batch.mix_SX is None:
        return None
    return VocabInputs(pool, batch.lora.extra.vocab, batch.mix_SX, batch.row_P)


def begin(
    top: dict[str, jax.Array], batch: ForwardBatch, vocab: VocabInputs | None, *, spec: LlamaSpec
) -> tuple[jax.Array, LayerInputs]:
    """Embeds the tokens and prepares what every layer reads.

    Args:
        top: Llama.params()["top"].
        vocab: from `vocab_inputs`.

    Returns:
        (x, inputs): x is the float32 residual stream in the activation layout.
    """
    embedded_TD = _embed(spec, top["embed"], batch.token_ids_T).astype(_F32)
    if vocab is not None:
        mix_TX = rows_to_tokens(vocab.mix_SX, vocab.row_P, len(batch.token_ids_T))
        embedded_TD = embedding_deltas(spec, vocab.pool, vocab.tables, embedded_TD, batch.token_ids_T, mix_TX)
    lora, mix_RT, users = batch.lora, None, None
    if lora is not None and batch.mix_SX is not None and batch.plan is None:
        mix_SR = jnp.take(batch.mix_SX, jnp.maximum(lora.owner_R, 0), axis=1, mode="clip")
        mix_SR = jnp.where(lora.owner_R >= 0, mix_SR, 0.0)
        mix_RT = rows_to_tokens(mix_SR, batch.row_P, len(batch.token_ids_T)).T
        if lies_in_blocks(spec, len(lora.owner_R)):
            users = BlockUsers.of(mix_RT[:, : len(batch.token_ids_T) - len(batch.row_P)])
    extra = lora and lora.extra
    inputs = LayerInputs(
        positions_T=batch.positions_T,
        slots_T=batch.slots_T,
        table_SP=batch.table_SP,
        row_P=batch.row_P,
        first_N=batch.first_N,
        decode_chunks=batch.decode_chunks,
        prefill_chunks=batch.prefill_chunks,
        runs_R3=batch.runs_R3,
        cos_TH2=top["cos"][batch.positions_T],
        sin_TH2=top["sin"][batch.positions_T],
        mix_RT=mix_RT,
        pieces=batch.pieces,
        users=users,
        scale_LMR=lora and lora.scale_LMR,
        const_LMR=lora and lora.const_LMR,
        gain_LMR=extra and extra.gain_LMR,
        norm_L2R=extra and extra.norm_L2R,
        plan=batch.plan,
    )
    return (embedded_TD.T if spec.features_first else embedded_TD), inputs


def rows_to_tokens(values_SX: jax.Array, row_P: jax.Array, num_tokens: int) -> jax.Array:
    """Gives each token its row's values: [S, X] to [T, X] (a decode row has one token, a prefill block many)."""
    return jnp.concatenate([values_SX[: num_tokens - len(row_P)], values_SX[row_P]])


def final_hidden(top: dict[str, jax.Array], x: jax.Array, vocab: VocabInputs | None, *, spec: LlamaSpec) -> jax.Array:
    """The last norm over the residual stream of T tokens, in the activation layout and the compute type."""
    if vocab is None:
        return rms_norm(spec, x, top["final_norm"])
    mix_TX = rows_to_tokens(vocab.mix_SX, vocab.row_P, x.shape[1 - spec.feature_axis])
    weight_TD = top["final_norm"].astype(_F32) + final_norm_deltas(spec, vocab.pool, vocab.tables, mix_TX)
    return rms_norm(spec, x, weight_TD.T if spec.features_first else weight_TD)


def compute_logits(
    top: dict[str, jax.Array], hidden: jax.Array, *, spec: LlamaSpec, vocab: VocabInputs | None = None
) -> jax.Array:
    """Head over hidden states.

    Args:
        top: Llama.params()["top"].
        hidden: S hidden states in the activation layout.
        vocab: what adapters change in the head of these S rows; None for the base's head.

    Returns:
        float32[S, vocab_rows] (inside shard_map this shard's [S, vocab_rows / TP]); the columns past a row's own
        vocabulary mean nothing.
    """
    y = linear(spec, top.get("lm_head", top["embed"]), hidden)
    logits_SV = y.T if spec.features_first else y
    if vocab is None:
        return logits_SV
    hidden_SD = hidden.T if spec.features_first else hidden
    return head_deltas(spec, vocab.pool, vocab.tables, logits_SV, hidden_SD, vocab.mix_SX)


def take_tokens(spec: LlamaSpec, hidden: jax.Array, tokens_S: jax.Array) -> jax.Array:
    """Selects S tokens of hidden states in the activation layout."""
    return jnp.take(hidden, tokens_S, axis=1 - spec.feature_axis, mode="clip")


def _embed(spec: LlamaSpec, embed_VD: jax.Array | QuantWeight, token_ids_T: jax.Array) -> jax.Array:
    if spec.axis_name is None:
        return take_rows(embed_VD, token_ids_T)
    local_T = token_ids_T - jax.lax.axis_index(spec.axis_name) * embed_VD.shape[0]
    here_T = (local_T >= 0) & (local_T < embed_VD.shape[0])
    found_TD = take_rows(embed_VD, jnp.where(here_T, local_T, 0))
    return jax.lax.psum(jnp.where(here_T[:, None], found_TD, 0), spec.axis_name)


def decoder_layer(
    w: dict[str, jax.Array],
    rows: LayerRows | UnitTable | None,
    pool: jax.Array,
    layer: jax.Array,
    x: jax.Array,
    inputs: LayerInputs,
    *,
    spec: LlamaSpec,
) -> tuple[jax.Array, jax.Array]:
    """One layer. DONATES pool and x when jitted so.

    Args:
        w: the layer's weights.
        rows: its active rank rows, or where those of all layers lie; None to run the base alone.
        pool: uint[L, P, E] (this shard's).
        layer: int32 scalar, its index.
        x: float32 residual stream in the activation layout.
        inputs: from `begin`.

    Returns:
        (x, pool).
    """
    config, tp, axis = spec.config, spec.geometry.tp, spec.feature_axis
    N, K, H = config.num_heads // tp, spec.geometry.num_kv_heads // tp, config.head_dim
    lora = layer_deltas(rows, layer, inputs, pool)

    h = rms_norm(spec, x, norm_weight(spec, w["input_norm"], lora, 0))
    qkv = column_parallel(spec, w["qkv"], w.get("qkv_bias"), h, lora, ("q_proj", "k_proj", "v_proj"))
    q, k, v = jnp.split(qkv, [N * H, (N + K) * H], axis)
    q_TNH, k_TKH = to_heads(spec, q, N), to_heads(spec, k, K)
    if config.qk_norm:
        q_TNH, k_TKH = head_norm(spec, q_TNH, w["q_norm"]), head_norm(spec, k_TKH, w["k_norm"])
    q_TNH, k_TKH = (rotate(x, inputs.cos_TH2, inputs.sin_TH2) for x in (q_TNH, k_TKH))
    pool = write_kv(spec, pool, layer, k_TKH, to_heads(spec, v, K), inputs.slots_T)
    lora = lora and lora.at(pool)
    attended = from_heads(spec, attend(spec, q_TNH.astype(spec.dtype), pool, layer, inputs, K))
    x = x + row_parallel(spec, w["o"], w.get("o_bias"), attended, lora, "o_proj")

    h = rms_norm(spec, x, norm_weight(spec, w["post_norm"], lora, 1))
    gate_up = column_parallel(spec, w["gate_up"], w.get("gate_up_bias"), h, lora, ("gate_proj", "up_proj"))
    gate, up = jnp.split(gate_up, 2, axis)
    activated = (jax.nn.silu(gate) * up).astype(spec.dtype)
    x = x + row_parallel(spec, w["down"], w.get("down_bias"), activated, lora, "down_proj")
    return x, pool
