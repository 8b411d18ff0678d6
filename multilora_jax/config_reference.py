"""The configuration reference: every key, its type, default and meaning, as Markdown made from the dataclass.

`python -m multilora_jax.config_reference` writes docs/CONFIG.md of the source tree; `--check` only says whether it is
current, and `--stdout` prints it.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from multilora_jax.config import EngineConfig, describe_keys
from multilora_jax.config_values import default_of
from multilora_jax.errors import UserError

PATH = Path(__file__).parent.parent / "docs" / "CONFIG.md"

COMMAND = "python -m multilora_jax.config_reference"

_HEAD = f"""# Configuration

Made by `{COMMAND}` from the dataclass `EngineConfig`: change the keys there, not here.

Each key may stand in the YAML file that `--config` names, on the command line of every command (`--max-num-seqs 8` or
`--max_num_seqs 8`; a flag overrides the file), and among the arguments of `LLM(…)`. Lists are written `a,b` or `a b` on
the command line, mappings `name=value`. An unknown key, a value of the wrong type and one out of range are refused by
name.
"""


def config_reference() -> str:
    """The whole document."""
    hints, docs, section_of = get_type_hints(EngineConfig), describe_keys(), sections()
    lines = [_HEAD]
    section = None
    for f in fields(EngineConfig):
        if section_of[f.name] != section:
            section = section_of[f.name]
            lines += [f"## {section}", "", "| Key | Type | Default | Meaning |", "|---|---|---|---|"]
        cells = (f"`{f.name}`", type_words(hints[f.name]), _default_words(f), docs[f.name])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if f is fields(EngineConfig)[-1] or section_of[_after(f)] != section:
            lines.append("")
    return "\n".join(lines)


def sections(config: type = EngineConfig) -> dict[str, str]:
    """Key to the heading of its group: the comment line above it in the source of its class, or where there is none
    the first line of that class's docstring."""
    found = {}
    for cls in reversed(config.__mro__):
        if not is_dataclass(cls):
            continue
        source = textwrap.dedent(inspect.getsource(cls))
        [node] = ast.parse(source).body
        assert isinstance(node, ast.ClassDef)
        heading = (ast.get_docstring(node) or cls.__name__).splitlines()[0].rstrip(".")
        comments = {
            number: line.removeprefix("    # ")
            for number, line in enumerate(source.splitlines(), 1)
            if line.startswith("    # ")
        }
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                above = [number for number in comments if number < item.lineno]
                found[item.target.id] = comments[max(above)] if above else heading
    return found


def type_words(hint: Any) -> str:
    """A key's type in the words of a YAML file."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in args)
    if origin is tuple:
        return f"list of {type_words(args[0])}"
    if origin is dict:
        return f"mapping of text to {type_words(args[1])}"
    return {str: "text", int: "integer", float: "number", bool: "true or false", object: "any value"}[hint]


def _default_words(f: Field[Any]) -> str:
    default = default_of(f)
    if f.name == "model":
        return "required"
    if default is None:
        return "–"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, (tuple, dict)) and not default:
        return "none"
    return f"`{default}`"


def _after(f: Field[Any]) -> str:
    names = [other.name for other in fields(EngineConfig)]
    return names[names.index(f.name) + 1]


def main(words: list[str]) -> int:
    """Entry point of the command; returns the exit status."""
    unknown = set(words) - {"--check", "--stdout"}
    if unknown:
        raise UserError(f"unknown argument {min(unknown)!r}: there are --check and --stdout", reason="bad_argument")
    text = config_reference()
    if "--stdout" in words:
        print(text, end="")
        return 0
    if "--check" in words:
        if PATH.exists() and PATH.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PATH} is not current: run {COMMAND}", file=sys.stderr)
        return 1
    if not PATH.parent.parent.joinpath("pyproject.toml").exists():
        raise UserError("this is no source tree: print the reference with --stdout", reason="bad_argument")
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text, encoding="utf-8")
    print(f"wrote {PATH}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error.message}")
