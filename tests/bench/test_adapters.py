"""`bench adapters` on a tiny model: what it runs, what it reports, what it refuses."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.adapters.host_base import read_model_config
from multilora_jax.adapters.make import make_adapters
from multilora_jax.bench import adapters
from multilora_jax.bench.adapter_set import Size, adapter_set, pages_of, size_of
from multilora_jax.bench.adapters import Workload, fit_config
from multilora_jax.bench.floors import byte_floor_ratio, expected_distinct
from multilora_jax.bench.pool_use import PoolUse
from multilora_jax.bench.runs import Run
from multilora_jax.config import EngineConfig
from multilora_jax.errors import ConfigError, UserError
from tests.tiny_engine import TINY_MODEL

TINY = str(Path(__file__).parent.parent.parent / "configs" / "tiny.yaml")


def bench(*words: str) -> int:
    values = absl_flags.FlagValues()
    adapters.define_flags(values)
    values(flags.normalise_argv(["bench", "--config", TINY, *words]))
    return adapters.main([], values)


@pytest.mark.slow
def test_command_measures_counts_of_a_mixed_set(narrow_engines, tmp_path, capsys):
    folder, out = tmp_path / "set", tmp_path / "out.json"
    words = (
        "--counts 6,1,2 --ranks 16,8 --resident 3 --max-num-seqs 2 --num-prompts 5 --input-len 4 --output-len 3 "
        f"--rounds 2 --adapters-dir {folder} --json {out}"
    )
    assert bench(*words.split()) == 0
    printed = capsys.readouterr().out
    header, *lines = printed.splitlines()
    assert header.split()[:7] == [
        "num_adapters", "tokens_per_second", "ttft_p50_s", "ratio_to_one", "byte_floor_ratio", "ratio_to_floor",
        "adapters_per_step",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[:3]] == ["1", "2", "6"]
    for text in ("room for about 3 of them", "6 of 6 adapters", "byte floor: a step of 2 reads", "fragmentation: at m"):
        assert text in printed
    assert len(list(folder.iterdir())) == 6  # made, and kept for the next run

    report = json.loads(out.read_text())
    assert report["command"] == "adapters"
    assert report["config"]["counts"] == [1, 2, 6]
    assert report["config"]["warm_up"] is True  # what was done; the configuration says false
    [engine] = narrow_engines
    geometry, rows = engine.geometry, report["rows"]
    own = [sum(geometry.module_dims(m)[i] for m in ("q_proj", "k_proj", "v_proj", "o_proj") for i in (0, 1))] * 2
    own = [rank * dims * geometry.num_layers * 4 for rank, dims in zip((16, 8), own, strict=True)]
    sizes = own * 3
    for row, count in zip(rows, (1, 2, 6), strict=True):
        assert list(row)[:7] == [
            "num_adapters", "tokens_per_second", "ttft_p50_s", "ratio_to_one", "byte_floor_ratio", "hits", "misses",
        ]  # fmt: skip
        assert row["num_adapters"] == count
        weights = row["weight_bytes_per_step"]
        assert row["byte_floor_ratio"] == pytest.approx(byte_floor_ratio(weights, sizes[:count], own[0], 2))
        assert row["floor_adapters_per_step"] == pytest.approx(expected_distinct(count, 2))
        assert row["tokens_per_second"] == statistics.median(row["tokens_per_second_by_round"])
        by_round = [
            mine / one
            for mine, one in zip(
                row["tokens_per_second_by_round"], rows[0]["tokens_per_second_by_round"], strict=True
            )
        ]  # fmt: skip
        assert row["ratio_to_one_by_round"] == pytest.approx(by_round)
        assert row["ratio_to_one"] == pytest.approx(statistics.median(by_round))
        assert row["ratio_to_floor"] == pytest.approx(row["ratio_to_one"] / row["byte_floor_ratio"])
        assert row["hits"] + row["misses"] == 2 * 5  # a hit or a miss of each request
        assert row["misses"] == row["adapter_loads"]
        assert row["ttft_p50_s"] > 0
        assert row["preemptions"] == 0
        assert 1 <= row["adapters_per_step"] <= min(count, 2)
        assert row["peak_adapter_pages"] <= engine.config.max_adapter_pages
        assert row["fragmentation"] >= 1
        assert row["padded_slot_pages"] > row["peak_adapter_pages"]
    assert (rows[0]["misses"], rows[1]["misses"]) == (0, 0)  # both fit
    assert rows[2]["misses"] > 0
    assert engine.stats().registered_adapters == 6
    assert engine.stats().compilations == 0
    engine.check_integrity()


def test_rows_are_computed_from_the_runs():
    def run(seconds: float, first_token_s: list[float], hits: int) -> Run:
        return Run(seconds, 100, 5, 0, [frozenset("a"), frozenset("ab")], hits, 10 - hits, first_token_s)

    # The machine was half as fast in the second round: each ratio is to the one adapter of its own round.
    runs = [run(2.0, [1.0, 2.0], 4), run(4.0, [3.0], 6), run(1.0, [5.0, 6.0], 5)]
    row = adapters._row(runs, [100.0, 50.0, 100.0], 1000, [100, 300], 100, 2)
    assert row["tokens_per_second"] == 50
    assert row["ratio_to_one_by_round"] == [0.5, 0.5, 1.0]
    assert row["ratio_to_one"] == 0.5
    assert row["ttft_p50_s"] == 3.0
    assert (row["hits"], row["misses"]) == (15, 15)
    assert row["adapters_per_step"] == 1.5
    assert row["byte_floor_ratio"] == pytest.approx(1100 / 1300)  # 1.5 of 200 bytes each
    assert row["ratio_to_floor"] == pytest.approx(0.5 * 1300 / 1100)
    without = adapters._row(runs, None, 1000, [100, 300], 100, 2)
    assert (without["ratio_to_one"], without["ratio_to_floor"], without["ratio_to_one_by_round"]) == (None, None, None)
    assert without["byte_floor_ratio"] == row["byte_floor_ratio"]


def test_the_pool_holds_the_resident_ones_and_a_full_batch():
    model = read_model_config(TINY_MODEL)
    config = EngineConfig.from_yaml(TINY, {"pool_memory_gib": 1.0, "max_num_seqs": 4, "adapter_roots": ["/x"]})
    unit, per_page = model.geometry(2, 16).unit, model.geometry(2, 16).units_per_page_all_layers
    sizes = [Size(128, unit * per_page * 3), Size(8, unit * (per_page + 1)), Size(8, unit)]
    assert pages_of(sizes, model, 16) == [3, 2, 1]
    work = Workload((1, 3), resident=2, input_len=30, output_len=10)
    fitted = fit_config(config, model, work, sizes)
    assert fitted.max_adapter_pages == 5
    assert fitted.pool_pages == 1 + 5 + 4 * 3 + 4
    assert fitted.pool_memory_gib is None
    assert (fitted.max_lora_rank, fitted.max_rank_rows) == (128, 3 * 128)
    assert (fitted.adapter_roots, fitted.lora_modules) == ((), {})
    kept = fit_config(
        EngineConfig.from_yaml(TINY, {"max_rank_rows": 128}), model, work, sizes, keep_rank_rows=True
    )  # fmt: skip
    assert kept.max_rank_rows == 128


def test_sets_are_made_kept_and_used_again(tmp_path):
    model = read_model_config(TINY_MODEL)
    options: dict[str, Any] = {"ranks": [8, 4], "modules": ["q_proj"], "seed": 1}
    with adapter_set(model, 3, folder=None, **options) as paths:
        sizes = [size_of(path) for path in paths]
        per_rank = sum(model.module_dims("q_proj")) * model.num_layers
        assert sizes == [Size(8, 8 * per_rank), Size(4, 4 * per_rank), Size(8, 8 * per_rank)]
    assert not Path(paths[0]).exists()
    folder = str(tmp_path / "kept")
    with adapter_set(model, 3, folder=folder, **options) as paths:
        first = paths
    with adapter_set(model, 2, folder=folder, **options) as paths:
        assert paths == first[:2]
    with pytest.raises(UserError, match="holds 3 adapters but 4 are needed") as caught:  # noqa: SIM117
        with adapter_set(model, 4, folder=folder, **options):
            pass
    assert caught.value.reason == "too_few_adapters"


def test_sizes_do_not_depend_on_the_files_type(tmp_path):
    model = read_model_config(TINY_MODEL)
    [wide] = make_adapters(model, str(tmp_path / "wide"), 1)
    [narrow] = make_adapters(model, str(tmp_path / "narrow"), 1, dtype="float16")
    assert size_of(wide) == size_of(narrow)


def test_pool_use_without_adapters():
    use = PoolUse(8)
    assert (use.row()["fragmentation"], use.line()) == (1.0, "fragmentation: no adapter was in the pool")


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        (["--counts", "1,x"], UserError, "counts must be integers .* got 'x'"),
        (["--ranks", "0"], UserError, "ranks must be integers"),
        (["--json", "/no/such/folder/x.json"], ConfigError, "cannot write"),
        (["--input-len", "250", "--output-len", "7"], ConfigError, "250 .* 7 exceed max_model_len 256"),
        (["--noenable_lora"], ConfigError, "nothing to measure"),
        (["--pool-pages", "9"], ConfigError, "pool_pages is set by this command"),
        (["--max-adapter-pages", "9"], ConfigError, "give --resident instead"),
        (["--cold", "--gap-steps", "80"], ConfigError, "exceed max_model_len 256"),
        (["--targets", "kv"], absl_flags.IllegalFlagValueError, "targets"),
    ],
)
def test_bad_flags_are_refused_before_the_model_is_loaded(monkeypatch, words, error, match):
    monkeypatch.setattr(adapters, "LLMEngine", None)
    monkeypatch.setattr(adapters, "make_adapters", None, raising=False)
    with pytest.raises(error, match=match):
        bench(*words)
