"""The pictures of `bench trace`: bars by case, or lines over what was swept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multilora_jax.bench.panels import Panel, Report, bars, has, legend


def _case(row: Mapping[str, Any], rows: list[Mapping[str, Any]]) -> str:
    """Its words: of policy and pool whatever differs between rows."""
    keys = [key for key in ("policy", "pool") if len({other[key] for other in rows}) > 1]
    return " ".join(row[key] for key in keys or ["policy"])


def _figure(key: str, label: str, scale: float = 1.0, spec: str | None = None) -> Panel:
    """One figure of all rows."""

    def draw(axes: Any, report: Report) -> None:
        rows, swept = list(report["rows"]), report["config"]["sweep"]
        axes.set(ylabel=label)
        series: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            series.setdefault(_case(row, rows), []).append(row)
        if swept:
            for name, mine in series.items():
                shown = [row for row in mine if row[key] is not None]
                axes.plot([row[swept] for row in shown], [row[key] * scale for row in shown], marker="o", label=name)
            axes.set_xticks(values := list(dict.fromkeys(row[swept] for row in rows)), [f"{v:g}" for v in values])
            axes.set_ylim(bottom=0)
            axes.set(xlabel=swept)
            axes.grid(alpha=0.3)
            legend(axes)
        else:
            values = [None if row[key] is None else row[key] * scale for row in rows]
            bars(axes, list(series), {"": values}, spec)
            axes.set(xlabel="policy" if len({row["pool"] for row in rows}) == 1 else "policy and pool")

    return Panel(draw, has(key))


TRACE_PANELS = (
    _figure("attainment", "share of requests within the objective", spec=".2f"),
    _figure("requests_per_second", "answered requests per second"),
    _figure("ttft_p50_s", "median time to first token, s"),
)
