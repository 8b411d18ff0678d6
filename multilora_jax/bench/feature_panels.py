"""The pictures of `bench prefix`, `lookup`, `structured` and `quality`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multilora_jax.bench.panels import Panel, Report, bars, legend, round_bars


def _first_tokens(axes: Any, report: Report) -> None:
    """Times of each request, in milliseconds, with what of its prompt was found."""
    rows = report["rows"]
    first = rows[0]["ttft_s"]
    round_bars(
        axes,
        [f"{row['request']}\n{row['cached_tokens']} of {row['prompt_tokens']}\ntokens found" for row in rows],
        [1e3 * row["ttft_s"] for row in rows],
        [[1e3 * seconds for seconds in row["ttft_s_by_round"]] for row in rows],
        marks=[None if row["aim_ratio"] is None else 1e3 * row["aim_ratio"] * first for row in rows],
        words="aim, at most",
        spec=".3g",
    )
    axes.set(ylabel="time to first token, ms")
    axes.tick_params("x", labelsize=8)


def _first_token_ratios(axes: Any, report: Report) -> None:
    rows = report["rows"]
    round_bars(
        axes, [row["request"] for row in rows], [row["ratio_to_first"] for row in rows],
        [row["ratio_to_first_by_round"] for row in rows], marks=[row["aim_ratio"] for row in rows],
        words="aim, at most",
    )  # fmt: skip
    axes.set(ylabel="time to first token / that of the first request")


_PARTS = {"": "whole run", "decode_": "decoding"}
"""What a speed of `bench lookup` is of: the beginning of its key to its words."""


def _lookup_speeds(axes: Any, report: Report) -> None:
    rows = report["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    series: dict[str, list[float | None]] = {}
    for row in rows:
        name = "without lookup" if row["lookup"] == "off" else f"guessing up to {row['lookup']} tokens"
        series.setdefault(name, []).extend(row[f"{part}tokens_per_second"] for part in _PARTS)
    bars(axes, [f"{task}\n{words}" for task in tasks for words in _PARTS.values()], series, ".0f")
    axes.set(ylabel="new tokens per second")


def _lookup_ratios(axes: Any, report: Report) -> None:
    rows = [row for row in report["rows"] if row["lookup"] != "off"]
    cases = [(row, part) for row in rows for part in _PARTS]
    round_bars(
        axes,
        [f"{row['task']}\n{_PARTS[part]}" for row, part in cases],
        [row[f"{part}ratio_to_plain"] for row, part in cases],
        [row[f"{part}ratio_to_plain_by_round"] for row, part in cases],
        marks=[row["aim_ratio"] for row, _ in cases],
        words="aim, at least",
    )
    axes.axhline(1, label="equal", linestyle="--", color="black", linewidth=0.8)
    axes.set(ylabel="speed / speed without lookup")
    legend(axes)


_CASES = {"plain": "no schema", "structured": "a schema in\nevery row", "half": "a schema in\nevery other row"}


def _step_times(axes: Any, report: Report) -> None:
    rows = report["rows"]
    bars(axes, [_CASES[row["case"]] for row in rows], {"": [row["ms_per_step"] for row in rows]})
    axes.set(ylabel="time between two tokens of an answer, ms")


def _step_ratios(axes: Any, report: Report) -> None:
    rows = [row for row in report["rows"] if row["case"] != "plain"]
    cases = [(_CASES[row["case"]], row, "ratio_to_plain", row["aim_ratio"]) for row in rows]
    cases += [("rows without one,\nbeside those", row, "neighbour_ratio", None) for row in rows
              if row["neighbour_ratio"] is not None]  # fmt: skip
    round_bars(
        axes,
        [name for name, *_ in cases],
        [row[key] for _, row, key, _ in cases],
        [row[f"{key}_by_round"] for _, row, key, _ in cases],
        marks=[aim for *_, aim in cases],
        words="aim, at most",
        spec=".3f",
    )
    axes.axhline(1, label="equal", linestyle="--", color="black", linewidth=0.8)
    axes.set(ylabel="time per token / that without schemas")
    legend(axes)


def _parsed(axes: Any, report: Report) -> None:
    row = next(row for row in report["rows"] if row["parsed_by_schema"] is not None)
    shares = {"all": row["parsed_share"], **row["parsed_by_schema"]}
    bars(axes, [*shares], {"": [100 * share for share in shares.values()]}, ".1f")
    axes.set(xlabel="schema", ylabel=f"share of {row['checked_answers']} answers that parse, %")


def _weights(
    keys: Mapping[str, Callable[[Report, Report], float]], label: str, spec: str, *, others: bool = False
) -> Callable[[Any, Report], None]:
    """Bars by weights, for each adapter and each of `keys`.

    Args:
        keys: words to a figure of a report and one of its rows.
        label: of the vertical axis; spec: of the values.
        others: leave float32 out.
    """

    def draw(axes: Any, report: Report) -> None:
        rows = [row for row in report["rows"] if not others or row["weights"] != "float32"]
        names = list(dict.fromkeys(row["weights"] for row in rows))
        series: dict[str, list[float | None]] = {}
        for words, figure in keys.items():
            for row in rows:
                under = "" if row["adapter"] == "-" else f"adapter {row['adapter']}"
                series.setdefault(", ".join(filter(None, (words, under))), []).append(figure(report, row))
        bars(axes, names, series, spec)
        axes.set(xlabel="weights of the base", ylabel=label)

    return draw


FEATURE_PANELS: dict[str, Sequence[Panel]] = {
    "prefix": (Panel(_first_tokens), Panel(_first_token_ratios)),
    "lookup": (Panel(_lookup_speeds), Panel(_lookup_ratios)),
    "structured": (Panel(_step_times), Panel(_step_ratios), Panel(_parsed)),
    "quality": (
        Panel(_weights({"": lambda _, row: row["perplexity"]}, "perplexity of the text", ".2f")),
        Panel(
            _weights(
                {
                    "most likely next token": lambda _, row: 100 * row["same_next_token"],
                    "greedy answer up to the first difference": lambda report, row: (
                        100 * row["same_prefix"] / report["config"]["output_len"]
                    ),
                },
                "the same as in float32, %", ".1f", others=True,
            ),
            lambda report: any(row["weights"] != "float32" for row in report["rows"]),
        ),
        Panel(_weights({"": lambda _, row: row["tokens_per_second"]}, "new tokens per second", ".0f")),
        Panel(_weights({"": lambda _, row: row["weight_mib"]}, "size of the weights, MiB", ".0f")),
    ),
}  # fmt: skip
