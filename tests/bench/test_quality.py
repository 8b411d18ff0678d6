"""`bench quality` on a tiny model: what it reports, and its arithmetic."""

from __future__ import annotations

import json
import math

import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.bench import quality
from multilora_jax.bench.quality import Seen, same_prefix
from multilora_jax.engine.llm_engine import LLMEngine
from tests.tiny_engine import narrowed


def test_rows_of_both_engines_with_and_without_an_adapter(configs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quality, "LLMEngine", lambda config: narrowed(LLMEngine(config, progress=False)))
    out, text = tmp_path / "out.json", tmp_path / "text.txt"
    text.write_text("A short text. " * 9, encoding="utf-8")
    monkeypatch.setattr(quality, "TEXT", text)
    values = absl_flags.FlagValues()
    quality.define_flags(values)
    words = (
        "--max-num-seqs 2 --max-num-batched-tokens 32 --part-len 50 --num-prompts 2 --input-len 5 --output-len 3 "
        "--rounds 1 --max-lora-rank 8 --max-rank-rows 16"
    )
    config = str(configs / "tiny.yaml")
    values(flags.normalise_argv(["bench", "--config", config, *words.split(), "--json", str(out)]))
    assert quality.main([], values) == 0
    assert "perplexity_ratio" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert (report["command"], report["config"]["quantization"]) == ("quality", "int8")
    rows = report["rows"]
    assert [row["weights"] for row in rows] == ["float32", "int8"] * 2
    assert rows[0]["adapter"] == rows[1]["adapter"] == "-" != rows[2]["adapter"] == rows[3]["adapter"]
    for reference, mine in (rows[:2], rows[2:]):
        assert reference["scored_tokens"] == mine["scored_tokens"] == 9 * 14 - 3  # the first token of each part is free
        assert reference["perplexity_ratio"] == reference["same_next_token"] == reference["ratio_to_float32"] == 1
        assert reference["same_prefix"] == 3
        assert mine["perplexity_ratio"] != 1
        assert mine["perplexity_ratio"] == pytest.approx(1, abs=0.05)
        assert mine["same_next_token"] > 0.8
        assert mine["weight_mib"] < 0.35 * reference["weight_mib"]
        assert mine["tokens_per_second"] > 0
    assert rows[0]["perplexity"] != rows[2]["perplexity"]


def test_arithmetic():
    assert Seen([math.log(0.5), math.log(0.125)], [], []).perplexity == pytest.approx(4)
    assert [same_prefix((1, 2, 3), other) for other in ((1, 2, 3), (1, 5, 3), (4, 2, 3))] == [3, 1, 0]
