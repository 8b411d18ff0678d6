"""`adapters list`: the adapters of a running server."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from typing import Any

from absl import flags as absl_flags

from multilora_jax.adapters.show import columns, printable
from multilora_jax.errors import UnavailableError, UserError

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

ARGUMENTS = ""
EXAMPLE = "python -m multilora_jax.adapters list --url http://127.0.0.1:8000"
ABOUT = """Lists the adapters of a running server: where each is now (registered: on disk only, host, loading,
resident), its rank, the start of its digest, whether it is pinned, and its folder. Rank and digest are known once an
adapter was first read."""

TIMEOUT_S = 10.0
"""Longest wait for an answer."""


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """Defines this command's flags."""
    absl_flags.DEFINE_string("url", "http://127.0.0.1:8000", "Address of the server.", flag_values=flag_values)
    absl_flags.DEFINE_string("api_key", None, "Bearer token, where the server asks for one.", flag_values=flag_values)
    absl_flags.DEFINE_boolean("json", False, "Print JSON instead of a table.", flag_values=flag_values)


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command from parsed flags; it takes no words."""
    del words
    rows = ask_server(flag_values.url, flag_values.api_key)
    print(json.dumps(rows, indent=2) if flag_values.json else show_rows(rows))
    return 0


def ask_server(url: str, api_key: str | None = None) -> list[dict[str, Any]]:
    """Asks a server for its adapters.

    Args:
        url: its address, with or without /v1; HOST:PORT is one of http.
        api_key: bearer token, None for none.

    Returns:
        of each adapter {"name", "state", "rank", "digest", "pinned", "path"}; rank and digest None before it was read.

    Raises:
        UnavailableError: nothing answers there (`no_server`).
        UserError: the server refuses (its own reason), or what answers is no such server (`bad_server`).
    """
    if re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^/:\s]+):[0-9]+(/.*)?", url):
        url = f"http://{url}"
    address = url.rstrip("/").removesuffix("/v1") + "/v1/models"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        request = urllib.request.Request(address, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        raise _refusal(address, error.code, error.read()) from None
    except ValueError:
        raise UserError(f"url: {url!r} is no address such as http://127.0.0.1:8000", reason="bad_value") from None
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        message = f"no answer from {address} ({why}): is a server running there? (--url)"
        raise UnavailableError(message, reason="no_server", param="url") from None
    try:
        cards = [card for card in json.loads(body)["data"] if card["parent"] is not None]
        return [
            {
                "name": card["id"], "state": card["state"], "rank": card["rank"], "digest": card["digest"],
                "pinned": card["pinned"], "path": card["root"],
            }
            for card in cards
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"what answers at {address} does not list adapters as this package's server does",
            reason="bad_server", param="url",
        ) from None  # fmt: skip


def show_rows(rows: list[dict[str, Any]]) -> str:
    """Rows of ask_server as a table."""
    if not rows:
        return "no adapters"
    lines = [("name", "state", "rank", "digest", "pinned", "path")]
    for row in rows:
        rank, digest = row["rank"], row["digest"]
        known = ("-" if rank is None else str(rank), "-" if digest is None else digest[:12])
        pinned = "yes" if row["pinned"] else "no"
        lines.append((printable(row["name"]), row["state"], *known, pinned, printable(row["path"])))
    return columns(lines)


def _refusal(address: str, status: int, body: bytes) -> UserError:
    try:
        error = json.loads(body)["error"]
        return UserError(f"{address} answers {status}: {error['message']}", reason=error.get("reason") or "refused")
    except (ValueError, KeyError, TypeError, AttributeError):
        return UserError(f"{address} answers {status}: is it a server of this package?", reason="bad_server")
