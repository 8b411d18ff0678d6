"""Adapters in the shape of pool pages: rank rows laid end to end as units, no padding to a rank or to all modules.

An adapter's units are numbered from 0, layer by layer, in each layer module by module in the order of MODULES, in
each module the rows of A, then the rows of B transposed. Unit j lies in page `j // units_per_page_all_layers` of the
adapter, there in layer slot `(j // units_per_page) % L`, at offset `j % units_per_page`: the layer slots of a page are
just room, and do not follow the layer a row belongs to. (The unified paging of S-LoRA, section 5.1 of
arXiv 2311.03285, with units small enough for grouped-query attention and the MLP.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from multilora_jax.errors import AdapterError
from multilora_jax.lora.weights import AdapterWeights, ModuleKey
from multilora_jax.memory.geometry import MODULES, PoolGeometry

_COMPUTE_DTYPES = {
    "float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16),
}  # fmt: skip


@dataclass(eq=False)
class HostAdapter:
    """One version of an adapter in host memory, ready to be copied page by page; compared by identity.

    Attributes:
        name, int_id, path: as registered.
        digest: SHA-256 (hex) of the content.
        rank: the largest rank of any module.
        pages: [num_pages, L, TP, E/TP] of the pool's storage type; zero past the last unit.
        num_pages: page ids that it takes in the pool.
        num_units: units in use.
        ranks_LM: int32[L, M], 0 where the module is absent.
        scale_LM: float32[L, M], factor on `B A x`, not folded into B; 0 where the module is absent.
        start_a_LM, start_b_LM: int32[L, M], first unit of the rows of A and of B transposed: row i of A has the units
            `start_a + i * units_a_M .. + units_a_M`.
        units_a_M, units_b_M: int32[M], units per row: in_dim/u and out_dim/u.
    """

    name: str
    int_id: int
    path: str
    digest: str
    rank: int
    pages: np.ndarray = field(repr=False)
    num_pages: int
    num_units: int
    ranks_LM: np.ndarray = field(repr=False)
    scale_LM: np.ndarray = field(repr=False)
    start_a_LM: np.ndarray = field(repr=False)
    start_b_LM: np.ndarray = field(repr=False)
    units_a_M: np.ndarray = field(repr=False)
    units_b_M: np.ndarray = field(repr=False)

    def row_units(self, module_index: int, first_row: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Units of the rank rows [first_row, first_row + num_rows) of one module in every layer.

        Args:
            module_index: position in MODULES.
            first_row, num_rows: range of rank rows; it may reach past the rank.

        Returns:
            int32[L, num_rows, in/u] and int32[L, num_rows, out/u]: the adapter's own unit numbers (see
            PoolGeometry.unit_addresses), -1 in rows at or past the rank.
        """
        rows_R = np.arange(first_row, first_row + num_rows, dtype=np.int32)
        live_LR = rows_R < self.ranks_LM[:, module_index, None]

        def units(start_LM: np.ndarray, per_row: int) -> np.ndarray:
            first_LR = start_LM[:, module_index, None] + rows_R * per_row
            units_LRU = first_LR[:, :, None] + np.arange(per_row, dtype=np.int32)
            return np.where(live_LR[:, :, None], units_LRU, np.int32(-1))

        return (
            units(self.start_a_LM, int(self.units_a_M[module_index])),
            units(self.start_b_LM, int(self.units_b_M[module_index])),
        )


def _units_per_row(geometry: PoolGeometry) -> tuple[np.ndarray, np.ndarray]:
    dims_M2 = np.array([geometry.module_dims(module) for module in MODULES], np.int32) // geometry.unit
    return dims_M2[:, 0], dims_M2[:, 1]


