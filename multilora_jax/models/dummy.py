"""Random parameters, drawn on the devices that hold them: each tensor from the seed and its own name."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from multilora_jax.models.quantised import QuantWeight

if TYPE_CHECKING:
    from multilora_jax.models.loader import ParamRecord


@dataclass(frozen=True)
class _Form:
    """What a program that draws parameters is compiled for."""

    rows: tuple[int, ...]
    copies: tuple[int, ...]
    shape: tuple[int, ...]
    scale: float
    dtype: Any
    quantised: bool
    shards: int


def draw_parameter(record: ParamRecord, dtype: Any, mesh: Mesh, tp: int, seed: int) -> Any:
    """A random array, or a QuantWeight of them; the same tensors for every mesh and every tp.

    Args:
        record: the parameter.
        dtype: of the parameter, where it is not quantised.
        mesh: devices that it is split over.
        tp: shards that its tensors are laid together for.
        seed: any integer of 32 bits.
    """
    shards = tp if len(record.sources) > 1 and record.spec[0] is not None else 1
    copies = tuple(map(record.copies_of, record.sources))
    form = _Form(record.rows, copies, record.shape, record.scale, dtype, record.quantised, shards)
    if isinstance(record.partition, QuantWeight):
        placed: Any = QuantWeight(*(NamedSharding(mesh, p) for p in vars(record.partition).values()))
    else:
        placed = NamedSharding(mesh, record.partition)
    # Host arrays, so that several processes can run it together.
    names = np.asarray([zlib.crc32(source.encode()) for source in record.sources], np.uint32)
    return _program(form, placed)(np.uint32(seed), names)


@functools.lru_cache(maxsize=64)
def _program(form: _Form, placed: Any) -> Any:
    return jax.jit(functools.partial(_draw, form=form), out_shardings=placed)


def _draw(seed: jax.Array, name_M: jax.Array, *, form: _Form) -> Any:
    width = form.shape[1:]
    parts = []
    for index, rows in enumerate(form.rows):
        # The generator is named, so that a seed means the same wherever jax is told to use another by default.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), name_M[index])
        shape = (rows // form.copies[index], *width)
        if form.scale:
            part = jax.random.normal(key, shape, jnp.float32) * form.scale
        else:
            part = jnp.ones(shape, jnp.float32)
        part = part.reshape(-1, rows // form.shards, *width)
        parts.append(jnp.repeat(part, form.copies[index], 0))
    whole = jnp.concatenate(parts, 1).reshape(-1, *width)
    whole = jnp.pad(whole, [(0, form.shape[0] - len(whole)), *[(0, 0)] * len(width)])
    if not form.quantised:
        return whole.astype(form.dtype)
    scale_O = jnp.max(jnp.abs(whole), 1) / 127
    divisor_O = jnp.where(scale_O > 0, scale_O, 1.0)
    values_OI = jnp.clip(jnp.round(whole / divisor_O[:, None]), -127, 127)
    return QuantWeight(values_OI.astype(jnp.int8), scale_O)
