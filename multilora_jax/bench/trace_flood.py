"""What one adapter that floods the server does to the others, in `bench trace`'s reports (host only, no jax)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from multilora_jax.bench.summary import summary
from multilora_jax.bench.trace_run import Outcome


def of_others(outcomes: Sequence[Outcome], num_adapters: int) -> dict[str, Any]:
    """The 95th percentile of the time to the first token, of all requests that are not the flood's, and by adapter.

    Args:
        outcomes: of a run.
        num_adapters: beside the one that floods, which is the last.

    Returns:
        "others_failed", and in seconds "others_ttft_p95_s" and "others_ttft_p95_by_adapter_s"; None where there is no
        first token.
    """
    times: dict[int, list[float]] = defaultdict(list)
    mine = [outcome for outcome in outcomes if outcome.request.adapter < num_adapters]
    for outcome in mine:
        if outcome.ttft_s is not None:
            times[outcome.request.adapter].append(outcome.ttft_s)
    return {
        "others_failed": sum(outcome.error is not None for outcome in mine),
        "others_ttft_p95_s": summary([seconds for own in times.values() for seconds in own])["p95"],
        "others_ttft_p95_by_adapter_s": [summary(times[number])["p95"] for number in range(num_adapters)],
    }


def flood_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of each row with a flood, its figures over those of the row without one.

    Args:
        rows: of a report that sweeps the flood.
    """
    without = {(row["policy"], row["pool"]): row for row in rows if not row["flood"]}
    lines: list[str] = []
    for row in rows:
        before = without.get((row["policy"], row["pool"]))
        if before is None or not row["flood"] or not row["others_ttft_p95_s"] or not before["others_ttft_p95_s"]:
            continue
        pairs = zip(row["others_ttft_p95_by_adapter_s"], before["others_ttft_p95_by_adapter_s"], strict=True)
        ratios = [mine / its for mine, its in pairs if mine and its]
        pool = "" if row["pool"] == "unified" else f" ({row['pool']} pool)"
        lines.append(
            f"{row['policy']}{pool}, p95 TTFT beside a flood of {row['flood']:g} requests/s over that without: "
            f"{row['others_ttft_p95_s'] / before['others_ttft_p95_s']:.2f} for the requests of all others together "
            f"({1000 * row['others_ttft_p95_s']:.0f} and {1000 * before['others_ttft_p95_s']:.0f} ms), "
            f"{statistics.median(ratios):.2f} for the median of {len(ratios)} adapters, {max(ratios):.2f} for the "
            f"worst; {row['others_failed']} of their requests failed"
        )
    return lines
