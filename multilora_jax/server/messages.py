"""Chat messages as a template takes them."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from multilora_jax.chat_template import flatten_content
from multilora_jax.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("role", "content", "name")
_OF_ROLE = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages of role, text content and, where they were sent, name, an assistant's tool_calls, a tool's
    tool_call_id. Only an assistant's message may be without content: it may have called tools instead.

    The arguments of tool calls, which the API has as text, come out as the object that they spell, which is what
    templates expect; text that spells none stays text. Fields of an answer of this API (`refusal`, `audio`...) may come
    back in the conversation as long as they are empty.

    Raises:
        UserError: the message says which one is at fault.
    """
    flat = flatten_content(messages)
    return [
        _message(message, f"messages[{i}]", has_content=given.get("content") is not None)
        for i, (message, given) in enumerate(zip(flat, messages, strict=True))
    ]


def _message(message: dict[str, Any], where: str, *, has_content: bool) -> dict[str, Any]:
    role = message["role"]
    if role not in ROLES:
        _refuse(f"{where}.role must be one of {', '.join(ROLES)}, not {role[:100]!r}")
    known = (*FIELDS, *_OF_ROLE.get(role, ()))
    for name, value in message.items():
        if name not in known and value not in (None, [], {}):
            _refuse(
                f"{where}: the field {name[:100]!r} is not supported by this server: a message of the role {role} has "
                f"{', '.join(known)}",
                "unsupported_parameter",
            )
    if role != "assistant" and not has_content:
        _refuse(f"{where}.content is missing: a message of the role {role} needs a text, which may be empty")
    out = {name: message[name] for name in known if message.get(name) is not None}
    for name in ("name", "tool_call_id"):
        if not isinstance(out.get(name, ""), str):
            _refuse(f"{where}.{name} must be a text, not {out[name]!r:.100}")
    calls = out.pop("tool_calls", [])
    if not isinstance(calls, list):
        _refuse(f"{where}.tool_calls must be a list, not {calls!r:.100}")
    if calls:  # templates ask whether there is such a field
        out["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return out


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        _refuse(f'{where} must be {{"id": …, "type": "function", "function": {{…}}}}, not {call!r:.100}')
    for name, value in call.items():
        if name not in ("id", "type", "function", "index") and value is not None:
            _refuse(f"{where} has an unknown field {name[:100]!r}: it takes id, type and function")
    if not isinstance(call.get("id", ""), str | None):
        _refuse(f"{where}.id must be a text, not {call['id']!r:.100}")
    index = call.get("index")  # as the pieces of a stream have it
    if index is not None and type(index) is not int:
        _refuse(f"{where}.index must be a whole number, not {index!r:.100}")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(f"{where}.function must have a name, and arguments")
    for name, value in function.items():
        if name not in ("name", "arguments") and value is not None:
            _refuse(f"{where}.function has an unknown field {name[:100]!r}: it takes name and arguments")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        _refuse(f"{where}.function.arguments must be a JSON object as text, not {arguments!r:.100}")
    given = {"id": call["id"]} if call.get("id") is not None else {}
    return {**given, "type": "function", "function": {"name": function["name"], "arguments": _spelled(arguments)}}


def _spelled(arguments: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """The object that the text spells; the text itself where that is none, as in an answer that was cut off."""
    if not isinstance(arguments, str):
        return arguments or {}
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _refuse(message: str, reason: str = "bad_messages") -> NoReturn:
    raise UserError(message, reason=reason, param="messages")
