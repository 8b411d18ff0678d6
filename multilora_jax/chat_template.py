"""Rendering of chat templates in a Jinja sandbox, with the functions that models' templates expect."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, ClassVar

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from multilora_jax.errors import UserError


class _GenerationTag(Extension):
    """`{% generation %}` marks an assistant's own words for training; for serving its body is all there is to it."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment.from_string(source)


def flatten_content(messages: Any) -> list[dict[str, Any]]:
    """Copies of the messages whose content is one string: text parts joined by newlines, None as empty.

    Raises:
        UserError: not a non-empty list of messages with a role, or content that is not text.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError("messages must be a non-empty list", reason="bad_messages", param="messages")
    return [_flatten(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _flatten(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{where} must be an object with a role", reason="bad_messages", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
            text = part.get("text") if isinstance(part, dict) else None
            if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
                raise UserError(
                    f"{where}.content has a part of type {kind!r}: only text parts with a text are supported",
                    reason="unsupported_content", param="messages",
                )  # fmt: skip
            texts.append(text)
        content = "\n".join(texts)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise UserError(f"{where}.content must be a string or text parts", reason="bad_messages", param="messages")
    return {**message, "content": content}


def render_chat(
    source: str, messages: list[dict[str, Any]], variables: dict[str, Any], *, continue_final_message: bool = False
) -> str:
    """Render a template over messages.

    Args:
        source: Jinja source; compiled once per text.
        messages: as flatten_content returns them.
        variables: further variables of the template.
        continue_final_message: cut the result right after the last message's content.

    Raises:
        UserError: reason `chat_template_error`, with what the template or Jinja said.
    """
    try:
        text = _compile(source).render(**{**variables, "messages": messages})
    # A template is a program of somebody else's: it may fail with any error, and none is this program's.
    except Exception as error:
        what = str(error) or type(error).__name__
        raise UserError(
            f"the chat template failed: {what}", reason="chat_template_error", param="chat_template"
        ) from error  # fmt: skip
    return _cut_after_last_content(text, messages[-1]["content"]) if continue_final_message else text


def _cut_after_last_content(text: str, content: str) -> str:
    core = content.strip()
    start = text.rfind(core) if core else -1
    if start < 0:
        raise UserError(
            "continue_final_message: the last message's content is empty, or the chat template changes it",
            reason="chat_template_error", param="continue_final_message",
        )  # fmt: skip
    end = start + len(core)
    trailing = content[len(content.rstrip()) :]
    return text[: end + len(trailing)] if trailing and text.startswith(trailing, end) else text[:end]
