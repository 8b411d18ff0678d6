"""Mistral, Qwen2 and Qwen3 against transformers and PEFT: tiny random models, bare and with an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.engine import programs
from multilora_jax.request import LoRARequest
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_engine, run_all, tokens_of

GOLDEN = Path(__file__).parent.parent / "data" / "golden_families"
MODELS = json.loads((GOLDEN / "manifest.json").read_text())["models"]
TOLERANCE = 2e-4
WINDOWED = {"mistral_window": 21, "qwen2_window": 17}


def requests_of(folder: Path, expected) -> tuple[list[Request], list[str]]:
    """Every prompt on the base and on the adapter, and what each is called in `expected`."""
    lora = LoRARequest("mine", 1, str(folder / "adapter"))
    jobs, names = [], []
    for i in range(sum(key.startswith("prompt.") for key in expected)):
        for kind, adapter in (("base", None), ("adapter", lora)):
            tokens = expected[f"{kind}.greedy.{i}"]
            jobs.append(Request(expected[f"prompt.{i}"].tolist(), greedy(len(tokens)), adapter))
            names.append(f"{kind}.{{}}.{i}")
    return jobs, names


@pytest.mark.parametrize(
    # What these two have, their windowed variants have too.
    "model",
    [pytest.param(m, marks=pytest.mark.slow) if m in ("mistral_full", "qwen2") else m for m in MODELS],
)
def test_logits_and_texts_equal_the_reference(model):
    expected = load_file(GOLDEN / model / "expected.safetensors")
    engine = make_engine(GOLDEN / model, max_num_batched_tokens=32)
    assert engine.model_config.sliding_window == WINDOWED.get(model)
    recorder = LogitsRecorder(engine)
    jobs, names = requests_of(GOLDEN / model, expected)
    outputs = run_all(engine, jobs)
    for number, name in enumerate(names):
        assert tokens_of(outputs)[number] == expected[name.format("greedy")].tolist(), name
        logits = expected[name.format("logits")]
        got = recorder.take(number)
        assert len(got) == len(logits)
        np.testing.assert_allclose(got, logits, rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("model", ["mistral_window", "qwen3_biased"])
def test_steps_of_many_tokens_in_the_other_layout(model, monkeypatch):
    monkeypatch.setattr(programs, "TOKENS_FIRST_FROM", 16)
    expected = load_file(GOLDEN / model / "expected.safetensors")
    engine = make_engine(GOLDEN / model, max_num_batched_tokens=64)
    jobs, names = requests_of(GOLDEN / model, expected)
    for name, tokens in zip(names, tokens_of(run_all(engine, jobs)), strict=True):
        assert tokens == expected[name.format("greedy")].tolist(), name


def test_without_the_window_the_logits_are_others(tmp_path):
    """The reference can tell: up to the window's length all agree, and nothing does behind it."""
    folder = shutil.copytree(GOLDEN / "mistral_window", tmp_path / "full")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    expected = load_file(folder / "expected.safetensors")
    engine = make_engine(folder)
    recorder = LogitsRecorder(engine)
    run_all(engine, [Request(expected["prompt.1"].tolist(), greedy(1))])
    got = recorder.take(0)
    errors = np.abs(got - expected["base.logits.1"][: len(got)]).max(1)
    assert errors[:21].max() < TOLERANCE
    assert errors[22:].min() > 100 * TOLERANCE


@pytest.mark.parametrize("model", WINDOWED)
def test_cached_prefixes_serve_sliding_windows(model):
    """Pages that a text shares, inside its window and outside, give it what computing them anew gave."""
    expected = load_file(GOLDEN / model / "expected.safetensors")
    engine = make_engine(GOLDEN / model)
    prompt, tokens = expected["prompt.1"].tolist(), expected["base.greedy.1"].tolist()
    [first] = run_all(engine, [Request(prompt, greedy(len(tokens)))])
    [again] = run_all(engine, [Request(prompt, greedy(len(tokens)))])
    [longer] = run_all(engine, [Request([*prompt, *tokens[:8]], greedy(len(tokens) - 8))])
    assert [first.num_cached_tokens, again.num_cached_tokens, longer.num_cached_tokens] == [0, 32, 48]
    assert tokens_of([first, again]) == [tokens, tokens]
    assert tokens_of([longer]) == [tokens[8:]]


@pytest.mark.parametrize("model", WINDOWED)
def test_a_text_goes_on_after_preemption(model):
    """Sequences that outgrow the pool are computed again from their beginning, in chunks."""
    expected = load_file(GOLDEN / model / "expected.safetensors")
    engine = make_engine(GOLDEN / model, pool_pages=12, enable_prefix_caching=False)
    prompt, tokens = expected["prompt.1"].tolist(), expected["base.greedy.1"].tolist()
    outputs = run_all(engine, [Request(prompt, greedy(len(tokens)))] * 4)
    assert engine.stats().num_preemptions > 0
    assert tokens_of(outputs) == [tokens] * 4
