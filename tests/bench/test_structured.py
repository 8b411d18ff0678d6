"""`bench structured` on a tiny model: what it runs and what it reports."""

from __future__ import annotations

import json
import shutil

import pytest

from multilora_jax.bench import lookup, quality, structured
from multilora_jax.errors import ConfigError


def test_answers_are_checked_and_each_case_has_the_same_steps(run_tiny, narrow_engines, tmp_path, capsys, monkeypatch):
    runs, answer = [], structured.answer
    monkeypatch.setattr(structured, "answer", lambda *args: runs.append(answer(*args)) or runs[-1])
    monkeypatch.setattr(structured, "MAX_TOKENS", 40)
    out, picture = tmp_path / "out.json", tmp_path / "out.html"
    words = "--num-answers 6 --num-timed 4 --rounds 1 --max-num-seqs 3"
    assert run_tiny(structured, words, "--json", str(out), "--plot", str(picture)) == 0
    assert "answers that parse" in picture.read_text()
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
    assert len({len(run.decode_s) for run in timed}) == 1
    # A random model may fill an answer with white space up to its limit; all others follow their schema.
    cut = sum(runs[0].outputs[n].outputs[0].finish_reason == "length" for n in range(6))
    assert whole["parsed_share"] == pytest.approx(1 - cut / 6)
    assert narrow_engines[0].stats().compilations == 0


def test_an_answer_that_breaks_off_does_not_parse():
    from multilora_jax.request import CompletionOutput, RequestOutput

    def parses(text: str, reason: str) -> bool:
        completion = CompletionOutput(0, text, [], finish_reason=reason)
        return structured._parses(RequestOutput("", None, [], None, [completion], True), {"required": ["a"]})

    assert parses('{"a": 1}', "stop")
    assert not parses('{"a": 1}', "length")
    assert not parses('{"a": 1', "stop")
    assert not parses('{"b": 1}', "stop")


@pytest.mark.parametrize("command", [lookup, structured, quality])
def test_a_model_without_a_tokenizer_is_refused(run_tiny, golden_tiny, tmp_path, command):
    folder = shutil.copytree(golden_tiny / "bases" / "tied", tmp_path / "model")
    with pytest.raises(ConfigError, match="the model has no tokenizer, which the texts need"):
        run_tiny(command, "", "--model", str(folder))
