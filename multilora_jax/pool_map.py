"""A picture of the pool in text: what its pages hold, one character for each (no jax)."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import numpy as np

from multilora_jax.memory.allocator import PageKind

if TYPE_CHECKING:
    from multilora_jax.engine.llm_engine import LLMEngine

_KIND_MARKS = {PageKind.FREE: ".", PageKind.KV: "#", PageKind.CACHED: "="}
_ADAPTER_MARKS = string.ascii_letters
_OTHER_ADAPTERS = "+"


def pool_map(engine: LLMEngine, *, width: int = 64, max_lines: int = 24) -> str:
    """The pool as lines of characters, with a legend.

    Args:
        engine: any engine, between two steps.
        width: characters of a line.
        max_lines: of the picture; in a pool with more pages than fit each character stands for several, and shows
            what most of them hold.

    Returns:
        the legend, one line for each kind of page and each resident adapter with its pages, then the picture, each
        line led by its first page id. Page 0 is not shown: it is never handed out.
    """
    geometry = engine.geometry
    kinds = engine.allocator.kinds()
    names = {PageKind.FREE: "free", PageKind.KV: "keys and values", PageKind.CACHED: "cached prefixes"}
    legend = [(mark, names[kind], kinds.count(kind)) for kind, mark in _KIND_MARKS.items()]
    marks_P = np.asarray([_KIND_MARKS.get(kind, _OTHER_ADAPTERS) for kind in kinds])
    for number, adapter in enumerate(engine.cache.residents()):
        mark = _ADAPTER_MARKS[number] if number < len(_ADAPTER_MARKS) else _OTHER_ADAPTERS
        marks_P[np.asarray(engine.cache.pages_of(adapter)) - 1] = mark
        legend.append((mark, f"adapter {adapter.name}", adapter.num_pages))
    pages_per_mark = max(1, -(-len(kinds) // (width * max_lines)))
    cells = "".join(_most_common(marks_P[i : i + pages_per_mark]) for i in range(0, len(kinds), pages_per_mark))
    lines = [f"{len(kinds)} pages of {geometry.page_bytes / 1024:.0f} KiB ({geometry.page_tokens} tokens each)"]
    if pages_per_mark > 1:
        lines[0] += f", {pages_per_mark} to a character"
    lines += [f"  {mark}  {name}: {count}" for mark, name, count in legend if count or mark in ".#"]
    digits = len(str(len(kinds)))
    for first in range(0, len(cells), width):
        lines.append(f"{first * pages_per_mark + 1:{digits}} {cells[first : first + width]}")
    return "\n".join(lines)


def _most_common(marks: np.ndarray) -> str:
    values, counts = np.unique(marks, return_counts=True)
    return str(values[counts.argmax()])
