"""Where a step's adapters keep what they change outside the layers, as the tables that the device reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from multilora_jax.models.batch import VocabTables
from multilora_jax.models.vocab_rows import FIELDS


def empty_tables(num_pages: int, num_slots: int) -> VocabTables:
    """Tables without an adapter (numpy leaves)."""
    return VocabTables(
        pages_P=np.zeros(num_pages, np.int32),  # pyright: ignore
        first_X=np.zeros(num_slots, np.int32),  # pyright: ignore
        layout_XF=np.zeros((num_slots, len(FIELDS)), np.int32),  # pyright: ignore
        scale_X2=np.zeros((num_slots, 2), np.float32),  # pyright: ignore
        slots_X=np.zeros(num_slots, np.int32),  # pyright: ignore
        num_slots=np.int32(0),  # pyright: ignore
    )


def vocab_tables(
    adapters: list[Any],
    pages_of: Callable[[Any], list[int]],
    slot_of: Callable[[Any], int],
    num_pages: int,
    num_slots: int,
) -> VocabTables:
    """Tables of the adapters of a step (numpy leaves).

    Args:
        adapters: distinct; those that change nothing outside the layers are skipped.
        pages_of: page ids of a resident adapter.
        slot_of: slot of an active adapter.
        num_pages: P of the pool, which bounds the pages of all adapters together.
        num_slots: X.
    """
    tables: Any = empty_tables(num_pages, num_slots)
    used, count = 0, 0
    for adapter in adapters:
        vocab, slot = adapter.layout.vocab, slot_of(adapter)
        if vocab is None:
            continue
        pages = pages_of(adapter)
        tables.pages_P[used : used + len(pages)] = pages
        tables.first_X[slot] = used
        tables.layout_XF[slot] = [getattr(vocab, name) for name in FIELDS]
        tables.scale_X2[slot] = vocab.embed_scale, vocab.head_scale
        tables.slots_X[count] = slot
        used, count = used + len(pages), count + 1
    tables.num_slots = np.int32(count)
    return tables
