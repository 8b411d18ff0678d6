"""The engine against PEFT's own numbers on tiny bases: every case is served exactly."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.lora.adapter_files import WEIGHTS_FILE
from multilora_jax.request import LoRARequest
from tests.oracle import Oracle, read_deltas
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_engine, run_all

NUM_PROMPTS, NEW_TOKENS = 3, 24


@pytest.fixture(scope="module")
def manifest(golden_tiny):
    return json.loads((golden_tiny / "manifest.json").read_text())


def cases_of(manifest: dict, base: str) -> list[str]:
    return [name for name, case in manifest["cases"].items() if case["base"] == base]


def load_all(engine, golden_tiny, names):
    """LoRARequests of adapters, all loaded."""
    requests = [LoRARequest(name, number, str(golden_tiny / "cases" / name)) for number, name in enumerate(names, 1)]
    for request in requests:
        engine.add_lora(request)
    return requests


def test_every_base_has_a_case(manifest):
    assert {case["base"] for case in manifest["cases"].values()} == set(manifest["bases"])
    assert len(manifest["cases"]) == 41


@pytest.mark.parametrize(
    "base",
    ["tied", "untied", "llama3rope", "linearrope", "biased", "headdim32", "mha", "bf16file", "fp16file", "sharded"],
)
def test_all_cases_of_a_base_in_one_mixed_batch(golden_tiny, manifest, base):
    engine = make_engine(golden_tiny / "bases" / base)
    recorder = LogitsRecorder(engine)
    names = cases_of(manifest, base)
    served = load_all(engine, golden_tiny, names)

    # Prompt by prompt, so that all adapters and the base are in flight together; the longest prompt takes two steps.
    jobs = [(lora, i) for i in range(NUM_PROMPTS) for lora in [None, *served]]
    expected = {
        lora: load_file(golden_tiny / ("bases" if lora is None else "cases") / (lora.name if lora else base)
                        / "expected.safetensors")
        for lora in [None, *served]
    }  # fmt: skip
    outputs = run_all(
        engine, [Request(expected[lora][f"prompt.{i}"].tolist(), greedy(NEW_TOKENS), lora) for lora, i in jobs]
    )
    for number, ((lora, i), output) in enumerate(zip(jobs, outputs, strict=True)):
        what = f"{lora.name if lora else base}, prompt {i}"
        assert list(output.outputs[0].token_ids) == expected[lora][f"greedy.{i}"].tolist(), what
        logits = recorder.take(number)
        wanted = expected[lora][f"logits.{i}"]
        assert len(logits) == len(wanted) + NEW_TOKENS - 1
        np.testing.assert_allclose(logits[: len(wanted)], wanted, rtol=0, atol=2e-3, err_msg=what)
    assert engine.stats().pages_adapter > 0


def test_bfloat16_errs_no_more_than_its_rounding(golden_tiny, manifest):
    """Root-mean-square error of the logits at most 1.5 times that of a float64 model that rounds where it must."""
    engine = make_engine(golden_tiny / "bases" / "untied", dtype="bfloat16")
    recorder = LogitsRecorder(engine)
    # The oracle reads no pickles.
    names = [n for n in cases_of(manifest, "untied") if (golden_tiny / "cases" / n / WEIGHTS_FILE).exists()]
    served = load_all(engine, golden_tiny, names)

    def rounded(x):
        return np.asarray(x, ml_dtypes.bfloat16).astype(np.float64)

    exact = Oracle.from_folder(golden_tiny / "bases" / "untied")
    coarse = Oracle.from_folder(golden_tiny / "bases" / "untied", rounded=rounded)
    prompts = manifest["prompts"][1:]
    jobs = [(lora, prompt) for prompt in prompts for lora in [None, *served]]
    run_all(engine, [Request(prompt, greedy(1), lora) for lora, prompt in jobs])
    own, allowed = [], []
    for number, (lora, prompt) in enumerate(jobs):
        deltas = None if lora is None else read_deltas(golden_tiny / "cases" / lora.name, exact)
        wanted = exact.logits(prompt, deltas)
        own.append(np.mean((recorder.take(number) - wanted) ** 2) ** 0.5)
        allowed.append(1.5 * np.mean((coarse.logits(prompt, deltas) - wanted) ** 2) ** 0.5)
    assert np.all(np.array(own) < allowed), (own, allowed)
    assert max(allowed) < 0.2  # of a standard deviation of 3: the bound itself is meaningful
