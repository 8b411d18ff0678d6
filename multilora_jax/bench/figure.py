"""The picture of a report: one for each command, drawn from the JSON rows with matplotlib (the extra `bench`)."""

from __future__ import annotations

import html
import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multilora_jax.bench.extras import require
from multilora_jax.bench.feature_panels import FEATURE_PANELS
from multilora_jax.bench.panels import LINE, Panel, Report, bars, has, legend, round_bars
from multilora_jax.bench.trace_panels import TRACE_PANELS
from multilora_jax.errors import ConfigError

KINDS = (".png", ".svg", ".pdf", ".html")
"""What a picture's file name may end in; .html is a page with the picture in it as SVG."""

FLOOR_WORDS = "floor by bytes read"


def check_figure(path: str) -> None:
    """Raises ConfigError where no picture of this name can be drawn: to be told before a long run, not after."""
    if Path(path).suffix.lower() not in KINDS:
        raise ConfigError(
            f"plot: {path!r} must end in one of {', '.join(KINDS)}, which says what is written",
            reason="bad_value", param="plot",
        )  # fmt: skip
    require("matplotlib", "bench", "plot")


def draw(report: Report, path: str) -> None:
    """Draws a report.

    Args:
        report: as a command writes it to JSON.
        path: the file; its ending says what is written, see KINDS.

    Raises:
        ConfigError: see check_figure; or no command of these names wrote this report (`bad_report`).
    """
    check_figure(path)
    panels = _PANELS.get(str(report.get("command")))
    if panels is None or not report.get("rows"):
        raise ConfigError(
            f"plot: no rows of a command among {', '.join(_PANELS)} in this report", reason="bad_report", param="plot"
        )
    # By name: the package is there without matplotlib. Without pyplot nothing looks for a screen.
    figures = importlib.import_module("matplotlib.figure")
    shown = [panel for panel in panels if panel.wanted(report)]
    figure = figures.Figure(figsize=(5.6 * len(shown), 4.6), layout="constrained")
    for number, panel in enumerate(shown):
        panel.draw(figure.add_subplot(1, len(shown), number + 1), report)
    figure.suptitle(_title(report), fontsize=10)
    if Path(path).suffix.lower() != ".html":
        figure.savefig(path, dpi=130)
        return
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    title = html.escape(_title(report))
    page = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
    Path(path).write_text(page + svg.getvalue()[svg.getvalue().index("<svg") :] + "</html>\n", encoding="utf-8")


def _title(report: Report) -> str:
    config, versions = report.get("config", {}), report.get("versions", {})
    words = [str(report["command"]), config.get("model"), config.get("dtype"), versions.get("cpu_model")]
    return "   ".join(str(word) for word in words if word)


def _ratio_bars(key: str, floor_key: str, by_round: str, label: str) -> Callable[[Any, Report], None]:
    """Bars of a ratio by mix, a line across each where its floor is, and a dot for each round."""

    def draw(axes: Any, report: Report) -> None:
        rows = report["rows"]
        round_bars(
            axes, [row["mix"] for row in rows], [row[key] for row in rows], [row[by_round] for row in rows],
            marks=[row[floor_key] for row in rows], words=FLOOR_WORDS,
        )  # fmt: skip
        axes.set(xlabel="mix of adapters", ylabel=label)

    return draw


def _speed_by_mix(axes: Any, report: Report) -> None:
    rows = report["rows"]
    bars(axes, [row["mix"] for row in rows], {"": [row["tokens_per_second"] for row in rows]}, ".0f")
    axes.set(xlabel="mix of adapters", ylabel="new tokens per second")


