"""The Mosaic GPU kernels of long segments, interpreted with the race detector on, and their gate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import mosaic
from pallas_kernels.dispatch import H200, assume_device
from pallas_kernels.segmented_lora import SegmentShape, lora_constants, lora_delta, lora_matmul, mosaic_prompts
from pallas_kernels.segmented_lora.arg_specs import segment_specs
from tests.pallas_kernels.pool_problem import PoolProblem, check_modules_without_rows
from tests.pallas_kernels.race_controls import leave_out
from tests.pallas_kernels.test_lora_delta import engine_rows
from tests.pallas_kernels.test_mosaic_gpu import NARROW, interpreted, traced

LONG = (SegmentShape(2, 2), SegmentShape(2, 4, block_tokens=64))
RACES = {
    "rows of A": ("shrink", "barrier_wait", 1), "tokens": ("shrink", "barrier_wait", 2),
    "rows of B": ("expand", "barrier_wait", 1), "old outputs": ("expand", "barrier_wait", 3),
    "outputs": ("expand", "commit_smem", 2),
}  # fmt: skip
"""What the kernels wait for, by its place in the trace of each."""


def long_problem(ranks=(8, 3), dtype="bfloat16", tokens=36, **options):
    """One long segment, a short one, a base token in between."""
    adapter_T = np.full(tokens + 3, 0)
    adapter_T[5], adapter_T[[7, 20]] = -1, 1
    return PoolProblem(list(ranks), adapter_T, dtype=dtype, **{**NARROW, **options})


def part_of(problem, rows=16):
    """The blocks of 64 alone."""
    [part] = problem.plan((SegmentShape(2, 4, block_tokens=64, tile_rows=rows),))
    return jax.tree.map(jnp.asarray, part)


def run_shrink(problem, part):
    s = mosaic_prompts.shrink(
        jnp.asarray(problem.x_TI), problem.pool, problem.rank_rows(), part, unit=problem.unit, interpret=True
    )
    return np.asarray(jax.block_until_ready(s))


def run_expand(problem, part):
    s = jnp.ones((1, len(problem.out_dims), len(part.row_W), part.block_tokens, part.tile_rows))
    return jax.block_until_ready(mosaic_prompts.expand(
        s, problem.pool, problem.rank_rows(), part, jnp.asarray(problem.y_TO), unit=problem.unit, dtype=problem.dtype,
        interpret=True,
    ))  # fmt: skip


@interpreted
def test_long_segments_beside_short_ones():
    """Prompts that lie between other tokens; ranks of 8 and 3 in tiles of 16; bfloat16 as bits."""
    long_problem(as_bits=True).check("mosaic_gpu", LONG)


def small_problem():
    problem = PoolProblem([1], [0], num_rows=1, in_dim=128, out_dims=(128,), unit=128, dtype="bfloat16")
    return problem, part_of(problem)


@interpreted
@pytest.mark.parametrize("left_out", [None, *RACES])
def test_a_wait_too_few_is_seen(monkeypatch, left_out):
    """Controls of the race detector: operands read before they have come, outputs sent before they are there."""
    if left_out is None:
        leave_out(monkeypatch, mosaic_prompts, "barrier_wait", 0)
        run_shrink(*small_problem())
        run_expand(*small_problem())
        return
    kernel, name, number = RACES[left_out]
    calls = leave_out(monkeypatch, mosaic_prompts, name, number)
    with pytest.raises(Exception, match="(?i)race"):
        {"shrink": run_shrink, "expand": run_expand}[kernel](*small_problem())
    assert len(calls) >= number


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ranks_types_and_several_units(dtype):
    """Three modules, ranks from 1 to 70 in tiles of 32, a whole block and a rest, four spans of a row in two units."""
    rng = np.random.default_rng(0)
    adapter_T = rng.permutation([0] * 70 + [1] * 40 + [2] * 33 + [3] * 2 + [-1] * 4)
    problem = PoolProblem(
        [70, 1, 33, 5], adapter_T, dtype=dtype, num_rows=128, in_dim=512, out_dims=(512, 256, 256), unit=256
    )
    problem.check("mosaic_gpu", (SegmentShape(3, 3, tile_rows=32), SegmentShape(5, 12, block_tokens=64, tile_rows=32)))


@interpreted
@pytest.mark.slow
def test_blocks_of_128_tokens():
    long_problem(tokens=90).check("mosaic_gpu", (SegmentShape(2, 2), SegmentShape(1, 1, block_tokens=128)))


@interpreted
@pytest.mark.slow
def test_modules_without_some_of_the_rows_and_weighted_mixes():
    """Several tiles a block; rows that a module is without; a bias; tables of all layers."""
    rng = np.random.default_rng(0)
    mix_TX = np.where(rng.random((8, 3)) < 0.5, 0, 1.5)
    mix_TX = np.concatenate([np.tile([[0.5, 0, -2]], (33, 1)), mix_TX])
    problem = PoolProblem(
        [[4, 0, 33], [0, 2, 8]], mix_TX=mix_TX, const=True, in_dim=256, out_dims=(128, 256), unit=128, dtype="bfloat16"
    )
    shapes = (SegmentShape(8, 24, tile_rows=32), SegmentShape(1, 3, block_tokens=64, tile_rows=32))
    problem.check("mosaic_gpu", shapes)
    problem.rank_rows = lambda: jax.tree.map(jnp.asarray, engine_rows(problem, 2))  # type: ignore[method-assign]
    problem.check("mosaic_gpu", shapes)


@interpreted
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # of the interpreter
def test_a_module_without_rows_leaves_its_outputs():
    sizes: dict[str, Any] = {"in_dim": 128, "out_dims": (128, 128), "unit": 128, "dtype": "bfloat16", "num_rows": 6}
    check_modules_without_rows("mosaic_gpu", (SegmentShape(2, 2, block_tokens=64),), **sizes)


@interpreted
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # of the interpreter
def test_what_a_token_holds_stays_its_own():
    problem = long_problem()
    clean = np.asarray(run_delta_of(problem))
    problem.x_TI[1] = np.inf
    dirty = np.asarray(run_delta_of(problem))
    others = np.arange(len(clean)) != 1
    np.testing.assert_array_equal(dirty[others], clean[others])
    assert not np.isfinite(dirty[1]).any()


def run_delta_of(problem, y_TO=None):
    return lora_delta(
        jnp.asarray(problem.x_TI), problem.pool, problem.rank_rows(), jax.tree.map(jnp.asarray, problem.plan(LONG)),
        jnp.asarray(problem.y_TO) if y_TO is None else y_TO, unit=problem.unit, implementation="mosaic_gpu",
        interpret=True,
    )  # fmt: skip


@interpreted
@pytest.mark.slow
def test_units_past_the_pool_count_as_zeros():
    """Of long segments: an address that nobody has checked reads nothing."""
    problem = long_problem()
    problem.units_a[:, 4] = problem.units_b[5] = len(problem.pool) + 3
    problem.a[0][0][4] = problem.b[0][0][5] = 0
    problem.check("mosaic_gpu", LONG)


@interpreted
@pytest.mark.slow
def test_outputs_of_a_narrow_type_and_constants_alone():
    problem = long_problem((4, 2), const=True)
    rows, plan = problem.rank_rows(), jax.tree.map(jnp.asarray, problem.plan(LONG))
    options = {"unit": 128, "implementation": "mosaic_gpu", "interpret": True}
    got = lora_constants(problem.pool, rows, plan, len(problem.mix_TX), dtype="bfloat16", **options)  # pyright: ignore
    b_XO = np.stack([np.asarray(problem.b[0][x][-1], np.float32) for x in range(2)])
    np.testing.assert_allclose(got, problem.mix_TX @ b_XO, rtol=1e-5, atol=1e-5)
    y_TO = jnp.asarray(problem.y_TO, jnp.bfloat16)
    got = run_delta_of(problem, y_TO)
    assert got.dtype == jnp.bfloat16
    wanted, bound = problem.wanted()
    assert np.all(np.abs(np.asarray(got, np.float32) - wanted) <= bound + 2**-7 * (np.abs(wanted) + np.abs(y_TO)))


@interpreted
@pytest.mark.slow
def test_gradients_of_dense_weights():
    """x's gradient runs the same kernels with A and B in each other's place."""
    rng = np.random.default_rng(0)
    x, a, b = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((300, 128), (1, 8, 128), (1, 8, 256))
    )
    segment_T = jnp.asarray(np.where(rng.random(300) < 0.2, -1, 0), jnp.int32)

    def loss(x, implementation):
        y = lora_matmul(x, a, b, segment_T, implementation=implementation, interpret=implementation != "xla")
        return (y * jnp.arange(256)).sum() / 1000

    got, wanted = (np.asarray(jax.grad(loss)(x, name), np.float32) for name in ("mosaic_gpu", "xla"))
    assert np.abs(got - wanted).max() <= 2**-6 * np.abs(wanted).max()


@interpreted
@pytest.mark.slow
@settings(max_examples=5)
@given(data=st.data(), ranks=st.lists(st.integers(0, 20), min_size=3, max_size=3), const=st.booleans())
def test_anything(data, ranks, const):
    """A few tokens of a block each: what matters is which rows and tokens are there."""
    weights = st.sampled_from([0, 0, 1, 0.5, -2])
    mix_TX = data.draw(st.lists(st.lists(weights, min_size=3, max_size=3), min_size=5, max_size=5))
    problem = PoolProblem(ranks, mix_TX=mix_TX, const=const, seed=sum(ranks), dtype="bfloat16", **NARROW)
    problem.check("mosaic_gpu", (SegmentShape(5, 30, block_tokens=64),))


def test_tensor_cores_are_for_long_segments_of_16_bits():
    tokens = [0] * 33 + [1, -1]
    jaxpr = traced("mosaic_gpu", tokens, LONG, dtype="bfloat16", **NARROW)
    assert "wgmma" in jaxpr
    assert "num_warps" not in jaxpr  # Triton's
    jaxpr = traced("mosaic_gpu", tokens, LONG, **NARROW)
    assert "wgmma" not in jaxpr
    assert "num_warps" in jaxpr
    assert "wgmma" not in traced("mosaic_gpu", [0, 1, -1], (SegmentShape(2, 2),), dtype="bfloat16", **NARROW)


@pytest.mark.parametrize(
    ("tokens", "rows", "modules", "dtype", "wanted"),
    [(64, 32, 3, "bfloat16", True), (128, 128, 1, "float16", True), (32, 16, 1, "bfloat16", False),
     (64, 64, 3, "bfloat16", False), (64, 16, 1, "float32", False)],
)  # fmt: skip
def test_what_they_take(tokens, rows, modules, dtype, wanted):
    part = segment_specs(SegmentShape(2, 2, block_tokens=tokens, tile_rows=rows))
    assert mosaic_prompts.takes(part, modules, dtype) == wanted


def test_what_they_do_not_take_the_triton_kernels_do():
    problem = long_problem()
    shapes = (SegmentShape(2, 2), SegmentShape(2, 4, block_tokens=32))
    with assume_device(H200):
        jaxpr = str(jax.make_jaxpr(lambda x: lora_delta(
            x, problem.pool, problem.rank_rows(), problem.plan(shapes), unit=128, implementation="mosaic_gpu"
        ))(jnp.asarray(problem.x_TI)))  # fmt: skip
    assert "wgmma" not in jaxpr
    assert "num_warps" in jaxpr


@pytest.mark.skipif(mosaic.CAN_INTERPRET, reason="this jax has the interpreter")
def test_a_jax_without_the_interpreter_says_so():
    with pytest.raises(NotImplementedError, match="interpreted from jax 0.11 on"):
        long_problem().check("mosaic_gpu", LONG)
