"""Pieces of a Llama layer as pure functions over arrays in one of two activation layouts.

`[features, T]` when `spec.features_first`, else `[T, features]`: float32 products on CPUs run at memory speed only
as `W[O, I] @ x[I, T]`, so activations stay that way from the embedding to the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.models.config import ModelConfig
from multilora_jax.models.quantised import QuantWeight, quant_product
from pallas_kernels.paged_attention import attend_runs, paged_attention, ragged_paged_attention

_F32 = jnp.float32


@dataclass(frozen=True)
class LlamaSpec:
    """Everything static about a compiled step.

    Attributes:
        config: sizes of the model.
        geometry: shape of the pool; its dtype is the compute type.
        prefill_block: most tokens of one prefill block.
        features_first: layout of activations, see this module.
        axis_name: mesh axis of tensor parallelism when run inside shard_map, None on one device.
        quantization: "int8" where the weights of products are QuantWeights, else None.
        attention_groups: decode rows and prefill blocks that attention takes at a time, see paged_attention.
        blocks_from: rank rows from which on their buffers lie in blocks, see lora_deltas_of_blocks; 0: never.
        pieces_from: rank rows from which on prompts are multiplied by those of their own adapters alone, see
            add_lora_of_pieces; 0: never.
        attention_backend: "xla", or the Pallas implementation of ragged_paged_attention to use instead.
        lora_backend: "xla" for products by copied rank rows, or the Pallas implementation of lora_delta, which reads
            adapters in place; that needs activations [T, features].
        interpret: whether Pallas kernels run in their interpreter, for tests without a GPU.
        own_rows: with axis_name: rank rows that are summed over devices for each token, at least as many as its own
            adapters have on average; 0: those of all adapters of the step.
    """

    config: ModelConfig
    geometry: PoolGeometry
    prefill_block: int = 32
    features_first: bool = True
    axis_name: str | None = None
    quantization: str | None = None
    attention_groups: tuple[int, int] = (16, 4)
    blocks_from: int = 0
    pieces_from: int = 0
    attention_backend: str = "xla"
    interpret: bool = False
    lora_backend: str = "xla"
    own_rows: int = 0

    @property
    def in_place(self) -> bool:
        """Whether adapters are read in place: no row of theirs is copied."""
        return self.lora_backend != "xla"

    @property
    def kernels(self) -> str:
        """What computes attention and the adapters' products, for people."""
        how = ", interpreted" if self.interpret else ""
        return f"attention by {self.attention_backend}, adapters by {self.lora_backend}{how}"

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.geometry.dtype)

    @property
    def feature_axis(self) -> int:
        return 0 if self.features_first else 1


def linear(spec: LlamaSpec, w_OI: jax.Array | QuantWeight, x: jax.Array, bias_O: jax.Array | None = None) -> jax.Array:
    """x W^T (+ bias) with float32 sums; x and the float32 result in the activation layout."""
    if isinstance(w_OI, QuantWeight):
        y = quant_product(w_OI, x, spec.features_first)
    elif spec.features_first:
        y = jax.lax.dot_general(w_OI, x, (((1,), (0,)), ((), ())), preferred_element_type=_F32)
    else:
        y = jax.lax.dot_general(x, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=_F32)
    return y if bias_O is None else y + along_features(spec, bias_O).astype(_F32)


def along_features(spec: LlamaSpec, vector: jax.Array) -> jax.Array:
    """Shapes a per-feature vector so that it broadcasts over tokens."""
    return vector[:, None] if spec.features_first else vector[None, :]


