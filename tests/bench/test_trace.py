"""`bench trace`: its figures from a run made up by hand, the command in simulated time and on a tiny model."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.bench import trace, trace_engine
from multilora_jax.bench.trace_cases import read_sweep
from multilora_jax.bench.trace_flood import flood_lines
from multilora_jax.bench.trace_load import TraceRequest
from multilora_jax.bench.trace_report import median_row, row_of, satisfaction
from multilora_jax.bench.trace_run import Counts, Event, Outcome, TraceRun, replay
from multilora_jax.errors import ConfigError, UserError
from multilora_jax.memory.allocator import PageKind
from tests.tiny_engine import narrowed


def bench(words: str) -> int:
    values = absl_flags.FlagValues()
    trace.define_flags(values)
    values(flags.normalise_argv(["bench", *words.split()]))
    return trace.main([], values)


def outcome(arrival: float, adapter: int, token_s: list[float], error: str | None = None) -> Outcome:
    ended = token_s[-1] if token_s else arrival + 5.5
    return Outcome(TraceRequest(arrival, adapter, 8, 9), token_s, len(token_s), ended, error)


def test_figures_of_a_run():
    outcomes = [
        outcome(0.0, 0, [1.0, 1.5, 2.5]),  # in time
        outcome(1.0, 0, [4.0, 5.0]),  # 3 s
        outcome(2.0, 1, [8.0]),  # at the objective: too late
        outcome(3.0, 2, [], "overloaded"),
    ]
    row = row_of(TraceRun(outcomes, 10.0, Counts(7, 5, 3, 100)), 6.0)
    assert (row["requests"], row["completed"], row["failed"], row["errors"]) == (4, 3, 1, {"overloaded": 1})
    assert (row["requests_per_second"], row["goodput_per_second"]) == (0.3, 0.2)
    assert row["output_tokens_per_second"] == pytest.approx(0.6)
    assert row["attainment"] == 0.5
    assert row["satisfaction"] == pytest.approx(((1 - 1 / 36) + (1 - 9 / 36)) / 4)
    assert (row["ttft_p50_s"], row["itl_p50_ms"], row["e2e_p50_s"]) == (3.0, 1000.0, 4.0)
    speeds = [(3 / 2.5 + 2 / 4) / 2, 1 / 6, 0.0]
    assert row["jain"] == pytest.approx(sum(speeds) ** 2 / (3 * sum(s * s for s in speeds)))
    assert (row["page_ins"], row["evictions"], row["preemptions"], row["steps"]) == (7, 5, 3, 100)


def test_what_a_flood_does_to_the_others():
    quiet = [outcome(0.0, 0, [1.0]), outcome(0.0, 0, [3.0]), outcome(0.0, 1, [2.0]), outcome(0.0, 1, [], "no")]
    flood = [outcome(0.0, 0, [2.0]), outcome(0.0, 0, [6.0]), outcome(0.0, 1, [3.0]), outcome(0.0, 3, [99.0])]
    rows = [
        {"flood": rate, "policy": "fair", "pool": "unified", **row_of(TraceRun(run, 9.0, Counts(0, 0, 0, 1)), 6.0, 3)}
        for rate, run in ((0.0, quiet), (4.0, flood))
    ]
    assert [row["others_failed"] for row in rows] == [1, 0]
    assert rows[0]["others_ttft_p95_by_adapter_s"] == [pytest.approx(2.9), 2.0, None]
    assert rows[1]["others_ttft_p95_by_adapter_s"] == [pytest.approx(5.8), 3.0, None]
    assert flood_lines(rows) == [
        "fair, p95 TTFT beside a flood of 4 requests/s over that without: 1.97 for the requests of all others together "
        "(5700 and 2900 ms), 1.75 for the median of 2 adapters, 2.00 for the worst; 0 of their requests failed"
    ]
    both = median_row([{key: row[key] for key in row if key not in ("policy", "pool")} for row in rows])
    assert both["others_ttft_p95_by_adapter_s"] == [pytest.approx(4.35), 2.5, None]
    assert flood_lines(rows[1:]) == []


@pytest.mark.parametrize(("ttft", "expected"), [(0.0, 1.0), (3.0, 0.75), (5.999, 0.00033), (6.0, 0.0), (None, 0.0)])
def test_satisfaction_is_s_lora_s(ttft, expected):
    assert satisfaction(ttft, 6.0) == pytest.approx(expected, abs=1e-5)


def test_a_row_of_several_rounds_is_of_medians():
    def row(seconds: float, errors: int) -> dict[str, Any]:
        failed = [outcome(0.0, 0, [], "queue_full")] * errors
        return row_of(TraceRun([outcome(0.0, 0, [1.0]), *failed], seconds, Counts(errors, 0, 0, 9)), 6.0)

    rows = [row(1.0, 0), row(4.0, 2), row(2.0, 1)]
    middle = median_row(rows)
    assert (middle["requests_per_second"], middle["page_ins"], middle["itl_p50_ms"]) == (0.5, 1, None)
    assert middle["errors"] == {"queue_full": 3}
    assert [one["requests_per_second"] for one in middle["by_round"]] == [1.0, 0.25, 0.5]
    assert median_row(rows[:1]) == rows[0]


class SlowServer:
    """Takes 1 s for each step, which gives each live request its next token; refuses adapter 9."""

    def __init__(self) -> None:
        self.time, self.live = 50.0, dict[int, int]()
        self.added: list[tuple[int, float]] = []

    def start(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait_until(self, seconds: float) -> None:
        self.time = seconds

    def is_busy(self) -> bool:
        return bool(self.live)

    def add(self, number: int, request: TraceRequest) -> None:
        if request.adapter == 9:
            raise UserError("no", reason="queue_full")
        self.added.append((number, self.time))
        self.live[number] = request.new_tokens

    def step(self) -> list[Event]:
        self.time += 1
        self.live = {number: left - 1 for number, left in self.live.items()}
        events = [Event(number, 1, not left) for number, left in self.live.items()]
        self.live = {number: left for number, left in self.live.items() if left}
        return events

    def counts(self) -> Counts:
        return Counts(0, 0, 0, int(self.time))


def test_requests_are_sent_when_due_whatever_became_of_others():
    server = SlowServer()
    requests = [TraceRequest(0.5, 0, 8, 2), TraceRequest(0.7, 1, 8, 1), TraceRequest(1.0, 9, 8, 1),
                TraceRequest(7.0, 0, 8, 1)]  # fmt: skip
    run = replay(server, requests)
    # The second is due while the first step runs; times count from when it was due all the same.
    assert server.added == [(0, 0.5), (1, 1.5), (3, 7.0)]
    assert [o.token_s for o in run.outcomes] == [[1.5, 2.5], [2.5], [], [8.0]]
    assert run.outcomes[1].ttft_s == pytest.approx(1.8)
    assert [o.error for o in run.outcomes] == [None, None, "queue_full", None]
    assert run.seconds == 8.0


QUICK = (
    "--dummy --duration 6 --rate 8 --input-range 8,64 --output-range 8,32 --num-adapters 20 --pool-pages 150 "
    "--first-token-objective-s 1 --max-adapter-pages 60 "
)


def test_the_command_in_simulated_time(tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "out.html"
    words = f"--policy fcfs,abort,oracle --pool unified,split --sweep cv=1,4 --json {out} --plot {picture}"
    assert bench(QUICK + words) == 0
    printed = capsys.readouterr().out
    assert printed.split()[:4] == ["cv", "policy", "pool", "completed"]
    for text in (
        "prompts of 8 to 63 tokens, answers of 8 to 31 (S-LoRA: 8 to 511 each); objective 1 s", "cv as swept",
        "S2: 20 adapters of rank 64, 32, 16, 8 in turn", "a step takes 40 ms, 0.4 for each token",
        "pages for adapters of 149 in the pool, where it is not unified: split 60",
        "throughput of the unified pool over that of split, oracle at cv 4: ",
    ):  # fmt: skip
        assert text in printed
    assert "abort split" in picture.read_text()
    report = json.loads(out.read_text())
    rows = report["rows"]
    assert [(row["cv"], row["policy"], row["pool"]) for row in rows] == [
        (cv, policy, pool)
        for cv in (1, 4) for policy in ("fcfs", "abort", "oracle") for pool in ("unified", "split")
    ]  # fmt: skip
    assert all(row["requests"] == 48 == row["completed"] + row["failed"] for row in rows)
    assert report["config"]["trace"]["num_adapters"] == 20
    assert bench(QUICK + words) == 0  # simulated time is the same every time
    assert json.loads(out.read_text())["rows"] == rows


def test_several_seeds_are_compared_trace_by_trace(tmp_path, capsys):
    out, whole = tmp_path / "one.json", tmp_path / "all.json"
    words = QUICK + "--policy fcfs,abort --pool unified,capped --sweep rate=8,12 "
    alone = []
    for seed in (5, 6, 7):
        assert bench(f"{words} --trace-seed {seed} --json {out}") == 0
        assert "less that" not in capsys.readouterr().out
        alone.append([row["attainment"] for row in json.loads(out.read_text())["rows"]])
    assert bench(f"{words} --trace-seed 5 --seeds 3 --json {whole}") == 0
    rows = json.loads(whole.read_text())["rows"]
    by_case = [list(values) for values in zip(*alone, strict=True)]
    assert [[run["attainment"] for run in row["by_round"]] for row in rows] == by_case
    assert [row["attainment"] for row in rows] == [sorted(values)[1] for values in by_case]
    gains = [abort - fcfs for fcfs, abort in zip(by_case[1], by_case[3], strict=True)]
    told = [line for line in capsys.readouterr().out.splitlines() if "less that" in line]
    assert [line.partition(":")[0] for line in told] == [
        f"attainment of abort less that of fcfs at rate {rate}{pool}"
        for rate in (8, 12) for pool in ("", " (capped pool)")
    ]  # fmt: skip
    expected = f"{np.mean(gains):+.3f} on average of 3 runs (standard error {np.std(gains, ddof=1) / 3**0.5:.3f}, "
    assert expected + f"{min(gains):+.3f} to {max(gains):+.3f})" in told[1]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--policy fcfs,best", "policy must be of fcfs, lcfs"), ("--pool half", "pool must be of unified, capped, sp"),
        ("--pool split:0%", "pool must be of"), ("--pool split:25", "pool must be of"),
        ("--pool unified:25%", "pool must be of"), ("--pool capped:x%", "pool must be of"),
        ("--pool split --max-adapter-pages 149", "below the pool's 149 pages"),
        ("--sweep speed=1", "sweep must be NAME=VALUE,VALUE with a name"), ("--sweep rate=1,x", "sweep must be"),
        ("--input-range 8", "input_range must be two lengths"), ("--rate 0", "rate must be above 0"),
        ("--scheduling-policy fair", "give --policy"), ("--step-base-ms 0", "step_base_ms must be above 0"),
        ("--ranks 8,x", "ranks must be integers"), ("--flood -1", "flood must be 0 or more"),
        ("--flood 1 --flood-range 9,9", "flood_range must be two lengths"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(words, match):
    with pytest.raises((ConfigError, UserError), match=match):
        bench(QUICK + words)


def test_a_flood_is_compared_with_none(capsys):
    words = "--policy fcfs,fair --num-adapters 5 --sweep flood=0,30 --flood-range 8,16"
    assert bench(QUICK + words) == 0
    printed = capsys.readouterr().out
    assert "beside them one adapter more: flood as swept, prompts of 8 to 15 tokens" in printed
    told = [line.split(", p95 TTFT beside a flood of 30 ")[0] for line in printed.splitlines() if "p95 TTFT" in line]
    assert told == ["fcfs", "fair"]


def test_a_split_needs_its_size():
    with pytest.raises(ConfigError, match="capped and split need a percentage .split:25%. or --max-adapter"):
        bench("--dummy --pool capped")


def test_sweeps():
    assert read_sweep(None) == (None, [None])
    assert read_sweep("num-adapters=5,10,5") == ("num_adapters", [5, 10])
    assert read_sweep("cv=0.5") == ("cv", [0.5])


@pytest.mark.slow
def test_the_command_on_an_engine(run_tiny, monkeypatch, tmp_path, capsys):
    engines = []

    def build(config: Any) -> Any:
        engines.append(narrowed(real(config, progress=False)))
        return engines[-1]

    def seen(server: trace_engine.EngineServer, requests: list[TraceRequest]) -> TraceRun:
        cache, total = server.engine.cache, server.engine.allocator.num_total
        pool = "split" if cache.is_split else "unified" if cache.max_adapter_pages == total else "capped"
        cases.append((type(server.engine.scheduler._policy).__name__, pool))
        most.append(0)
        return replay(server, requests, watch=lambda _: look(server.engine))

    def look(engine: Any) -> None:
        engine.check_integrity()
        held = engine.allocator.num_total - engine.allocator.num_free - engine.allocator.count(PageKind.ADAPTER)
        most[-1] = max(most[-1], held)

    real, cases, most = trace_engine.LLMEngine, [], list[int]()
    monkeypatch.setattr(trace_engine, "LLMEngine", build)
    monkeypatch.setattr(trace_engine, "replay", seen)
    out = tmp_path / "out.json"
    words = (
        "--setting S1 --ranks 8,4 --num-adapters 4 --rate 2000 --duration 0.01 --input-range 4,8 --output-range 2,6 "
        "--policy fcfs,abort --pool unified,capped:8%,split --max-adapter-pages 252 --rounds 2 "
        "--first-token-objective-s 60"
    )
    assert run_tiny(trace, words, "--json", str(out)) == 0
    assert "objective 60 s" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert [(row["policy"], row["pool"]) for row in report["rows"]] == [
        (policy, pool) for policy in ("fcfs", "abort") for pool in ("unified", "capped:8%", "split")
    ]  # fmt: skip
    for row in report["rows"]:
        assert (row["requests"], row["completed"], row["attainment"]) == (20, 20, 1.0)
        assert len(row["by_round"]) == 2
        assert row["page_ins"] >= 1
        assert row["ttft_p50_s"] > 0
    turns = [(policy, pool) for policy in ("Policy", "Abort") for pool in ("unified", "capped", "split")]
    assert cases == [*turns, *turns[1:], turns[0]]
    # Three pages are left for keys and values where the pool is split, and no more than that is used.
    assert all((held <= 3) == (pool == "split") for held, (_, pool) in zip(most, cases, strict=True))
    [engine] = engines
    assert engine.stats().registered_adapters == 4
    engine.check_integrity()


def test_only_the_simulation_has_an_oracle(run_tiny):
    with pytest.raises(ConfigError, match="policy must be of"):
        run_tiny(trace, "--policy oracle")
