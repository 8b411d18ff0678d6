"""What devices send each other between shrink and expand: of each token the rank rows of its own adapters.

Every rank row is split along its long side, so the projections of all devices are summed. Of [T, R] each token needs
only the rows that its own adapters have (S-LoRA's B r, section 6, not B times the rows of the whole batch). They are
packed one behind another before the sum, whatever each token's rank, and taken apart after it. How many there may be is
static; a batch with more of them (tokens that mix several adapters) is summed as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.segmented_lora.plan import NOBODY, Plan

_F32 = jnp.float32


def packed_size(num_tokens: int, num_rows: int, own_rows: int) -> int | None:
    """Elements of each module that are summed: own_rows for each token; None where all rows are no more than that.

    Args:
        num_tokens: T; num_rows: R.
        own_rows: most rank rows that a token's own adapters have, on average over the batch; 0 for any number.
    """
    return num_tokens * own_rows if 0 < own_rows < num_rows else None


def sum_dense(s: jax.Array, own: jax.Array, size: int | None, axis_name: str) -> jax.Array:
    """Projections of all tokens on all rows summed over an axis of devices; where `own` is False they mean nothing.

    Args:
        s: each device's part, [M, T, R] or [M, R, T].
        own: bool[T, R] or [R, T], the rows of each token's own adapters, the same on all devices.
        size: see packed_size. Of more rows than that the last are lost.
    """
    if size is None:
        return jax.lax.psum(s, axis_name)
    [place_X] = jnp.nonzero(own.reshape(-1), size=size, fill_value=own.size)
    flat_MN = s.reshape(len(s), -1)
    packed_MX = jax.lax.psum(flat_MN.at[:, place_X].get(mode="fill", fill_value=0), axis_name)
    return jnp.zeros_like(flat_MN).at[:, place_X].set(packed_MX, mode="drop").reshape(s.shape)


def sum_tiles(
    parts: Sequence[jax.Array], plan: Plan, num_tokens: int, num_rows: int, own_rows: int, axis_name: str
) -> list[jax.Array]:
    """The projections of a plan's tiles summed over their partial sums and over an axis of devices, all in one sum.

    A tile has room for C tokens and K rows, of which a batch fills a part: only that is sent.

    Args:
        parts: of each part of the plan float32[Z, M, W, C, K], from `shrink`.
        num_tokens: T; num_rows: R.
        own_rows: see packed_size. Of more rows the last are lost.

    Returns:
        of each part float32[1, M, W, C, K].
    """
    size = packed_size(num_tokens, num_rows, own_rows)
    places = _dense_places(plan, num_rows) if size is None else _packed_places(plan, size)
    shape = (num_tokens, num_rows) if size is None else (size,)
    sums_MN = jnp.zeros((parts[0].shape[1], *shape), _F32)
    for s_ZMWCK, place in zip(parts, places, strict=True):
        sums_MN = sums_MN.at[(slice(None), *place)].set(s_ZMWCK.sum(0), mode="drop")
    sums_MN = jax.lax.psum(sums_MN, axis_name)
    return [sums_MN.at[(slice(None), *place)].get(mode="fill", fill_value=0)[None] for place in places]


def _dense_places(plan: Plan, num_rows: int) -> list[tuple[jax.Array, ...]]:
    """Of each part (token, row) of every place of its tiles, to be broadcast to [W, C, K]; past the end if idle."""
    places = []
    for part in plan:
        place_K = jnp.arange(part.tile_rows)
        row_WK = jnp.where(place_K < part.num_rows_W[:, None], part.row_W[:, None] + place_K, num_rows)
        places.append((jnp.asarray(part.token_NC)[part.block_W][:, :, None], row_WK[:, None]))
    return places


def _packed_places(plan: Plan, size: int) -> list[tuple[jax.Array, ...]]:
    """The same as one number: tile behind tile, in each the rows of its first token, of its second and on."""
    places, start = [], jnp.int32(0)
    for part in plan:
        # A block's free places come after its tokens, so what a tile fills is a whole rectangle.
        tokens_W1 = jnp.sum(jnp.asarray(part.token_NC) != NOBODY, 1, dtype=jnp.int32)[part.block_W][:, None]
        rows_W1 = jnp.asarray(part.num_rows_W)[:, None]
        filled_W1 = tokens_W1 * rows_W1
        end_W1 = start + jnp.cumsum(filled_W1, 0, dtype=jnp.int32)
        token_C, row_K = jnp.arange(part.block_tokens), jnp.arange(part.tile_rows)
        place_WCK = (end_W1 - filled_W1)[:, :, None] + token_C[:, None] * rows_W1[:, :, None] + row_K
        is_live_WCK = (token_C < tokens_W1)[:, :, None] & (row_K < rows_W1)[:, None]
        places.append((jnp.where(is_live_WCK, place_WCK, size),))
        start = end_W1[-1, 0]
    return places
