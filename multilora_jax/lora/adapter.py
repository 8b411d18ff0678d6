"""What the rest of the system calls an adapter: a name, and one version of what stands behind it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multilora_jax.lora.packing import AdapterLayout
    from multilora_jax.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class AdapterVersion:
    """What one content of an adapter is; small, and kept for as long as the adapter is registered.

    Attributes:
        digest: SHA-256 (hex) of the content.
        layout: where everything lies in its pages.
        base_model: what the adapter says it was trained on, advisory.
        tokenizer: the adapter's own, None where it brings none or one equal to the base's.
        chat_template: the adapter's own Jinja template, None where it brings none.
        warnings: what is odd about it but served.
    """

    digest: str
    layout: AdapterLayout = field(repr=False)
    base_model: str | None = None
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    chat_template: str | None = field(default=None, repr=False)
    warnings: tuple[str, ...] = ()


@dataclass(eq=False)
class Adapter:
    """One registration of a name; compared by identity, so an old and a new version of one name are two adapters.

    Nothing but the name and the path is known until the first load sets `version`. The pages themselves live in the
    host tier and in the pool, not here.

    Attributes:
        name, int_id: as registered.
        path: absolute folder, as the caller spelled it; empty for one that was handed over in memory.
        folder: the real folder behind `path` when it was registered, which every load reads: a link that moves on to
            another version does not change this one. Empty for one that was handed over in memory.
        trusted: the path comes from the operator, so adapter_roots does not bind it.
        created: time.time() of the registration.
        version: set once, by the first load.
    """

    name: str
    int_id: int
    path: str
    folder: str = ""
    trusted: bool = False
    created: float = field(default_factory=time.time)
    version: AdapterVersion | None = None

    @property
    def digest(self) -> str | None:
        """SHA-256 (hex) of the content, None before the first load."""
        return None if self.version is None else self.version.digest

    @property
    def layout(self) -> AdapterLayout:
        """Of the loaded version."""
        assert self.version is not None, f"adapter {self.name!r} was never loaded"
        return self.version.layout

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return self.layout.rank

    @property
    def num_rows(self) -> int:
        """Rank rows that it takes in a step: its rank, and a row each for biases, gains and norms where it has such."""
        return self.layout.num_rows

    @property
    def num_pages(self) -> int:
        """Page ids that it takes in the pool."""
        return self.layout.num_pages
