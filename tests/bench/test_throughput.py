"""`bench throughput` on a tiny model: what it runs, what it reports, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.bench import throughput
from multilora_jax.bench.runs import Run, run_loop, run_once
from multilora_jax.bench.throughput import Workload, fit_config, measure
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.engine.row_buffers import RowBuffers
from multilora_jax.errors import ConfigError, UserError
from tests.tiny_engine import narrowed

ROOT = Path(__file__).parent.parent.parent
TINY = str(ROOT / "configs" / "tiny.yaml")


def bench(*words: str) -> int:
    values = absl_flags.FlagValues()
    throughput.define_flags(values)
    values(flags.normalise_argv(["bench", "--config", TINY, *words]))
    return throughput.main([], values)


def tiny(**overrides) -> EngineConfig:
    return EngineConfig.from_yaml(TINY, overrides)


@pytest.mark.slow
def test_command_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "out.json"
    words = (
        "throughput --mix base,distinct,uniform --num-adapters 4 --rank 8 --num-prompts 8 --input-len 5 "
        "--output-len 3 --max-num-seqs 4 --max-num-batched-tokens 128 --rounds 2"
    )
    done = subprocess.run(
        [sys.executable, "-m", "multilora_jax.bench", *words.split(), "--config", TINY, "--json", str(out)],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    for column in ("mix", "num_adapters", "tokens_per_second", "ratio_to_base", "byte_floor_ratio"):
        assert column in header.split()
    assert [line.split()[0] for line in lines] == ["base", "distinct", "uniform"]
    assert "making 4 random adapters of rank 8" in done.stderr
    for text in ("warm run: base", "round 1 of 2: distinct", "round 2 of 2: uniform"):
        assert text in done.stderr
    assert "too small" not in done.stderr

    read = json.loads(out.read_text())
    assert list(read) == ["command", "config", "versions", "rows"]
    assert read["command"] == "throughput"
    assert read["config"]["num_prompts"] == 8
    assert read["config"]["max_num_seqs"] == 4
    base, distinct, uniform = read["rows"]
    assert [row["num_adapters"] for row in read["rows"]] == [0, 4, 2]
    assert [row["new_tokens"] for row in read["rows"]] == [24, 24, 24]
    assert (base["ratio_to_base"], base["byte_floor_ratio"]) == (1.0, 1.0)
    assert distinct["byte_floor_ratio"] < uniform["byte_floor_ratio"] < 1
    for row in read["rows"]:
        assert row["tokens_per_second"] > 0
        assert len(row["tokens_per_second_by_round"]) == len(row["ratio_to_base_by_round"]) == 2
        assert row["adapter_loads"] == row["preemptions"] == 0


def test_help_names_the_command_and_every_flag():
    done = subprocess.run(
        [sys.executable, "-m", "multilora_jax.bench", "throughput", "--help"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    for word in ("throughput", "--mix", "--num_adapters", "--num_prompts", "--input_len", "--output_len", "--rank",
                 "--rounds", "--json", "--max_num_seqs", "--dtype", "skewed"):  # fmt: skip
        assert word in done.stdout, word


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (["--mix", "base,skewd"], UserError, "unknown mix 'skewd': name one or more of base, identical, distinct"),
        (["--json", "/no/such/folder/x.json"], ConfigError, "cannot write"),
        (["--input-len", "250", "--output-len", "7"], ConfigError, "250 .* 7 exceed max_model_len 256"),
        (["--noenable_lora"], ConfigError, "--mix base is all that can be measured"),
        (["--num-adapters", "0"], absl_flags.IllegalFlagValueError, "num_adapters"),
    ],
)
def test_bad_flags_are_refused_before_the_model_is_loaded(monkeypatch, words, error, match):
    monkeypatch.setattr(throughput, "LLMEngine", None)
    with pytest.raises(error, match=match):
        bench(*words)


def test_the_budgets_of_a_step_follow_the_workload(monkeypatch):
    seen = []
    monkeypatch.setattr(throughput, "measure", lambda config, work: seen.append((config, work)) or {"rows": []})
    monkeypatch.setattr(throughput, "table", lambda rows, columns: "")
    bench("--rank", "12")
    bench("--max-num-seqs", "16", "--rank", "128", "--num-adapters", "3")
    bench("--max-rank-rows", "512")
    assert [(c.max_num_seqs, c.max_rank_rows, c.max_lora_rank, w.num_adapters) for c, w in seen] == [
        (8, 128, 64, 8),  # eight adapters of 12 rank rows each, rounded up to 16
        (16, 384, 128, 3),
        (8, 512, 64, 8),
    ]


def test_given_adapters_come_first(tmp_path):
    given = {"a": "/a", "b": "/b", "c": "/c"}
    config = EngineConfig.from_dict({"model": "/m", "lora_modules": given, "adapter_roots": ["/x"]})
    assert fit_config(config, Workload(("distinct",), 2), 4).lora_modules == {}
    fitted = fit_config(config, Workload(("distinct",), 2, given_adapters=True), 4)
    assert fitted.lora_modules == {"a": "/a", "b": "/b"}
    assert fitted.adapter_roots == ()
    assert fitted.max_rank_rows == 128  # two of the largest rank allowed
    with pytest.raises(ConfigError, match="mix base"):
        fit_config(EngineConfig(model="/m", enable_lora=False), Workload(("base", "identical"), 2), 4)
    fit_config(EngineConfig(model="/m", enable_lora=False), Workload(("base",), 2), 4)


def small(*mixes: str, **options) -> Workload:
    return Workload(mixes, **{"num_adapters": 2, "rank": 8, "num_prompts": 4, "input_len": 4, "output_len": 3,
                              "rounds": 1, **options})  # fmt: skip


@pytest.mark.slow
def test_without_base_there_is_no_ratio_and_a_small_pool_is_named(caplog):
    work = small("distinct", "identical", num_adapters=10, rank=32, num_prompts=12)
    report = measure(fit_config(tiny(), work, 2), work)
    assert [row["ratio_to_base"] for row in report["rows"]] == [None, None]
    assert "the pool is too small" in caplog.text
    assert "it has 255" in caplog.text
    assert report["rows"][0]["adapter_loads"] > 0
    assert report["config"]["pool_pages"] == 256


def test_floor_counts_the_bytes_of_the_ranks():
    work = small("base", "identical", "distinct")
    config = fit_config(tiny(), work, 2)
    rows = measure(config, work)["rows"]
    m = LLMEngine(config, progress=False).model_config
    D, Q, KV, F = m.hidden_size, m.q_dim, m.kv_dim, m.ffn_size
    one = 4 * m.num_layers * 8 * ((D + Q) + 2 * (D + KV) + (Q + D) + 3 * (D + F))
    weights = 4 * (m.num_parameters - (0 if m.tie_word_embeddings else m.vocab_size * D))
    expected = [1.0, weights / (weights + one), weights / (weights + 2 * one)]
    assert [row["byte_floor_ratio"] for row in rows] == pytest.approx(expected)
    assert [row["adapters_per_step"] for row in rows] == [0, 1, 2]


def test_a_run_has_buffers_of_its_own_size():
    work = small("distinct", rank=16)
    engine = LLMEngine(fit_config(tiny(), work, 2), progress=False)
    engine.warm_up()
    prompts, ids = [[1, 2, 3]] * 4, (str(n) for n in range(100))
    with throughput.random_adapters(engine, work) as adapters:
        one, two = (engine.lora_request(adapter.name) for adapter in adapters)
        run = run_once(engine, prompts, [one, two, one, two], 3, ids)
        assert run.new_tokens == 12
        assert run.loads == 2
        assert run.step_adapters[-1] == {"random-0", "random-1"}
        rows, buckets = engine.runner.rows, engine.runner.rows.buckets
        assert isinstance(rows, RowBuffers)
        assert rows.rank_rows.bucket == min(b for b in buckets if b >= 32)
        again = run_once(engine, prompts, [one, None, None, None], 3, ids)
        assert again.loads == 0
        assert rows.rank_rows.bucket == min(b for b in buckets if b >= 16) < 32
    assert not Path(adapters[0].path).exists()
    engine.check_integrity()


def test_ratios_are_taken_round_by_round():
    # The machine was half as fast in the second round: each ratio is to the base of its own round.
    none, both = frozenset(), frozenset("ab")
    base = [Run(1.0, 100, 0, 0, [none]), Run(2.0, 100, 0, 0, [none]), Run(1.0, 100, 0, 0, [none])]
    mine = [Run(2.0, 100, 0, 0, [frozenset("a")]), Run(4.0, 100, 0, 0, [both]),
            Run(1.0, 100, 0, 0, [both])]  # fmt: skip
    runs, sizes = {"base": base, "distinct": mine}, {"a": 30, "b": 70}
    row = throughput._row("distinct", runs, sizes, 100)
    assert row["ratio_to_base_by_round"] == [0.5, 0.5, 1.0]
    assert row["ratio_to_base"] == 0.5
    assert row["tokens_per_second"] == 50
    assert row["byte_floor_ratio"] == 0.5  # the typical step reads both adapters
    assert row["num_adapters"] == 2
    assert row["ratio_to_loop"] is row["loop_floor_ratio"] is None

    # The loop takes a step for each adapter where the mix takes one for both.
    loop = [Run(4.0, 100, 0, 0, [frozenset("a"), frozenset("b")])] * 3
    row = throughput._row("distinct", {"distinct": [mine[2]] * 3, "loop": loop}, sizes, 100)
    assert row["ratio_to_loop_by_round"] == [4, 4, 4]
    assert row["loop_floor_ratio"] == (130 + 170) / 200
    row = throughput._row("loop", {**runs, "loop": loop}, sizes, 100)
    assert (row["ratio_to_loop"], row["loop_floor_ratio"]) == (1, 1)
    assert row["byte_floor_ratio"] == 100 / (130 + 170)
    assert throughput._row("loop", {"loop": loop}, sizes, 100)["byte_floor_ratio"] is None


def test_a_loop_answers_adapter_by_adapter():
    work = small("loop", rank=4, targets="qv")
    engine = narrowed(LLMEngine(fit_config(tiny(), work, 2), progress=False))
    prompts, ids = [[1, 2, 3]] * 4, (str(n) for n in range(100))
    with throughput.random_adapters(engine, work) as adapters:
        one, two = (engine.lora_request(adapter.name) for adapter in adapters)
        assert [adapter.layout.ranks_LM[0].tolist() for adapter in adapters] == [[4, 0, 4, 0, 0, 0, 0]] * 2
        run = run_loop(engine, prompts, [one, two, one, two], 3, ids)
    assert run.new_tokens == 12
    assert {len(step) for step in run.step_adapters} == {1}
    names = [next(iter(step)) for step in run.step_adapters]
    assert names == sorted(names)  # one adapter's steps, then the other's
    assert len(run.first_token_s) == 4
    assert min(run.first_token_s[1], run.first_token_s[3]) > max(run.first_token_s[0], run.first_token_s[2])
    assert sum(run.first_token_s) < 4 * run.seconds


def test_compiling_during_a_run_fails_loudly(monkeypatch):
    work = small("base")
    monkeypatch.setattr(LLMEngine, "warm_up", lambda self: None)
    with pytest.raises(RuntimeError, match="compiled after warm-up: these figures are not valid"):
        measure(fit_config(tiny(), work, 2), work)
