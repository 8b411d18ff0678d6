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

from multilora_jax.models.batch import ForwardBatch, LayerInputs, LayerRows
from multilora_jax.models.layers import (
    LlamaSpec,
    along_features,
    attend,
    from_heads,
    linear,
    rms_norm,
    rotate,
    to_heads,
    write_kv,
)
from pallas_kernels.segmented_lora import lora_expand, lora_shrink

_F32 = jnp.float32


class Weights(nnx.Module):
    """The weights of one layer, or of the model outside its layers, by name."""

    def __init__(self, arrays: dict[str, jax.Array]):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))


class Llama(nnx.Module):
    """A Llama base model.

    Args:
        spec: static description.
        top: embed [V, D], final_norm [D], lm_head [V, D] (absent when tied), cos and sin [positions, H/2].
        layers: per layer input_norm [D], qkv [(N+2K)*H, D], o [D, N*H], post_norm [D], gate_up [2F, D], down [D, F],
            and where the model has biases qkv_bias, o_bias, gate_up_bias, down_bias.
    """

    def __init__(self, spec: LlamaSpec, top: dict[str, jax.Array], layers: list[dict[str, jax.Array]]):
        self.spec = spec
        self.top = Weights(top)
        self.layers = nnx.List([Weights(layer) for layer in layers])

    def params(self) -> dict[str, Any]:
        """Plain nested containers of arrays, the form that crosses jit: {"top": {...}, "layers": [{...}, ...]}."""
        state = nnx.to_pure_dict(nnx.state(self, nnx.Param))
        layers: dict[int, dict[str, jax.Array]] = state["layers"]
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
    x, inputs = begin(params["top"], batch, spec=spec)
    rows = batch.lora.layers if batch.lora is not None else [None] * len(params["layers"])
    layer_fn = jax.jit(functools.partial(decoder_layer, spec=spec))
    for index, weights in enumerate(params["layers"]):
        x, pool = layer_fn(weights, rows[index], pool, jnp.int32(index), x, inputs)
    return pool, rms_norm(spec, x, params["top"]["final_norm"])