def _layout(
    weights: AdapterWeights, geometry: PoolGeometry, units_a_M: np.ndarray, units_b_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """ranks_LM, start_a_LM, start_b_LM and the number of units."""
    ranks_LM = np.zeros((geometry.num_layers, len(MODULES)), np.int32)
    for (layer, module), a in weights.a.items():
        ranks_LM[layer, MODULES.index(module)] = a.shape[0]
    a_LM, b_LM = ranks_LM * units_a_M, ranks_LM * units_b_M
    ends_LM = np.cumsum(a_LM + b_LM, dtype=np.int64).reshape(a_LM.shape)
    start_a_LM = (ends_LM - b_LM - a_LM).astype(np.int32)
    present_LM = ranks_LM > 0
    return (
        ranks_LM,
        np.where(present_LM, start_a_LM, 0),
        np.where(present_LM, start_a_LM + a_LM, 0).astype(np.int32),
        int(ends_LM[-1, -1]),
    )


def pack(weights: AdapterWeights, geometry: PoolGeometry, name: str, int_id: int) -> HostAdapter:
    """Rounds an adapter to the pool's compute type and lays it out in pages.

    A row of length n is cut per shard first, so that shard t holds its contiguous n/TP elements, and then in units of
    u/TP: unit k of shard t is `row[t*n/TP + k*u/TP :][: u/TP]`.

    Raises:
        AdapterError: a finite value becomes infinite in the compute type (`weights_overflow`).
    """
    units_a_M, units_b_M = _units_per_row(geometry)
    ranks_LM, start_a_LM, start_b_LM, num_units = _layout(weights, geometry, units_a_M, units_b_M)
    num_pages, tp, per_page = geometry.pages_for_units(num_units), geometry.tp, geometry.units_per_page_all_layers
    dtype, width = _COMPUTE_DTYPES[geometry.dtype], geometry.unit // tp
    scale_LM = np.zeros(ranks_LM.shape, np.float32)
    # Zeroed by the system, so that only the tail of the last page costs anything.
    units_UTW = np.zeros((num_pages * per_page, tp, width), geometry.storage_dtype)
    for (layer, module), a in weights.a.items():
        m = MODULES.index(module)
        scale_LM[layer, m] = weights.scale[layer, module]
        for start_LM, rows_RN in ((start_a_LM, a), (start_b_LM, weights.b[layer, module].T)):
            with np.errstate(over="ignore"):  # found by isfinite, and named
                cast_RN = rows_RN.astype(dtype, order="C", copy=False)
            if not np.isfinite(cast_RN).all():
                raise AdapterError(
                    f"layer {layer} {module} has values up to {np.abs(rows_RN).max():g}, beyond the range of "
                    f"{geometry.dtype}: serve it with dtype bfloat16 or float32",
                    reason="weights_overflow", param="lora_path",
                )  # fmt: skip
            rank, length = cast_RN.shape
            units = rank * (length // geometry.unit)
            start = int(start_LM[layer, m])
            shards_RTKW = cast_RN.view(geometry.storage_dtype).reshape(rank, tp, -1, width)
            units_UTW[start : start + units] = shards_RTKW.transpose(0, 2, 1, 3).reshape(units, tp, width)
    pages = units_UTW.reshape(num_pages, geometry.num_layers, geometry.units_per_page, tp, width)
    pages = np.ascontiguousarray(pages.transpose(0, 1, 3, 2, 4)).reshape(num_pages, geometry.num_layers, tp, -1)
    return HostAdapter(
        name, int_id, weights.path, weights.digest, weights.rank, pages, num_pages, num_units, ranks_LM, scale_LM,
        start_a_LM, start_b_LM, units_a_M, units_b_M,
    )  # fmt: skip


def unpack(host: HostAdapter, geometry: PoolGeometry) -> dict[ModuleKey, tuple[np.ndarray, np.ndarray]]:
    """The inverse of `pack`: (A, B) of every module, [r, in] and [out, r] in the compute type."""
    dtype, width = _COMPUTE_DTYPES[geometry.dtype], geometry.unit // geometry.tp
    pages = host.pages.reshape(-1, geometry.num_layers, geometry.tp, geometry.units_per_page, width)
    units_UTW = pages.transpose(0, 1, 3, 2, 4).reshape(-1, geometry.tp, width)

    def rows(units_RK: np.ndarray) -> np.ndarray:
        rows_RKTW = units_UTW[units_RK].transpose(0, 2, 1, 3)
        return np.ascontiguousarray(rows_RKTW).reshape(len(units_RK), -1).view(dtype)

    result = {}
    for layer, m in np.argwhere(host.ranks_LM):
        a_LRK, b_LRK = host.row_units(int(m), 0, int(host.ranks_LM[layer, m]))
        result[int(layer), MODULES[m]] = (rows(a_LRK[layer]), rows(b_LRK[layer]).T)
    return result
