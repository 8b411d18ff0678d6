"""What the scheduler may accept, and which adapters a step can hold together (host only, no jax)."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable
from typing import Any

from multilora_jax.engine.kv_manager import KVManager
from multilora_jax.engine.step_plan import SchedulerConfig
from multilora_jax.errors import AdapterError, NotFoundError, UserError
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.lora.residency import CacheableAdapter
from multilora_jax.memory.allocator import PageAllocator
from multilora_jax.request import Sequence


class Obstacle(enum.Enum):
    """Why its adapters keep a sequence from running now."""

    NO_ROOM = enum.auto()
    """A step cannot hold them beside those of the running sequences."""
    ABSENT = enum.auto()
    """One is not in the pool, and none is on its way."""
    COMING = enum.auto()
    """One is on its way."""
    COMING_AGAIN = enum.auto()
    """One is on its way, and has been before: it was evicted before anybody ran it."""


class ActiveAdapters:
    """The distinct adapters of all running sequences, counted against the budgets of a step.

    Args:
        config: the budgets.
        cache: says which adapters are ready.

    Attributes:
        users: of each adapter, how many running sequences use it; in the order in which they came.
        num_rows: rank rows that they take together.
        is_staged: whether a step can use a ready adapter at once; until it can, it counts as on its way.
    """

    def __init__(self, config: SchedulerConfig, cache: AdapterCache[Any]) -> None:
        self._config = config
        self._cache = cache
        self._max_loras = sys.maxsize if config.max_loras is None else config.max_loras
        self.is_staged: Callable[[Any], bool] = lambda _: True
        self.users: dict[Any, int] = {}
        self.num_rows = 0

    def clear(self) -> None:
        """No sequence runs any more."""
        self.users.clear()
        self.num_rows = 0

    def obstacle(self, adapters: Iterable[Any]) -> Obstacle | None:
        """What keeps a sequence with these adapters from running now; None if nothing does."""
        users = self.users
        slots, num_rows = self._max_loras - len(users), self.num_rows
        for adapter in adapters:
            if adapter not in users:
                slots -= 1
                if slots < 0:
                    return Obstacle.NO_ROOM
                num_rows += self._config.rank_rows(adapter.num_rows)
        if num_rows > self._config.max_rank_rows:
            return Obstacle.NO_ROOM
        cache = self._cache
        missing = [adapter for adapter in adapters if not cache.is_ready(adapter)]
        if not missing:
            return None if all(map(self.is_staged, adapters)) else Obstacle.COMING
        if not any(cache.is_coming(adapter) for adapter in missing):
            return Obstacle.ABSENT
        return Obstacle.COMING_AGAIN if any(cache.was_lost(adapter) for adapter in missing) else Obstacle.COMING

    def has_room_for(self, adapters: Iterable[Any]) -> bool:
        """Whether a step could hold these adapters beside those of the running sequences."""
        return self.obstacle(adapters) is not Obstacle.NO_ROOM

    def add(self, adapters: Iterable[Any]) -> None:
        """A sequence with these adapters starts to run."""
        for adapter in adapters:
            if adapter not in self.users:
                self.users[adapter] = 0
                self.num_rows += self._config.rank_rows(adapter.num_rows)
            self.users[adapter] += 1

    def remove(self, adapters: Iterable[Any]) -> None:
        """A sequence with these adapters stops running."""
        for adapter in adapters:
            self.users[adapter] -= 1
            if not self.users[adapter]:
                del self.users[adapter]
                self.num_rows -= self._config.rank_rows(adapter.num_rows)


class AdmissionLimits:
    """Refuses, with the numbers, what could never run: the scheduler promises that all it accepts runs to its end.

    Args:
        config: the budgets of a step.
        allocator, kv, cache: the pool's books.
    """

    def __init__(
        self, config: SchedulerConfig, allocator: PageAllocator, kv: KVManager, cache: AdapterCache[Any]
    ) -> None:
        self._config = config
        self._allocator = allocator
        self._kv = kv
        self._cache = cache

    def check_adapter(self, adapter: CacheableAdapter) -> None:
        """Raise AdapterError if no step could ever hold the adapter."""
        rows, pages = self._config.rank_rows(adapter.num_rows), adapter.num_pages
        if rows > self._config.max_rank_rows:
            raise AdapterError(
                f"adapter {adapter.name!r} of rank {adapter.rank} takes {rows} rank rows but a step holds "
                f"{self._config.max_rank_rows}: raise max_rank_rows",
                reason="rank_too_large", param="max_rank_rows",
            )  # fmt: skip
        if pages > self._cache.max_adapter_pages:
            raise AdapterError(
                f"adapter {adapter.name!r} takes {pages} pages but adapters may hold {self._cache.max_adapter_pages}: "
                f"raise pool_pages or max_adapter_pages",
                reason="adapter_too_large", param="pool_pages",
            )  # fmt: skip

    def check_fits(self, seq: Sequence) -> None:
        """Raise UserError if the sequence could not run to its end even alone beside the pinned adapters."""
        config, cache = self._config, self._cache
        for adapter in seq.adapters:
            self.check_adapter(adapter)
        if len(set(seq.adapters)) < len(seq.adapters):
            raise UserError(
                "the request names an adapter twice: name it once, with the sum of its scales",
                reason="duplicate_adapter", param="lora_request",
            )  # fmt: skip
        if config.max_loras is not None and len(seq.adapters) > config.max_loras:
            raise UserError(
                f"the request mixes {len(seq.adapters)} adapters but a step holds {config.max_loras}: "
                f"name fewer or raise max_loras",
                reason="mix_too_large", param="max_loras",
            )  # fmt: skip
        rows = sum(config.rank_rows(adapter.num_rows) for adapter in seq.adapters)
        if rows > config.max_rank_rows:
            raise UserError(
                f"the {len(seq.adapters)} adapters of the request take {rows} rank rows together but a step holds "
                f"{config.max_rank_rows}: name fewer or raise max_rank_rows",
                reason="mix_too_large", param="max_rank_rows",
            )  # fmt: skip
        pinned = cache.pinned_pages
        own = sum(adapter.num_pages for adapter in seq.adapters if not cache.is_pinned(adapter))
        if own and own + pinned > cache.max_adapter_pages:
            raise UserError(
                f"the adapters of the request take {own} pages and the pinned ones {pinned}, but adapters may hold "
                f"{cache.max_adapter_pages}: unpin some or raise pool_pages or max_adapter_pages",
                reason="adapter_too_large", param="pool_pages",
            )  # fmt: skip
        num_tokens, kv_pages = self._most_kv(seq)
        most = self._allocator.num_total - max(pinned, self._pages_apart - own)
        if kv_pages + own > most:
            raise UserError(
                f"the request may reach {num_tokens} tokens ({seq.num_prompt_tokens} of them its prompt), which take "
                f"{kv_pages} pages and its adapters {own}, but only {most} pages can be had ({pinned} are pinned): "
                f"shorten the prompt, lower max_tokens, unpin adapters or raise pool_pages",
                reason="request_too_large", param="max_tokens",
            )  # fmt: skip

    def check_pin(self, adapter: CacheableAdapter, live: Iterable[Sequence]) -> None:
        """Raise UserError if the adapter cannot be pinned without stranding one of the `live` sequences.

        Raises:
            NotFoundError: the adapter was unloaded.
            UserError: reason `pin_limit`, with the numbers.
        """
        cache = self._cache
        if cache.is_dropped(adapter):
            raise NotFoundError(
                f"adapter {adapter.name!r} was unloaded: load it again", reason="unknown_adapter", param="lora_name"
            )
        if cache.is_pinned(adapter):
            return
        pinned = cache.pinned_pages + adapter.num_pages
        total, cap = self._allocator.num_total, cache.max_adapter_pages
        start = f"pinning adapter {adapter.name!r} ({adapter.num_pages} pages) would bring the pinned pages to {pinned}"
        if pinned > cap or pinned >= total:
            raise UserError(
                f"{start} of {min(cap, total)} that adapters may hold and {total} in the pool: unpin another, or raise "
                f"pool_pages or max_adapter_pages",
                reason="pin_limit", param="lora_name",
            )  # fmt: skip
        for seq in live:
            own = sum(a.num_pages for a in seq.adapters if a is not adapter and not cache.is_pinned(a))
            _, kv_pages = self._most_kv(seq)
            if kv_pages + max(own + pinned, self._pages_apart) > total or (own and own + pinned > cap):
                raise UserError(
                    f"{start}, but request {seq.request_id!r} was promised {kv_pages} pages for its tokens and {own} "
                    f"for its adapters, of {total} in the pool and {cap} for adapters: wait for its end, or unpin "
                    f"another",
                    reason="pin_limit", param="lora_name",
                )  # fmt: skip

    @property
    def _pages_apart(self) -> int:
        """Pages of the pool that can never be KV, whatever adapters there are."""
        return self._cache.max_adapter_pages if self._cache.is_split else 0

    def _most_kv(self, seq: Sequence) -> tuple[int, int]:
        """Tokens that the sequence may reach and the pages that they take."""
        num_tokens = max(seq.num_tokens, seq.max_total_tokens)
        return num_tokens, self._kv.pages_for_tokens(num_tokens)
