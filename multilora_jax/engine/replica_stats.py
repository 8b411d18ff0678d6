"""The figures of several replicas as those of one engine (host only, no jax)."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

from multilora_jax.engine.metrics import EngineStats

_SAME = ("registered_adapters",)
"""Figures that are the same on every replica."""

_TIERS = ("host", "loading", "resident")
"""From far to near."""


def merge_stats(replicas: list[EngineStats]) -> EngineStats:
    """Sums over the replicas; an adapter is in the nearest tier that it has on any. `replicas` keeps the parts."""
    merged: dict[str, Any] = {}
    for field in fields(EngineStats):
        values = [getattr(stats, field.name) for stats in replicas]
        first = values[0]
        if field.name == "tiers":
            merged[field.name] = _merge_tiers(values)
        elif field.name == "replicas" or isinstance(first, str) or field.name in _SAME:
            merged[field.name] = first
        elif isinstance(first, dict):
            total: Counter[str] = Counter()
            for value in values:
                total.update(value)
            merged[field.name] = dict(total)
        elif isinstance(first, tuple):
            merged[field.name] = tuple(map(sum, zip(*values, strict=True)))
        else:
            merged[field.name] = sum(values)
    merged["replicas"] = replicas
    return EngineStats(**merged)


def _merge_tiers(tiers: list[list[tuple[str, int, str, bool]]]) -> list[tuple[str, int, str, bool]]:
    found: dict[str, tuple[str, int, str, bool]] = {}
    for name, rank, tier, pinned in (entry for each in tiers for entry in each):
        _, _, old, was_pinned = found.get(name, (name, rank, tier, False))
        found[name] = name, rank, max(old, tier, key=_TIERS.index), pinned or was_pinned
    return list(found.values())
