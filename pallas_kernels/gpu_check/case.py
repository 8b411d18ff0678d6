"""What is compiled, and what must be true of the result."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh


@dataclass(frozen=True)
class Case:
    """One function to compile.

    Attributes:
        fn: of arrays, not jitted. It is traced with the target as dispatch.current_device(). None where `lower` is.
        args: pytrees of jax.ShapeDtypeStruct; only shape and dtype count.
        mesh: sizes and names of the device mesh.
        specs: a PartitionSpec, or a tree of them, for each argument; None replicates all.
        donate: positions of donated arguments.
        expect: texts that the optimised HLO must contain.
        forbid: regular expressions that no line of it may match.
        max_temp_bytes: most temporary memory per device.
        min_alias_bytes: least memory of results that reuses donated arguments.
        check_limits: whether its kernels are held to the recorded registers and shared memory, and to loads of more
            than 2 bytes at a time; False for programs, whose further kernels are XLA's own.
        kernels: regular expression: the kernels that check_limits is about, where XLA's own stand beside them.
        must_fail: a control: passes only if some problem matches this regular expression.
        lower: of the mesh of target devices to what `jax.jit(..).lower(..)` gives, in place of fn, args, specs, donate.
    """

    fn: Callable[..., Any] | None
    args: Sequence[Any] = ()
    mesh: tuple[tuple[int, ...], tuple[str, ...]] = ((1,), ("x",))
    specs: Sequence[Any] | None = None
    donate: tuple[int, ...] = ()
    expect: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    max_temp_bytes: int | None = None
    min_alias_bytes: int = 0
    check_limits: bool = True
    kernels: str = ""
    must_fail: str | None = None
    lower: Callable[[Mesh], Any] | None = None

    def holds(self, kernel: str) -> bool:
        """Whether a kernel is held to limits."""
        return self.check_limits and re.search(self.kernels, kernel) is not None


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An array of this shape."""
    return jax.ShapeDtypeStruct(shape, dtype)
