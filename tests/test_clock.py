"""Clock jumps: durations and deadlines are taken on the monotonic clock, and the wall clock is only shown."""

from __future__ import annotations

import ast

import pytest

from tests.test_layout import module_name, project_sources, python_files

WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now", "time.localtime"}

SHOWN = {
    "multilora_jax.server.answers": "`created` of an answer",
    "multilora_jax.server.context": "`created` of the base's card",
    "multilora_jax.server.metrics": "the value of vllm:lora_requests_info",
    "multilora_jax.server.tracing": "the times of spans",
    "multilora_jax.lora.adapter": "`created` of an adapter's card",
    "multilora_jax.template_sandbox": "the date that a chat template asks for",
}
"""Where the time of day may be read, and what for."""


def names_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{names_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def readers(sources: dict[str, tuple[str, bool]]) -> dict[str, list[int]]:
    """Lines that name a wall clock, by module."""
    found: dict[str, list[int]] = {}
    for module, (text, _) in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and names_of(node) in WALL:
                found.setdefault(module, []).append(node.lineno)
    return found


def test_the_time_of_day_is_read_where_it_is_shown_and_nowhere_else():
    known = {name for name in readers(project_sources()) if not name.startswith("multilora_jax.server.log")}
    assert known <= SHOWN.keys(), {name: readers(project_sources())[name] for name in known - SHOWN.keys()}


@pytest.mark.parametrize("text", ["import time\nx = time.time() + 5", "from datetime import datetime\ndatetime.now()"])
def test_the_audit_sees(text):
    assert readers({"m": (text, False)}) == {"m": [2]}


def test_no_module_imports_the_clock_under_another_name():
    for path in python_files("multilora_jax"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not {alias.name for alias in node.names} & {"time", "time_ns"}, module_name(path)
