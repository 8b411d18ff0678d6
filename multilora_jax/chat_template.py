"""Rendering of chat templates: any message form in, one text out, and every failure the template's own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinja2 import Template

from multilora_jax.errors import UserError
from multilora_jax.template_limits import TemplateLimitError, TemplateLimits, metered
from multilora_jax.template_sandbox import TemplateEnvironment

LIMITS = TemplateLimits()
"""Of every template, whoever wrote it."""


@functools.cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


@functools.lru_cache(maxsize=64)
def _compile(source: str) -> Template:
    return _environment().template(source)


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Turns whatever a template raises into a UserError."""
    try:
        yield
    except TemplateLimitError as error:
        raise UserError(
            f"{what}: {error}, and a template may not; shorten the conversation, or use another template",
            reason="template_limit", param="chat_template",
        ) from None  # fmt: skip
    # A template is a program of somebody else's: it may fail with any error, and none is this program's.
    except Exception as error:
        says = str(error) or type(error).__name__
        raise UserError(f"{what}: {says}", reason="chat_template_error", param="chat_template") from error


def check_template(source: str) -> None:
    """Raises UserError (`chat_template_error`, `template_limit`) for a template that does not compile."""
    with _failing_as("the chat template cannot be used"), metered(LIMITS):
        _compile(source)


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
    source: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    *,
    continue_final_message: bool = False,
    limits: TemplateLimits | None = None,
) -> str:
    """Render a template over messages.

    Args:
        source: Jinja source; compiled once per text.
        messages: as flatten_content returns them.
        variables: further variables of the template.
        continue_final_message: cut the result right after the last message's content.
        limits: what the template may take; LIMITS by default.

    Raises:
        UserError: reason `chat_template_error`, with what the template or Jinja said, or `template_limit`.
    """
    with _failing_as("the chat template failed"), metered(LIMITS if limits is None else limits):
        text = _compile(source).render(**{**variables, "messages": messages})
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
