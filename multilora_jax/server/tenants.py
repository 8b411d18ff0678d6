"""Who calls: the tenant behind a key, what it may see, and the salt that keeps its cache apart."""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass, field
from functools import cached_property

from multilora_jax.errors import PermissionDeniedError
from multilora_jax.key_file import KeyEntry
from multilora_jax.server.limits import Limits

ADMIN, DEFAULT, ANONYMOUS = "admin", "default", "anonymous"
"""Tenants of the configuration's admin_keys, of its api_keys, and of requests without a key where none is needed."""


@dataclass(frozen=True, eq=False)
class Caller:
    """One key, or all those without one.

    Attributes:
        tenant: whose prompts share a prefix cache.
        adapters: patterns of the names that it may use and see; None for all.
        best_priority: the lowest priority it may ask for; None for any.
        admin: whether it may manage adapters; reads_metrics: whether it may read /metrics.
        named: whether the tenant comes from the file of keys: then fair shares count by it, not by what a request
            says of its user.
        salted: whether its cached prefixes are kept from other tenants; only a server with one tenant does without.
        limits: of its requests.
    """

    tenant: str
    adapters: tuple[str, ...] | None = None
    best_priority: int | None = None
    admin: bool = False
    reads_metrics: bool = False
    named: bool = False
    salted: bool = True
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def of_entry(cls, entry: KeyEntry) -> Caller:
        """The caller that an entry of the file of keys stands for."""
        everything = entry.admin
        return cls(
            entry.tenant,
            None if everything else entry.adapters,
            None if everything else entry.best_priority,
            admin=entry.admin,
            reads_metrics=entry.metrics or entry.admin,
            named=True,
            limits=Limits(entry.requests_per_minute, entry.tokens_per_minute, entry.max_concurrent),
        )

    @property
    def sees_all(self) -> bool:
        return self.adapters is None

    def sees(self, name: str) -> bool:
        """Whether an adapter of this name exists for the caller."""
        return self.adapters is None or self._pattern.fullmatch(name) is not None

    def salt(self, own: str | None) -> str | None:
        """The engine's cache salt for a request whose own is `own`.

        JSON of a pair, so that no tenant can write a salt that comes out as another tenant's.
        """
        return json.dumps([self.tenant, own]) if self.salted else own

    def priority(self, asked: int) -> int:
        """The priority to run with. 0 stands for no wish and becomes the best that the caller may have.

        Raises:
            PermissionDeniedError: a better one is asked for (`priority_too_good`).
        """
        best = self.best_priority
        if best is None or asked >= best:
            return asked
        if asked == 0:
            return best
        raise PermissionDeniedError(
            f"priority {asked} is better than this key may ask for: send {best} or more (lower numbers run earlier)",
            reason="priority_too_good", param="priority",
        )  # fmt: skip

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # Linear in the name's length for what people write; names have at most 256 characters.
        return re.compile("|".join(map(fnmatch.translate, self.adapters or ())) or r"(?!)")
