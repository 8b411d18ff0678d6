"""Adapters that are found by their name when a request first names them: in a folder, or on the hub.

Both are off unless the configuration allows them, and look only where it says. What is found is registered under the
name that the request gave, as if an operator had loaded it; what is not found is the same error 404 as ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from multilora_jax.config import EngineConfig
from multilora_jax.errors import NotFoundError, PermissionDeniedError, UnavailableError, UserError
from multilora_jax.lora.adapter_files import CONFIG_FILE
from multilora_jax.lora.folders import AllowedFolders
from multilora_jax.lora.registry import MAX_NAME_LENGTH
from multilora_jax.request import LoRARequest
from multilora_jax.server.mixes import MixEntry

if TYPE_CHECKING:
    from multilora_jax.server.context import ServerContext, Target

MISSING_FOR_S = 60.0
"""How long the hub is not asked again for what it did not have."""
_MAX_MISSING = 1000
_MAX_DOWNLOADS = 2

_HUB_FILES = ["adapter_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*.json",
              "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"]  # fmt: skip
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

log = logging.getLogger(__name__)


async def resolve_target(context: ServerContext, model: str, mix: Sequence[MixEntry] = ()) -> Target:
    """What a request's `model` and `lora` name, as ServerContext.resolve; unknown names are looked for first.

    Raises:
        UserError, NotFoundError: see ServerContext.resolve.
        UnavailableError: the hub cannot be reached (`hub_unreachable`).
    """
    for _ in range(len(mix) + 2):  # one unknown name is found at a time
        try:
            return context.resolve(model, mix)
        except NotFoundError:
            names = [model, *(entry.name for entry in mix)]
            if not await context.resolvers.find_any(context, names):
                raise
    return context.resolve(model, mix)


class Resolvers:
    """Where unknown names are looked for.

    Args:
        config: its lora_resolver_folder and lora_resolver_hub are used.
    """

    def __init__(self, config: EngineConfig):
        self._folder = config.lora_resolver_folder
        self._hub = frozenset(config.lora_resolver_hub)
        self._allowed = AllowedFolders([self._folder]) if self._folder else None
        # Of their own: a hub that does not answer must not take the threads that others' texts are read on.
        self._downloads = ThreadPoolExecutor(_MAX_DOWNLOADS, thread_name_prefix="hub")
        self._missing: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def find_any(self, context: ServerContext, names: Sequence[str]) -> bool:
        """Registers the first of the names that is unknown and is found; False where there is none."""
        if self._folder is None and not self._hub:
            return False
        llm = context.engine.engine
        for name in names:
            name = name.removeprefix(f"{llm.base_name}:")
            if name == llm.base_name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
                continue
            if llm.adapters.registry.find(name) is not None or not context.sees(name):
                continue
            if await self._find(context, name):
                return True
        return False

    async def _find(self, context: ServerContext, name: str) -> bool:
        # Of many requests that name it at the same moment one looks; the others find it there.
        registry = context.engine.engine.adapters.registry
        lock = self._locks.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                if registry.find(name) is not None:
                    return True
                path = await asyncio.to_thread(self._in_folder, name) or await self._on_hub(name)
                if path is None:
                    return False
                await context.engine.register_lora(LoRARequest(name, registry.next_int_id(), path))
                log.info("adapter %r found at %r", name, path)
                return True
        except PermissionDeniedError as error:  # the hub's cache may lie outside adapter_roots
            log.warning("adapter %r is not registered: %s", name, error.message)
            return False
        except UserError as error:
            if error.reason == "adapter_exists":
                return True
            raise
        finally:
            if not lock.locked():
                self._locks.pop(name, None)

    def _in_folder(self, name: str) -> str | None:
        """The adapter's folder; a name leads nowhere but straight into the resolver's own one."""
        if self._folder is None or self._allowed is None or name in (".", "..") or re.search(r"[/\\\0]", name):
            return None
        path = os.path.join(self._folder, name)
        if not os.path.isfile(os.path.join(path, CONFIG_FILE)):
            return None
        try:
            self._allowed.real_folder(path)
        except UserError as error:  # a link that leads out: for the caller it is not there
            log.warning("adapter %r is not taken from %r: %s", name, path, error.reason)
            return None
        return path

    async def _on_hub(self, name: str) -> str | None:
        owner = name.partition("/")[0]
        if not _HUB_ID.fullmatch(name) or not {name, f"{owner}/*"} & self._hub:
            return None
        if time.monotonic() - self._missing.get(name, -MISSING_FOR_S) < MISSING_FOR_S:
            return None
        path = await asyncio.get_running_loop().run_in_executor(self._downloads, download, name)
        if path is None:
            if len(self._missing) >= _MAX_MISSING:
                self._missing.clear()
            self._missing[name] = time.monotonic()
        return path


def download(hub_id: str) -> str | None:
    """The folder of an adapter of the hub, fetched into the hub's own cache; None where the hub has none of this id.

    Only safetensors, JSON and a chat template are fetched.

    Raises:
        UserError: huggingface_hub is not installed (`hub_not_installed`).
        UnavailableError: the hub cannot be reached and the cache does not hold it (`hub_unreachable`).
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    except ImportError:
        raise UserError(
            f"{hub_id!r} would be fetched from the hub, but huggingface_hub is not installed on the server: "
            "pip install 'multilora_jax[hub]'",
            reason="hub_not_installed", param="model",
        ) from None  # fmt: skip
    try:
        path = snapshot_download(hub_id, allow_patterns=_HUB_FILES)
    except (RepositoryNotFoundError, HFValidationError):
        return None
    # The client raises its own, httpx's and the system's errors: each means that the hub could not be asked.
    except Exception as error:
        log.warning("adapter %r could not be fetched: %s: %s", hub_id, type(error).__name__, error)
        raise UnavailableError(
            f"the adapter {hub_id!r} could not be fetched from the hub: try again later", reason="hub_unreachable"
        ) from error
    return path if os.path.isfile(os.path.join(path, CONFIG_FILE)) else None
