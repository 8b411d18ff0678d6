"""What the page at / shows of a running server, as one JSON object with what changed since the viewer's last look."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING, Any

from multilora_jax.engine.metrics import EngineStats
from multilora_jax.engine.pool_view import PoolCapture, PoolView, capture
from multilora_jax.engine.replica_stats import merge_stats
from multilora_jax.server.history import History

if TYPE_CHECKING:
    from multilora_jax.async_engine import AsyncEngine
    from multilora_jax.lora.adapter import Adapter

INTERVAL_S = 1.0
"""How often a viewer should ask."""

SHARED_S = 0.5
"""Viewers that ask within this time of each other are shown the same look at the engine."""

MAX_ROWS = 200
"""Most adapters listed; those in memory come first."""

MAX_NAMED = 64
"""Most adapters whose running or waiting requests are told one by one."""

_TIERS = ("resident", "loading", "host", "registered")


class LiveView:
    """Looks at one engine for all viewers together, and only while somebody asks.

    Args:
        engine: its outputs are observed from now on, for the curves and the totals by adapter.
    """

    def __init__(self, engine: AsyncEngine):
        self._engine = engine
        self._pool: PoolView | None = None
        self._epoch = secrets.token_hex(4)  # another one after a restart, whose captures are numbered anew
        self._lock = asyncio.Lock()
        self._taken = float("-inf")
        self._stats = EngineStats()
        self.history = History()
        engine.add_observer(self.history.observe)

    async def look(self, cursor: str = "") -> dict[str, Any]:
        """The state now.

        Args:
            cursor: of the viewer's last answer. The cells and points are those that changed after it, all of them
                where it is not one of this server's: `pool.full` tells which.
        """
        async with self._lock:
            if time.monotonic() - self._taken >= SHARED_S:
                await self._take()
            since, first = self._read(cursor)
            return self._answer(since, first)

    async def _take(self) -> None:
        found = await asyncio.gather(*(_look_at(replica) for replica in self._engine.replicas))
        self._taken = time.monotonic()
        looks = [look for look in found if look is not None]
        if len(looks) == len(found):  # else a step takes long: the last look is shown again
            stats = [figures for figures, _ in looks]
            self._stats = stats[0] if len(stats) == 1 else merge_stats(stats)
            self._view.update(*(books for _, books in looks))

    @property
    def _view(self) -> PoolView:
        if self._pool is None:
            self._pool = PoolView(*(replica.engine.allocator.num_total for replica in self._engine.replicas))
        return self._pool

    def _read(self, cursor: str) -> tuple[int, int]:
        """(number of the viewer's last capture, first bucket to send), or (-1, 0)."""
        epoch, _, rest = cursor.partition(".")
        since, _, bucket = rest.partition(".")
        if epoch != self._epoch or not (since.isdecimal() and bucket.isdecimal()):
            return -1, 0
        return int(since), int(bucket)

    def _answer(self, since: int, first: int) -> dict[str, Any]:
        s, llm = self._stats, self._engine.engine
        rows = self._rows()
        points = self.history.points(first)
        return {
            "cursor": f"{self._epoch}.{self._view.sequence}.{points[-1][0]}",
            "interval_s": INTERVAL_S,
            "model": {
                "name": llm.base_name, "max_model_len": llm.max_model_len, "seats": llm.config.max_num_seqs,
                "attention": s.attention_backend,
            },
            "pool": self._pool_part(since),
            "requests": {
                "running": s.num_running, "waiting": s.num_waiting,
                "running_by": _most(s.running_by_adapter), "waiting_by": _most(s.waiting_by_adapter),
            },
            "totals": {
                name: getattr(s, name)
                for name in (
                    "prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits", "adapter_hits",
                    "adapter_misses", "adapter_loads", "adapter_evictions", "num_preemptions", "steps", "compilations",
                )
            },
            "adapters": {"registered": s.registered_adapters, "rows": rows},
            "history": {"bucket_s": self.history.bucket_s, "buckets": self.history.num_buckets, "points": points},
        }  # fmt: skip

    def _pool_part(self, since: int) -> dict[str, Any]:
        s, pool, geometry = self._stats, self._view, self._engine.engine.geometry
        return {
            "pages": s.pages_total, "page_bytes": geometry.page_bytes, "page_tokens": geometry.page_tokens,
            "free": s.pages_free, "kv": s.pages_kv, "cached": s.pages_cached, "adapter": s.pages_adapter,
            "cells": pool.num_cells, "pages_per_cell": pool.pages_per_cell,
            "full": since < 0, "runs": pool.runs(since),
            "slots": {str(slot): count for slot, count in pool.pages_by_slot.items()},
        }  # fmt: skip

    def _placed(self) -> list[tuple[Adapter, str, bool]]:
        """(adapter, tier, pinned) of those to list."""
        places = {name: (tier, pinned) for name, _, tier, pinned in self._stats.tiers}
        adapters = self._engine.list_loras()
        if len(adapters) > MAX_ROWS:
            order = {name: _TIERS.index(tier) for name, (tier, _) in places.items()}
            adapters.sort(key=lambda adapter: order.get(adapter.name, len(_TIERS)))
        return [(a, *places.get(a.name, ("registered", False))) for a in adapters[:MAX_ROWS]]

    def _uses(self, adapter: Adapter) -> tuple[int, int]:
        """(hits, misses) of an adapter, over all replicas."""
        uses = []
        for replica in self._engine.replicas:
            own = replica.engine.adapters.registry.find(adapter.name)
            uses.append((0, 0) if own is None else replica.engine.cache.tally.of(own))
        hits, misses = map(sum, zip(*uses, strict=True))
        return hits, misses

    def _rows(self) -> list[dict[str, Any]]:
        s, slots = self._stats, self._view.slots
        placed = self._placed()
        resident = {name for name, _, tier, _ in s.tiers if tier in _TIERS[:2]}
        slots.keep(resident | {adapter.name for adapter, _, _ in placed})
        rows = []
        for adapter, tier, pinned in placed:
            totals = self.history.totals(adapter.name)
            hits, misses = self._uses(adapter)
            version = adapter.version
            rows.append(
                {
                    "name": adapter.name, "tier": tier, "pinned": pinned, "slot": slots.take(adapter.name, resident),
                    "rank": None if version is None else adapter.rank,
                    "pages": None if version is None else adapter.num_pages,
                    "digest": None if version is None else version.digest[:12],
                    "hits": hits, "misses": misses, "requests": totals.requests, "tokens": totals.tokens,
                    "prompt_tokens": totals.prompt_tokens, "cached_tokens": totals.cached_tokens,
                    "running": s.running_by_adapter.get(adapter.name, 0),
                    "waiting": s.waiting_by_adapter.get(adapter.name, 0),
                }
            )  # fmt: skip
        return rows


async def _look_at(replica: AsyncEngine) -> tuple[EngineStats, PoolCapture] | None:
    """Figures and books of one moment, between two steps; None where a step takes long."""
    llm = replica.engine
    found: list[tuple[EngineStats, PoolCapture]] = []
    await replica.between_steps(lambda: found.append((llm.stats(), capture(llm))))
    return found[0] if found else None


def _most(counts: dict[str, int]) -> dict[str, int]:
    """The largest MAX_NAMED counts."""
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:MAX_NAMED])
