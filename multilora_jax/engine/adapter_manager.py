"""The engine's adapters: names, tiers, transfers and who uses what (host only, no jax)."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from multilora_jax.config import EngineConfig
from multilora_jax.engine.adapter_text import AdapterText
from multilora_jax.engine.adapter_tiers import READER_THREADS, make_reader
from multilora_jax.engine.inputs import Mix, read_mix
from multilora_jax.engine.metrics import EngineStats
from multilora_jax.engine.scheduler import Scheduler
from multilora_jax.engine.transfers import AdapterTransfers
from multilora_jax.errors import NotFoundError, UnavailableError, UserError
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.cache import AdapterCache
from multilora_jax.lora.deltas import BaseTensors
from multilora_jax.lora.host_tier import HostTier
from multilora_jax.lora.reader import AdapterReader
from multilora_jax.lora.registry import AdapterRegistry
from multilora_jax.lora.residency import PageWrite
from multilora_jax.lora.weights import weights_from_arrays
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.models.config import ModelConfig
from multilora_jax.request import LoRARequest, Sequence
from multilora_jax.tokenizer import Tokenizer


class _PageSource:
    """What AdapterTransfers asks for host copies."""

    def __init__(self, host: HostTier, reader: AdapterReader):
        self.get, self.request = host.get, reader.request


class AdapterManager:
    """Adapters of one engine in all their tiers: registered, in host memory, in the pool.

    What is said to be for any thread takes the engine's lock where it touches the books of the pool; the rest is
    called by the engine with that lock held.

    Args:
        config: the engine's.
        model_config, geometry, base: of the served model.
        tokenizer: the base's, None where it has none.
        cache, scheduler: the pool's books.
        books: the engine's lock around them.
        forget: called, with the lock held, with an unloaded adapter that no request uses any more.
        read_back: copies pages of the pool to the host: [n, L, TP, E/TP].
        throttle: see AdapterReader.
        shares_cores: whether the model runs on the cores of this process.

    Attributes:
        registry, host, reader: of this engine.
        text: how requests on its adapters read and write text.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        geometry: PoolGeometry,
        base: BaseTensors,
        tokenizer: Tokenizer | None,
        cache: AdapterCache[Adapter],
        scheduler: Scheduler,
        books: threading.Lock,
        *,
        forget: Callable[[Adapter], None],
        read_back: Callable[[list[int]], np.ndarray],
        throttle: Callable[[int], float] | None = None,
        shares_cores: bool = False,
    ):
        self._config = config
        self._model_config = model_config
        self.text = AdapterText(model_config, tokenizer)
        self._cache = cache
        self._scheduler = scheduler
        self._books = books
        self._forget = forget
        self._read_back = read_back
        self.reader = make_reader(
            config, model_config, geometry, base, tokenizer, throttle,
            is_busy=(lambda: scheduler.num_running > 0) if shares_cores else None,
        )  # fmt: skip
        self.host = self.reader.host
        self.registry = AdapterRegistry(
            self.reader,
            config.adapter_roots,
            base_names=[config.base_name],
            check=self._check,
            in_use=self._in_use,
            on_replaced=self._retire,
        )
        self.transfers = AdapterTransfers(
            cache,
            _PageSource(self.host, self.reader),
            scheduler,
            pages_per_step=max(1, int(config.adapter_transfer_mib * 2**20 / geometry.page_bytes)),
            prefetch=config.adapter_prefetch,
            lookahead=config.prefetch_lookahead,
            max_reads=min(2 * READER_THREADS, config.max_cpu_loras or 2 * READER_THREADS),
        )
        self._users: Counter[Adapter] = Counter()
        for int_id, (name, path) in enumerate(config.lora_modules.items(), 1):
            self.register(LoRARequest(name, int_id, path), trusted=True)

    # For any thread

    def load(self, request: LoRARequest, *, pinned: bool = False) -> Adapter:
        """Reads and registers an adapter, and pins it if asked; see AdapterRegistry.load.

        Raises:
            UserError: there is no room to pin it (`pin_limit`); then nothing was loaded and nothing replaced.
        """
        self._check_enabled()
        with self._secured(request.lora_name):
            adapter = self.registry.load(request, check=functools.partial(self._check, pinned=pinned))
        if pinned:
            self._pin(adapter)
        return adapter

    def register(self, request: LoRARequest, *, trusted: bool = False) -> Adapter:
        """Gives an adapter a name without reading it; see AdapterRegistry.register."""
        self._check_enabled()
        return self.registry.register(request, trusted=trusted)

    def add(
        self,
        name: str,
        arrays: Mapping[str, Any],
        config: Any,
        *,
        int_id: int | None = None,
        load_inplace: bool = False,
    ) -> Adapter:
        """Registers an adapter from arrays; see LLMEngine.add_adapter."""
        self._check_enabled()
        limits = {"max_lora_rank": self._config.max_lora_rank, "max_extra_vocab": self._config.max_extra_vocab}
        weights = weights_from_arrays(arrays, config, self._model_config, **limits)
        return self.registry.add(name, int_id, weights, load_inplace=load_inplace)

    def name_of(self, adapter: str | int) -> str:
        """A name as it is, an id as the name that has it; what nothing has as text, for an error to say."""
        return next((a.name for a in self.registry.list() if a.int_id == adapter), str(adapter))

    def remove(self, name: str) -> None:
        """Forgets a name: new requests get NotFoundError, those under way finish, then all its memory comes free."""
        with self._secured(name):
            self._retire(self.registry.remove(name))

    def pin(self, name: str) -> None:
        """Brings an adapter into the pool, as soon as there is room, and keeps it there until unpinned or removed.

        Raises:
            NotFoundError: no such adapter; or see `AdapterRegistry.ensure_loaded`.
            UserError: there is no room for it beside what was promised to others (`pin_limit`).
        """
        adapter = self.registry.get(name, param="lora_name")
        self.registry.ensure_loaded(adapter)
        self._pin(adapter)

    def _pin(self, adapter: Adapter) -> None:
        with self._books:
            if self._cache.is_dropped(adapter):
                raise NotFoundError(
                    f"adapter {adapter.name!r} was just unloaded or replaced",
                    reason="unknown_adapter",
                    param="lora_name",
                )
            self._scheduler.check_pin(adapter)
            self._cache.pin(adapter)

    def unpin(self, name: str) -> None:
        """Undoes `pin`; nothing to do for an adapter that is not pinned. Raises NotFoundError."""
        with self._books:
            self._cache.unpin(self.registry.get(name, param="lora_name"))

    def prepare(self, requests: Iterable[LoRARequest]) -> None:
        """Loads, in parallel, what the requests name and was never loaded; blocks. Raises for the first bad one."""
        distinct = list(dict.fromkeys(requests))
        if len(distinct) == 1:
            self._resolve(distinct[0])
        elif distinct:
            with ThreadPoolExecutor(min(READER_THREADS, len(distinct))) as pool:
                list(pool.map(self._resolve, distinct))

    def resolve(self, mix: Mix) -> tuple[tuple[Adapter, ...], tuple[float, ...]]:
        """The adapters that a request means and its factors on them; loads what never was.

        Raises:
            UserError: no LoRARequest, or an adapter that is named twice (`bad_lora_request`).
            NotFoundError, AdapterError: see AdapterRegistry.
        """
        requests = read_mix(mix)
        if requests:
            self._check_enabled()
        adapters = tuple(self._resolve(request) for request in requests)
        if len(set(adapters)) < len(adapters):
            raise UserError(
                "lora_request names an adapter twice: add up its scales",
                reason="bad_lora_request",
                param="lora_request",
            )
        return adapters, tuple(request.scale for request in requests)

    def states(self) -> dict[str, str]:
        """Of every name, where its adapter is: "registered" (on disk only), "host", "loading" or "resident"."""
        with self._books:
            tiers = self._tiers()
        return {adapter.name: tiers.get(adapter, "registered") for adapter in self.registry.list()}

    # For the engine, with its lock held

    @property
    def has_transfers(self) -> bool:
        """Whether a pinned adapter is still on its way, so that steps are needed even without a request."""
        return not all(map(self._cache.is_ready, self._cache.pinned()))

    def before_step(self) -> list[tuple[PageWrite, np.ndarray]]:
        """Pages that must be copied to the device before the next step, see AdapterTransfers.plan."""
        waiting = self._scheduler.waiting(self._config.prefetch_lookahead)
        return self.transfers.plan(waiting, busy=self._scheduler.num_running > 0)

    def failed_sequences(self) -> list[tuple[Sequence, UserError]]:
        """Waiting sequences whose adapter could not be read again, and why, each told once."""
        failed: dict[str, tuple[Sequence, UserError]] = {}
        for adapter in self.transfers.awaited():
            cause = self.reader.failure(adapter)
            if cause is not None:
                what = f"adapter {adapter.name!r} could not be read ({type(cause).__name__}: {cause})"
                known = isinstance(cause, UserError)
                error = cause if known else UnavailableError(what, reason="adapter_unreadable")
                self.transfers.forget(adapter)
                for seq in [seq for seq in self._scheduler.waiting() if adapter in seq.adapters]:
                    failed.setdefault(seq.request_id, (seq, error))
        return list(failed.values())

    def enter(self, seq: Sequence) -> None:
        """Counts a new sequence as a user of its adapters."""
        self._users.update(seq.adapters)

    def leave(self, seq: Sequence) -> None:
        """Takes `enter` back; an unloaded adapter goes with its last user."""
        for adapter in seq.adapters:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]
                self._forget_if_unused(adapter)

    def fill(self, stats: EngineStats) -> None:
        """Writes the figures about adapters."""
        cache = self._cache
        stats.adapter_hits, stats.adapter_misses = cache.hits, cache.misses
        stats.adapter_loads, stats.adapter_evictions = cache.loads, cache.evictions
        stats.registered_adapters = len(self.registry)
        stats.host_adapters, stats.host_adapter_bytes = len(self.host), self.host.bytes
        stats.host_evictions = self.host.evictions
        stats.tiers = [
            (a.name, a.rank, tier, cache.is_pinned(a)) for a, tier in self._tiers().items() if self.registry.has(a)
        ]

    def close(self) -> None:
        """Ends the reader's threads."""
        self.reader.close()

    def _tiers(self) -> dict[Adapter, str]:
        """Where the adapters are that are in memory: however many names there are, this looks at these alone."""
        tiers = {a: "resident" if self._cache.is_ready(a) else "loading" for a in self._cache.residents()}
        return tiers | {adapter: "host" for adapter in self.host.adapters() if adapter not in tiers}

    def _check_enabled(self) -> None:
        if not self._config.enable_lora:
            raise UserError(
                "this server runs without adapters (enable_lora is false)", reason="lora_disabled", param="model"
            )

    def _check(self, adapter: Adapter, *, pinned: bool = False) -> None:
        with self._books:
            self._scheduler.check_adapter(adapter)
            if pinned:
                self._scheduler.check_pin(adapter)

    def _resolve(self, request: LoRARequest) -> Adapter:
        adapter = self.registry.resolve(request)
        self.registry.ensure_loaded(adapter)
        return adapter

    @contextmanager
    def _secured(self, name: str) -> Iterator[None]:
        """Keeps the host copy of an adapter in use while its name is taken from it, and after: its files may go."""
        adapter = self.registry.find(name)
        secured = adapter is not None and bool(adapter.path) and self._keep(adapter)
        try:
            yield
        finally:
            if secured and adapter is not None and self.registry.has(adapter):  # it lost nothing
                with self._books:
                    pages = self.host.get(adapter)
                    self.host.remove(adapter)
                    if pages is not None:
                        self.host.put(adapter, pages)

    def _keep(self, adapter: Adapter) -> bool:
        """Holds the host copy of an adapter in use against eviction; False if none is in use, or to be had."""
        for read_again in (True, False):
            with self._books:
                if adapter not in self._users:
                    return False
                pages = self.host.get(adapter)
                if pages is None and self._cache.is_ready(adapter):
                    pages = self._read_back(self._cache.pages_of(adapter))
                if pages is not None:
                    self.host.put(adapter, pages, keep=True)
                    return True
            if read_again:
                with suppress(UserError):  # the files have gone already: its queued requests will say so
                    self.reader.load(adapter)
        return False

    def _in_use(self, adapter: Adapter) -> bool:
        with self._books:
            return adapter in self._users

    def _retire(self, adapter: Adapter) -> None:
        with self._books:
            self._cache.drop(adapter)
            pages = self.host.get(adapter) if adapter in self._users else None
            if pages is not None:
                # Its files may be overwritten by now: what its queued requests need must not be evicted.
                self.host.put(adapter, pages, keep=True)
            self._forget_if_unused(adapter)

    def _forget_if_unused(self, adapter: Adapter) -> None:
        if self._cache.is_dropped(adapter) and adapter not in self._users:
            self._forget(adapter)
            self.registry.forget(adapter)
