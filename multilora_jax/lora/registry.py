"""The adapters that can be asked for by name: checked, packed and kept in host memory (no device, no engine)."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from multilora_jax.errors import NotFoundError, PermissionDeniedError, UserError
from multilora_jax.lora.packing import HostAdapter, pack
from multilora_jax.lora.weights import CONFIG_FILE, WEIGHTS_FILE, load_adapter
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.request import LoRARequest

if TYPE_CHECKING:
    from multilora_jax.models.config import ModelConfig

MAX_NAME_LENGTH = 256
MAX_NAMES_SHOWN = 20
"""Most valid names that an error lists."""
_MAX_NAMES_COMPARED = 1000


def check_name(name: str) -> None:
    """Raises UserError unless `name` can be an adapter's: at most MAX_NAME_LENGTH printable characters."""
    if len(name) > MAX_NAME_LENGTH:
        raise UserError(
            f"lora_name has {len(name)} characters, at most {MAX_NAME_LENGTH} are allowed",
            reason="bad_lora_name", param="lora_name",
        )  # fmt: skip
    if not name.isprintable():
        raise UserError(f"lora_name {name!r} holds control characters", reason="bad_lora_name", param="lora_name")


def _encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False
    return True


class AdapterRegistry:
    """Names to adapters. Every method may be called from any thread.

    Loads and removals of one name happen one after the other, those of different names in parallel, on the callers'
    threads. A failed load leaves everything as it was.

    Args:
        model_config: the base that adapters must fit.
        geometry: the pool they are packed for.
        max_lora_rank: larger ranks are refused.
        adapter_roots: folders that adapters must lie in, symbolic links followed; None or empty allows any folder.
        base_names: names under which the base itself is served; no adapter may take one.
        check: called with every packed adapter before it is registered; what it raises refuses the load.
        on_replaced: called with the old adapter after `load_inplace` put another in its place.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        geometry: PoolGeometry,
        max_lora_rank: int,
        adapter_roots: Iterable[str] | None = None,
        *,
        base_names: Iterable[str] = (),
        check: Callable[[HostAdapter], None] | None = None,
        on_replaced: Callable[[HostAdapter], None] | None = None,
    ):
        self._model_config = model_config
        self._geometry = geometry
        self._max_lora_rank = max_lora_rank
        self._roots = [os.path.realpath(root) for root in adapter_roots or ()]
        self._base_names = tuple(base_names)
        self._check = check
        self._on_replaced = on_replaced
        self._lock = threading.Lock()
        self._adapters: dict[str, HostAdapter] = {}
        self._name_locks: dict[str, tuple[threading.Lock, int]] = {}
        self._last_id = 0

    def load(self, request: LoRARequest, *, trusted: bool = False) -> HostAdapter:
        """Checks, packs and registers an adapter; blocks while it reads the files.

        Args:
            request: with a path. `load_inplace` lets it replace an adapter of the same name; requests that run on
                the old one keep it.
            trusted: the path comes from the operator's own configuration, so adapter_roots does not bind it.

        Raises:
            UserError: `adapter_exists`, `bad_lora_name`, `name_is_base_model`, `lora_int_id_in_use`, `bad_lora_path`.
            PermissionDeniedError: `path_outside_roots`.
            NotFoundError, AdapterError: see `load_adapter` and `pack`.
        """
        check_name(request.lora_name)
        with self._name_lock(request.lora_name):
            return self._load(request, trusted)

    def resolve(self, request: LoRARequest) -> HostAdapter:
        """The adapter that a request means: the registered one, or it is loaded from the request's path.

        Raises:
            NotFoundError: the name is unknown and there is no path to load it from (`unknown_adapter`).
            UserError: the name is registered with another id or another path (`adapter_exists`); or see `load`.
        """
        if not request.lora_path:
            return self.get(request.lora_name)  # whichever version has the name now, whatever its id
        existing = self._find(request.lora_name)
        if existing is not None and not request.load_inplace:
            return self._same(existing, request)
        check_name(request.lora_name)
        with self._name_lock(request.lora_name):
            existing = self._find(request.lora_name)
            if existing is not None and not request.load_inplace:
                return self._same(existing, request)
            return self._load(request, trusted=False)

    def get(self, name: str, *, param: str = "model") -> HostAdapter:
        """The adapter called `name`; `param` is the field that a NotFoundError (`unknown_adapter`) blames."""
        existing = self._find(name)
        if existing is None:
            raise self._unknown(name, param)
        return existing

    def remove(self, name: str) -> HostAdapter:
        """Forgets `name` and returns its adapter, which running requests may go on using.

        Raises:
            NotFoundError: there is no such adapter (`unknown_adapter`), or no longer.
        """
        with self._name_lock(name):
            with self._lock:
                removed = self._adapters.pop(name, None)
            if removed is None:
                raise self._unknown(name, "lora_name")
            return removed

    def list(self) -> list[HostAdapter]:
        """All adapters, the first registered first."""
        with self._lock:
            return [*self._adapters.values()]

    def next_int_id(self) -> int:
        """An id for a caller that has none of its own; never given twice."""
        with self._lock:
            self._last_id += 1
            return self._last_id

    def _find(self, name: str) -> HostAdapter | None:
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

    def _load(self, request: LoRARequest, trusted: bool) -> HostAdapter:
        """`load` while the name's lock is held."""
        with self._lock:
            self._check_free(request)
        folder = self._allowed_folder(request.lora_path, trusted)
        weights = load_adapter(folder, self._model_config, max_lora_rank=self._max_lora_rank)
        # The path as given, made absolute: what a caller repeats, even if a link on it moves on to a newer version.
        weights = dataclasses.replace(weights, path=os.path.abspath(request.lora_path))
        adapter = pack(weights, self._geometry, request.lora_name, request.lora_int_id)
        if self._check is not None:
            self._check(adapter)
        with self._lock:
            self._check_free(request)  # an id may have been taken under another name meanwhile
            replaced = self._adapters.get(request.lora_name)
            self._adapters[request.lora_name] = adapter
            self._last_id = max(self._last_id, request.lora_int_id)
        if replaced is not None and self._on_replaced is not None:
            self._on_replaced(replaced)
        return adapter

    def _check_free(self, request: LoRARequest) -> None:
        name = request.lora_name
        if name in self._base_names:
            raise UserError(
                f"{name!r} is the base model's own name: choose another for the adapter",
                reason="name_is_base_model", param="lora_name",
            )  # fmt: skip
        if name in self._adapters and not request.load_inplace:
            raise UserError(
                f"an adapter {name!r} is loaded already: unload it first, or set load_inplace to replace it",
                reason="adapter_exists", param="lora_name",
            )  # fmt: skip
        for other in self._adapters.values():
            if other.int_id == request.lora_int_id and other.name != name:
                raise UserError(
                    f"lora_int_id {request.lora_int_id} belongs to adapter {other.name!r}: give each its own",
                    reason="lora_int_id_in_use", param="lora_int_id",
                )  # fmt: skip

    def _same(self, existing: HostAdapter, request: LoRARequest) -> HostAdapter:
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

    def _allowed_folder(self, path: str, trusted: bool) -> str:
        """The real folder behind `path`. Whether anything exists outside the roots is not told."""
        if not path or "\0" in path or not _encodable(path):
            what = "is not a path the file system can hold" if path else "is empty"
            raise UserError(f"lora_path {what}", reason="bad_lora_path", param="lora_path")
        folder = os.path.realpath(path)
        if self._roots and not trusted:
            for name in ("", CONFIG_FILE, WEIGHTS_FILE):
                real = os.path.realpath(os.path.join(folder, name))
                if not any(os.path.commonpath((root, real)) == root for root in self._roots):
                    raise PermissionDeniedError(
                        f"lora_path {path[:500]!r} leads outside the folders that adapters may be loaded from: "
                        "move the adapter there, or add its folder to adapter_roots",
                        reason="path_outside_roots", param="lora_path",
                    )  # fmt: skip
        return folder

    def _unknown(self, name: str, param: str) -> NotFoundError:
        with self._lock:
            names = [*self._base_names, *self._adapters]
        shown = ", ".join(names[:MAX_NAMES_SHOWN])
        more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
        # Comparing is costly, and holds the interpreter: not for very many or very long names.
        compared = itertools.islice(names, _MAX_NAMES_COMPARED) if len(name) <= MAX_NAME_LENGTH else ()
        close = difflib.get_close_matches(name, compared, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        shortened = name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 3] + "..."
        return NotFoundError(
            f"there is no model or adapter {shortened!r}.{hint} Available: {shown or 'none'}{more}.",
            reason="unknown_adapter", param=param,
        )  # fmt: skip
