"""The configuration's keys about connections and the server's end: their descriptions and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multilora_jax.config_values import key_info

SERVING: Mapping[str, dict[str, Any]] = {
    "max_connections": key_info(
        "Connections that are served at once; further ones are told so with 503 and Retry-After, and cut where they "
        "are very many.",
        low=1,
    ),
    "client_timeout_s": key_info(
        "Seconds after which a client is cut off that neither goes on sending its request nor goes on reading its "
        "answer.",
        above=0,
    ),
}
"""Key to its metadata."""
