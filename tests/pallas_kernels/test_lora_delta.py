"""lora_delta of every implementation, interpreted, against the oracle: segments, ranks, types, weighted mixes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.bench.mixes import MIXES, segments
from pallas_kernels.dispatch import H200, assume_device
from pallas_kernels.segmented_lora import (
    LayerRankRows,
    SegmentShape,
    lora_constants,
    lora_delta,
    pallas_triton,
    xla_pool,
)
from pallas_kernels.segmented_lora.arg_specs import segment_specs
from pallas_kernels.segmented_lora.own_rows import sum_tiles
from pallas_kernels.segmented_lora.plan import NOBODY
from tests.pallas_kernels.pool_problem import SHORT, TRACES, PoolProblem, check_modules_without_rows, run_delta

IMPLEMENTATIONS = ["xla", "triton"]
BOTH = (SegmentShape(24, 48), SegmentShape(4, 8, block_tokens=32, tile_rows=32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mix", MIXES)
def test_segment_mixes(mix, implementation):
    """One bucket for all: short segments in blocks of 16, those of 12 tokens on in blocks of 32."""
    adapter_T = np.random.default_rng(0).permutation(segments(mix, 24))
    ranks = [(1, 8, 16, 3)[i % 4] for i in range(24)]
    PoolProblem(ranks, adapter_T, num_rows=192).check(implementation, BOTH, long_segment=12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types_and_pools_of_bits(dtype, implementation):
    adapter_T = np.array([0, 1, -1, 2, 2, 0, -1, 3, 1])
    PoolProblem([8, 1, 3, 16], adapter_T, dtype=dtype).check(implementation)
    PoolProblem([8, 1, 3, 16], adapter_T, dtype=dtype, as_bits=True).check(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ranks_from_1_to_128(implementation):
    ranks = [1, 64, 128, 2, 33, 0, 16]
    adapter_T = np.random.default_rng(1).integers(-1, len(ranks), 20)
    PoolProblem(ranks, adapter_T, out_dims=(64,), num_rows=256).check(implementation, (SegmentShape(8, 32),))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("in_dim", "out_dims", "unit"), [(192, (576,), 192), (96, (32, 64), 16), (16, (48, 48), 16), (256, (256,), 64)]
)
def test_widths(in_dim, out_dims, unit, implementation):
    adapter_T = np.array([0, 1, 0, -1, 1, 1])
    PoolProblem([4, 17], adapter_T, in_dim=in_dim, out_dims=out_dims, unit=unit).check(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_modules_without_some_of_the_rows(implementation):
    """The rank differs by module, down to 0; with a bias row after the rows of the largest."""
    ranks = [[4, 0, 20], [0, 0, 8], [4, 3, 1]]
    adapter_T = np.array([0, 1, 2, 2, -1, 1, 0, 2])
    PoolProblem(ranks, adapter_T).check(implementation)
    PoolProblem(ranks, adapter_T, const=True).check(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weighted_mixes(implementation):
    mix_TX = np.zeros((20, 4), np.float32)
    mix_TX[0, 0], mix_TX[1] = 1, (0.5, -2, 0, 0.25)
    mix_TX[2], mix_TX[3], mix_TX[5] = (0, 1, 1, 0), (0, 0.125, 3, 0), (1, 1, 1, 1)
    mix_TX[7:] = np.where(np.random.default_rng(0).random((13, 4)) < 0.5, 0, 1.5)
    PoolProblem([5, 1, 33, 16], mix_TX=mix_TX, const=True).check(implementation, (SegmentShape(16, 96),))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_s_products_by_tiles(monkeypatch, dtype):
    """Mixes, a bias, ranks that differ by module: each tile with the tokens of its block alone."""
    monkeypatch.setattr(xla_pool, "prefers_tiles", lambda *_: True)
    mix_TX = np.where(np.random.default_rng(0).random((13, 3)) < 0.5, 0, 1.5)
    ranks = [[4, 0, 20], [0, 0, 8], [4, 3, 1]]
    PoolProblem(ranks, mix_TX=mix_TX, const=True, in_dim=160, dtype=dtype).check("xla", (SegmentShape(10, 60),))


def test_tiles_are_for_many_rows_and_full_blocks(monkeypatch):
    monkeypatch.setattr(xla_pool, "dense_units", lambda dtype: dtype == "bfloat16")

    def plan(blocks, tiles):
        return (jax.tree.map(lambda x: np.zeros(x.shape), segment_specs(SegmentShape(blocks, tiles))),)

    assert xla_pool.prefers_tiles(plan(32, 32), 256, 512, "float32")
    assert not xla_pool.prefers_tiles(plan(32, 32), 256, 48, "float32")
    assert not xla_pool.prefers_tiles(plan(32, 32), 32, 512, "float32")
    assert not xla_pool.prefers_tiles(plan(32, 32), 256, 512, "bfloat16")
    assert xla_pool.prefers_tiles(plan(32, 32), 256, 512, "float16")
    # Eight adapters on 32 tokens: half of the work. 64 on 64: a quarter, one token to a block.
    assert not xla_pool.prefers_tiles(plan(8, 8), 32, 128, "float32")
    assert xla_pool.prefers_tiles(plan(8, 8), 32, 128, "float16")
    assert not xla_pool.prefers_tiles(plan(64, 64), 64, 1024, "float32")
    assert xla_pool.prefers_tiles(plan(64, 64), 64, 1024, "float16")
    assert not xla_pool.prefers_tiles(plan(32, 32), 32, 512, "float16")


def test_a_cpu_names_the_types_that_it_multiplies_itself(monkeypatch):
    for flags, wanted in (("flags: amx_bf16 avx512f", (True, False)), ("flags: avx2", (False, False))):
        monkeypatch.setattr(xla_pool.Path, "read_text", lambda *_, flags=flags, **__: flags)
        xla_pool.dense_units.cache_clear()
        assert (xla_pool.dense_units("bfloat16"), xla_pool.dense_units("float16")) == wanted
        assert not xla_pool.dense_units("float32")
    xla_pool.dense_units.cache_clear()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("adapter_T", [[-1] * 20, [0] + [-1] * 19, [-1] * 19 + [2], [1] * 20])
def test_empty_and_single_token_segments(adapter_T, implementation):
    PoolProblem([8, 1, 3], adapter_T).check(implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_a_token_holds_stays_its_own(implementation):
    problem = PoolProblem([4, 8], [0, 1, -1, 1], out_dims=(32,))
    plan = jax.tree.map(jnp.asarray, problem.plan(SHORT))

    def run():
        return np.asarray(run_delta(
            problem.x_TI, problem.pool, problem.rank_rows(), plan, problem.y_TO, unit=32,
            implementation=implementation, interpret=True,
        ))  # fmt: skip

    clean = run()
    problem.x_TI[1] = np.inf
    dirty = run()
    np.testing.assert_array_equal(dirty[[0, 2, 3]], clean[[0, 2, 3]])
    assert not np.isfinite(dirty[1]).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_module_without_rows_leaves_its_outputs(implementation):
    check_modules_without_rows(implementation, out_dims=(64, 32))


@settings(max_examples=30)
@given(data=st.data(), ranks=st.lists(st.integers(0, 40), min_size=4, max_size=4), const=st.booleans())
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_anything(data, ranks, const, implementation):
    """Batches of one bucket: nothing is compiled after the first."""
    weights = st.sampled_from([0, 0, 1, 0.5, -2])
    shape = (SegmentShape(20, 96, tile_rows=32),)
    mix_TX = data.draw(st.lists(st.lists(weights, min_size=4, max_size=4), min_size=12, max_size=12))
    PoolProblem(ranks, mix_TX=mix_TX, const=const, num_rows=192, seed=sum(ranks)).check(implementation, shape)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_batch_of_a_bucket_recompiles(implementation):
    before = len(TRACES)
    for ranks, seed in (([1, 2, 3], 0), ([30, 30, 30], 1), ([0, 0, 1], 2), ([16, 40, 7], 3)):
        adapter_T = np.random.default_rng(seed).integers(-1, 3, 19)
        PoolProblem(ranks, adapter_T, in_dim=32).check(implementation)
    assert len(TRACES) == before + 1


def test_a_sharded_input_and_output():
    """Two shards, each with its half of every rank row: one sum of the projections."""
    problem = PoolProblem([4, 8, 3], [0, 1, -1, 1, 0, 2], in_dim=64, out_dims=(64,), unit=32)
    plan, rows = jax.tree.map(jnp.asarray, problem.plan(SHORT)), problem.rank_rows()
    pool = jnp.stack(jnp.split(problem.pool, 2, 1))  # half of every unit
    x = problem.x_TI.reshape(6, 2, 2, 16).transpose(2, 0, 1, 3).reshape(2, 6, 32)
    y = problem.y_TO.reshape(6, 2, 2, 16).transpose(2, 0, 1, 3).reshape(2, 6, 32)
    rows.out_dims = (32,)
    wanted, bound = problem.wanted()

    def check(parts):
        got = np.asarray(jnp.stack(parts)).reshape(2, 6, 2, 16).transpose(1, 2, 0, 3).reshape(6, 64)
        assert np.all(np.abs(got - wanted) <= 2 * bound)

    def shard(x, pool, y, own_rows):
        return lora_delta(x, pool, rows, plan, y, unit=16, axis_name="model", own_rows=own_rows, implementation="xla")

    for own_rows in (0, 5):
        check(list(jax.vmap(functools.partial(shard, own_rows=own_rows), axis_name="model")(x, pool, y)))
    # The kernels' own halves, with the sum between them done by hand.
    [part] = plan
    shrink = functools.partial(pallas_triton.shrink, unit=16, interpret=True)
    s = sum(shrink(x[i], pool[i], rows, part).sum(0, keepdims=True) for i in range(2))
    expand = functools.partial(pallas_triton.expand, unit=16, dtype=x.dtype, interpret=True)
    check([expand(jnp.asarray(s), pool[i], rows, part, y[i]) for i in range(2)])
    # What crosses between shards: the tiles, of which tokens fill a part, are put there and taken back.
    tiles = jnp.stack([shrink(x[i], pool[i], rows, part) for i in range(2)])
    for own_rows in (0, 5):  # of [M, T, R]; or of [M, 5 T], where the batch has 27 own rows
        [summed] = jax.vmap(lambda s, n=own_rows: sum_tiles([s], plan, 6, 96, n, "model"), axis_name="model")(tiles)
        check([expand(summed[i], pool[i], rows, part, y[i]) for i in range(2)])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_units_past_the_pool_count_as_zeros(implementation):
    """An address that nobody has checked reads nothing, in a kernel as in XLA's gather."""
    problem = PoolProblem([4, 3], [0, 1, -1, 1], out_dims=(32,))
    for table, rows in ((problem.units_a, (slice(None), 4)), (problem.units_b, (5,))):
        table[rows] = len(problem.pool) + 3
    problem.a[0][1][0] = problem.b[0][1][1] = 0
    problem.check(implementation)


