"""Chat messages as a template takes them."""

from __future__ import annotations

from typing import Any

from multilora_jax.chat_template import flatten_content
from multilora_jax.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "name")


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of role, text content and, where it was sent, name.

    Fields of an answer of this API (`refusal`, `audio`...) may come back in the conversation as long as they are
    empty.

    Raises:
        UserError: the message says which one is at fault.
    """
    return [_message(message, f"messages[{i}]") for i, message in enumerate(flatten_content(messages))]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if message["role"] not in ROLES:
        raise UserError(
            f"{where}.role must be one of {', '.join(ROLES)}, not {message['role'][:100]!r}",
            reason="bad_messages", param="messages",
        )  # fmt: skip
    for name, value in message.items():
        if name not in FIELDS and value not in (None, [], {}):
            raise UserError(
                f"{where}: the field {name[:100]!r} is not supported by this server: a message has {', '.join(FIELDS)}",
                reason="unsupported_parameter", param="messages",
            )  # fmt: skip
    return {name: message[name] for name in FIELDS if message.get(name) is not None}
