"""Cases that must fail, so that the check cannot pass empty: spills, shared memory, types that no instruction takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gpu_check.case import Case, shaped

_F32 = jnp.float32


def _whole_product(x: jax.Array, w: jax.Array, *, num_warps: int) -> jax.Array:
    """A product in one block, far too large for one."""

    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = jax.lax.dot_general(x_ref[...], w_ref[...], (((1,), (0,)), ((), ())), preferred_element_type=_F32)

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), _F32), name="whole_product",
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
    )(x, w)  # fmt: skip


def _too_much_scratch(x: jax.Array) -> jax.Array:
    def kernel(x_ref, o_ref, scratch_ref):
        del scratch_ref
        o_ref[...] = x_ref[...]

    return mosaic_gpu.kernel(
        kernel, out_type=jax.ShapeDtypeStruct(x.shape, _F32), scratch_types=[mosaic_gpu.SMEM((80_000,), _F32)],
        compiler_params=mosaic_gpu.CompilerParams(lowering_semantics=mosaic_gpu.LoweringSemantics.Lane),
    )(x)  # fmt: skip


def _unaligned_rows(x: jax.Array, start: jax.Array) -> jax.Array:
    """Loads of which the compiler cannot know that they are aligned."""

    def kernel(x_ref, start_ref, o_ref):
        o_ref[...] = x_ref[pl.ds(start_ref[0], 1024)]

    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct((1024,), x.dtype), name="unaligned_rows",
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
    )(x, start)  # fmt: skip


def _copied_pool(pool: jax.Array) -> jax.Array:
    return pool.T + 1


def cases() -> dict[str, Case]:
    """Each fails for the reason that its must_fail names."""

    def product(num_warps: int):
        return lambda x, w: _whole_product(x, w, num_warps=num_warps)

    return {
        "control_spill": Case(product(1), [shaped(256, 64), shaped(64, 256)], must_fail="spills"),
        "control_shared_memory": Case(
            product(4), [shaped(256, 1024, dtype=_F32), shaped(1024, 256, dtype=_F32)],
            must_fail="Shared memory size limit",
        ),
        "control_mosaic_shared_memory": Case(
            _too_much_scratch, [shaped(128, dtype=_F32)], must_fail="(?i)smem|shared"
        ),
        "control_narrow_loads": Case(
            _unaligned_rows, [shaped(4096), shaped(1, dtype=jnp.int32)], must_fail="loads of 2 bytes"
        ),
        "control_no_kernel": Case(lambda x: x, [shaped(128)], must_fail="no kernel was compiled"),
        "control_text": Case(_copied_pool, [shaped(64, 256)], expect=("triton",), must_fail="'triton' is not in"),
        "control_forbidden": Case(_copied_pool, [shaped(64, 256)], forbid=("transpose_fusion",), must_fail="matches"),
        "control_alias": Case(_copied_pool, [shaped(64, 256)], min_alias_bytes=1, must_fail="bytes are aliased"),
    }  # fmt: skip
