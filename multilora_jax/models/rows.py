"""Copying rank rows out of the pool into the dense buffers that the XLA path multiplies by."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from multilora_jax.memory.geometry import MODULES, PoolGeometry
from multilora_jax.models.batch import LayerRows
from multilora_jax.models.layers import LlamaSpec
from pallas_kernels.segmented_lora.xla_blocks import BLOCK_ROWS, is_blocked

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


def _specs(a: P, b: P) -> LayerRows:
    # `Any`: a tree of PartitionSpecs has the structure of LayerRows, not its leaves.
    specs: dict[str, Any] = {f.name: a if f.name.startswith("a_") else b for f in dataclasses.fields(LayerRows)}
    return LayerRows(**specs)


_ROWS_SPEC = _specs(P(None, None, "model"), P("model", None))
_BLOCKED_SPEC = _specs(P(None, "model"), P(None, None, "model"))


def lies_in_blocks(spec: LlamaSpec, num_rows: int) -> bool:
    """Whether buffers of so many rows lie in blocks, see `pallas_kernels.segmented_lora.xla_blocks`."""
    return 0 < spec.blocks_from <= num_rows


def layer_rows_spec(spec: LlamaSpec, num_rows: int) -> LayerRows:
    """How buffers of R rows are sharded: every rank row is split along its long dimension."""
    return _BLOCKED_SPEC if lies_in_blocks(spec, num_rows) else _ROWS_SPEC


def attention_rows(rows: LayerRows) -> LayerRows:
    """Those of the attention alone; also of a LayerRows of anything else."""
    return dataclasses.replace(rows, a_gate_up=None, a_down=None, b_gate=None, b_up=None, b_down=None)


def make_rows(spec: LlamaSpec, num_rows: int, num_layers: int) -> list[LayerRows]:
    """Buffers of R rank rows for some layers, zeros, whole (all shards)."""
    g, blocked, num_blocks = spec.geometry, lies_in_blocks(spec, num_rows), num_rows // BLOCK_ROWS

    def layer() -> LayerRows:
        arrays: dict[str, jax.Array] = {}
        for module, (a, place, b) in PLACES.items():
            in_dim, out_dim = g.module_dims(module)
            if place == 0:
                members = sum(other == a for other, _, _ in PLACES.values())
                shape = (num_blocks, in_dim, members * BLOCK_ROWS) if blocked else (members, num_rows, in_dim)
                arrays[a] = jnp.zeros(shape, spec.dtype)
            shape = (num_blocks, BLOCK_ROWS, out_dim) if blocked else (out_dim, num_rows)
            arrays[b] = jnp.zeros(shape, spec.dtype)
        return LayerRows(**arrays)

    return [layer() for _ in range(num_layers)]


def unit_columns(geometry: PoolGeometry) -> dict[tuple[str, str], slice]:
    """Columns of `units_LCU` in insert_rows: those of each (module, "a" or "b")."""
    columns, start = {}, 0
    for module in MODULES:
        for kind, length in zip("ab", geometry.module_dims(module), strict=True):
            columns[module, kind] = slice(start, start + length // geometry.unit)
            start += length // geometry.unit
    return columns


def insert_rows(
    spec: LlamaSpec,
    layers: list[LayerRows],
    pool: jax.Array,
    units_LCU: jax.Array,
    first: jax.Array,
    start: jax.Array,
    *,
    modules: tuple[str, ...] = MODULES,
) -> list[LayerRows]:
    """Copies C rank rows to the buffer rows from `start` on; of blocks C is BLOCK_ROWS and start the first row of one.
    DONATES layers when jitted so.

    Args:
        layers: row buffers of some of the model's layers.
        pool: uint[L, P, E] (this shard's).
        units_LCU: int32[L, C, U], of all layers: for each row the rows of the pool as a matrix of units that it is made
            of, module by module as `unit_columns` says; unit 0, which is of page 0 and finite, where there is none.
        first: int32 scalar, index of the first of `layers`.
        start: int32 scalar.
        modules: the modules to copy; the rows of the others stay as they are.
    """
    width = spec.geometry.unit // spec.geometry.tp
    units, columns = pool.reshape(-1, width), unit_columns(spec.geometry)
    units_NCU = jax.lax.dynamic_slice_in_dim(units_LCU, first, len(layers))

    def gather(column: slice) -> jax.Array:
        index_NCU = units_NCU[:, :, column]
        bits = units.at[index_NCU].get(mode="promise_in_bounds")
        rows = jax.lax.bitcast_convert_type(bits, spec.dtype)
        return rows.reshape(*index_NCU.shape[:2], -1)

    gathered = {module: (gather(columns[module, "a"]), gather(columns[module, "b"])) for module in modules}
    result = []
    for index, layer in enumerate(layers):
        arrays = dict(vars(layer))
        for module in modules:
            a, place, b = PLACES[module]
            a_NCI, b_NCO = gathered[module]
            if is_blocked(arrays[b]):
                block = start // BLOCK_ROWS
                a_1IC, b_1CO = a_NCI[index].T[None], b_NCO[index][None]
                arrays[a] = jax.lax.dynamic_update_slice(arrays[a], a_1IC, (block, 0, place * BLOCK_ROWS))
                arrays[b] = jax.lax.dynamic_update_slice(arrays[b], b_1CO, (block, 0, 0))
                continue
            arrays[a] = jax.lax.dynamic_update_slice(arrays[a], a_NCI[index][None], (place, start, 0))
            arrays[b] = jax.lax.dynamic_update_slice(arrays[b], b_NCO[index].T, (0, start))
        result.append(LayerRows(**arrays))
    return result
