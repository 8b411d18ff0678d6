"""Copying rank rows out of the pool into the dense buffers that the XLA path multiplies by."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from multilora_jax.memory.geometry import MODULES
from multilora_jax.models.batch import LayerRows
from multilora_jax.models.layers import LlamaSpec

PLACES = {
    "q_proj": ("a_qkv", 0, "b_q"),
    "k_proj": ("a_qkv", 1, "b_k"),
    "v_proj": ("a_qkv", 2, "b_v"),
    "o_proj": ("a_o", 0, "b_o"),
    "gate_proj": ("a_gate_up", 0, "b_gate"),
    "up_proj": ("a_gate_up", 1, "b_up"),
    "down_proj": ("a_down", 0, "b_down"),
}
"""Where a module's rows lie: A's buffer and its place in it, B's buffer."""

# `Any`: a tree of PartitionSpecs has the structure of LayerRows, not its leaves.
_SPECS: dict[str, Any] = {
    field.name: P(None, None, "model") if field.name.startswith("a_") else P("model", None)
    for field in dataclasses.fields(LayerRows)
}
LAYER_ROWS_SPEC = LayerRows(**_SPECS)
"""Every rank row is split along its long dimension."""


def make_rows(spec: LlamaSpec, num_rows: int) -> list[LayerRows]:
    """Buffers of R rank rows for every layer, zeros, whole (all shards)."""
    g = spec.geometry

    def layer() -> LayerRows:
        arrays: dict[str, jax.Array] = {}
        for module, (a, place, b) in PLACES.items():
            in_dim, out_dim = g.module_dims(module)
            if place == 0:
                members = sum(other == a for other, _, _ in PLACES.values())
                arrays[a] = jnp.zeros((members, num_rows, in_dim), spec.dtype)
            arrays[b] = jnp.zeros((out_dim, num_rows), spec.dtype)
        return LayerRows(**arrays)

    return [layer() for _ in range(g.num_layers)]


def insert_rows(
    spec: LlamaSpec,
    layers: list[LayerRows],
    pool: jax.Array,
    a_units: list[jax.Array],
    b_units: list[jax.Array],
    start: jax.Array,
) -> list[LayerRows]:
    """Copies C rank rows of every module to the buffer rows from `start` on. DONATES layers when jitted so.

    Args:
        layers: row buffers of some of the model's layers.
        pool: uint[L, P, E] (this shard's).
        a_units, b_units: per module int32[layers, C, in/u] and int32[layers, C, out/u], rows of the pool as a matrix
            of units; unit 0, which is of page 0 and finite, where there is no such row.
        start: int32 scalar.
    """
    width = spec.geometry.unit // spec.geometry.tp
    units = pool.reshape(-1, width)

    def gather(index_LCU: jax.Array) -> jax.Array:
        bits = units.at[index_LCU].get(mode="promise_in_bounds")
        rows = jax.lax.bitcast_convert_type(bits, spec.dtype)
        return rows.reshape(*index_LCU.shape[:2], -1)

    gathered = [(gather(a), gather(b)) for a, b in zip(a_units, b_units, strict=True)]
    result = []
    for index, layer in enumerate(layers):
        arrays = dict(vars(layer))
        for m, module in enumerate(MODULES):
            a, place, b = PLACES[module]
            a_LCI, b_LCO = gathered[m]
            arrays[a] = jax.lax.dynamic_update_slice(arrays[a], a_LCI[index][None], (place, start, 0))
            arrays[b] = jax.lax.dynamic_update_slice(arrays[b], b_LCO[index].T, (0, start))
        result.append(LayerRows(**arrays))
    return result
