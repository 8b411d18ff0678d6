"""Tool calls in an answer's shape: the message of a whole answer, the deltas of a stream."""

from __future__ import annotations

import uuid
from typing import Any

from multilora_jax.config_api import ToolCallParserName
from multilora_jax.request import FinishReason, StructuredOutputsParams
from multilora_jax.server.chat_protocol import ChatBody
from multilora_jax.server.inputs import Voice
from multilora_jax.server.tool_readers import READERS, CallArguments, CallStart, TextPiece
from multilora_jax.server.tools import style_of, tool_grammar


class ToolUse:
    """What a chat request's tools mean for its answers; without any, or under tool_choice none, nothing.

    Args:
        configured: the server's tool_call_parser.

    Attributes:
        structure: the form that an answer must have because of them; None for the form that the request asks for.

    Raises:
        UserError: the chat template cannot tell the model of tools.
    """

    def __init__(self, body: ChatBody, voice: Voice, configured: ToolCallParserName):
        self._body = body
        self._style: ToolCallParserName | None = None
        self.structure: StructuredOutputsParams | None = None
        if body.choice.mode != "none":
            self._style = style_of(configured, voice.tool_template)
            self.structure = tool_grammar(
                body.checked_tools, body.choice, self._style,
                parallel=body.parallel_tool_calls is not False, answer=body.structure,
            )  # fmt: skip

    @property
    def style(self) -> ToolCallParserName | None:
        """How the answer writes calls; None where it has none."""
        return self._style

    @property
    def structure_field(self) -> str | None:
        """The field that an error about the answer's form blames."""
        field = self._body.structure_field
        if self.structure is not None and (field is None or self._body.choice.forced):
            return "tools"
        return field

    def writer(self) -> AnswerWriter:
        """For one answer."""
        return AnswerWriter(self._style, self._body.max_calls, self._body.choice.mode == "named")


class AnswerWriter:
    """One answer's text as content and calls.

    Args:
        style: how it writes calls; None where all is content.
        max_calls: calls beyond so many are left out.
        is_named: the request names the function to call.
    """

    def __init__(self, style: ToolCallParserName | None, max_calls: int | None = None, is_named: bool = False):
        self._reader = None if style is None else READERS[style](max_calls)
        self._is_named = is_named

    def delta(self, text: str, ended: bool) -> dict[str, Any]:
        """What the next piece of text, the last one where `ended`, adds to the message."""
        if self._reader is None:
            return {"content": text} if text else {}
        events = self._reader.feed(text)
        if ended:
            events += self._reader.finish()
        content = ""
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            if isinstance(event, TextPiece):
                content += event.text
            elif isinstance(event, CallStart):
                calls[event.index] = {
                    "index": event.index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }  # fmt: skip
            else:
                assert isinstance(event, CallArguments)
                call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += event.text
        out: dict[str, Any] = {"content": content} if content else {}
        if calls:
            out["tool_calls"] = [calls[index] for index in sorted(calls)]
        return out

    def message(self, text: str) -> dict[str, Any]:
        """The message of a whole answer."""
        delta = self.delta(text, ended=True)
        calls = [{k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls", [])]
        content = delta.get("content", None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None}
        return {**message, "tool_calls": calls} if calls else message

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's, but "tool_calls" where the model chose to call something."""
        called = self._reader is not None and self._reader.num_calls > 0 and not self._is_named
        return "tool_calls" if called and reason == FinishReason.STOP.value else reason
