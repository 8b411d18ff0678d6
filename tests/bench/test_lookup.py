"""`bench lookup` on a tiny model: what it runs and reports."""

from __future__ import annotations

import json

import numpy as np
import pytest

from multilora_jax.bench import lookup
from multilora_jax.bench.answers import Answers
from multilora_jax.errors import ConfigError
from multilora_jax.request import CompletionOutput, RequestOutput
from tests.tiny_engine import tiny_engine

WORDS = "--num-prompts 2 --num-records 3 --output-len 16 --rounds 2 --max-num-seqs 8 --max-model-len 512"


def test_both_ways_of_each_task_are_reported(run_tiny, narrow_engines, tmp_path, capsys):
    out, picture = tmp_path / "out.json", tmp_path / "out.svg"
    assert run_tiny(lookup, WORDS, "--json", str(out), "--plot", str(picture)) == 0
    assert capsys.readouterr().out.split()[: len(lookup.COLUMNS)] == list(lookup.COLUMNS)
    assert "<svg" in picture.read_text()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["task"], row["lookup"]) for row in rows] == [
        ("extraction", "off"), ("extraction", "8"), ("prose", "off"), ("prose", "8"),
    ]  # fmt: skip
    for plain, guessed in (rows[:2], rows[2:]):
        assert plain["ratio_to_plain"] == plain["decode_ratio_to_plain"] == plain["tokens_per_step"] == 1
        assert plain["accepted_share"] == 0
        assert plain["new_tokens"] == guessed["new_tokens"] == 2 * 16
        assert plain["prompt_tokens"] == guessed["prompt_tokens"]
    assert rows[2]["prompt_tokens"] == 2 * 64
    assert [row["aim_ratio"] for row in rows] == [None, lookup.AIM, None, None]
    assert narrow_engines[0].stats().proposed_tokens > 0


def run_of(seconds: float, decode_s: list[float], *, proposed: int = 0, accepted: int = 0) -> lookup._Run:
    """A run of one prompt of 5 tokens and one answer of 9, 8 of which came in steps of decoding alone."""
    output = RequestOutput("", None, [0] * 5, None, [CompletionOutput(0, "", [1] * 9)], finished=True)
    return lookup._Run(Answers([output], seconds, decode_s, 8), proposed, accepted)


def test_ratios_of_the_whole_run_and_of_decoding_are_to_the_same_round():
    plain = [run_of(3, [0.25] * 8), run_of(6, [0.5] * 8), run_of(3, [0.25] * 8)]
    guessed = [run_of(2, [0.5] * 2, proposed=8, accepted=6) for _ in plain]
    row = lookup._row("extraction", 8, guessed, plain)
    assert (row["prompt_tokens"], row["new_tokens"], row["accepted_share"]) == (5, 9, 0.75)
    assert (row["tokens_per_second"], row["decode_tokens_per_second"], row["tokens_per_step"]) == (4.5, 8, 4)
    assert row["ratio_to_plain_by_round"] == [1.5, 3, 1.5]
    assert row["decode_ratio_to_plain_by_round"] == [2, 4, 2]
    assert (row["ratio_to_plain"], row["decode_ratio_to_plain"]) == (1.5, 2)


def test_without_steps_of_decoding_alone_there_is_no_figure_of_them():
    row = lookup._row("prose", 8, [run_of(2, [])], [run_of(3, [0.25] * 8)])
    assert row["ratio_to_plain"] == 1.5
    keys = ("decode_tokens_per_second", "decode_ratio_to_plain", "decode_ratio_to_plain_by_round", "tokens_per_step")
    assert [row[key] for key in keys] == [None] * 4


@pytest.mark.usefixtures("narrow_engines")
def test_texts_that_differ_are_no_figures(run_tiny, monkeypatch):
    run = lookup._run
    monkeypatch.setattr(lookup, "_run", lambda e, p, w, k: run(e, p if k else [q[:-1] for q in p], w, k))
    with pytest.raises(RuntimeError, match="extraction: the texts differ"):
        run_tiny(lookup, WORDS)


def test_an_unknown_task_is_refused(run_tiny):
    with pytest.raises(ConfigError, match="unknown task 'verse': give some of extraction, prose"):
        run_tiny(lookup, WORDS, "--tasks", "prose,verse")


def test_answers_longer_than_what_there_is_to_extract_are_told(caplog):
    engine = tiny_engine()
    lookup._extraction_prompts(engine, lookup.Workload(num_prompts=2, num_records=4, output_len=40))
    assert not caplog.text
    lookup._extraction_prompts(engine, lookup.Workload(num_prompts=2, num_records=4, output_len=400))
    assert "answers of 400 tokens go on after the 1" in caplog.text


def test_the_answer_quotes_the_prompt():
    text, rest = lookup.extraction(np.random.default_rng(0), 4)
    records, extracted = text.split("The same as a list of fields:")
    assert extracted.count("E-mail: ") == 2
    assert len(rest.splitlines()) == 2
    for line in extracted.strip().splitlines()[:2] + rest.splitlines():
        assert line.rsplit(" ", 1)[1] in records
