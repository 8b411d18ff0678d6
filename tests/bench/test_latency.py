"""`bench latency` on a tiny model: what it counts, what it breaks down, what it leaves behind."""

from __future__ import annotations

import itertools
import json

import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.bench import latency
from multilora_jax.bench.latency import Times, Workload, run_batch
from multilora_jax.bench.phases import PHASES, StepPhases
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError, UserError
from tests.bench.test_throughput import TINY
from tests.tiny_engine import narrowed, tiny_engine


@pytest.fixture
def narrow(monkeypatch) -> None:
    """Engines that compile what they use and no more."""
    monkeypatch.setattr(LLMEngine, "warm_up", lambda self: None)
    monkeypatch.setattr(latency, "check_compilations", lambda engine: None)
    monkeypatch.setattr(latency, "LLMEngine", lambda config: narrowed(LLMEngine(config, progress=False)))


def bench(*words: str) -> int:
    values = absl_flags.FlagValues()
    latency.define_flags(values)
    values(flags.normalise_argv(["bench", "--config", TINY, *words]))
    return latency.main([], values)


def test_times_of_a_request():
    times = Times()
    times.add(10.0, [10.5, 10.6, 10.9], 5)  # two of the gaps brought two tokens each
    times.add(10.0, [11.0], 1)
    assert times.ttft_ms == pytest.approx([500, 1000])
    assert times.itl_ms == pytest.approx([100, 300])
    assert times.tpot_ms == pytest.approx([100])
    assert times.e2el_ms == pytest.approx([900, 1000])


def test_command_prints_two_tables_and_writes_json(narrow, capsys, tmp_path):
    out = tmp_path / "out.json"
    words = "--mix base,distinct --batch-size 3 --input-len 5 --output-len 4 --num-iters 2 --num-iters-warmup 1"
    assert bench(*words.split(), "--num-iters-phases", "1", "--rank", "8", "--json", str(out)) == 0
    printed = capsys.readouterr().out.split("\n\n")
    assert printed[0].splitlines()[0].split() == ["mix", "metric", "mean", "median", "p95", "p99", "max"]
    assert printed[1].splitlines()[0].split() == ["mix", "step", *(f"{phase}_ms" for phase in PHASES), "total_ms"]
    read = json.loads(out.read_text())
    assert list(read) == ["command", "config", "versions", "rows", "phases", "floors"]
    assert printed[2].splitlines()[0].split() == ["floor", "floor_ms", "step_ms", "ratio"]
    step_ms = next(row["median"] for row in read["rows"] if (row["mix"], row["metric"]) == ("base", "itl_ms"))
    assert [row["floor"] for row in read["floors"]] == ["bare products", "weights read once"]
    for row in read["floors"]:
        assert row["step_ms"] == step_ms
        assert row["ratio"] == pytest.approx(step_ms / row["floor_ms"])
    assert read["config"]["max_num_seqs"] == 3
    assert [(row["mix"], row["metric"]) for row in read["rows"]] == [
        (mix, metric) for mix in ("base", "distinct") for metric in ("ttft_ms", "itl_ms", "tpot_ms", "e2el_ms")
    ]
    # 2 timed iterations of 3 requests; each has 3 gaps between its 4 tokens.
    assert [len(row["values"]) for row in read["rows"][:4]] == [6, 18, 6, 6]
    assert all(0 < row["median"] <= row["p95"] <= row["p99"] <= row["max"] for row in read["rows"])
    assert [(row["mix"], row["step"]) for row in read["phases"]] == [
        ("base", "prefill"), ("base", "decode"), ("distinct", "prefill"), ("distinct", "decode"),
    ]  # fmt: skip
    assert all(row["num_steps"] >= 1 for row in read["phases"])
    for row in read["phases"]:
        assert all(row[f"{phase}_ms"] > 0 for phase in PHASES)


def test_watching_the_phases_changes_nothing_and_ends():
    engine = tiny_engine(max_num_seqs=4)
    before, ids = (engine.runner.execute, engine.runner.programs.get), map(str, itertools.count())
    phases, times = StepPhases(), Times()
    with phases.watch(engine):
        assert engine.runner.execute != before[0]
        run_batch(engine, [[1, 2], [3]], [None, None], 3, ids, times, step=phases.step)
    assert (engine.runner.execute, engine.runner.programs.get) == before
    assert len(times.e2el_ms) == 2
    counts = {kind: {len(values) for values in found.values()} for kind, found in phases.seconds.items()}
    assert counts["decode"] in ({2}, {3})  # a prompt of one token runs as a decode row
    engine.check_integrity()


def test_the_adapters_are_as_many_as_the_batch():
    work = Workload(("distinct",), batch_size=5, rank=4, targets="qv").offline
    assert (work.num_adapters, work.num_prompts, work.rank, work.targets) == (5, 5, 4, "qv")


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (["--mix", "loop"], UserError, "unknown mix 'loop': name one or more of base, identical"),
        (["--plot", "x.txt"], ConfigError, "'x.txt' must end in one of .png, .svg, .pdf, .html"),
        (["--plot", "/no/such/folder/x.png"], ConfigError, "plot: cannot write"),
        (["--input-len", "250", "--output-len", "7"], ConfigError, "250 .* 7 exceed max_model_len 256"),
    ],
)
def test_bad_flags_are_refused_before_the_model_is_loaded(monkeypatch, words, error, match):
    monkeypatch.setattr(latency, "LLMEngine", None)
    with pytest.raises(error, match=match):
        bench(*words)