def test_free_places_are_no_token_of_a_longer_x():
    """A plan of four tokens, an x of six: no block may write the fifth, which many would at once."""
    problem = PoolProblem([4, 8], [0, 1, -1, 1, -1, -1], out_dims=(32,))
    problem.adapter_T = np.array([0, 1, -1, 1])
    [part] = problem.plan(SHORT)
    assert set(part.token_NC.ravel().tolist()) == {0, 1, 3, NOBODY}
    problem.check("triton")


def test_more_tiles_than_programs(monkeypatch):
    """A program then takes several tiles; those of a bucket that a batch leaves idle take none."""
    monkeypatch.setattr(pallas_triton, "SHRINK_PROGRAMS", 3)
    adapter_T = np.random.default_rng(1).integers(-1, 6, 20)
    PoolProblem([16, 40, 3, 17, 1, 30], adapter_T, in_dim=128, num_rows=128).check("triton", (SegmentShape(21, 48),))


def engine_rows(problem, layer):
    """The same rows in the last of three layers of tables that an engine keeps: units of A, then of B."""
    M, R, Ua = problem.units_a.shape
    units_LRU = np.full((3, R, M * Ua + problem.units_b.shape[1] + 1), -1, np.int32)
    units_LRU[layer, :, 1:] = np.concatenate([*problem.units_a, problem.units_b], 1)
    tables = np.zeros((2, 3, M + 2, R), np.float32)
    tables[0, layer, 2:], tables[1, layer, 2:] = problem.scale, problem.const
    columns = tuple(1 + m * Ua for m in range(M))
    return LayerRankRows(
        units_LRU, tables[0], tables[1], np.int32(layer), columns_a=columns, column_b=1 + M * Ua, units_in=Ua,
        units_out=problem.units_b.shape[1], first_module=2, out_dims=problem.out_dims,
    )  # fmt: skip


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_one_layer_in_the_tables_of_all(implementation):
    problem = PoolProblem([4, 20, 9], [0, 1, -1, 2, 2, 0], const=True)
    problem.rank_rows = lambda: jax.tree.map(jnp.asarray, engine_rows(problem, 2))  # type: ignore[method-assign]
    problem.check(implementation)
    rows = engine_rows(problem, 1)
    rows.units_in = 1
    with pytest.raises(ValueError, match="rows of 1 and 4 units: x and the outputs have 2 and 4"):
        lora_delta(jnp.asarray(problem.x_TI), problem.pool, rows, problem.plan(SHORT), unit=32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_constants_alone(implementation):
    """Every row of B with a constant, whatever its scale: gains and norms of adapters."""
    problem = PoolProblem([4, 9], mix_TX=[[1, 0], [0.5, -2], [0, 0]], dtype="bfloat16", const=True)
    rows, plan = problem.rank_rows(), jax.tree.map(jnp.asarray, problem.plan(SHORT))
    got = lora_constants(
        problem.pool, rows, plan, 3, unit=32, dtype="bfloat16", implementation=implementation, interpret=True
    )
    b_XO = np.stack([np.concatenate([np.asarray(b[x][-1], np.float32) for b in problem.b]) for x in range(2)])
    np.testing.assert_allclose(got, problem.mix_TX @ b_XO, rtol=1e-5, atol=1e-5)


def test_the_device_decides():
    """On an H200 a kernel is traced, elsewhere XLA's products."""
    problem = PoolProblem([4], [0, -1])

    def names():
        jaxpr = jax.make_jaxpr(lambda x: lora_delta(x, problem.pool, problem.rank_rows(), problem.plan(SHORT), unit=32))
        return str(jaxpr(jnp.asarray(problem.x_TI)))

    assert "pallas_call" not in names()
    with assume_device(H200):
        assert "pallas_call" in names()
