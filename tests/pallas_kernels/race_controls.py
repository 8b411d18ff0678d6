"""Controls of the race detector of Pallas' Mosaic GPU interpreter: what it must see where a wait is left out."""

from __future__ import annotations

import jax.numpy as jnp


def seen_product(a_smem, b_smem, _):
    """What the race detector sees: jax 0.12 asks of wgmma's reads nothing."""
    return jnp.matmul(a_smem[...].astype(jnp.float32), b_smem[...].astype(jnp.float32))


def leave_out(monkeypatch, kernels, name, number):
    """Of the kernels of a module, their number-th wait; returns the list of all."""
    monkeypatch.setattr(kernels.mosaic, "product", seen_product)
    whole, calls = getattr(kernels.plgpu, name), []

    def some(*args):
        calls.append(args)
        if len(calls) != number:
            whole(*args)

    monkeypatch.setattr(kernels.plgpu, name, some)
    return calls
