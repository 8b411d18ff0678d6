"""What `bench trace` makes of a run: S-LoRA's figures of service, latencies, and what the pool had to do."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from multilora_jax.bench.report import table
from multilora_jax.bench.summary import jain, summary
from multilora_jax.bench.trace_flood import flood_lines, of_others
from multilora_jax.bench.trace_run import Outcome, TraceRun

COLUMNS = {
    "policy": "", "pool": "", "completed": "d", "failed": "d", "requests_per_second": ".3f",
    "goodput_per_second": ".3f", "attainment": ".3f", "satisfaction": ".3f", "ttft_p50_s": ".3f", "ttft_p95_s": ".3f",
    "itl_p50_ms": ".1f", "itl_p99_ms": ".1f", "e2e_p50_s": ".2f", "e2e_p95_s": ".2f", "jain": ".3f", "page_ins": "d",
    "evictions": "d", "preemptions": "d",
}  # fmt: skip
STATISTICS = {"median": "p50", "p95": "p95", "p99": "p99"}


def attained(outcome: Outcome, objective_s: float) -> bool:
    """Whether the first token came in less than the objective."""
    return outcome.ttft_s is not None and outcome.ttft_s < objective_s


def satisfaction(ttft_s: float | None, objective_s: float) -> float:
    """S-LoRA's measure of a reader's patience: 1 for a first token at once, 0 from the objective on (or for none)."""
    return 0.0 if ttft_s is None or ttft_s >= objective_s else 1 - (ttft_s / objective_s) ** 2


def row_of(run: TraceRun, objective_s: float, others: int | None = None) -> dict[str, Any]:
    """The figures of one run, a row of the report.

    Rates are per second from the start to the end of the last request, the drain included. Latencies are of the
    requests that were answered in full; attainment and satisfaction are of all, one without a first token counting 0.

    Args:
        run: see trace_run.replay.
        objective_s: for the first token.
        others: adapters beside the one that floods; None where this is not of interest.
    """
    outcomes = run.outcomes
    done = [outcome for outcome in outcomes if outcome.error is None]
    good = sum(attained(outcome, objective_s) for outcome in done)
    ttfts = [outcome.ttft_s for outcome in done if outcome.ttft_s is not None]
    gaps = [after - before for outcome in done for before, after in itertools.pairwise(outcome.token_s)]
    e2e = [outcome.ended_s - outcome.request.arrival_s for outcome in done]
    row = {
        "requests": len(outcomes),
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        "seconds": run.seconds,
        "requests_per_second": len(done) / run.seconds,
        "output_tokens_per_second": sum(outcome.num_tokens for outcome in done) / run.seconds,
        "goodput_per_second": good / run.seconds,
        "attainment": statistics.mean(attained(outcome, objective_s) for outcome in outcomes),
        "satisfaction": statistics.mean(satisfaction(outcome.ttft_s, objective_s) for outcome in outcomes),
        **_percentiles("ttft", ttfts, "s"),
        **_percentiles("itl", [1000 * gap for gap in gaps], "ms"),
        **_percentiles("e2e", e2e, "s"),
        "jain": jain(speeds(outcomes)),
    }
    beside = {} if others is None else of_others(outcomes, others)
    return {**row, **beside, **run.counts._asdict()}


def speeds(outcomes: Sequence[Outcome]) -> list[float]:
    """Of each adapter, the tokens per second that a request of it saw from arrival to end, on average; 0 if it failed.

    As `bench serve` has it, so that Jain's index means the same there.
    """
    by_adapter: dict[int, list[float]] = defaultdict(list)
    for outcome in outcomes:
        seconds = outcome.ended_s - outcome.request.arrival_s
        speed = outcome.num_tokens / seconds if outcome.error is None and seconds > 0 else 0.0
        by_adapter[outcome.request.adapter].append(speed)
    return [statistics.mean(values) for values in by_adapter.values()]


def median_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of several runs of a case: the median of each figure, and under "by_round" those of each run.

    Args:
        rows: of row_of, at least one.
    """
    if len(rows) == 1:
        return dict(rows[0])
    out: dict[str, Any] = {}
    for key, value in rows[0].items():
        values = [row[key] for row in rows]
        if isinstance(value, dict):
            out[key] = dict(sum((Counter(one) for one in values), Counter()))
        elif isinstance(value, list):
            out[key] = [None if None in of_one else statistics.median(of_one) for of_one in zip(*values, strict=True)]
        elif any(one is None for one in values):
            out[key] = None
        else:
            middle = statistics.median(values)
            out[key] = round(middle) if all(isinstance(one, int) for one in values) else middle
    shown = ("requests_per_second", "goodput_per_second", "attainment", "satisfaction", "ttft_p50_s")
    return {**out, "by_round": [{key: row[key] for key in shown} for row in rows]}


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """What is printed of a report."""
    swept = report["config"]["sweep"]
    columns = {swept: "g", **COLUMNS} if swept else COLUMNS
    lines = [table(report["rows"], columns), *report["config"]["notes"]]
    lines += _differences(report["rows"], swept) + _pool_ratios(report["rows"], swept)
    lines += flood_lines(report["rows"]) if swept == "flood" else []
    errors = sum((Counter(row["errors"]) for row in report["rows"]), Counter())
    if errors:
        told = ", ".join(f"{count} {reason}" for reason, count in errors.most_common())
        lines.append(f"requests without a whole answer, by reason: {told}")
    return lines


def _differences(rows: Sequence[Mapping[str, Any]], swept: str | None) -> list[str]:
    """Of several runs of each case: attainment against the policy before, run by run, so that a trace's luck cancels
    out."""
    lines, last = [], dict[Any, Mapping[str, Any]]()
    for row in rows:
        case = row["pool"], row[swept] if swept else None
        before, last[case] = last.get(case), row
        if before is None or "by_round" not in row:
            continue
        pairs = zip(row["by_round"], before["by_round"], strict=True)
        gains = [mine["attainment"] - other["attainment"] for mine, other in pairs]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        at = f" at {swept} {row[swept]:g}" if swept else ""
        at += "" if row["pool"] == "unified" else f" ({row['pool']} pool)"
        lines.append(
            f"attainment of {row['policy']} less that of {before['policy']}{at}: {statistics.mean(gains):+.3f} on "
            f"average of {len(gains)} runs (standard error {error:.3f}, {min(gains):+.3f} to {max(gains):+.3f})"
        )
    return lines


def _pool_ratios(rows: Sequence[Mapping[str, Any]], swept: str | None) -> list[str]:
    """Of each row beside one of the unified pool: the throughput of that over its own, run by run."""
    unified = {(row["policy"], row[swept] if swept else None): row for row in rows if row["pool"] == "unified"}
    lines: list[str] = []
    for row in rows:
        before = unified.get((row["policy"], row[swept] if swept else None))
        if before is None or row is before:
            continue
        runs = zip(before.get("by_round", [before]), row.get("by_round", [row]), strict=True)
        key = "requests_per_second"
        ratios = [its[key] / mine[key] for its, mine in runs if mine[key]]
        if not ratios:
            continue
        at = f" at {swept} {row[swept]:g}" if swept else ""
        among = f" (median of {len(ratios)} runs, {min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
        lines.append(
            f"throughput of the unified pool over that of {row['pool']}, {row['policy']}{at}: "
            f"{statistics.median(ratios):.2f}{among}"
        )
    return lines


def _percentiles(name: str, values: Sequence[float], unit: str) -> dict[str, float | None]:
    figures = summary(values)
    return {f"{name}_{short}_{unit}": figures[statistic] for statistic, short in STATISTICS.items()}
