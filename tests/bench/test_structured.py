"""`bench structured` on a tiny model: what it runs and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.bench import structured
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError
from tests.tiny_engine import narrowed

TINY = str(Path(__file__).parent.parent.parent / "configs" / "tiny.yaml")


def bench(*words: str) -> int:
    values = absl_flags.FlagValues()
    structured.define_flags(values)
    values(flags.normalise_argv(["bench", "--config", TINY, *words]))
    return structured.main([], values)


@pytest.fixture
def built(monkeypatch) -> list[LLMEngine]:
    """Engines of few compiled shapes, in order."""
    engines: list[LLMEngine] = []

    def build(*args, **kwargs) -> LLMEngine:
        engines.append(narrowed(LLMEngine(*args, progress=False, **kwargs)))
        return engines[-1]

    monkeypatch.setattr(structured, "LLMEngine", build)
    return engines


def test_answers_are_checked_and_each_case_has_the_same_steps(built, tmp_path, capsys, monkeypatch):
    runs, run = [], structured._run
    monkeypatch.setattr(structured, "_run", lambda *args: runs.append(run(*args)) or runs[-1])
    monkeypatch.setattr(structured, "MAX_TOKENS", 40)
    out = tmp_path / "out.json"
    words = "--num-answers 6 --num-timed 4 --rounds 1 --max-num-seqs 3 --json"
    assert bench(*words.split(), str(out)) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert {"case", "parsed_share", "ratio_to_plain", "neighbour_ratio"} <= set(header.split())
    assert [line.split()[0] for line in lines] == ["plain", "structured", "half"]
    plain, whole, half = json.loads(out.read_text())["rows"]
    assert [row["structured_answers"] for row in (plain, whole, half)] == [0, 4, 2]
    assert plain["ratio_to_plain"] == 1
    assert whole["checked_answers"] == 6
    assert plain["new_tokens"] == whole["new_tokens"] == half["new_tokens"]
    assert half["neighbour_ratio"] > 0
    timed = runs[1:]
    assert len(timed) == 6
    assert len({len(run.step_s) for run in timed}) == 1
    # A random model may fill an answer with white space up to its limit; all others follow their schema.
    cut = sum(runs[0].outputs[n].outputs[0].finish_reason == "length" for n in range(6))
    assert whole["parsed_share"] == pytest.approx(1 - cut / 6)
    assert built[0].stats().compilations == 0


def test_an_answer_that_breaks_off_does_not_parse():
    from multilora_jax.request import CompletionOutput, RequestOutput

    def parses(text: str, reason: str) -> bool:
        completion = CompletionOutput(0, text, [], finish_reason=reason)
        return structured._parses(RequestOutput("", None, [], None, [completion], True), {"required": ["a"]})

    assert parses('{"a": 1}', "stop")
    assert not parses('{"a": 1}', "length")
    assert not parses('{"a": 1', "stop")
    assert not parses('{"b": 1}', "stop")


def test_a_model_without_a_tokenizer_is_refused(golden_tiny):
    with pytest.raises(ConfigError, match="tokenizer"):
        bench("--model", str(golden_tiny / "bases" / "tied"), "--tokenizer", "")
