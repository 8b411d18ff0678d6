"""Pieces of code that runs once per shard inside shard_map, and as it is on one device (axis_name None).

A vocabulary of V tokens is split in order: shard t has the tokens from `t * V / TP` on. No shard ever sees all logits;
what rows need of the others' is a maximum, a sum or a count of theirs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding


def first_token(width: int, axis_name: str | None) -> jax.Array | int:
    """The token that this shard's first column of logits stands for, each shard having `width` of them."""
    return 0 if axis_name is None else jax.lax.axis_index(axis_name) * width


def own_slice(x: jax.Array, axis: int, axis_name: str | None, num_shards: int) -> jax.Array:
    """This shard's slice of one axis of a replicated array."""
    if axis_name is None:
        return x
    width = x.shape[axis] // num_shards
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis_name) * width, width, axis)


def sum_over(x: jax.Array, axis_name: str | None) -> jax.Array:
    """Sum over the shards."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def max_over(x: jax.Array, axis_name: str | None) -> jax.Array:
    """Largest over the shards."""
    return x if axis_name is None else jax.lax.pmax(x, axis_name)


def num_shards(axis_name: str | None) -> int:
    """How many shards there are."""
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)


def best_over(value_S: jax.Array, token_S: jax.Array, axis_name: str | None) -> jax.Array:
    """int32[S]: of each shard's best token the one of the largest value, the first of equal ones.

    Args:
        value_S: float32[S], of this shard's best token of each row.
        token_S: int32[S], that token.
    """
    if axis_name is None:
        return token_S
    value_NS, token_NS = jax.lax.all_gather((value_S, token_S), axis_name)
    return jnp.take_along_axis(token_NS, jnp.argmax(value_NS, 0)[None], 0)[0]


def place(tree: Any, sharding: NamedSharding) -> Any:
    """Host arrays on devices, which may be of several processes: each process puts what its own devices get.

    (device_put would first compare every array with that of the other processes.)
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def whole(array: Any) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(whole, tree)
