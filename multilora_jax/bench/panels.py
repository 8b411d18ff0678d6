"""What the pictures of reports are made of: pairs of axes, bars and legends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]

LINE = {"color": "black", "linewidth": 1.6}
"""How floors, aims and equals are drawn."""


class Panel:
    """One pair of axes: how it is drawn, and whether the report has what it shows."""

    def __init__(self, draw: Callable[[Any, Report], None], wanted: Callable[[Report], bool] = lambda _: True):
        self.draw, self.wanted = draw, wanted


def has(key: str) -> Callable[[Report], bool]:
    """Whether any row has a value there."""
    return lambda report: any(row.get(key) is not None for row in report["rows"])


def bars(
    axes: Any,
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    spec: str | None = None,
    *,
    notes: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Groups of bars, a value on each; None is no bar.

    Args:
        axes: where.
        names: of the groups.
        series: name to a value for each group.
        spec: of the values; by default three digits, and none behind the point of large ones.
        notes: name of a series to what stands below each of its values.
    """
    width = 0.8 / max(1, len(series))
    spec = spec or three_digits([value for values in series.values() for value in values])
    for number, (label, values) in enumerate(series.items()):
        places = [i - 0.4 + width * (number + 0.5) for i in range(len(names))]
        drawn = axes.bar(places, [value or 0 for value in values], width * 0.94, label=label)
        texts = ["" if value is None else format(value, spec) for value in values]
        if notes is not None:
            texts = [f"{text}\n{note}" for text, note in zip(texts, notes[label], strict=True)]
        axes.bar_label(drawn, texts, fontsize=7, padding=2)
    longest = max(len(line) for name in names for line in name.split("\n"))
    axes.set_xticks(range(len(names)), names, rotation=25 if longest * len(names) > 48 else 0)
    axes.margins(y=0.14)
    if len(series) > 1:
        legend(axes)


def three_digits(values: Sequence[float | None]) -> str:
    """The format specification of values of one kind."""
    return ".0f" if max((value or 0 for value in values), default=0) >= 100 else ".3g"


def legend(axes: Any) -> None:
    """Above the axes, where nothing is drawn, in as many columns as are not wider than they."""
    longest = max(map(len, axes.get_legend_handles_labels()[1]), default=0)
    columns = max(1, min(4, 70 // (longest + 8)))
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False)


def equal_line(axes: Any) -> None:
    """A line at 1, behind bars of ratios."""
    axes.axhline(1, label="equal", linestyle="--", color="black", linewidth=0.8, zorder=0)
    legend(axes)


def round_bars(
    axes: Any,
    names: Sequence[str],
    values: Sequence[float | None],
    rounds: Sequence[Sequence[float] | None],
    *,
    marks: Sequence[float | None],
    words: str,
    spec: str = ".2f",
) -> None:
    """Bars of medians over rounds, a dot for each round, and a line across those that have a mark.

    Args:
        axes: where.
        names, values, rounds: of each bar; no value is no bar.
        marks: floor or aim of each; words: what they are.
        spec: of the values.
    """
    drawn = axes.bar(names, [value or 0 for value in values], 0.75, label="measured, median")
    # In the middle: dots and marks are where the bars end.
    texts = ["" if value is None else format(value, spec) for value in values]
    axes.bar_label(drawn, texts, label_type="center", fontsize=8, color="white")
    for place, (mark, dots) in enumerate(zip(marks, rounds, strict=True)):
        if mark is not None:
            axes.hlines(mark, place - 0.44, place + 0.44, label=words, **LINE)
            words = "_" + words.removeprefix("_")  # a label of this form is in no legend
        label = "single rounds" if place == 0 else None
        axes.plot([place] * len(dots or ()), dots or [], "o", color="black", markersize=3, alpha=0.5, label=label)
    axes.margins(y=0.1)
    legend(axes)
