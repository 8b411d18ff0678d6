"""What the Mosaic GPU kernels share: how they are launched, and how they are interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
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
    return plgpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]


def sync(barrier: Any) -> None:
    """All of a warpgroup's warps reach this point before any goes on; `barrier` has one arrival."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


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
