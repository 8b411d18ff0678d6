"""The `tools` and `tool_choice` of a chat request: checked, and as a grammar where the answer has to be a call."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from multilora_jax.config_api import ToolCallParserName
from multilora_jax.errors import UserError
from multilora_jax.request import StructuredOutputsParams
from multilora_jax.server.tool_readers import CLOSE, OPEN, PYTHON_TAG

MAX_TOOLS = 128
MAX_WHITESPACE = 8
"""Most characters of white space in one place of a call: room for the indents that models write."""
NAME_PATTERN = r"[A-Za-z0-9_.-]{1,64}"
MODES = ("none", "auto", "required")
_KEYWORD = {"hermes": "arguments", "llama3_json": "parameters"}
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True)
class Tool:
    """One function that the model may call.

    Attributes:
        given: the tool as chat templates take it: as it was sent, and never without parameters.
        parameters: a JSON schema.
        strict: its arguments follow the schema also where the model need not call anything.
    """

    name: str
    given: dict[str, Any]
    parameters: dict[str, Any]
    strict: bool


@dataclass(frozen=True)
class ToolChoice:
    """What a request's tool_choice asks for: a mode of MODES, or "named" and the function's name."""

    mode: str
    name: str | None = None

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode in ("required", "named")


def check_tools(value: Any) -> list[Tool]:
    """The tools of a request; none for null and for an empty list.

    Raises:
        UserError: param is `tools`, and the message says which entry is at fault.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        _refuse(f"tools must be a list of functions, not {value!r:.100}", "bad_type")
    if len(value) > MAX_TOOLS:
        _refuse(f"tools has {len(value)} entries: at most {MAX_TOOLS} are served", "too_many_tools")
    tools = [_tool(item, f"tools[{i}]") for i, item in enumerate(value)]
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            _refuse(f"tools[{i}].function.name: {tool.name!r} is there twice", "duplicate_tool")
        seen.add(tool.name)
    return tools


def _tool(item: Any, where: str) -> Tool:
    if not isinstance(item, dict):
        _refuse(f'{where} must be {{"type": "function", "function": {{…}}}}, not {item!r:.100}', "bad_type")
    if item.get("type") != "function":
        _refuse(f'{where}.type must be "function", not {item.get("type")!r:.100}', "unsupported_tool")
    _check_fields(item, ("type", "function"), where)
    function = item.get("function")
    where = f"{where}.function"
    if not isinstance(function, dict):
        _refuse(f"{where} must be an object with a name, not {function!r:.100}", "bad_type")
    _check_fields(function, _FUNCTION_FIELDS, where)
    name = function.get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        _refuse(f"{where}.name must be 1 to 64 letters, digits, '_', '-' or '.', not {name!r:.100}", "bad_tool_name")
    description, parameters, strict = (function.get(key) for key in _FUNCTION_FIELDS[1:])
    if not isinstance(description, str | None):
        _refuse(f"{where}.description must be a text, not {description!r:.100}", "bad_type")
    if not isinstance(parameters, dict | None):
        _refuse(f"{where}.parameters must be a JSON schema, not {parameters!r:.100}", "bad_type")
    if not isinstance(strict, bool | None):
        _refuse(f"{where}.strict must be true or false, not {strict!r:.100}", "bad_type")
    parameters = parameters or {"type": "object", "properties": {}}
    given = {**item, "function": {**function, "parameters": parameters}}
    return Tool(name, given, parameters, bool(strict))


def check_tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """What tool_choice means for these tools; without it auto where there are any, else none.

    Raises:
        UserError: param is `tool_choice`.
    """
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if isinstance(value, str) and value in MODES:
        if value == "required" and not tools:
            _refuse("tool_choice is required and there are no tools: send tools", "missing_tools", "tool_choice")
        return ToolChoice(value if tools else "none")
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or set(value) > {"type", "function"} or set(function or ()) > {"name"}:
        _refuse(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}, not '
            f"{value!r:.100}",
            "bad_value", "tool_choice",
        )  # fmt: skip
    if name not in [tool.name for tool in tools]:
        names = ", ".join(tool.name for tool in tools[:20]) or "there are none"
        _refuse(f"tool_choice: no tool is called {name[:100]!r}: the tools are {names}", "unknown_tool", "tool_choice")
    return ToolChoice("named", name)


def tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    style: ToolCallParserName,
    *,
    parallel: bool = True,
    answer: StructuredOutputsParams | None = None,
) -> StructuredOutputsParams | None:
    """The form that an answer with tools must have; None where it may be any text.

    Where a call is asked for, the answer is calls in the model's own style whose arguments follow the tools' schemas.
    Under "auto" the answer may be anything, but for calls to tools that are strict.

    Args:
        style: "hermes" or "llama3_json".
        parallel: whether there may be several calls.
        answer: what an answer that calls nothing must be: a JSON schema or any JSON object.
    """
    keyword = _KEYWORD[style]
    named = [tool for tool in tools if choice.name in (None, tool.name)]
    calls = " | ".join(f"%json {_call_schema(tool, keyword, choice.forced or tool.strict)}" for tool in named)
    if style == "hermes":
        call, gap = f'"{OPEN}" /\\s{{0,2}}/ ({calls}) /\\s{{0,2}}/ "{CLOSE}"', "/\\s{0,2}/"
    else:
        call, gap = f"{calls}", "/;\\s?/"
    several = parallel and choice.mode != "named"
    rules = [f"call: {call}", f"calls: call ({gap} call)*" if several else "calls: call"]
    if choice.forced:
        return _lark("start: calls", *rules)
    if answer is not None:
        schema = {"type": "object"} if answer.kind == "json_object" else answer.json
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return _lark(f"start: calls | %json {text}", *rules)
    if not any(tool.strict for tool in tools):
        return None
    if style == "llama3_json":
        return _lark("start: calls | TEXT", *rules, "TEXT: /([^{\\s](.|\\n)*)?/")
    # Text up to a tag, then what belongs in it; and in the end text without a tag.
    rules = [
        f'after: /\\s{{0,2}}/ ({calls}) /\\s{{0,2}}/ "{CLOSE}"',
        f"tag[lazy]: /(.|\\n)*{OPEN}/",
        f"REST: /(.|\\n)*/ & ~/(.|\\n)*{OPEN}(.|\\n)*/",
    ]
    return _lark(f"start: (tag after){'*' if parallel else '?'} REST", *rules)


def style_of(configured: ToolCallParserName, template: str | None) -> ToolCallParserName:
    """How the model writes calls: as configured, or what its chat template shows.

    Raises:
        UserError: the template takes no tools, or shows no style that is known here; param is `tools`.
    """
    text = template or ""
    if not re.search(r"\btools\b", text):
        _refuse(
            "the chat template of this model takes no tools: leave tools out, send tool_choice none, or have the "
            "server started with a chat_template that takes them",
            "template_without_tools",
        )
    if configured != "auto":
        return configured
    if OPEN in text:
        return "hermes"
    if PYTHON_TAG in text or re.search(r"\\?[\"']parameters\\?[\"']", text):
        return "llama3_json"
    _refuse(
        "the chat template of this model does not show how it writes tool calls: have the server started with "
        "tool_call_parser hermes or llama3_json",
        "unknown_tool_style",
    )


def _call_schema(tool: Tool, keyword: str, strictly: bool) -> str:
    """A call's JSON object as a JSON schema: the tool's own parameters moved one level down."""
    inner: Any = {"type": "object"}
    if strictly:
        own = {key: value for key, value in tool.parameters.items() if key not in ("$schema", "$id")}
        try:
            inner = _moved(own, f"#/properties/{keyword}")
        except RecursionError:
            _refuse(f"tools: the parameters of {tool.name!r} are nested too deep", "bad_value")
    schema = {
        "x-guidance": {"whitespace_pattern": f"[ \\n\\r\\t]{{1,{MAX_WHITESPACE}}}"},
        "type": "object",
        "properties": {"name": {"const": tool.name}, keyword: inner},
        "required": ["name", keyword],
        "additionalProperties": False,
    }
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError) as error:
        _refuse(f"tools: the parameters of {tool.name!r} are no JSON schema: {error}", "bad_value")


def _moved(schema: Any, prefix: str) -> Any:
    """A schema whose references to its own parts still find them below `prefix`."""
    if isinstance(schema, list):
        return [_moved(item, prefix) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: _moved(value, prefix) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        out["$ref"] = prefix + reference[1:]
    return out


def _lark(*lines: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(grammar="\n".join(lines) + "\n")


def _check_fields(item: dict[str, Any], known: Sequence[str], where: str) -> None:
    for name in item:
        if name not in known:
            _refuse(
                f"{where} has an unknown field {str(name)[:100]!r}: it takes {', '.join(known)}", "unknown_parameter"
            )


def _refuse(message: str, reason: str, param: str = "tools") -> NoReturn:
    raise UserError(message, reason=reason, param=param)
