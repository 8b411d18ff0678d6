"""A server with two tenants, an administrator and a scraper, for the tests of who may see and do what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from multilora_jax.key_file import hash_key
from tests.server.harness import Server

KEYS = {"a": "mlj-key-of-team-a", "b": "mlj-key-of-team-b", "ops": "mlj-key-of-ops", "scraper": "mlj-key-of-scraper"}
"""Tenant to key."""

ENTRIES: dict[str, dict[str, Any]] = {
    "a": {"adapters": ["adapter-a", "a-*"]}, "b": {"adapters": ["adapter-b", "b-*"]}, "ops": {"admin": True},
    "scraper": {"metrics": True},
}  # fmt: skip


def write_keys(folder: Path, **more: dict[str, Any]) -> str:
    """A file of keys of ENTRIES; `more` adds fields to the entry of a tenant."""
    entries = [
        {"tenant": name, "sha256": hash_key(KEYS[name]), **entry, **more.get(name, {})}
        for name, entry in ENTRIES.items()
    ]
    path = folder / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": entries}), encoding="utf-8")
    return str(path)


def keyed_server(make_server: Callable[..., Server], folder: Path, limits: Any = None, **config: Any) -> Server:
    """A server whose keys are those of `write_keys`; `limits` are its `more`."""
    return make_server(keys_file=write_keys(folder, **(limits or {})), **config)


def bearer(tenant: str | None) -> dict[str, str]:
    """The headers of a request of a tenant, or of somebody with a key that nobody has."""
    return {} if tenant is None else {"Authorization": f"Bearer {KEYS.get(tenant, tenant)}"}
