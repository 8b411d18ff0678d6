"""What plain XLA offers for tokens of many adapters, from dense weights padded to one rank."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

_F32 = jnp.float32

Alternative = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(x_TI, a_XRI, b_XRO, adapter_T), adapter_T ascending and none the base, to float32[T, O]."""


def gather_bmm(x_TI: jax.Array, a_XRI: jax.Array, b_XRO: jax.Array, adapter_T: jax.Array) -> jax.Array:
    """Each token's own weights gathered, then batched products."""
    s_TR = jnp.einsum("ti,tri->tr", x_TI, a_XRI[adapter_T], preferred_element_type=_F32)
    return jnp.einsum("tr,tro->to", s_TR.astype(x_TI.dtype), b_XRO[adapter_T], preferred_element_type=_F32)


def ragged(x_TI: jax.Array, a_XRI: jax.Array, b_XRO: jax.Array, adapter_T: jax.Array) -> jax.Array:
    """lax.ragged_dot over the segments of adapters."""
    sizes_X = jnp.bincount(adapter_T, length=len(a_XRI)).astype(jnp.int32)
    s_TR = jax.lax.ragged_dot(x_TI, a_XRI.swapaxes(1, 2), sizes_X, preferred_element_type=_F32)
    return jax.lax.ragged_dot(s_TR.astype(x_TI.dtype), b_XRO, sizes_X, preferred_element_type=_F32)


def one_hot(x_TI: jax.Array, a_XRI: jax.Array, b_XRO: jax.Array, adapter_T: jax.Array) -> jax.Array:
    """Every token times every adapter, all but its own masked."""
    X, R, width = a_XRI.shape
    s_TS = jnp.einsum("ti,si->ts", x_TI, a_XRI.reshape(X * R, width), preferred_element_type=_F32)
    own_TS = adapter_T[:, None] == jnp.arange(X * R) // R
    s_TS = jnp.where(own_TS, s_TS, 0).astype(x_TI.dtype)
    return jnp.einsum("ts,so->to", s_TS, b_XRO.reshape(X * R, -1), preferred_element_type=_F32)


def loop(x_TI: jax.Array, a_XRI: jax.Array, b_XRO: jax.Array, adapter_T: jax.Array) -> jax.Array:
    """Adapter after adapter."""

    def body(i: jax.Array, y_TO: jax.Array) -> jax.Array:
        s_TR = jnp.einsum("ti,ri->tr", x_TI, a_XRI[i], preferred_element_type=_F32)
        s_TR = jnp.where((adapter_T == i)[:, None], s_TR, 0).astype(x_TI.dtype)
        return y_TO + jnp.einsum("tr,ro->to", s_TR, b_XRO[i], preferred_element_type=_F32)

    return jax.lax.fori_loop(0, len(a_XRI), body, jnp.zeros((len(x_TI), b_XRO.shape[2]), _F32))


ALTERNATIVES: dict[str, Alternative] = {
    "xla gather-BMM": gather_bmm, "xla ragged_dot": ragged, "xla one-hot": one_hot, "xla loop": loop,
}  # fmt: skip
