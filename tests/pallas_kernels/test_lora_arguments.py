"""Arguments of lora_delta, lora_constants and make_plan: what is taken as it is, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.segmented_lora import SegmentShape, lora_constants, lora_delta, make_plan, pallas_triton
from pallas_kernels.segmented_lora.blocks import ExpandBlocks, ShrinkBlocks
from pallas_kernels.segmented_lora.plan import NOBODY
from tests.pallas_kernels.pool_problem import SHORT, PoolProblem

IMPLEMENTATIONS = ["xla", "triton"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_arrays_of_numpy_and_no_tokens(implementation):
    """Called without jit, as in a notebook."""
    problem = PoolProblem([4, 8], [0, 1, -1, 1], out_dims=(32,), const=True)
    wanted, bound = problem.wanted()
    assert np.all(np.abs(problem.given(implementation) - wanted) <= bound)
    options: dict[str, Any] = {"unit": 32, "implementation": implementation, "interpret": True}
    pool: Any = np.asarray(problem.pool)
    rows, plan = jax.tree.map(np.asarray, problem.rank_rows()), problem.plan(SHORT)
    constants = lora_constants(pool, rows, plan, 4, dtype="float32", **options)
    b_XO = np.stack([np.asarray(problem.b[0][x][-1]) for x in range(2)])
    np.testing.assert_allclose(constants, problem.mix_TX @ b_XO, rtol=1e-5, atol=1e-5)
    assert lora_delta(jnp.asarray(problem.x_TI[:0]), pool, rows, plan, **options).shape == (0, 32)
    assert lora_constants(pool, rows, plan, 0, dtype="float32", **options).shape == (0, 32)


def test_blocks_that_leave_a_part_out_are_refused():
    problem = PoolProblem([4], [0, -1])
    [part], rows, x = problem.plan(SHORT), problem.rank_rows(), jnp.asarray(problem.x_TI)
    with pytest.raises(ValueError, match="leave out a part of 64 inputs"):
        pallas_triton.shrink(x, problem.pool, rows, part, unit=32, interpret=True, blocks=ShrinkBlocks(32, 3))
    s, y = jnp.zeros((1, 3, 24, 16, 16)), jnp.asarray(problem.y_TO)
    with pytest.raises(ValueError, match="leave out a part of the outputs"):
        pallas_triton.expand(
            s, problem.pool, rows, part, y, unit=32, dtype=x.dtype, interpret=True, blocks=ExpandBlocks(32, 3)
        )


def test_no_pool_has_more_units_than_32_bits_number():
    problem = PoolProblem([4], [0, -1])
    pool = jax.ShapeDtypeStruct((2**17, 2**20), jnp.float32)
    with pytest.raises(ValueError, match="a pool of 4294967296 units of 32: 32 bits number 2147483647"):
        jax.eval_shape(lambda x, pool: lora_delta(x, pool, problem.rank_rows(), problem.plan(SHORT), unit=32),
                       problem.x_TI, pool)  # fmt: skip


def test_bad_arguments_are_named():
    problem = PoolProblem([4], [0, -1])
    rows, plan = problem.rank_rows(), problem.plan(SHORT)
    x, pool = jnp.asarray(problem.x_TI), problem.pool
    for unit, words in ((24, "units of 24 do not divide the pool's rows of 32"), (0, "has no units of 0")):
        with pytest.raises(ValueError, match=words):
            lora_delta(x, pool, rows, plan, unit=unit)
        with pytest.raises(ValueError, match=words):
            lora_constants(pool, rows, plan, 2, unit=unit, dtype="float32")
    with pytest.raises(ValueError, match="do not divide the outputs"):
        lora_delta(x, pool, replace(rows, out_dims=(64, 32, 33)), plan, unit=32)
    with pytest.raises(ValueError, match="has no units of 32"):
        lora_delta(x, jnp.float32(1), rows, plan, unit=32)
    with pytest.raises(TypeError, match="the pool is float32: it must have x's type, bfloat16"):
        lora_constants(pool, rows, plan, 2, unit=32, dtype="bfloat16")
    with pytest.raises(TypeError, match="plan must be a tuple of Segments, as make_plan gives it, not Segments"):
        lora_delta(x, pool, rows, plan[0], unit=32)  # pyright: ignore
    with pytest.raises(TypeError, match="units_b_RV is float32: it must be int32"):
        lora_delta(x, pool, replace(rows, units_b_RV=rows.units_b_RV.astype(jnp.float32)), plan, unit=32)
    with pytest.raises(TypeError, match="scale_MR is int32: it must be float32"):
        lora_delta(x, pool, replace(rows, scale_MR=rows.scale_MR.astype(jnp.int32)), plan, unit=32)
    with pytest.raises(TypeError, match="rows must be RankRows or LayerRankRows, not tuple"):
        lora_delta(x, pool, (rows,), plan, unit=32)  # pyright: ignore
    with pytest.raises(TypeError, match="y must be floating, not int32"):
        lora_delta(x, pool, rows, plan, jnp.zeros((2, 128), jnp.int32), unit=32)
    with pytest.raises(TypeError, match="the pool is float32: it must have x's type, bfloat16"):
        lora_delta(x.astype(jnp.bfloat16), pool, rows, plan, unit=32)
    with pytest.raises(TypeError, match=r"x must be float\[T, I\], not int32"):
        lora_delta(x.astype(jnp.int32), pool, rows, plan, unit=32)
    with pytest.raises(ValueError, match=r"units_a_MRU is \[3, 96, 2\]: .* must be \[3, 96, 1\]"):
        lora_delta(x[:, :32], pool, rows, plan, unit=32)
    with pytest.raises(ValueError, match=r"y is \[2, 64\]"):
        lora_delta(x, pool, rows, plan, jnp.zeros((2, 64)), unit=32)
    with pytest.raises(NotImplementedError, match="need an NVIDIA GPU"):
        lora_delta(x, pool, rows, plan, unit=32, implementation="triton")
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        lora_delta(x, pool, rows, plan, unit=32, implementation="cuda")


def test_units_that_no_kernel_takes_fall_through_to_xla():
    problem = PoolProblem([4], [0, -1], in_dim=24, out_dims=(12,), unit=12)
    problem.check(None)
    with pytest.raises(NotImplementedError, match="units of 12 elements"):
        problem.check("triton")


def test_plans_refuse_what_does_not_fit():
    with pytest.raises(
        ValueError, match="needs 2 blocks of 16 tokens and 3 tiles of 16 rows, and the shape has 2 and 2"
    ):
        make_plan(np.array([0, 20]), np.array([20, 4]), (SegmentShape(2, 2),), adapter_T=np.array([0, 1]))
    with pytest.raises(ValueError, match=r"outside of -1 .. 0"):
        make_plan(np.array([0]), np.array([4]), SHORT, adapter_T=np.array([1]))
    with pytest.raises(ValueError, match="either adapter_T or mix_TX"):
        make_plan(np.array([0]), np.array([4]), SHORT)
    with pytest.raises(ValueError, match=r"must be \[T, 2\]"):
        make_plan(np.array([0, 4]), np.array([4, 4]), SHORT, mix_TX=np.ones((3, 1)))
    with pytest.raises(ValueError, match="tile_rows is 24"):
        SegmentShape(1, 1, tile_rows=24)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"first": [0]}, ValueError, "as many numbers, none negative"),
        ({"ranks": [-4, 3]}, ValueError, "none negative"),
        ({"ranks": [4.0, 3.0]}, TypeError, "num_rows_X must be integers, not float64"),
        ({"adapter_T": [0.0, 1.0]}, TypeError, "adapter_T must be integers"),
        ({"adapter_T": [True, False]}, TypeError, "adapter_T must be integers, not bool"),
        ({"adapter_T": [[0, 1]]}, ValueError, r"adapter_T is \[1, 2\]: it must have one axis"),
        ({"adapter_T": None, "mix_TX": [[np.nan, 1]]}, ValueError, "factors that are not finite"),
        ({"shapes": SHORT[0]}, TypeError, "a tuple of one SegmentShape or two"),
        ({"shapes": ()}, ValueError, "0 shapes"),
        ({"shapes": SHORT * 3}, ValueError, "3 shapes"),
    ],
)
def test_bad_batches_are_named(changed, error, words):
    known = {"first": [0, 4], "ranks": [4, 3], "shapes": SHORT, "adapter_T": [0, 1], **changed}
    with pytest.raises(error, match=words):
        make_plan(known.pop("first"), known.pop("ranks"), known.pop("shapes"), **known)


def test_batches_of_nobody():
    """No token, or no adapter at all: lists will do."""
    for ranks, adapter_T in (([4], []), ([], [-1, -1])):
        [part] = make_plan([0] * len(ranks), ranks, SHORT, adapter_T=adapter_T)  # pyright: ignore
        assert not part.num_tiles_N.any()
        assert (part.token_NC == NOBODY).all()