def rms_norm(spec: LlamaSpec, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32, returned in the compute type.

    The weight is [D], or in x's layout where tokens have weights of their own.
    """
    x = x.astype(_F32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, spec.feature_axis, keepdims=True) + spec.config.rms_norm_eps)
    weight = weight if weight.ndim == 2 else along_features(spec, weight)
    return (x * scale * weight.astype(_F32)).astype(spec.dtype)


def to_heads(spec: LlamaSpec, x: jax.Array, num_heads: int) -> jax.Array:
    """Activation layout to [T, heads, H]."""
    x_TO = x.T if spec.features_first else x
    return x_TO.reshape(x_TO.shape[0], num_heads, spec.config.head_dim)


def from_heads(spec: LlamaSpec, x_TNH: jax.Array) -> jax.Array:
    """[T, heads, H] to the activation layout."""
    x_TO = x_TNH.reshape(x_TNH.shape[0], -1)
    return x_TO.T if spec.features_first else x_TO


def head_norm(spec: LlamaSpec, x_TNH: jax.Array, weight_H: jax.Array) -> jax.Array:
    """rms_norm of every head by itself (QK-norm, arXiv 2010.04245, without its scale); float32 in and out."""
    scale = jax.lax.rsqrt(jnp.mean(x_TNH * x_TNH, -1, keepdims=True) + spec.config.rms_norm_eps)
    return x_TNH * scale * weight_H.astype(_F32)


def rotate(x_TNH: jax.Array, cos_TH2: jax.Array, sin_TH2: jax.Array) -> jax.Array:
    """Rotary position embedding of the two halves of each head (float32 in and out)."""
    first, second = jnp.split(x_TNH, 2, -1)
    cos, sin = cos_TH2[:, None], sin_TH2[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def write_kv(
    spec: LlamaSpec, pool_LPE: jax.Array, layer: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, slots_T: jax.Array
) -> jax.Array:
    """Scatters the K and V of T tokens of one layer into their page slots. DONATES pool_LPE when jitted so.

    Only finite values are written, zeros in place of others: attention gives unseen slots the weight 0, and 0 * NaN
    would carry what an overflowing adapter left in a page over to the page's next owner.

    Args:
        pool_LPE: uint[L, P, E], this shard's bits.
        slots_T: int32[T], page * page_tokens + offset.
    """
    S = spec.geometry.page_tokens
    L, P, _ = pool_LPE.shape
    kv_T2KH = jnp.stack([k_TKH, v_TKH], 1).astype(spec.dtype)
    kv_T2KH = jnp.where(jnp.isfinite(kv_T2KH), kv_T2KH, 0)
    bits = jax.lax.bitcast_convert_type(kv_T2KH, pool_LPE.dtype)
    pages = pool_LPE.reshape(L, P, 2, k_TKH.shape[1], S, spec.config.head_dim)
    pages = pages.at[layer, slots_T // S, :, :, slots_T % S].set(bits, mode="promise_in_bounds")
    return pages.reshape(pool_LPE.shape)


def attend(
    spec: LlamaSpec, q_TNH: jax.Array, pool_LPE: jax.Array, layer: jax.Array, batch: Any, num_kv_heads: int
) -> jax.Array:
    """Attention of a step's two regions (decode rows, prefill blocks) over the pool; [T, N, H] in and out."""
    if spec.attention_backend != "xla":
        return _attend_ragged(spec, q_TNH, pool_LPE, layer, batch, num_kv_heads)
    num_prompt = len(batch.row_P)
    num_decodes = len(q_TNH) - num_prompt
    sizes = {
        "num_kv_heads": num_kv_heads, "page_tokens": spec.geometry.page_tokens, "window": spec.config.sliding_window,
    }  # fmt: skip
    decode_group, block_group = spec.attention_groups
    regions = []
    if num_decodes:
        out = paged_attention(
            q_TNH[:num_decodes, None], pool_LPE, layer, batch.table_SP[:num_decodes],
            batch.positions_T[:num_decodes, None], batch.decode_chunks, group=decode_group, **sizes,
        )  # fmt: skip
        out = out[:, 0]
        if len(batch.runs_R3):
            out = attend_runs(
                out, q_TNH, pool_LPE, layer, batch.table_SP, batch.positions_T, batch.runs_R3, **sizes
            )  # fmt: skip
        regions.append(out)
    if num_prompt:
        # A block is as many tokens from its first on as fit: those of its row, whose places come first, and others.
        token_NQ = jnp.minimum(batch.first_N[:, None] + jnp.arange(spec.prefill_block), num_prompt - 1)
        out = paged_attention(
            q_TNH[num_decodes:][token_NQ], pool_LPE, layer, batch.table_SP[num_decodes:],
            batch.positions_T[num_decodes:][token_NQ], batch.prefill_chunks, group=block_group, **sizes,
        )  # fmt: skip
        block_P = batch.row_P - num_decodes
        place_P = jnp.arange(num_prompt) - batch.first_N[block_P]
        regions.append(out.at[block_P, place_P].get(mode="clip"))  # tokens of padding may be behind any block
    return regions[0] if len(regions) == 1 else jnp.concatenate(regions)


def _attend_ragged(
    spec: LlamaSpec, q_TNH: jax.Array, pool_LPE: jax.Array, layer: jax.Array, batch: Any, num_kv_heads: int
) -> jax.Array:
    """The same in one call of a Pallas implementation, which reads what rows there are instead of padded ones."""
    num_prompt, num_blocks = len(batch.row_P), len(batch.first_N)
    num_decodes = len(q_TNH) - num_prompt
    start_S = jnp.arange(num_decodes, dtype=jnp.int32)
    count_S, context_S = jnp.ones_like(start_S), batch.positions_T[:num_decodes] + 1
    if num_prompt:
        place_Q, position_P = jnp.arange(spec.prefill_block), batch.positions_T[num_decodes:]
        token_NQ = batch.first_N[:, None] + place_Q
        near_NQ = jnp.minimum(token_NQ, num_prompt - 1)
        own_NQ = batch.row_P[near_NQ] == num_decodes + jnp.arange(num_blocks)[:, None]
        # Tokens of padding name the first block, and are at position 0.
        first_N = position_P[batch.first_N]
        own_NQ &= (position_P[near_NQ] == first_N[:, None] + place_Q) & (token_NQ < num_prompt)
        count_N = own_NQ.sum(1, dtype=jnp.int32)
        start_S = jnp.concatenate([start_S, num_decodes + batch.first_N])
        count_S = jnp.concatenate([count_S, count_N])
        context_S = jnp.concatenate([context_S, first_N + count_N])
    return ragged_paged_attention(
        q_TNH, pool_LPE, layer, batch.table_SP, start_S, count_S, context_S, num_decodes=num_decodes,
        most_queries=spec.prefill_block, num_kv_heads=num_kv_heads, page_tokens=spec.geometry.page_tokens,
        window=spec.config.sliding_window, implementation=spec.attention_backend, interpret=spec.interpret,
    )  # fmt: skip
