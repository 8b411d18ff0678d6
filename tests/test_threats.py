"""docs/THREATS.md: every line names a test, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "THREATS.md").read_text(encoding="utf-8")
DEFENDED = TEXT.partition("## Not defended")[0]


def functions_of(path: str) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, functions)}


def test_every_threat_names_a_test_and_every_test_exists():
    threats = re.split(r"^- ", DEFENDED, flags=re.MULTILINE)[1:]
    assert len(threats) >= 25
    for threat in threats:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", threat)
        assert named, threat
        for path, name in named:
            assert name in functions_of(path), f"{path}::{name}"
