"""The device pool: its shape, and writes that happen in place."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.memory.pool import POOL_SPEC, make_pool, write_page

SIZES: dict[str, Any] = {
    "num_layers": 3, "page_tokens": 16, "hidden": 64, "q_dim": 64, "kv_dim": 32, "ffn": 96, "num_kv_heads": 2,
    "head_dim": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


@pytest.mark.parametrize(("dtype", "storage"), [("float32", "uint32"), ("bfloat16", "uint16"), ("float16", "uint16")])
def test_the_pool_is_zeros_of_an_unsigned_type(mesh, dtype, storage):
    pool = make_pool(PoolGeometry(num_pages=5, dtype=dtype, **SIZES), mesh)
    assert pool.shape == (3, 5, 1024)
    assert pool.dtype == storage
    assert pool.sharding == NamedSharding(mesh, POOL_SPEC)
    assert not np.asarray(pool).any()


def test_a_page_is_written_in_all_layers_and_nothing_else(mesh):
    geometry = PoolGeometry(num_pages=6, **SIZES)
    pool, wanted = make_pool(geometry, mesh), np.zeros((3, 6, 1024), np.uint32)
    rng = np.random.default_rng(0)
    for page_id in (4, 1, 4, 5):
        page_LE = rng.integers(0, 2**32, (3, 1024), np.uint32)
        pool = write_page(pool, page_LE, np.int32(page_id))
        wanted[:, page_id] = page_LE
        np.testing.assert_array_equal(pool, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writing_is_in_place(mesh, dtype):
    geometry = PoolGeometry(num_pages=4096, dtype=dtype, **SIZES)
    pool = make_pool(geometry, mesh)
    address, old = pool.unsafe_buffer_pointer(), pool
    page_LE = np.ones((3, 1024), geometry.storage_dtype)
    pool = write_page(pool, page_LE, np.int32(7))
    assert pool.unsafe_buffer_pointer() == address
    assert old.is_deleted()
    memory = write_page.lower(pool, page_LE, np.int32(7)).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes / 100
