"""What `bench serve` makes of its answers: the report, and the lines that it prints (host only)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from multilora_jax.bench.report import make_report, table
from multilora_jax.bench.serve_client import Answer, since_of
from multilora_jax.bench.summary import jain, summary

LATE = "client_late_ms"
METRICS = ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms", LATE)
COLUMNS = {"metric": "", "mean": ".1f", "median": ".1f", "p95": ".1f", "p99": ".1f", "max": ".1f"}
ADAPTER_COLUMNS = {
    "model": "", "requests": "d", "failed": "d", "output_tokens": "d", "tokens_per_second_of_a_request": ".1f",
    "ttft_ms": ".1f",
}  # fmt: skip

MOST_SHOWN = 5
"""Kinds of errors that are printed."""

LATE_SHARE = 0.1
"""Part of the median TTFT that the client may be late before that is said in words."""


def make_serve_report(settings: Mapping[str, Any], answers: Sequence[Answer]) -> dict[str, Any]:
    """The report (see bench.report): a row for each metric, and besides

    - "totals": of the whole run; rates are per second from the first request due to the end of the last stream;
    - "adapters": a row for each model name, the slowest first; "jain": the fairness among them, None for one alone;
    - "errors": message to number; "requests": every request.

    Args:
        settings: of the run; "request_rate" (None for all at once), "max_concurrency" and "goodput" are used.
        answers: of all requests.
    """
    rate = settings["request_rate"] or math.inf
    done = [answer for answer in answers if answer.error is None]
    times = [answer.times_ms(since_of(answer, rate, settings["max_concurrency"])) for answer in done]
    values = {name: [one[name] for one in times if one[name] is not None] for name in ("ttft_ms", "tpot_ms", "e2el_ms")}
    values["itl_ms"] = [gap for one in times for gap in one["itl_ms"]]
    values[LATE] = [(answer.woke - answer.due) * 1000 for answer in answers]
    rows = [{"metric": metric, **summary(values[metric])} for metric in METRICS]
    duration = max(answer.ended for answer in answers)
    limits = settings["goodput"]
    good = sum(all(one[f"{name}_ms"] is None or one[f"{name}_ms"] <= limits[name] for name in limits) for one in times)
    output_tokens, input_tokens = sum(a.output_tokens for a in done), sum(a.input_tokens or 0 for a in done)
    totals = {
        "completed": len(done), "failed": len(answers) - len(done), "duration_s": duration,
        "input_tokens": input_tokens, "output_tokens": output_tokens, "requests_per_second": len(done) / duration,
        "output_tokens_per_second": output_tokens / duration,
        "total_tokens_per_second": (input_tokens + output_tokens) / duration,
        "good": good if limits else None, "goodput_per_second": good / duration if limits else None,
    }  # fmt: skip
    by_answer = dict(zip(map(id, done), times, strict=True))
    adapters = [_adapter_row(model, answers, by_answer) for model in dict.fromkeys(a.model for a in answers)]
    adapters.sort(key=lambda row: row["tokens_per_second_of_a_request"])
    shares = [row["tokens_per_second_of_a_request"] for row in adapters]
    none = {"ttft_ms": None, "tpot_ms": None, "e2el_ms": None, "itl_ms": []}
    requests = [
        {
            "model": a.model, "due_s": a.due, "sent_s": a.sent, "input_tokens": a.input_tokens,
            "output_tokens": a.output_tokens, "error": a.error, **by_answer.get(id(a), none),
        }
        for a in answers
    ]  # fmt: skip
    return {
        **make_report("serve", settings, rows), "totals": totals, "adapters": adapters,
        "jain": jain(shares) if len(adapters) > 1 else None,
        "errors": dict(Counter(a.error for a in answers if a.error is not None)), "requests": requests,
    }  # fmt: skip


def _adapter_row(model: str, answers: Sequence[Answer], times: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Of one model name; a request's speed is its tokens over its time to the end, and 0 where all failed."""
    mine = [answer for answer in answers if answer.model == model]
    done = [(answer, times[id(answer)]) for answer in mine if answer.error is None]
    speeds = [answer.output_tokens / (one["e2el_ms"] / 1000) for answer, one in done]
    return {
        "model": model, "requests": len(mine), "failed": len(mine) - len(done),
        "output_tokens": sum(answer.output_tokens for answer, _ in done),
        "tokens_per_second_of_a_request": sum(speeds) / len(speeds) if speeds else 0.0,
        "ttft_ms": summary([one["ttft_ms"] for _, one in done])["median"],
    }  # fmt: skip


def lines_of(report: Mapping[str, Any]) -> list[str]:
    """What is printed."""
    totals, limits = report["totals"], report["config"]["goodput"]
    lines = [
        f"{totals['completed']} requests completed, {totals['failed']} failed, in {totals['duration_s']:.2f} s",
        f"{totals['requests_per_second']:.2f} requests/s, {totals['output_tokens_per_second']:.1f} new tokens/s, "
        f"{totals['total_tokens_per_second']:.1f} with those of the prompts",
    ]
    if limits:
        words = ", ".join(f"{name} <= {limit:g} ms" for name, limit in limits.items())
        lines.append(f"goodput: {totals['goodput_per_second']:.2f} requests/s ({totals['good']}) with {words}")
    lines += ["", table(report["rows"], COLUMNS)]
    if report["jain"] is not None:
        lines += ["", table(report["adapters"], ADAPTER_COLUMNS), f"Jain's index of fairness: {report['jain']:.3f}"]
    figures = {row["metric"]: row for row in report["rows"]}
    late, first = figures[LATE]["p99"], figures["ttft_ms"]["median"]
    if first is not None and late > LATE_SHARE * first:
        lines.append(
            f"the client itself was {late:.1f} ms late (p99): it could not keep up, and its figures are partly its own"
        )
    errors = sorted(report["errors"].items(), key=lambda pair: -pair[1])
    lines += [f"failed: {count} x {message}" for message, count in errors[:MOST_SHOWN]]
    if len(errors) > MOST_SHOWN:
        lines.append(f"failed: {len(errors) - MOST_SHOWN} further kinds of errors, see --json")
    return lines
