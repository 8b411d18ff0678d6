"""The ways in which a request's body may say what form its answer must have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from multilora_jax.errors import UserError
from multilora_jax.request import StructuredOutputsParams

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""Older names of vLLM's for the fields of structured_outputs."""


def read_structure(body: Any) -> tuple[str, StructuredOutputsParams] | tuple[None, None]:
    """What structured_outputs, response_format or one of the guided fields asks for, and which does; None where none.

    Args:
        body: with these fields as attributes, None where they were not sent.

    Raises:
        UserError: one that is malformed, by its name, or more than one of them.
    """
    found = {
        name: value
        for name in ("structured_outputs", "response_format", *GUIDED)
        if (value := getattr(body, name)) is not None and not _is_text(name, value)
    }
    if len(found) > 1:
        raise UserError(
            f"{' and '.join(found)} both say what form the answer must have: send one of them",
            reason="conflicting_parameters", param=list(found)[-1],
        )  # fmt: skip
    for name, value in found.items():
        if name == "response_format":
            return name, StructuredOutputsParams.of(_format(value))
        try:
            return name, StructuredOutputsParams.of({GUIDED[name]: value} if name in GUIDED else value)
        except UserError as error:
            raise _named(error, name) from error
    return None, None


@contextmanager
def naming(field: str | None) -> Iterator[None]:
    """Gives errors about structured_outputs the name of the field that was sent in its place; None for none."""
    try:
        yield
    except UserError as error:
        named = error if field is None else _named(error, field)
        if named is error:
            raise
        raise named from error


def _named(error: UserError, field: str) -> UserError:
    about = "structured_outputs"
    if field == about or (error.param != about and about not in error.message):
        return error
    param = field if error.param == about else error.param
    return UserError(error.message.replace("structured_outputs", field, 1), reason=error.reason, param=param)


def _is_text(name: str, value: Any) -> bool:
    return name == "response_format" and value == {"type": "text"}


def _format(value: Any) -> dict[str, Any]:
    """OpenAI's response_format as fields of structured_outputs."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        _check_fields(value, {"type"}, "response_format")
        return {"json_object": True}
    if kind != "json_schema":
        _refuse(
            'must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": …, '
            f'"schema": …}}}}, not {value!r:.100}'
        )
    _check_fields(value, {"type", "json_schema"}, "response_format")
    inner = value.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        _refuse('must be {"name": …, "schema": …} with a JSON schema', "response_format.json_schema")
    _check_fields(inner, {"name", "description", "schema", "strict"}, "response_format.json_schema")
    return {"json": inner["schema"]}


def _check_fields(value: dict[str, Any], known: set[str], where: str) -> None:
    for name in value:
        if name not in known:
            _refuse(f"has no field {str(name)[:100]!r}", where)


def _refuse(what: str, where: str = "response_format") -> NoReturn:
    raise UserError(f"{where} {what}", reason="bad_value", param="response_format")