def _check(pool: jax.Array, batch: ForwardBatch, spec: LlamaSpec) -> None:
    """Shapes and types at the boundary, checked while tracing."""
    g = spec.geometry
    shards = 1 if spec.axis_name is None else g.tp
    chex.assert_shape(pool, (g.num_layers, g.num_pages, g.page_elements // shards))
    chex.assert_type(pool, g.storage_dtype)
    chex.assert_equal_shape([batch.token_ids_T, batch.positions_T, batch.slots_T, batch.adapter_T])
    chex.assert_rank([batch.token_ids_T, batch.table_SP, batch.decode_chunks, batch.prefill_chunks], [1, 2, 0, 0])
    chex.assert_type(jax.tree.leaves((batch.token_ids_T, batch.positions_T, batch.slots_T, batch.table_SP)), jnp.int32)
    tokens, rows = batch.token_ids_T.shape[0], batch.table_SP.shape[0]
    if tokens < rows or (tokens - rows) % (spec.prefill_block - 1):
        raise ValueError(
            f"a batch of {rows} rows cannot have {tokens} tokens: it has one for each decode row and "
            f"{spec.prefill_block} for each prefill block"
        )


def begin(top: dict[str, jax.Array], batch: ForwardBatch, *, spec: LlamaSpec) -> tuple[jax.Array, LayerInputs]:
    """Embeds the tokens and prepares what every layer reads.

    Returns:
        (x, inputs): x is the float32 residual stream in the activation layout.
    """
    embedded_TD = _embed(spec, top["embed"], batch.token_ids_T).astype(_F32)
    own_RT = scale_LMR = None
    if batch.lora is not None:
        own_RT = batch.lora.owner_R[:, None] == batch.adapter_T[None, :]
        scale_LMR = batch.lora.scale_LMR
    inputs = LayerInputs(
        positions_T=batch.positions_T,
        slots_T=batch.slots_T,
        table_SP=batch.table_SP,
        decode_chunks=batch.decode_chunks,
        prefill_chunks=batch.prefill_chunks,
        cos_TH2=top["cos"][batch.positions_T],
        sin_TH2=top["sin"][batch.positions_T],
        own_RT=own_RT,
        scale_LMR=scale_LMR,
    )
    return (embedded_TD.T if spec.features_first else embedded_TD), inputs


def compute_logits(top: dict[str, jax.Array], hidden: jax.Array, *, spec: LlamaSpec) -> jax.Array:
    """Head over hidden states in the activation layout; `top` is Llama.params()["top"]. Returns float32[S, V]."""
    y = linear(spec, top.get("lm_head", top["embed"]), hidden)
    logits_SV = y.T if spec.features_first else y
    if spec.axis_name is not None and logits_SV.shape[1] != spec.config.vocab_size:
        logits_SV = jax.lax.all_gather(logits_SV, spec.axis_name, axis=1, tiled=True)
    return logits_SV


def take_tokens(spec: LlamaSpec, hidden: jax.Array, tokens_S: jax.Array) -> jax.Array:
    """Selects S tokens of hidden states in the activation layout."""
    return jnp.take(hidden, tokens_S, axis=1 - spec.feature_axis, mode="clip")


def _embed(spec: LlamaSpec, embed_VD: jax.Array, token_ids_T: jax.Array) -> jax.Array:
    shard_rows = embed_VD.shape[0]
    if spec.axis_name is None or shard_rows == spec.config.vocab_size:
        return jnp.take(embed_VD, token_ids_T, axis=0, mode="clip")
    local_T = token_ids_T - jax.lax.axis_index(spec.axis_name) * shard_rows
    here_T = (local_T >= 0) & (local_T < shard_rows)
    found_TD = jnp.take(embed_VD, jnp.where(here_T, local_T, 0), axis=0, mode="clip")
    return jax.lax.psum(jnp.where(here_T[:, None], found_TD, 0), spec.axis_name)


def _psum(spec: LlamaSpec, x: jax.Array) -> jax.Array:
    return x if spec.axis_name is None else jax.lax.psum(x, spec.axis_name)


def _shard_slice(spec: LlamaSpec, x: jax.Array) -> jax.Array:
    """This shard's slice of the features of a replicated activation."""
    if spec.axis_name is None:
        return x
    width = x.shape[spec.feature_axis] // spec.geometry.tp
    start = jax.lax.axis_index(spec.axis_name) * width
    return jax.lax.dynamic_slice_in_dim(x, start, width, spec.feature_axis)


def _add_shard_slice(spec: LlamaSpec, y: jax.Array, delta: jax.Array) -> jax.Array:
    """Adds a delta that covers this shard's slice of the features to a partial sum over all of them.

    The base's own all-reduce then adds the slices of all shards, so the adapter costs no further collective of [T, D]
    (the fusion of S-LoRA section 6).
    """
    if spec.axis_name is None:
        return y + delta
    width = delta.shape[spec.feature_axis]
    start = jax.lax.axis_index(spec.axis_name) * width
    old = jax.lax.dynamic_slice_in_dim(y, start, width, spec.feature_axis)
    return jax.lax.dynamic_update_slice_in_dim(y, old + delta, start, spec.feature_axis)


def _column_parallel(
    spec: LlamaSpec, w_OI: jax.Array, bias_O: jax.Array | None, x: jax.Array, a_MRI: Any, b_OR: Any, weight_MRT: Any
) -> jax.Array:
    """Projections that share an input (q, k, v or gate, up), outputs side by side, each with its LoRA delta."""
    y = linear(spec, w_OI, x, bias_O)
    if a_MRI is None:
        return y
    s = lora_shrink(
        _shard_slice(spec, x), a_MRI, weight_MRT, features_first=spec.features_first, axis_name=spec.axis_name
    )
    deltas = [lora_expand(s[m], b_OR[m], features_first=spec.features_first) for m in range(len(b_OR))]
    return y + jnp.concatenate(deltas, spec.feature_axis)


def _row_parallel(
    spec: LlamaSpec, w_OI: jax.Array, bias_O: jax.Array | None, x: jax.Array, a_MRI: Any, b_OR: Any, weight_MRT: Any
) -> jax.Array:
    """A projection whose input is sharded (o, down), with its LoRA delta."""
    y = linear(spec, w_OI, x)
    if a_MRI is not None:
        s = lora_shrink(x, a_MRI, weight_MRT, features_first=spec.features_first, axis_name=spec.axis_name)
        y = _add_shard_slice(spec, y, lora_expand(s[0], b_OR, features_first=spec.features_first))
    y = _psum(spec, y)
    return y if bias_O is None else y + along_features(spec, bias_O).astype(_F32)


def decoder_layer(
    w: dict[str, jax.Array],
    rows: LayerRows | None,
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
        rows: its active rank rows, None to run the base alone.
        pool: uint[L, P, E] (this shard's).
        layer: int32 scalar, its index.
        x: float32 residual stream in the activation layout.
        inputs: from `begin`.

    Returns:
        (x, pool).
    """
    config, tp, axis = spec.config, spec.geometry.tp, spec.feature_axis
    N, K, H = config.num_heads // tp, config.num_kv_heads // tp, config.head_dim
    weight_MRT = None
    if inputs.own_RT is not None and inputs.scale_LMR is not None:
        # alpha / r where rank row r belongs to token t's adapter, else 0
        weight_MRT = jnp.where(inputs.own_RT[None], inputs.scale_LMR[layer][:, :, None], 0.0)

    def part(first: int, last: int) -> jax.Array | None:
        return None if weight_MRT is None else weight_MRT[first:last]

    h = rms_norm(spec, x, w["input_norm"])
    qkv = _column_parallel(
        spec, w["qkv"], w.get("qkv_bias"), h, rows and rows.a_qkv, rows and (rows.b_q, rows.b_k, rows.b_v), part(0, 3)
    )
    q, k, v = jnp.split(qkv, [N * H, (N + K) * H], axis)
    q_TNH = rotate(to_heads(spec, q, N), inputs.cos_TH2, inputs.sin_TH2)
    k_TKH = rotate(to_heads(spec, k, K), inputs.cos_TH2, inputs.sin_TH2)
    pool = write_kv(spec, pool, layer, k_TKH, to_heads(spec, v, K), inputs.slots_T)
    attended = from_heads(spec, attend(spec, q_TNH.astype(spec.dtype), pool, layer, inputs, K))
    x = x + _row_parallel(spec, w["o"], w.get("o_bias"), attended, rows and rows.a_o, rows and rows.b_o, part(3, 4))

    h = rms_norm(spec, x, w["post_norm"])
    gate_up = _column_parallel(
        spec, w["gate_up"], w.get("gate_up_bias"), h, rows and rows.a_gate_up, rows and (rows.b_gate, rows.b_up),
        part(4, 6),
    )  # fmt: skip
    gate, up = jnp.split(gate_up, 2, axis)
    activated = (jax.nn.silu(gate) * up).astype(spec.dtype)
    x = x + _row_parallel(
        spec, w["down"], w.get("down_bias"), activated, rows and rows.a_down, rows and rows.b_down, part(6, 7)
    )
    return x, pool
