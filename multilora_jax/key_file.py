"""The file of hashed keys: who each key belongs to and what it may do (host only).

A key is 256 random bits, so its plain SHA-256 is as good as the key is: nobody can try enough keys to find one that
has a given hash. Salted and slow hashes help where secrets are guessable, as passwords are; here they would only make
every request slow, and the server easy to keep busy with wrong keys.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from multilora_jax.config_values import nearest, read_yaml_mapping
from multilora_jax.errors import ConfigError

KEY_PREFIX = "mlj-"
"""Begins every key made here, so that scanners for leaked secrets can be told of it."""

MAX_TENANT_LENGTH = 64
RESERVED_TENANTS = ("admin", "anonymous", "default")
"""Names of those who come without an entry in the file: see server.tenants."""


@dataclass(frozen=True)
class KeyEntry:
    """One key of the file.

    Attributes:
        tenant: whose key it is; several keys of one tenant share a prefix cache, and each has its own limits.
        sha256: of the key's UTF-8 bytes, as 64 hexadecimal digits.
        adapters: patterns (*, ?, [seq]) of the names that it may use and see; the base may always be used.
        best_priority: the lowest number that it may send as `priority` (lower runs earlier).
        requests_per_minute, tokens_per_minute, max_concurrent: limits; None for none. Tokens are those of prompts
            and answers.
        metrics: whether it may read /metrics, which tells of every tenant's adapters.
        admin: whether it may do everything, on every adapter.
    """

    tenant: str
    sha256: str
    adapters: tuple[str, ...] = ()
    best_priority: int = 0
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    metrics: bool = False
    admin: bool = False


def new_key() -> str:
    """A fresh key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """The hash that stands for a key, as hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(path: str) -> tuple[KeyEntry, ...]:
    """The entries of a file: a YAML mapping whose one key `keys` is a list of mappings with KeyEntry's fields.

    Raises:
        ConfigError: `bad_keys_file` names the entry and what is wrong; a value that may be a secret is not quoted.
        NotFoundError: there is no such file.
    """
    content = read_yaml_mapping(Path(path))
    listed = content.get("keys")
    if set(content) != {"keys"} or not isinstance(listed, list) or not listed:
        raise _bad(path, "must hold one key, `keys`, with a list of at least one entry")
    entries = [read_entry(entry, f"{path}: keys[{i}]") for i, entry in enumerate(listed)]
    seen: dict[str, int] = {}
    for i, entry in enumerate(entries):
        if entry.sha256 in seen:
            raise _bad(path, f"keys[{i}] has the sha256 of keys[{seen[entry.sha256]}]: a key has one entry")
        seen[entry.sha256] = i
    return tuple(entries)


def read_entry(entry: Any, where: str) -> KeyEntry:
    """One entry, checked. Raises ConfigError (`bad_keys_file`), whose message begins with `where`."""
    if not isinstance(entry, Mapping):
        raise _bad(where, "must be a mapping with at least tenant and sha256")
    known = [f.name for f in fields(KeyEntry)]
    for name in entry:
        if name in ("key", "token", "secret"):
            raise _bad(where, f"has {name!r}: this file holds hashes only; write sha256 and change that key")
        if name not in known:
            close = nearest(str(name), known)
            raise _bad(
                where, f"has an unknown field {str(name)[:50]!r}: " + (f"did you mean {close!r}?" if close else
                f"the fields are {', '.join(known)}"),
            )  # fmt: skip
    for name in ("tenant", "sha256"):
        if name not in entry:
            raise _bad(where, f"has no {name}")
    _check_names(entry, where)
    for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
        _check_integer(entry, name, where, low=1)
    _check_integer(entry, "best_priority", where, low=-math.inf)
    for name in ("metrics", "admin"):
        if not isinstance(entry.get(name, False), bool):
            raise _bad(where, f"{name} must be true or false")
    return KeyEntry(**{**entry, "adapters": tuple(entry.get("adapters", ()))})


def _check_names(entry: Mapping[Any, Any], where: str) -> None:
    tenant, digest, adapters = entry["tenant"], entry["sha256"], entry.get("adapters", [])
    if not isinstance(tenant, str) or not re.fullmatch(rf"[\w.@-]{{1,{MAX_TENANT_LENGTH}}}", tenant):
        raise _bad(where, f"tenant must be 1 to {MAX_TENANT_LENGTH} letters, digits, or any of _.@-")
    if tenant in RESERVED_TENANTS and not entry.get("admin"):
        raise _bad(where, f"the tenant {tenant!r} is this server's own word: choose another")
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise _bad(
            where, "sha256 must be 64 lower-case hexadecimal digits in quotes, as `python -m multilora_jax.keys new` "
            "prints them",
        )  # fmt: skip
    if not isinstance(adapters, list | tuple) or not all(isinstance(p, str) and p.strip() for p in adapters):
        raise _bad(where, 'adapters must be a list of names or patterns, as in ["team-a-*"]')


def _check_integer(entry: Mapping[Any, Any], name: str, where: str, low: float) -> None:
    value = entry.get(name, KeyEntry.__dataclass_fields__[name].default)
    if name != "best_priority" and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        limit = "" if low == -math.inf else f" of at least {low:g}"
        raise _bad(where, f"{name} must be an integer{limit}")


def _bad(where: str, what: str) -> ConfigError:
    return ConfigError(f"{where}: {what}", reason="bad_keys_file", param="keys_file")
