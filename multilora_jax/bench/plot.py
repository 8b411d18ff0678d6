"""`bench plot`: the picture of a report that a benchmark wrote."""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags as absl_flags

from multilora_jax.bench.figure import check_figure, draw
from multilora_jax.bench.report import check_writable
from multilora_jax.errors import ConfigError, UserError

ARGUMENTS = "REPORT.json OUT"
EXAMPLE = "python -m multilora_jax.bench plot out.json out.png"
ABOUT = """Draws a report that another command wrote with --json. OUT ends in .png, .svg, .pdf or .html."""


def define_flags(flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> None:
    """This command has no flags."""


def main(words: list[str], flag_values: absl_flags.FlagValues = absl_flags.FLAGS) -> int:
    """Runs the command on its two words."""
    del flag_values
    if len(words) != 2:
        raise UserError(f"give {ARGUMENTS}, for example: {EXAMPLE}", reason="bad_argument")
    source, out = words
    check_figure(out)
    check_writable(out, "plot")
    try:
        report = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot: cannot read {source!r}: {error}", reason="bad_report", param="plot") from None
    if not isinstance(report, dict):
        raise ConfigError(f"plot: {source!r} is no report", reason="bad_report", param="plot")
    draw(report, out)
    return 0
