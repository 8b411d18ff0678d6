"""Stored tensors straight into sharded parameters: each process reads only the parts that its own devices hold.

Whatever the number of devices and the type, parameters are laid out in the buffers that the devices take over: what a
shard needs of each tensor is read into its place, converted on the way. Reading goes on while others are placed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from multilora_jax.models.checkpoint.orbax import SCALE, OrbaxCheckpoint
from multilora_jax.models.quantised import QuantWeight

if TYPE_CHECKING:
    from multilora_jax.models.loader import ParamRecord

_ALIGNMENT = 64
"""Bytes. XLA on CPUs takes over a buffer that begins at a multiple, any other is copied."""
_PIECE_BYTES = 8 << 20
"""What one thread reads at a time."""


def begin_restore(
    record: ParamRecord, dtype: Any, mesh: Mesh, tp: int, checkpoint: OrbaxCheckpoint, readers: Executor
) -> Callable[[], Any]:
    """Begins to read one parameter.

    Args:
        record: the parameter, quantised if and only if the checkpoint is.
        dtype: of the parameter, where it is not quantised.
        mesh: devices.
        tp: shards of the model's axis.
        checkpoint: read from.
        readers: threads that read.

    Returns:
        A function that waits for it and gives the placed array, or a QuantWeight of them.
    """
    if not record.quantised:
        return _begin(record, record.sources, record.shape, record.spec, dtype, mesh, tp, checkpoint, readers)
    scales = tuple(source + SCALE for source in record.sources)
    split = P(record.spec[0])
    values_OI = _begin(record, record.sources, record.shape, record.spec, np.int8, mesh, tp, checkpoint, readers)
    scale_O = _begin(record, scales, record.shape[:1], split, np.float32, mesh, tp, checkpoint, readers)
    return lambda: QuantWeight(values_OI(), scale_O())


def _begin(
    record: ParamRecord,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    partition: P,
    dtype: Any,
    mesh: Mesh,
    tp: int,
    checkpoint: OrbaxCheckpoint,
    readers: Executor,
) -> Callable[[], jax.Array]:
    """begin_restore of an array that is laid together of the tensors `names` as the record's of its sources."""
    sharding = NamedSharding(mesh, partition)
    buffers: dict[tuple[Any, ...], np.ndarray] = {}
    devices: list[tuple[Any, tuple[Any, ...]]] = []
    readings: list[Future[None]] = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        devices.append((device, bounds))
        if bounds in buffers:
            continue
        buffers[bounds] = buffer = _aligned(tuple(end - start for start, end in bounds), np.dtype(dtype))
        if len(names) == 1 and bounds[0][1] > record.rows[0]:
            buffer[max(record.rows[0] - bounds[0][0], 0) :] = 0
        columns = tuple(slice(*part) for part in bounds[1:])
        for name, rows, first in _pieces(record, names, bounds[0], shape[0], tp):
            for start, end in _divided(rows, buffer):
                part = buffer[first + start - rows.start : first + end - rows.start]
                index = (slice(start, end), *columns)
                readings.append(readers.submit(checkpoint.read_into, name, index, part))

    def wait() -> jax.Array:
        for reading in readings:
            reading.result()
        readings.clear()
        arrays = [jax.device_put(buffers[bounds], device) for device, bounds in devices]
        buffers.clear()
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    return wait


def _pieces(
    record: ParamRecord, names: tuple[str, ...], bounds: tuple[int, int], num_rows: int, tp: int
) -> list[tuple[str, slice, int]]:
    """(tensor, its rows, their first row in the buffer) of all that a device's rows are made of; others are zeros."""
    start, end = bounds
    if len(names) == 1:
        rows = slice(start, min(end, record.rows[0]))
        return [(names[0], rows, 0)] if rows.start < rows.stop else []
    shards = tp if record.spec[0] is not None else 1
    block, pieces = num_rows // shards, []
    for shard in range(start // block, end // block):
        for name, source in zip(names, record.sources, strict=True):
            place, length = record.place_of(source, shards)
            own = shard // record.copies_of(source) * length
            pieces.append((name, slice(own, own + length), shard * block + place - start))
    return pieces


def _divided(rows: slice, buffer: np.ndarray) -> Iterator[tuple[int, int]]:
    """First row and end of pieces of about _PIECE_BYTES."""
    step = max(1, _PIECE_BYTES // (buffer.nbytes // len(buffer)))
    return ((start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that begins at a multiple of _ALIGNMENT."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return raw[offset : offset + size].view(dtype).reshape(shape)
