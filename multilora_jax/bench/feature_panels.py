"""The pictures of `bench prefix`, `lookup`, `structured` and `quality`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multilora_jax.bench.panels import Panel, Report, bars, equal_line, round_bars, three_digits


def _first_tokens(axes: Any, report: Report) -> None:
    """Times of each request, in milliseconds, with what of its prompt was found."""
    rows = report["rows"]
    times = [1e3 * row["ttft_s"] for row in rows]
    round_bars(
        axes,
        [f"{row['request']}\n{row['cached_tokens']} of {row['prompt_tokens']}\ntokens found" for row in rows],
        times,
        [[1e3 * seconds for seconds in row["ttft_s_by_round"]] for row in rows],
        marks=[None if row["aim_ratio"] is None else row["aim_ratio"] * times[0] for row in rows],
        words="aim, at most",
        spec=three_digits(times),
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
    bars(axes, [f"{task}\n{words}" for task in tasks for words in _PARTS.values()], series)
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
    equal_line(axes)
    axes.set(ylabel="speed / speed without lookup")


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
    equal_line(axes)
    axes.set(ylabel="time per token / that without schemas")


def _parsed(axes: Any, report: Report) -> None:
    row = next(row for row in report["rows"] if row["parsed_by_schema"] is not None)
    shares = {"all": row["parsed_share"], **row["parsed_by_schema"]}
    bars(axes, [*shares], {"": [100 * share for share in shares.values()]}, ".1f")
    axes.set(xlabel="schema", ylabel=f"share of {row['checked_answers']} answers that parse, %")


def _perplexities(axes: Any, report: Report) -> None:
    """With how much each is above float32's."""
    rows = [{**row, "change": _change(row)} for row in report["rows"]]
    bars(axes, *_by_weights(rows, "perplexity"), ".2f", notes=_by_weights(rows, "change")[1])
    axes.set(xlabel="weights of the base", ylabel=f"perplexity of {rows[0]['scored_tokens']:,} tokens of a text")


def _change(row: Report) -> str:
    return "reference" if row["weights"] == "float32" else f"{100 * (row['perplexity_ratio'] - 1):+.2f} %"


def _agreement(axes: Any, report: Report) -> None:
    rows = [row for row in report["rows"] if row["weights"] != "float32"]
    length = report["config"]["output_len"]
    shares = [
        {**row, "next": 100 * row["same_next_token"], "answer": 100 * row["same_prefix"] / length} for row in rows
    ]
    names, series = _by_weights(shares, "next", "most likely next token")
    series |= _by_weights(shares, "answer", "greedy answer up to the first difference")[1]
    bars(axes, names, series, ".1f")
    axes.set(xlabel="weights of the base", ylabel="the same as in float32, %")


def _weight_speeds(axes: Any, report: Report) -> None:
    bars(axes, *_by_weights(report["rows"], "tokens_per_second"))
    axes.set(xlabel="weights of the base", ylabel="new tokens per second")


def _weight_sizes(axes: Any, report: Report) -> None:
    rows = [row for row in report["rows"] if row["adapter"] == "-"]
    bars(axes, *_by_weights(rows, "weight_mib"))
    axes.set(xlabel="weights of the base", ylabel="size of the weights, MiB")


def _by_weights(rows: Sequence[Report], key: str, words: str = "") -> tuple[list[str], dict[str, list[Any]]]:
    """Names of weights, and a series for each adapter, whose name begins with `words`."""
    several, series = len({row["adapter"] for row in rows}) > 1, dict[str, list[Any]]()
    for row in rows:
        under = "no adapter" if row["adapter"] == "-" else f"adapter {row['adapter']}"
        name = ", ".join(filter(None, (words, under if several else "")))
        series.setdefault(name, []).append(row[key])
    return list(dict.fromkeys(row["weights"] for row in rows)), series


FEATURE_PANELS: dict[str, Sequence[Panel]] = {
    "prefix": (Panel(_first_tokens), Panel(_first_token_ratios)),
    "lookup": (Panel(_lookup_speeds), Panel(_lookup_ratios)),
    "structured": (Panel(_step_times), Panel(_step_ratios), Panel(_parsed)),
    "quality": (
        Panel(_perplexities),
        Panel(_agreement, lambda report: any(row["weights"] != "float32" for row in report["rows"])),
        Panel(_weight_speeds),
        Panel(_weight_sizes),
    ),
}
