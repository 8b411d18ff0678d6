"""The projections of a layer with the deltas of every token's own adapters.

With the factors `w` that a token puts on its adapters `i` a projection gives

    y = (W x) * (1 + sum_i w_i g_i) + bias + sum_i w_i (scale_i B_i A_i x + c_i)

where g is DoRA's gain (arXiv 2402.09353, the magnitude over the norm of the adapted weight, less one) and c a bias
that the adapter changes. All of it lies in the rank rows of `LayerRows`; a step without gains carries no trace of
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from multilora_jax.memory.geometry import MODULES
from multilora_jax.models.batch import LayerInputs, LayerRows, UnitTable
from multilora_jax.models.in_place import InPlaceDeltas
from multilora_jax.models.layers import LlamaSpec, along_features, linear
from multilora_jax.models.rows import PLACES
from multilora_jax.models.shards import own_slice
from pallas_kernels.segmented_lora import (
    BlockUsers,
    PromptPieces,
    add_lora_of_pieces,
    lora_deltas_of_blocks,
    lora_expand,
    lora_shrink,
)

_F32 = jnp.float32


@dataclass(frozen=True)
class LayerDeltas:
    """The rank rows of one layer and what they mean there."""

    rows: LayerRows
    mix_RT: jax.Array  # float32[R, T]
    scale_MR: jax.Array  # float32[7, R]
    const_MR: jax.Array  # float32[7, R]
    gain_MR: jax.Array | None  # float32[7, R]
    norm_2R: jax.Array | None  # float32[2, R]
    pieces: PromptPieces | None
    users: BlockUsers | None
    num_prompt_tokens: int

    def at(self, pool: jax.Array) -> LayerDeltas:
        """The same with a newer pool, of which it reads nothing."""
        return self

    @property
    def has_gains(self) -> bool:
        """Whether the step has an adapter with gains (DoRA)."""
        return self.gain_MR is not None

    @property
    def has_norms(self) -> bool:
        """Whether the step has an adapter that changes the layer's norms."""
        return self.norm_2R is not None

    def touches(self, module: str) -> bool:
        """Whether the step has rows for the module."""
        return getattr(self.rows, PLACES[module][0]) is not None

    def add(self, spec: LlamaSpec, y: jax.Array, x: jax.Array, modules: tuple[str, ...]) -> jax.Array:
        """y plus the deltas of modules that share the input x: this shard's features of x and of the outputs, which
        lie side by side."""
        if self.pieces is None:
            # Each delta to its part of y, which is taken apart again anyway: joined, all are written down once more.
            deltas = self._dense(spec, x, self.mix_RT, modules)
            ends = list(itertools.accumulate(delta.shape[spec.feature_axis] for delta in deltas))
            parts = jnp.split(y, ends[:-1], spec.feature_axis)
            return jnp.concatenate(list(map(jnp.add, parts, deltas)), spec.feature_axis)
        axis, num_decodes = 1 - spec.feature_axis, x.shape[1 - spec.feature_axis] - self.num_prompt_tokens
        few = jax.lax.slice_in_dim(x, 0, num_decodes, axis=axis)
        few = jnp.concatenate(self._dense(spec, few, self.mix_RT[:, :num_decodes], modules), spec.feature_axis)
        rows, pieces, num_tokens = self._of(modules), self.pieces, self.num_prompt_tokens

        def add_prompts(y_TO: jax.Array, x_TI: jax.Array) -> jax.Array:
            return add_lora_of_pieces(y_TO, x_TI, *rows, pieces, num_tokens, axis_name=spec.axis_name)

        if spec.features_first:
            return y + add_prompts(jnp.pad(few.T, ((0, num_tokens), (0, 0))), x.T).T
        few += jax.lax.slice_in_dim(y, 0, num_decodes)
        return add_prompts(jax.lax.dynamic_update_slice(y, few, (0, 0)), x)

    def _dense(self, spec: LlamaSpec, x: jax.Array, mix_RT: jax.Array, modules: tuple[str, ...]) -> list[jax.Array]:
        """The deltas of tokens by all rank rows, or by the blocks that they use; of each module."""
        a, b_M, scale_MR, const_MR = self._of(modules)
        layout: Any = {"features_first": spec.features_first, "axis_name": spec.axis_name}
        if self.users is not None:
            deltas = lora_deltas_of_blocks(x, a, b_M, scale_MR, const_MR, self.users, **layout)
        else:
            own_rows = spec.own_rows if self.pieces is None else 0  # an average over all tokens of the step
            s = lora_shrink(x, a, scale_MR, mix_RT, const_MR, own_rows=own_rows, **layout)
            deltas = [self.expand(spec, s[m], module) for m, module in enumerate(modules)]
        return deltas

    def _of(self, modules: tuple[str, ...]) -> tuple[jax.Array, list[jax.Array], jax.Array, jax.Array]:
        """Of modules that share an input: their rows of A, of each its rows of B, and what the rows are there."""
        first = MODULES.index(modules[0])
        part = slice(first, first + len(modules))
        a, b_M = getattr(self.rows, PLACES[modules[0]][0]), [getattr(self.rows, PLACES[m][2]) for m in modules]
        return a, b_M, self.scale_MR[part], self.const_MR[part]

    def gains(self, spec: LlamaSpec, modules: tuple[str, ...]) -> jax.Array:
        """sum_i w_i g_i of these modules side by side, this shard's outputs."""
        assert self.gain_MR is not None
        found = [self._vectors(spec, self.gain_MR[MODULES.index(module)], module) for module in modules]
        return jnp.concatenate(found, spec.feature_axis)

    def norm_delta(self, spec: LlamaSpec, which: int) -> jax.Array:
        """sum_i w_i of the deltas of the input norm (0) or the other (1), this shard's features."""
        assert self.norm_2R is not None
        return self._vectors(spec, self.norm_2R[which], ("o_proj", "down_proj")[which])

    def expand(self, spec: LlamaSpec, s: jax.Array, module: str) -> jax.Array:
        """lora_expand of one module: this shard's outputs."""
        return lora_expand(s, getattr(self.rows, PLACES[module][2]), features_first=spec.features_first)

    def _vectors(self, spec: LlamaSpec, flags_R: jax.Array, module: str) -> jax.Array:
        """sum_i w_i v_i for every token, v_i being the rows of the module's B that flags_R marks (this shard's)."""
        weight_RT = jnp.where(flags_R[:, None] != 0, self.mix_RT, 0).astype(spec.dtype)
        return self.expand(spec, weight_RT if spec.features_first else weight_RT.T, module)


