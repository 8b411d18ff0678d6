"""Which implementation of an operation runs: a gate by device, an override by name, a fall through.

Every operation has up to three implementations under one interface: `mosaic_gpu` (Pallas, Hopper), `triton` (Pallas,
Ampere and later) and `xla` (any device). An operation lists its own in order of preference; `choose` keeps those that
the device can run, and `call` takes the first that does not raise NotImplementedError. A shape or type that is wrong
for the operation is a ValueError or TypeError, and never leads to another implementation.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
"""Every name that `implementation` may have, besides None."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Device:
    """What the gate needs to know of a device.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        kind: the vendor's name, such as "NVIDIA H200"; tuned block sizes go by it.
        capability: CUDA compute capability, (9, 0) for an H200; None for anything that is not an NVIDIA GPU.
    """

    platform: str
    kind: str
    capability: tuple[int, int] | None = None


H200 = Device("gpu", "NVIDIA H200", (9, 0))
"""The device that kernels are compiled for where there is none (see gpu_check)."""

_assumed: contextvars.ContextVar[Device | None] = contextvars.ContextVar("assumed_device", default=None)


@contextlib.contextmanager
def assume_device(device: Device) -> Iterator[None]:
    """Lets the gate see `device` instead of the default one: to lower for a target that is not there.

    Read while tracing: a function that was jitted before keeps what it chose then.
    """
    token = _assumed.set(device)
    try:
        yield
    finally:
        _assumed.reset(token)


@functools.cache
def _default_device() -> Device:
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    try:
        major, _, minor = str(capability).partition(".")
        version = (int(major), int(minor))
    except ValueError:
        version = None  # AMD names an architecture here, a CPU nothing
    return Device(device.platform, device.device_kind, version)


def current_device() -> Device:
    """The device that operations are written for: the assumed one, else the first of the default backend."""
    return _assumed.get() or _default_device()


def unsupported(implementation: str, device: Device) -> str | None:
    """Why the device cannot run the implementation; None if it can.

    `triton` needs compute capability 8.0: bfloat16 in tensor cores and asynchronous copies came with it. `mosaic_gpu`
    needs 9.x: its kernels use wgmma, an instruction that sm_90a has and neither older nor newer GPUs do.
    """
    if implementation == "xla":
        return None
    if device.capability is None:
        return f"{implementation} kernels need an NVIDIA GPU, and the device is a {device.kind or device.platform}"
    have = ".".join(map(str, device.capability))
    if implementation == "triton" and device.capability < (8, 0):
        return f"triton kernels need compute capability 8.0 or later, and {device.kind} has {have}"
    if implementation == "mosaic_gpu" and device.capability[0] != 9:
        return f"mosaic_gpu kernels need compute capability 9.x, and {device.kind} has {have}"
    return None


def choose(
    op: str, offered: Mapping[str, Any] | tuple[str, ...], implementation: str | None = None, *, interpret: bool = False
) -> tuple[str, ...]:
    """Names of the implementations to try, the preferred one first.

    Args:
        op: name of the operation, for messages.
        offered: those that the operation has, in its order of preference.
        implementation: the caller's choice; None leaves it to the device.
        interpret: Pallas kernels are interpreted and run on any device.

    Raises:
        ValueError: no such implementation of this operation.
        NotImplementedError: the device cannot run the one that was asked for.
    """
    device = current_device()
    if implementation is None:
        return tuple(name for name in offered if interpret or unsupported(name, device) is None)
    if implementation not in offered:
        raise ValueError(f"{op} has no implementation {implementation!r}: use None or one of {', '.join(offered)}")
    reason = None if interpret else unsupported(implementation, device)
    if reason is not None:
        raise NotImplementedError(f"{op}: {reason}; use implementation=None or 'xla'")
    return (implementation,)


def call(
    op: str,
    offered: Mapping[str, Callable[..., _Result]],
    *args: Any,
    implementation: str | None = None,
    interpret: bool = False,
    **options: Any,
) -> _Result:
    """Runs the first of the chosen implementations that takes these arguments.

    Args:
        op, offered, implementation, interpret: see `choose`; the Pallas ones get `interpret` as a keyword.
        args, options: the operation's own.

    Raises:
        NotImplementedError: none takes them; the message has every reason.
    """
    reasons = []
    for name in choose(op, offered, implementation, interpret=interpret):
        extra = {} if name == "xla" else {"interpret": interpret}
        try:
            return offered[name](*args, **options, **extra)
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError(f"no implementation of {op} takes these arguments: {'; '.join(reasons)}")