def _lines(
    keys: Mapping[str, tuple[str, dict[str, Any]]], label: str, scale: float = 1.0
) -> Callable[[Any, Report], None]:
    """Lines over the number of adapters, on a logarithmic axis.

    Args:
        keys: key of a row to (its words, how it is drawn).
        label: of the vertical axis.
        scale: factor on the values.
    """

    def draw(axes: Any, report: Report) -> None:
        rows = report["rows"]
        for key, (words, style) in keys.items():
            axes.plot([row["num_adapters"] for row in rows], [row[key] * scale for row in rows], label=words, **style)
        counts = [row["num_adapters"] for row in rows]
        axes.set_xscale("log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set(xlabel="registered adapters", ylabel=label)
        axes.grid(alpha=0.3)
        legend(axes)

    return draw


_MARKED = {"marker": "o"}
_DASHED = {"color": "black", "linestyle": "--"}


def _cold_times(axes: Any, report: Report) -> None:
    rows = report["rows"]
    keys = {"cold adapter": "cold_ttft_p50_s", "adapter in the pool": "warm_ttft_p50_s"}
    bars(axes, [f"prefetch {row['prefetch']}" for row in rows], {w: [row[k] for row in rows] for w, k in keys.items()})
    axes.set(ylabel="median time to first token, s")


def _cold_gaps(axes: Any, report: Report) -> None:
    row = next(row for row in report["rows"] if row["gap_ratio"] is not None)
    bars(axes, ["while an adapter loads", "as many steps without"], {"": [row["gap_ratio"], row["quiet_gap_ratio"]]})
    axes.axhline(1, **LINE)
    axes.set(ylabel="largest gap between tokens / median gap")


def _percentiles(metric: str, label: str) -> Panel:
    """Bars of a metric's statistics, by mix where the report has mixes."""

    def rows_of(report: Report) -> list[Mapping[str, Any]]:
        return [row for row in report["rows"] if row["metric"] == metric and row["mean"] is not None]

    def draw(axes: Any, report: Report) -> None:
        names = ("mean", "median", "p95", "p99")
        bars(axes, names, {row.get("mix", ""): [row[name] for name in names] for row in rows_of(report)})
        axes.set(xlabel="statistic", ylabel=f"{label}, ms")

    return Panel(draw, lambda report: bool(rows_of(report)))


def _phases(axes: Any, report: Report) -> None:
    rows = report["phases"]
    names = [f"{row['mix']}\n{row['step']}" for row in rows]
    bottom = [0.0] * len(rows)
    for key in ("plan_ms", "inputs_ms", "device_ms", "output_ms"):
        axes.bar(names, [row[key] for row in rows], 0.6, bottom=bottom, label=key.removesuffix("_ms"))
        bottom = [low + row[key] for low, row in zip(bottom, rows, strict=True)]
    axes.margins(y=0.1)
    axes.set(xlabel="mix and kind of step", ylabel="median time of a step, ms")
    legend(axes)


def _distribution(keys: Mapping[str, str], label: str) -> Callable[[Any, Report], None]:
    """The share of requests that took at most so long, for keys of the single requests."""

    def draw(axes: Any, report: Report) -> None:
        for key, words in keys.items():
            values = sorted(r[key] for r in report["requests"] if r["error"] is None and r[key] is not None)
            if values:
                shares = [(i + 1) / len(values) for i in range(len(values))]
                axes.step([0, *values], [0, *shares], where="post", label=words)
        for word, limit in report["config"].get("goodput", {}).items():
            if f"{word}_ms" in keys:
                axes.axvline(limit, linestyle=":", color="black", label=f"limit of {word}")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.02)
        axes.set(xlabel=label, ylabel="share of requests")
        axes.grid(alpha=0.3)
        legend(axes)

    return draw


def _by_adapter(axes: Any, report: Report) -> None:
    rows = report["adapters"][:24]
    axes.barh([row["model"] for row in rows], [row["tokens_per_second_of_a_request"] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="new tokens per second of a request, mean", title=f"Jain's index {report['jain']:.3f}")


def _engines(report: Report) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Engine and dtype to number of adapters to row."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in report["rows"]:
        found.setdefault(f"{row['engine']} {row['dtype']}", {})[row["num_adapters"]] = row
    return found


def _peers(key: str, label: str, spec: str, *, inverse: bool = False) -> Callable[[Any, Report], None]:
    """Bars by number of adapters, one for each engine; `inverse` shows 1 / value, and a line at 1."""

    def draw(axes: Any, report: Report) -> None:
        counts = sorted({row["num_adapters"] for row in report["rows"]})
        series = {}
        for name, rows in _engines(report).items():
            values = [rows[count][key] if count in rows else None for count in counts]
            series[name] = [None if v is None else 1 / v if inverse else v for v in values]
        bars(axes, [str(count) for count in counts], series, spec)
        if inverse:
            axes.axhline(1, label="equal", **LINE)
            legend(axes)
        axes.set(xlabel="distinct adapters of the requests", ylabel=label)

    return draw


_LATENCIES = {
    "ttft_ms": "time to first token",
    "itl_ms": "between two tokens",
    "tpot_ms": "per token after the first",
    "e2el_ms": "to the last token",
}

_PANELS: dict[str, Sequence[Panel]] = {
    **FEATURE_PANELS,
    "throughput": (
        Panel(_speed_by_mix),
        Panel(
            _ratio_bars("ratio_to_base", "byte_floor_ratio", "ratio_to_base_by_round", "speed / speed of the base"),
            has("ratio_to_base"),
        ),
        Panel(
            _ratio_bars("ratio_to_loop", "loop_floor_ratio", "ratio_to_loop_by_round", "speed / speed of the loop"),
            has("ratio_to_loop"),
        ),
    ),
    "adapters": (
        Panel(
            _lines(
                {"ratio_to_one": ("measured", _MARKED), "byte_floor_ratio": (FLOOR_WORDS, _DASHED)},
                "speed / speed with one adapter",
            ),
            has("ratio_to_one"),
        ),
        Panel(_lines({"tokens_per_second": ("measured", _MARKED)}, "new tokens per second")),
        Panel(_lines({"ttft_p50_s": ("median", _MARKED)}, "time to first token, ms", 1000)),
    ),
    "adapters --cold": (Panel(_cold_times), Panel(_cold_gaps, has("gap_ratio"))),
    "latency": (
        *(_percentiles(metric, label) for metric, label in _LATENCIES.items() if metric != "tpot_ms"),
        Panel(_phases, lambda report: bool(report["phases"])),
    ),
    "serve": (
        Panel(_distribution({key: _LATENCIES[key] for key in ("ttft_ms", "e2el_ms")}, "time from arrival, ms")),
        Panel(_distribution({"tpot_ms": _LATENCIES["tpot_ms"]}, "time, ms")),
        Panel(_by_adapter, lambda report: report["jain"] is not None),
    ),
    "peers": (
        Panel(_peers("tokens_per_second", "new tokens per second", ".0f")),
        Panel(_peers("ratio_to_ours", "speed of this engine / speed of the other", ".2f", inverse=True)),
    ),
    "trace": TRACE_PANELS,
}
