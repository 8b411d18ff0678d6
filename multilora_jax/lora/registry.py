"""The adapters that can be asked for by name (no device, no engine)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from multilora_jax.errors import NotFoundError, UserError
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.folders import AllowedFolders, check_files
from multilora_jax.lora.names import MAX_NAME_LENGTH as MAX_NAME_LENGTH
from multilora_jax.lora.names import check_name, unknown_adapter
from multilora_jax.lora.reader import AdapterReader
from multilora_jax.lora.weights import AdapterWeights
from multilora_jax.request import LoRARequest


def _same_content(old: Adapter, new: Adapter) -> bool:
    """Whether nobody could tell `new` from `old`, which is loaded then."""
    return (
        old.version is not None
        and new.version is not None
        and (old.int_id, old.path, old.folder, old.trusted) == (new.int_id, new.path, new.folder, new.trusted)
        and old.version.digest == new.version.digest  # of tokenizer and template too
    )


class AdapterRegistry:
    """Names to adapters. Every method may be called from any thread.

    A registered adapter is a name and a path; `ensure_loaded` reads it when it is first wanted. What is done to one
    name is done one after the other, to different names in parallel. A call that fails leaves everything as it was.

    Args:
        reader: reads adapters, into its host tier.
        adapter_roots: folders that adapters must lie in, symbolic links followed; None or empty allows any folder.
        base_names: names under which the base itself is served; no adapter may take one.
        check: called with every adapter, complete, before it is first served; what it raises refuses the load.
        in_use: whether requests still run on an adapter that has just lost its name. If so the owner calls `forget`
            when the last of them ends; without it nothing is ever in use.
        on_replaced: called with the old adapter after `load_inplace` put another in its place.
    """

    def __init__(
        self,
        reader: AdapterReader,
        adapter_roots: Iterable[str] | None = None,
        *,
        base_names: Iterable[str] = (),
        check: Callable[[Adapter], None] | None = None,
        in_use: Callable[[Adapter], bool] | None = None,
        on_replaced: Callable[[Adapter], None] | None = None,
    ):
        self._reader = reader
        self._folders = AllowedFolders(adapter_roots)
        self._base_names = tuple(base_names)
        self._check = check
        self._in_use = in_use
        self._on_replaced = on_replaced
        self._lock = threading.Lock()
        self._adapters: dict[str, Adapter] = {}
        self._names_by_id: dict[int, str] = {}
        self._name_locks: dict[str, tuple[threading.Lock, int]] = {}
        self._last_id = 0

    def register(self, request: LoRARequest, *, trusted: bool = False) -> Adapter:
        """Gives a name to a folder without opening a file of it: its files need only be there.

        Args:
            request: with a path. Where `load_inplace` would replace an adapter the new one is loaded first, as by
                `load`.
            trusted: the path comes from the operator's own configuration, so adapter_roots does not bind it.

        Raises:
            UserError: `adapter_exists`, `bad_lora_name`, `name_is_base_model`, `lora_int_id_in_use`, `bad_lora_path`.
            PermissionDeniedError: `path_outside_roots`.
            NotFoundError: `adapter_path_not_found`, `adapter_file_not_found`.
        """
        check_name(request.lora_name)
        with self._name_lock(request.lora_name):
            if self.find(request.lora_name) is not None and request.load_inplace:
                return self._load(request, trusted)
            adapter = self._new(request, trusted)
            check_files(adapter.folder, request.lora_path, request.lora_name)
            return self._publish(adapter, replace=False)

    def load(
        self, request: LoRARequest, *, trusted: bool = False, check: Callable[[Adapter], None] | None = None
    ) -> Adapter:
        """Registers an adapter and loads it before anybody sees it; blocks until then.

        Args:
            request: with a path. `load_inplace` lets it replace an adapter of the same name, from one moment to the
                next; requests that run on the old one keep it. Where the old one has the same path, id and content
                it stays and is returned: nothing that is in memory or in the pool need be brought there again.
            trusted: see `register`.
            check: in place of the registry's own, for this load.

        Raises:
            UserError, PermissionDeniedError: see `register`.
            UnavailableError, NotFoundError, AdapterError, ConfigError: see `AdapterReader.load`.
        """
        check_name(request.lora_name)
        with self._name_lock(request.lora_name):
            return self._load(request, trusted, check)

    def examine(self, path: str) -> Adapter:
        """An adapter as `load` would make it, under no name and kept nowhere; raises as `load`."""
        folder = self._folders.real_folder(path)
        adapter = Adapter(os.path.basename(folder), 0, os.path.abspath(path), folder)
        self._reader.examine(adapter, self._check)
        return adapter

    def add(self, name: str, int_id: int | None, weights: AdapterWeights, *, load_inplace: bool = False) -> Adapter:
        """Registers an adapter from memory; its pages are never evicted from the host tier.

        Args:
            name: as in LoRARequest.
            int_id: as in LoRARequest; None for the replaced adapter's, or a new one.
            weights: checked ones.
            load_inplace: see `load`.

        Raises:
            UserError: see `register`.
            AdapterError: see `AdapterReader.add`.
        """
        check_name(name)
        with self._name_lock(name):
            if int_id is None:
                existing = self.find(name) if load_inplace else None
                int_id = self.next_int_id() if existing is None else existing.int_id
            request = LoRARequest(name, int_id, load_inplace=load_inplace)
            with self._lock:
                self._check_free(name, int_id, load_inplace)
            adapter = Adapter(request.lora_name, request.lora_int_id, "")
            self._reader.add(adapter, weights, self._check)
            return self._publish(adapter, load_inplace)

    def ensure_loaded(self, adapter: Adapter) -> None:
        """Loads a registered adapter if that has not happened yet; blocks until it is done.

        One that is removed or replaced meanwhile is loaded all the same: a request may have begun with it. A failure
        leaves it registered, and the next call tries again.

        Raises:
            PermissionDeniedError: `path_outside_roots`, where a link was changed since the registration.
            UnavailableError, UserError, NotFoundError, AdapterError, ConfigError: see `load`.
        """
        if adapter.version is None:
            if not adapter.trusted:
                self._folders.check_inside(adapter.folder, adapter.path)
            self._reader.load(adapter, self._check)

    def resolve(self, request: LoRARequest) -> Adapter:
        """The adapter that a request means: the registered one, or it is loaded from the request's path.

        A registered one may not be loaded yet: see `ensure_loaded`.

        Raises:
            NotFoundError: the name is unknown and there is no path to load it from (`unknown_adapter`).
            UserError: the name is registered with another id or another path (`adapter_exists`); or see `load`.
        """
        if not request.lora_path:
            return self.get(request.lora_name)  # whichever version has the name now, whatever its id
        existing = self.find(request.lora_name)
        if existing is not None and not request.load_inplace:
            return self._same(existing, request)
        check_name(request.lora_name)
        with self._name_lock(request.lora_name):
            existing = self.find(request.lora_name)
            if existing is not None and not request.load_inplace:
                return self._same(existing, request)
            return self._load(request, trusted=False)

    def get(self, name: str, *, param: str = "model") -> Adapter:
        """The adapter called `name`; `param` is the field that a NotFoundError (`unknown_adapter`) blames."""
        existing = self.find(name)
        if existing is None:
            raise self._unknown(name, param)
        return existing

    def remove(self, name: str) -> Adapter:
        """Forgets `name` and returns its adapter, which running requests may go on using.

        Its host copy is freed at once, or by `forget` if it is in use.

        Raises:
            NotFoundError: there is no such adapter (`unknown_adapter`), or no longer.
        """
        with self._name_lock(name):
            with self._lock:
                removed = self._adapters.pop(name, None)
                if removed is not None:
                    del self._names_by_id[removed.int_id]
            if removed is None:
                raise self._unknown(name, "lora_name")
            self._forget_unless_in_use(removed)
            return removed

    def forget(self, adapter: Adapter) -> None:
        """Frees the host copy of an adapter that was removed or replaced; may be called more than once."""
        self._reader.forget(adapter)

    def __len__(self) -> int:
        """How many names there are."""
        with self._lock:
            return len(self._adapters)

    def has(self, adapter: Adapter) -> bool:
        """Whether new requests for the adapter's name get this very adapter."""
        return self.find(adapter.name) is adapter

    def list(self) -> list[Adapter]:
        """All adapters, the first registered first."""
        with self._lock:
            return [*self._adapters.values()]

    def next_int_id(self) -> int:
        """An id for a caller that has none of its own; never given twice."""
        with self._lock:
            self._last_id += 1
            return self._last_id

    def find(self, name: str) -> Adapter | None:
        """The adapter called `name`, None if there is none."""
        with self._lock:
            return self._adapters.get(name)

    @contextmanager
    def _name_lock(self, name: str) -> Iterator[None]:
        """Holds the lock of one name; the lock exists only while somebody holds it or waits for it."""
        with self._lock:
            lock, users = self._name_locks.get(name, (threading.Lock(), 0))
            self._name_locks[name] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._name_locks.pop(name)
                if users > 1:
                    self._name_locks[name] = (lock, users - 1)

    def _load(self, request: LoRARequest, trusted: bool, check: Callable[[Adapter], None] | None = None) -> Adapter:
        """`load` while the name's lock is held."""
        adapter = self._new(request, trusted)
        self._reader.load(adapter, check or self._check)
        return self._publish(adapter, request.load_inplace)

    def _new(self, request: LoRARequest, trusted: bool) -> Adapter:
        """An adapter that nobody sees yet, its name, id and path checked."""
        with self._lock:
            self._check_free(request.lora_name, request.lora_int_id, request.load_inplace)
        folder = self._folders.real_folder(request.lora_path, trusted=trusted)
        # The path as given, made absolute: what a caller repeats, even if a link on it moves on to a newer version.
        path = os.path.abspath(request.lora_path)
        return Adapter(request.lora_name, request.lora_int_id, path, folder, trusted)

    def _publish(self, adapter: Adapter, replace: bool) -> Adapter:
        """Puts an adapter under its name while the name's lock is held; returns the one that has the name then."""
        with self._lock:
            self._check_free(adapter.name, adapter.int_id, replace)  # an id may have been taken meanwhile
            old = self._adapters.get(adapter.name)
            if old is not None and _same_content(old, adapter):
                self._reader.host.remove(adapter)
                return old
            if old is not None:
                del self._names_by_id[old.int_id]
            self._adapters[adapter.name] = adapter
            self._names_by_id[adapter.int_id] = adapter.name
            self._last_id = max(self._last_id, adapter.int_id)
        if old is not None:
            self._forget_unless_in_use(old)
            if self._on_replaced is not None:
                self._on_replaced(old)
        return adapter

    def _forget_unless_in_use(self, adapter: Adapter) -> None:
        if self._in_use is None or not self._in_use(adapter):
            self.forget(adapter)

    def _check_free(self, name: str, int_id: int, load_inplace: bool) -> None:
        if name in self._base_names:
            raise UserError(
                f"{name!r} is the base model's own name: choose another for the adapter",
                reason="name_is_base_model", param="lora_name",
            )  # fmt: skip
        if name in self._adapters and not load_inplace:
            raise UserError(
                f"an adapter {name!r} is loaded already: unload it first, or set load_inplace to replace it",
                reason="adapter_exists", param="lora_name",
            )  # fmt: skip
        owner = self._names_by_id.get(int_id, name)
        if owner != name:
            raise UserError(
                f"lora_int_id {int_id} belongs to adapter {owner!r}: give each its own",
                reason="lora_int_id_in_use", param="lora_int_id",
            )  # fmt: skip

    def _same(self, existing: Adapter, request: LoRARequest) -> Adapter:
        """`existing` if the request means it."""
        path = request.lora_path
        same_path = not path or os.path.abspath(path) == existing.path
        if same_path and request.lora_int_id == existing.int_id:
            return existing
        raise UserError(
            f"adapter {existing.name!r} is registered with lora_int_id {existing.int_id} and path {existing.path!r}, "
            f"not {request.lora_int_id} and {path[:500]!r}: use another name, or load_inplace to replace it",
            reason="adapter_exists", param="lora_name",
        )  # fmt: skip

    def _unknown(self, name: str, param: str) -> NotFoundError:
        with self._lock:
            names = [*self._base_names, *self._adapters]
        return unknown_adapter(name, names, param)
