"""JSON schemas of the fields whose values pydantic does not check itself, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from multilora_jax.request import MAX_LOGPROBS, MAX_SCALE
from multilora_jax.sampling_params import MAX_N, MAX_PROMPT_LOOKUP, MAX_STOP_CHARS, MAX_STOPS
from multilora_jax.server.mixes import MAX_ADAPTERS
from multilora_jax.server.tools import MAX_TOOLS, MODES, NAME_PATTERN

Schema = dict[str, Any]


def or_null(*schemas: Schema) -> Schema:
    """Any of these, or null."""
    return {"anyOf": [*schemas, {"type": "null"}]}


def _object(properties: Schema, required: list[str], **extra: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **extra}


def _list(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    return {"type": "array", "items": items, "minItems": low, **({} if high is None else {"maxItems": high})}


def integer(low: int, high: int | None = None) -> Schema:
    """json_schema_extra of an integer field that may be null: its range."""
    limits = {"minimum": low} | ({} if high is None else {"maximum": high})
    return {"anyOf": [{"type": "integer", **limits}, {"type": "null"}]}


def number(**limits: float) -> Schema:
    """The same of a number."""
    return {"anyOf": [{"type": "number", **limits}, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
NON_EMPTY: Schema = {"type": "string", "minLength": 1}
TOKEN: Schema = {"type": "integer", "minimum": 0}

POSITIVE = integer(1)
LOGPROBS = integer(0, MAX_LOGPROBS)
CONTINUATIONS = integer(1, MAX_N)
LOOKUP = integer(0, MAX_PROMPT_LOOKUP)
TRUNCATION: Schema = {"anyOf": [{"type": "integer", "const": -1}, {"type": "integer", "minimum": 1}, {"type": "null"}]}

PROMPT: Schema = {
    "anyOf": [NON_EMPTY, _list(NON_EMPTY, 1), _list(TOKEN, 1), _list(_list(TOKEN, 1), 1)],
    "examples": ["The capital of France is"],
}

_MIX_ENTRY = _object(
    {"name": NON_EMPTY, "scale": or_null({"type": "number", "minimum": -MAX_SCALE, "maximum": MAX_SCALE})}, ["name"]
)
LORA = or_null(_list(_MIX_ENTRY, high=MAX_ADAPTERS), _MIX_ENTRY)

_STOP: Schema = {**NON_EMPTY, "maxLength": MAX_STOP_CHARS}
STOP = or_null(_STOP, _list(_STOP, 0, MAX_STOPS))

_TEXT_PART = {"type": "object", "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": TEXT},
              "required": ["text"]}  # fmt: skip
_CONTENT: Schema = {"anyOf": [TEXT, _list(_TEXT_PART)]}
_CALL = _object(
    {
        "id": or_null(TEXT),
        "type": {"const": "function"},
        "index": or_null({"type": "integer"}),
        "function": _object(
            {"name": TEXT, "arguments": or_null(TEXT, {"type": "object"})}, ["name"]
        ),
    },
    ["function"],
)  # fmt: skip
_SPOKEN = {"content": _CONTENT, "name": or_null(TEXT)}
# Further fields may stand in a message as long as they are empty, as those of an answer are that comes back.
_EMPTY: Schema = {"enum": [None, [], {}]}
MESSAGES = _list(
    {
        "anyOf": [
            {
                "type": "object",
                "properties": {"role": {"enum": ["system", "developer", "user"]}, **_SPOKEN},
                "required": ["role", "content"],
                "additionalProperties": _EMPTY,
            },
            {
                "type": "object",
                "properties": {
                    "role": {"const": "assistant"},
                    **_SPOKEN,
                    "content": or_null(_CONTENT),
                    "tool_calls": or_null(_list(_CALL)),
                },
                "required": ["role"],
                "additionalProperties": _EMPTY,
            },
            {
                "type": "object",
                "properties": {"role": {"const": "tool"}, **_SPOKEN, "tool_call_id": or_null(TEXT)},
                "required": ["role", "content"],
                "additionalProperties": _EMPTY,
            },
        ]
    },
    1,
)  # fmt: skip
MESSAGES["examples"] = [[{"role": "user", "content": "What is the capital of France?"}]]

_FUNCTION_NAME: Schema = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
_FUNCTION = _object(
    {
        "name": _FUNCTION_NAME,
        "description": or_null(TEXT),
        "parameters": or_null({"type": "object"}),
        "strict": or_null({"type": "boolean"}),
    },
    ["name"],
)  # fmt: skip
TOOLS = or_null(
    _list(_object({"type": {"const": "function"}, "function": _FUNCTION}, ["type", "function"]), high=MAX_TOOLS)
)
TOOL_CHOICE = or_null(
    {"enum": list(MODES)},
    _object(
        {"type": {"const": "function"}, "function": _object({"name": _FUNCTION_NAME}, ["name"])}, ["type", "function"]
    ),
)

STRUCTURED_OUTPUTS = or_null(
    {
        "type": "object",
        "description": "exactly one of json, regex, choice, grammar and json_object",
        "properties": {
            "json": or_null(TEXT, {"type": "object"}),
            "regex": or_null(TEXT),
            "choice": or_null(_list(NON_EMPTY, 1)),
            "grammar": or_null(TEXT),
            "json_object": or_null({"type": "boolean"}),
            "disable_any_whitespace": {"type": "boolean"},
        },
        "additionalProperties": False,
        "minProperties": 1,
    }
)
GUIDED_JSON = or_null(TEXT, {"type": "object"})
GUIDED_TEXT = or_null(TEXT)
GUIDED_CHOICE = or_null(_list(NON_EMPTY, 1))
_JSON_SCHEMA = _object(
    {"name": {}, "description": {}, "schema": {"type": "object"}, "strict": {}}, ["schema"]
)  # fmt: skip
RESPONSE_FORMAT = or_null(
    {"const": {"type": "text"}},
    {"const": {"type": "json_object"}},
    _object({"type": {"const": "json_schema"}, "json_schema": _JSON_SCHEMA}, ["type", "json_schema"]),
)
