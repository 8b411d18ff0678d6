"""The page's files and the headers that a browser gets with them. They hold nothing secret: they are open to all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

INDEX = "index.html"

NAMES = (
    "index.html", "page.css", "parts.css", "icon.svg", "theme.js", "main.js", "dom.js", "api.js", "colours.js",
    "live.js", "pool.js", "batch.js", "charts.js", "adapters.js", "playground.js", "answers.js", "picker.js",
)  # fmt: skip
"""What may be asked for; nothing else of the folder is served."""

PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in NAMES if name != INDEX)})
"""The routes of these files."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Only this server's own files run, and no text can become markup or code, whatever an adapter is called."""

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class PageFile:
    """One file, with the headers of its answer."""

    content: bytes
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        return self.headers["ETag"]


@cache
def page_file(name: str) -> PageFile:
    """A file of NAMES, read once. Raises KeyError for any other name."""
    if name not in NAMES:
        raise KeyError(name)
    content = files("multilora_jax.server").joinpath("page", name).read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
    kind = TYPES[name[name.rindex(".") :]]
    return PageFile(content, {**HEADERS, "Content-Type": kind, "ETag": etag})
