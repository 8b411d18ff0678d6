"""What every benchmark command puts out: a plain table, and a JSON file of one form."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from multilora_jax import __version__
from multilora_jax.bench.figure import check_figure, draw
from multilora_jax.errors import ConfigError

# The flags count as those of the program that asks for them, so that its --help lists them.
absl_flags.disclaim_key_flags()

Row = Mapping[str, Any]


def make_report(command: str, config: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """{"command", "config", "versions", "rows"}, ready for JSON: the form that every command writes."""
    return {"command": command, "config": dict(config), "versions": versions(), "rows": [dict(row) for row in rows]}


def define_output_flags(flag_values: absl_flags.FlagValues) -> None:
    """Defines --json and --plot."""
    absl_flags.DEFINE_string("json", None, "File to write the figures to.", flag_values=flag_values)
    absl_flags.DEFINE_string(
        "plot", None, "File to draw the figures in: .png, .svg, .pdf or .html; needs matplotlib (the extra bench).",
        flag_values=flag_values,
    )  # fmt: skip


def check_outputs(flag_values: absl_flags.FlagValues) -> None:
    """Raises ConfigError where what --json and --plot name cannot be written: before a long run, not after."""
    if flag_values.json is not None:
        check_writable(flag_values.json)
    if flag_values.plot is not None:
        check_writable(flag_values.plot, "plot")
        check_figure(flag_values.plot)


def write_outputs(flag_values: absl_flags.FlagValues, report: Mapping[str, Any]) -> None:
    """Writes a report where --json and --plot say."""
    if flag_values.json is not None:
        write_json(flag_values.json, report)
    if flag_values.plot is not None:
        draw(report, flag_values.plot)


def write_json(path: str, report: Mapping[str, Any]) -> None:
    """Writes a report; NaN and infinities are refused with ValueError, as JSON has none."""
    Path(path).write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def check_writable(path: str, param: str = "json") -> None:
    """Raises ConfigError where a file of this name cannot be written: to be told before a long run, not after."""
    folder = Path(path).parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{param}: cannot write {path!r}: give a file name in an existing folder", reason="bad_value", param=param
        )


def versions() -> dict[str, Any]:
    """Versions of what decides the figures, and the machine."""
    out: dict[str, Any] = {"multilora_jax": __version__, "python": platform.python_version()}
    for package in ("jax", "jaxlib", "flax", "numpy"):
        out[package] = metadata.version(package)
    return {**out, "platform": platform.platform(), "cpu_model": cpu_model(), "cpu_count": cpu_count()}


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def cpu_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def table(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Rows as aligned text.

    Args:
        columns: key to its format specification (".1f"); text is aligned left, numbers right, None is a dash.
    """
    cells = [[*columns]]
    for row in rows:
        cells.append(["-" if row[key] is None else format(row[key], spec) for key, spec in columns.items()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [all(isinstance(row[key], str) for row in rows) for key in columns]
    lines = [
        "  ".join(c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(line, widths, left, strict=True))
        for line in cells
    ]
    return "\n".join(line.rstrip() for line in lines)
