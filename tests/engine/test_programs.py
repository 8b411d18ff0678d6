"""The compiled programs: the pool is updated in place, each is compiled once, unforeseen shapes are errors."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from multilora_jax.engine.batch import BatchShape, empty_batch, pack
from multilora_jax.engine.programs import MAX_CPU_GROUP, Programs, layer_group
from multilora_jax.memory.geometry import MODULES
from multilora_jax.memory.pool import POOL_SPEC
from multilora_jax.models.config import ModelConfig, RopeConfig
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.loader import load_llama

CONFIG = ModelConfig(
    name="tiny", vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96,
    rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=64,
)  # fmt: skip
SHAPE, ROWS, BLOCK, WIDTH = BatchShape(num_prompt_tokens=32, num_blocks=4, num_decodes=4), 32, 16, 8
DECODES = BatchShape(num_prompt_tokens=0, num_blocks=0, num_decodes=8)


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def make_programs(mesh, dtype, num_pages):
    """Programs over a pool that is described but never allocated."""
    geometry = CONFIG.geometry(num_pages=num_pages, page_tokens=16, dtype=dtype)
    spec = LlamaSpec(CONFIG, geometry, BLOCK, features_first=dtype == "float32")
    shape = (2, num_pages, geometry.page_elements)
    pool: Any = jax.ShapeDtypeStruct(shape, geometry.storage_dtype, sharding=NamedSharding(mesh, POOL_SPEC))
    params = load_llama(spec, 64, mesh, None).params()
    return Programs(spec, mesh, params, pool, WIDTH, ROWS, SHAPE.num_rows), num_pages * geometry.page_bytes


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def big(request, mesh):
    """(programs, bytes of their pool of 65536 pages)."""
    return make_programs(mesh, request.param, 65536)


@pytest.mark.parametrize(
    "key",
    [
        ("layers", SHAPE, 0, False),
        ("layers", SHAPE, ROWS, False),
        ("layers", SHAPE, ROWS, True),
        ("layers", DECODES, 0, False),
        ("layers", DECODES, ROWS, False),
        ("write_page",),
        ("begin", SHAPE, ROWS, True),
        ("finish", SHAPE, True),
        ("logprobs", True),
    ],
)
def test_the_pool_is_updated_and_read_in_place(big, key):
    programs, pool_bytes = big
    memory = programs.get(*key).memory_analysis()
    assert pool_bytes >= 2**28
    if key[0] in ("layers", "write_page"):
        assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 100


def test_rank_rows_are_read_from_the_pool_without_copying_it(big):
    programs, pool_bytes = big
    memory = programs.get("insert", ROWS, MODULES).memory_analysis()
    rows_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(programs._row_buffers(ROWS)))
    assert memory.alias_size_in_bytes >= rows_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 100


def test_each_program_is_compiled_once_whoever_asks(mesh):
    programs, _ = make_programs(mesh, "float32", 8)
    got, start = [], threading.Barrier(4)

    def ask():
        start.wait()
        got.append(programs.get("rows", 8))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, got))) == 1
    assert programs.num_compilations == 1
    assert programs.get("rows", 8) is got[0]
    programs.get("rows", 16)
    assert programs.num_compilations == 2


def test_a_shape_that_was_not_foreseen_is_an_error(mesh):
    programs, _ = make_programs(mesh, "float32", 8)
    begin = programs.get("begin", SHAPE, 0, False)
    top = programs._params["top"]
    sampled_S = np.zeros(SHAPE.num_rows, np.int32)
    x, *_ = begin(top, pack(empty_batch(SHAPE, programs.spec, WIDTH)), sampled_S, None, None)
    assert x.shape == (64, 36)
    with pytest.raises(TypeError):
        begin(top, pack(empty_batch(BatchShape(32, 4, 5), programs.spec, WIDTH)), sampled_S, None, None)


def test_layers_are_grouped_by_a_divisor_on_cpus():
    assert MAX_CPU_GROUP == 4
    groups = {n: layer_group(n, "cpu") for n in (1, 2, 6, 7, 12, 16, 22, 30, 32)}
    assert groups == {1: 1, 2: 2, 6: 3, 7: 1, 12: 4, 16: 4, 22: 2, 30: 3, 32: 4}
    assert layer_group(32, "gpu") == 32


def test_steps_with_prompts_run_one_layer_at_a_time_on_cpus(mesh):
    programs, _ = make_programs(mesh, "float32", 8)
    assert (programs.layers_at_once(DECODES), programs.layers_at_once(SHAPE)) == (2, 1)
    for shape in (DECODES, SHAPE):
        arguments, _ = programs.lower("layers", shape, 0, False).args_info
        assert len(arguments[0]) == programs.layers_at_once(shape)
