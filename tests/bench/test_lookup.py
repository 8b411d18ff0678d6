"""`bench lookup` on a tiny model: what it runs and reports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.bench import lookup
from multilora_jax.engine.llm_engine import LLMEngine
from tests.tiny_engine import narrowed

TINY = str(Path(__file__).parent.parent.parent / "configs" / "tiny.yaml")
SIZES = {"num-prompts": 2, "num-records": 2, "output-len": 24, "rounds": 1, "max-num-seqs": 8, "max-model-len": 512}
WORDS = [f"--{name}={value}" for name, value in SIZES.items()]


def bench(*words: str) -> int:
    values = absl_flags.FlagValues()
    lookup.define_flags(values)
    values(flags.normalise_argv(["bench", "--config", TINY, *WORDS, *words]))
    return lookup.main([], values)


@pytest.fixture
def engines(monkeypatch) -> list[LLMEngine]:
    built: list[LLMEngine] = []

    def build(config):
        built.append(narrowed(LLMEngine(config, progress=False)))
        return built[-1]

    monkeypatch.setattr(lookup, "LLMEngine", build)
    return built


def test_both_ways_are_reported(engines, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert bench("--json", str(out)) == 0
    assert capsys.readouterr().out.split()[: len(lookup.COLUMNS)] == list(lookup.COLUMNS)
    plain, guessed = json.loads(out.read_text())["rows"]
    assert (plain["lookup"], plain["ratio_to_plain"], plain["accepted_share"]) == ("off", 1, 0)
    assert guessed["lookup"] == "8"
    stats = engines[0].stats()
    assert stats.proposed_tokens > 0
    assert guessed["accepted_share"] == pytest.approx(stats.accepted_tokens / stats.proposed_tokens, abs=0.2)


def test_texts_that_differ_are_no_figures(engines, monkeypatch):
    run = lookup._run
    monkeypatch.setattr(lookup, "_run", lambda e, p, w, k, i: run(e, p if k else [q[:-1] for q in p], w, k, i))
    with pytest.raises(RuntimeError, match="texts differ"):
        bench()


def test_the_answer_quotes_the_prompt():
    text = lookup.extraction_prompt(np.random.default_rng(0), 4)
    records, extracted = text.split("The same as a list of fields:")
    assert extracted.count("E-mail: ") == 2
    for line in extracted.strip().splitlines()[:2]:
        assert line.rsplit(" ", 1)[1] in records
