"""The unified pool on the device: one array for KV and adapters, updated in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from multilora_jax.errors import ConfigError
from multilora_jax.memory.geometry import PoolGeometry

POOL_SPEC = P(None, None, "model")
"""The pool is split over its elements: E is laid out shard after shard, `[TP, E/TP]`.

The two are one axis because an axis of size 1 between them makes newer compilers copy the whole pool (jaxlib 0.12)."""


def pool_program(geometry: PoolGeometry, mesh: Mesh) -> Any:
    """The jitted function that makes a pool of zeros on the mesh."""
    g = geometry
    shape, sharding = (g.num_layers, g.num_pages, g.page_elements), NamedSharding(mesh, POOL_SPEC)
    return jax.jit(lambda: jax.numpy.zeros(shape, g.storage_dtype), out_shardings=sharding)


def make_pool(geometry: PoolGeometry, mesh: Mesh) -> jax.Array:
    """Zeros, uint[L, P, E], each shard's [L, P, E/TP] allocated on its own device."""
    g = geometry
    try:
        return pool_program(geometry, mesh)().block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        size = g.num_pages * g.page_bytes / 2**30
        raise ConfigError(
            f"the pool of {g.num_pages} pages takes {size:.1f} GiB, which the device does not have: lower pool_pages, "
            "pool_memory_gib or gpu_memory_utilization", reason="pool_too_large", param="pool_pages",
        ) from error  # fmt: skip


@functools.partial(jax.jit, donate_argnums=0)
def write_page(pool: jax.Array, page_LE: jax.Array | np.ndarray, page_id: jax.Array | np.ndarray) -> jax.Array:
    """Copies one page of an adapter into the pool in place. DONATES pool.

    Args:
        pool: uint[L, P, E].
        page_LE: uint[L, E], one page of HostAdapter.pages, its shards end to end.
        page_id: int32 scalar.
    """
    return jax.lax.dynamic_update_slice(pool, page_LE[:, None], (0, page_id, 0))


def read_page(pool: jax.Array, page_id: jax.Array | np.ndarray) -> jax.Array:
    """One page of the pool: uint[L, E]; the inverse of `write_page`."""
    return jax.lax.dynamic_index_in_dim(pool, page_id, 1, keepdims=False)
