"""What the Mosaic GPU kernels share: how they are launched, and how they are interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CAN_INTERPRET = hasattr(plgpu, "InterpretGPUParams")
"""That of jax 0.10 is no public one, and takes minutes for a kernel of a few programs."""

THREADS = 128
"""Of a warpgroup: what Pallas calls a thread here."""

BOX = 256
"""Most elements of a side of a block that TMA copies at once."""


def compiler_params() -> plgpu.CompilerParams:
    """Barriers are the kernels' own: the automatic ones stand before every single copy."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True)


def interpreter(interpret: bool) -> Any:
    """The interpreter's settings: a race is an error. None to compile.

    Raises:
        NotImplementedError: this jax has no such interpreter.
    """
    if not interpret:
        return None
    if not CAN_INTERPRET:
        raise NotImplementedError(f"Mosaic GPU kernels are interpreted from jax 0.11 on, not by {jax.__version__}")
    # A wait for copies of all of its few TMA threads would count as one for any copy.
    return plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=32)  # pyright: ignore[reportAttributeAccessIssue]


def sync(barrier: Any) -> None:
    """All of a warpgroup's warps reach this point before any goes on; `barrier` has one arrival."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def load(ref: Any, layout: Any) -> jax.Array:
    """Loads plain memory in a layout, bank conflicts or not."""
    place = () if CAN_INTERPRET else (...,)  # jax 0.10 wants an index
    return plgpu.load(ref, *place, layout=layout, optimized=False)


def spread(vector: jax.Array, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """The vector along an axis of a whole array of that layout."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, shape, (axis,)), layout)


def store(ref: Any, value: jax.Array) -> None:
    """Stores an array of wgmma's layout in plain memory, bank conflicts or not; from jax 0.12 on that is to be said."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = value


def product(a_smem: Any, b_smem: Any, shape: tuple[int, ...]) -> jax.Array:
    """a b in float32, [rows, columns], by wgmma; both lie in atoms."""
    rows, columns = shape

    def run(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, a_smem, b_smem)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((rows, columns), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def update(
    body: Callable[..., None], inputs: Sequence[jax.Array], old: jax.Array, *, grid: Sequence[int],
    scratch: Sequence[Any], name: str, interpret: bool,
) -> jax.Array:  # fmt: skip
    """Runs body(*input refs, ref of old, *scratch refs), which changes `old` in place; returns it.

    Args:
        grid: its axes are named "0", "1", ..
    """
    if CAN_INTERPRET:
        ref = jax.new_ref(old)
        fill(body, (*inputs, ref), (), grid=grid, scratch=scratch, name=name, interpret=interpret)
        return ref[...]
    # In jax 0.10 a kernel takes no mutable array; the way that goes there is deprecated in 0.12.
    mesh = plgpu.Mesh(grid=tuple(grid), grid_names=tuple(map(str, range(len(grid)))))
    params = interpreter(interpret) or False

    def run(refs: Any) -> None:
        def kernel() -> None:
            pl.run_scoped(lambda *scratch_refs: body(*refs, *scratch_refs), *scratch)

        kernel.__name__ = name
        pl.core_map(mesh, compiler_params=compiler_params(), interpret=params)(kernel)

    return pl.run_state(run)((*inputs, old))[-1]


def fill(
    body: Callable[..., None], inputs: Sequence[Any], out: Any, *, grid: Sequence[int], scratch: Sequence[Any],
    name: str, interpret: bool,
) -> Any:  # fmt: skip
    """Runs body(*input refs, *output refs, *scratch refs), which writes what it likes of new arrays.

    Args:
        inputs: arrays and mutable arrays.
        out: jax.ShapeDtypeStruct, or a tuple of them.
        grid: see `update`.
    """

    def kernel(*refs: Any) -> None:
        body(*refs)

    kernel.__name__ = name
    return plgpu.kernel(
        kernel, out_type=out, grid=tuple(grid), grid_names=tuple(map(str, range(len(grid)))),
        scratch_types=list(scratch), compiler_params=compiler_params(), interpret=interpreter(interpret),
    )(*inputs)  # fmt: skip