Deltas = LayerDeltas | InPlaceDeltas


def layer_deltas(
    rows: LayerRows | UnitTable | None, layer: jax.Array, inputs: LayerInputs, pool: jax.Array
) -> Deltas | None:
    """Those of a layer; None where no token of the step has an adapter."""
    if rows is None or inputs.scale_LMR is None or inputs.const_LMR is None:
        return None
    if isinstance(rows, UnitTable):
        return None if inputs.plan is None else InPlaceDeltas(rows, pool, inputs.plan, layer, inputs)
    if inputs.mix_RT is None:
        return None
    gain = None if inputs.gain_LMR is None else inputs.gain_LMR[layer]
    norm = None if inputs.norm_L2R is None else inputs.norm_L2R[layer]
    return LayerDeltas(
        rows, inputs.mix_RT, inputs.scale_LMR[layer], inputs.const_LMR[layer], gain, norm, inputs.pieces,
        inputs.users, len(inputs.row_P),
    )  # fmt: skip


def norm_weight(spec: LlamaSpec, weight_D: jax.Array, lora: Deltas | None, which: int) -> jax.Array:
    """Weight of the input norm (0) or the other norm (1): [D], or of each token where adapters may change it."""
    if lora is None or not lora.has_norms:
        return weight_D
    return along_features(spec, weight_D).astype(_F32) + _gather_features(spec, lora.norm_delta(spec, which))


def column_parallel(
    spec: LlamaSpec,
    w_OI: jax.Array,
    bias_O: jax.Array | None,
    x: jax.Array,
    lora: Deltas | None,
    modules: tuple[str, ...],
) -> jax.Array:
    """Projections that share an input (q, k, v or gate, up), outputs side by side; float32 in the activation layout."""
    if lora is None or not lora.touches(modules[0]):
        return linear(spec, w_OI, x, bias_O)
    y = linear(spec, w_OI, x)
    if lora.has_gains:
        y = y * (1 + lora.gains(spec, modules))
    if bias_O is not None:
        y = y + along_features(spec, bias_O).astype(_F32)
    own = own_slice(x, spec.feature_axis, spec.axis_name, spec.geometry.tp)
    return lora.add(spec, y, own, modules)


def row_parallel(
    spec: LlamaSpec, w_OI: jax.Array, bias_O: jax.Array | None, x: jax.Array, lora: Deltas | None, module: str
) -> jax.Array:
    """A projection whose input is sharded (o, down); float32 in the activation layout, summed over shards."""
    y = linear(spec, w_OI, x)
    if lora is not None and lora.touches(module):
        if lora.has_gains:
            y = y * (1 + _gather_features(spec, lora.gains(spec, (module,))))
        y = _add_to_shard_slice(spec, y, lambda y: lora.add(spec, y, x, (module,)))
    if spec.axis_name is not None:
        y = jax.lax.psum(y, spec.axis_name)
    return y if bias_O is None else y + along_features(spec, bias_O).astype(_F32)


def _gather_features(spec: LlamaSpec, x: jax.Array) -> jax.Array:
    """All features of an activation of which each shard has its slice."""
    if spec.axis_name is None:
        return x
    return jax.lax.all_gather(x, spec.axis_name, axis=spec.feature_axis, tiled=True)


def _add_to_shard_slice(spec: LlamaSpec, y: jax.Array, add: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Adds a delta that covers this shard's slice of the features to a partial sum over all of them.

    The base's own all-reduce then adds the slices of all shards, so the adapter costs no further collective of [T, D]
    (the fusion of S-LoRA section 6).
    """
    if spec.axis_name is None:
        return add(y)
    width = y.shape[spec.feature_axis] // spec.geometry.tp
    start = jax.lax.axis_index(spec.axis_name) * width
    old = jax.lax.dynamic_slice_in_dim(y, start, width, spec.feature_axis)
    return jax.lax.dynamic_update_slice_in_dim(y, add(old), start, spec.feature_axis)
