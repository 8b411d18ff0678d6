"""The unified pool on the device: one array for KV and adapters, updated in place."""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from multilora_jax.memory.geometry import PoolGeometry

POOL_SPEC = P(None, None, "model", None)
"""The pool is split over its third axis, TP."""


def make_pool(geometry: PoolGeometry, mesh: Mesh) -> jax.Array:
    """Zeros, uint[L, P, TP, E/TP], each shard allocated on its own device."""
    g = geometry
    shape = (g.num_layers, g.num_pages, g.tp, g.page_elements // g.tp)
    sharding = NamedSharding(mesh, POOL_SPEC)
    return jax.jit(lambda: jax.numpy.zeros(shape, g.storage_dtype), out_shardings=sharding)()


@functools.partial(jax.jit, donate_argnums=0)
def write_page(pool: jax.Array, page_LTE: jax.Array | np.ndarray, page_id: jax.Array | np.ndarray) -> jax.Array:
    """Copies one page of an adapter into the pool in place. DONATES pool.

    Args:
        pool: uint[L, P, TP, E/TP].
        page_LTE: uint[L, TP, E/TP], one page of HostAdapter.pages.
        page_id: int32 scalar.
    """
    return jax.lax.dynamic_update_slice(pool, page_LTE[:, None], (0, page_id, 0, 0))
