"""How log records are written: lines for people, or one JSON object a line.

A record may have `fields` (`log.info("request", extra={"fields": {...}})`): name to value, which become name=value in
text and keys of the object in JSON.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any


class TextFormatter(logging.Formatter):
    """Time, level, message, and the fields as name=value; always one line but for a traceback."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        line = super().formatMessage(record)
        fields = getattr(record, "fields", {})
        return " ".join([line, *(f"{name}={_word(value)}" for name, value in fields.items() if value is not None)])


class JsonFormatter(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, message, the fields, and a traceback as `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def log_to_stderr(log_format: str = "text", level: int = logging.INFO) -> None:
    """Writes each of the package's log records of this level and above to stderr; text or json."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logger = logging.getLogger("multilora_jax")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


def _word(value: Any) -> str:
    """A value without spaces or line ends outside of quotes."""
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
