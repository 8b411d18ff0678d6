"""The Mosaic GPU kernels of lora_delta, interpreted with the race detector on, against the oracle; and their gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.bench.mixes import MIXES, segments
from pallas_kernels import mosaic
from pallas_kernels.dispatch import H200, assume_device
from pallas_kernels.segmented_lora import SegmentShape, lora_constants, lora_delta, pallas_mosaic_gpu
from pallas_kernels.segmented_lora.api import pick
from tests.pallas_kernels.pool_problem import PoolProblem, check_modules_without_rows
from tests.pallas_kernels.test_lora_delta import engine_rows

interpreted = pytest.mark.skipif(
    not mosaic.CAN_INTERPRET, reason=f"jax {jax.__version__} has no public interpreter of Mosaic GPU; 0.11 has one"
)
NARROW = {"in_dim": 256, "out_dims": (128,), "unit": 128}


@interpreted
def test_decodes_of_mixed_ranks():
    """A base token, a rank of 1, two tokens of one adapter; 2 units a row; bfloat16 as bits."""
    problem = PoolProblem([8, 1], [0, 1, -1, 1], dtype="bfloat16", as_bits=True, **NARROW)
    problem.check("mosaic_gpu", (SegmentShape(2, 2),))


@interpreted
@pytest.mark.slow
def test_a_module_without_rows_leaves_its_outputs():
    sizes = {"in_dim": 128, "out_dims": (128, 128), "unit": 128, "num_rows": 6}
    check_modules_without_rows("mosaic_gpu", (SegmentShape(2, 2),), **sizes)


@interpreted
def test_a_wait_too_few_is_seen(monkeypatch):
    """A control of the race detector: rows that are read before they have come."""
    monkeypatch.setattr(pallas_mosaic_gpu, "_await", lambda *_: None)
    problem = PoolProblem([1], [0], **NARROW, num_rows=1)
    [part] = problem.plan((SegmentShape(1, 1),))
    with pytest.raises(Exception, match="(?i)race"):
        jax.block_until_ready(pallas_mosaic_gpu.shrink(
            jnp.asarray(problem.x_TI), problem.pool, problem.rank_rows(), part, unit=128, interpret=True
        ))  # fmt: skip


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("mix", MIXES)
def test_segment_mixes(mix):
    adapter_T = np.random.default_rng(0).permutation(segments(mix, 8))
    ranks = [(1, 8, 16, 3)[i % 4] for i in range(8)]
    PoolProblem(ranks, adapter_T, dtype="bfloat16", as_bits=True, **NARROW).check("mosaic_gpu", (SegmentShape(8, 8),))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types(dtype):
    """Three modules, several units a copy and several copies a row."""
    problem = PoolProblem([8, 1, 16], [0, 1, -1, 2, 2], dtype=dtype, in_dim=1536, out_dims=(512, 256, 256), unit=256)
    problem.check("mosaic_gpu", (SegmentShape(3, 3),))


@interpreted
@pytest.mark.slow
def test_modules_without_some_of_the_rows_and_weighted_mixes():
    """Several tiles a block; rows that a module is without; a bias; tables of all layers."""
    mix_TX = np.where(np.random.default_rng(0).random((5, 3)) < 0.5, 0, 1.5)
    problem = PoolProblem([[4, 0, 33], [0, 2, 8]], mix_TX=mix_TX, const=True, in_dim=256, out_dims=(128, 256), unit=128)
    problem.check("mosaic_gpu", (SegmentShape(5, 15, tile_rows=32),))
    problem.rank_rows = lambda: jax.tree.map(jnp.asarray, engine_rows(problem, 2))  # type: ignore[method-assign]
    problem.check("mosaic_gpu", (SegmentShape(5, 15, tile_rows=32),))


@interpreted
@pytest.mark.slow
def test_long_segments_beside_short_ones():
    problem = PoolProblem([4, 3], [0] * 32 + [1, -1], dtype="float16", **NARROW)
    problem.check("mosaic_gpu", (SegmentShape(2, 2), SegmentShape(1, 1, block_tokens=32)))


@interpreted
@pytest.mark.slow
def test_outputs_of_a_narrow_type_and_constants_alone():
    problem = PoolProblem([4, 2], mix_TX=[[1, 0], [0.5, -2], [0, 0]], dtype="bfloat16", const=True, **NARROW)
    rows, plan = problem.rank_rows(), jax.tree.map(jnp.asarray, problem.plan((SegmentShape(2, 4),)))
    options = {"unit": 128, "implementation": "mosaic_gpu", "interpret": True}
    got = lora_constants(problem.pool, rows, plan, 3, dtype="bfloat16", **options)  # pyright: ignore
    b_XO = np.stack([np.asarray(problem.b[0][x][-1], np.float32) for x in range(2)])
    np.testing.assert_allclose(got, problem.mix_TX @ b_XO, rtol=1e-5, atol=1e-5)
    y_TO = jnp.asarray(problem.y_TO, jnp.bfloat16)
    got = lora_delta(jnp.asarray(problem.x_TI), problem.pool, rows, plan, y_TO, **options)  # pyright: ignore
    assert got.dtype == jnp.bfloat16
    wanted, bound = problem.wanted()
    assert np.all(np.abs(np.asarray(got, np.float32) - wanted) <= bound + 2**-7 * (np.abs(wanted) + np.abs(y_TO)))


@interpreted
@pytest.mark.slow
@settings(max_examples=5)
@given(data=st.data(), ranks=st.lists(st.integers(0, 20), min_size=3, max_size=3), const=st.booleans())
def test_anything(data, ranks, const):
    weights = st.sampled_from([0, 0, 1, 0.5, -2])
    mix_TX = data.draw(st.lists(st.lists(weights, min_size=3, max_size=3), min_size=5, max_size=5))
    problem = PoolProblem(ranks, mix_TX=mix_TX, const=const, seed=sum(ranks), **NARROW)
    problem.check("mosaic_gpu", (SegmentShape(5, 30),))


def traced(implementation, adapter_T, shapes, **sizes):
    """Names of the kernels, and the jaxpr."""
    problem = PoolProblem([4, 3], adapter_T, **sizes)
    with assume_device(H200):
        return str(jax.make_jaxpr(lambda x: lora_delta(
            x, problem.pool, problem.rank_rows(), problem.plan(shapes), unit=problem.unit, implementation=implementation
        ))(jnp.asarray(problem.x_TI)))  # fmt: skip


def test_it_runs_where_it_is_named_and_nowhere_else():
    shapes = (SegmentShape(2, 2), SegmentShape(1, 1, block_tokens=32))
    tokens = [0] * 32 + [1, -1]
    by_name = traced("mosaic_gpu", tokens, shapes, **NARROW)
    assert "copy_gmem_to_smem" in by_name
    assert "num_warps" in by_name  # Triton's, of the long segments
    assert "num_warps" not in traced("mosaic_gpu", [0, 1, -1], (SegmentShape(2, 2),), **NARROW)
    assert "copy_gmem_to_smem" not in traced(None, tokens, shapes, **NARROW)
    with assume_device(H200):
        assert pick(128, "bfloat16") == "triton"
        assert pick(128, "bfloat16", "mosaic_gpu") == "mosaic_gpu"


def test_what_it_does_not_take_is_named():
    with assume_device(H200), pytest.raises(NotImplementedError, match="units of 192 elements are no whole number of"):
        pick(192, "bfloat16", "mosaic_gpu")
    with pytest.raises(NotImplementedError, match="mosaic_gpu kernels need an NVIDIA GPU"):
        pick(128, "bfloat16", "mosaic_gpu")
    with pytest.raises(NotImplementedError, match="not float64"):
        pallas_mosaic_gpu.check_supported((128, 128), "float64")


@pytest.mark.skipif(mosaic.CAN_INTERPRET, reason="this jax has the interpreter")
def test_a_jax_without_the_interpreter_says_so():
    with pytest.raises(NotImplementedError, match="interpreted from jax 0.11 on"):
        PoolProblem([2], [0], **NARROW).check("mosaic_gpu", (SegmentShape(1, 1),))
