"""The engine against PEFT on what golden_tiny leaves out: vocabularies, DoRA everywhere, mixes, and bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.engine import programs
from multilora_jax.request import LoRARequest
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_engine, run_all

GOLDEN = Path(__file__).parent.parent / "data" / "golden_peft"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
BASES = sorted({entry["base"] for kind in ("cases", "mixes") for entry in MANIFEST[kind].values()})


class Loras:
    """LoRARequests by path below golden_peft, all of one engine."""

    def __init__(self):
        self._known: dict[str, LoRARequest] = {}

    def get(self, path: str, scale: float = 1.0) -> LoRARequest:
        known = self._known.setdefault(path, LoRARequest(path, len(self._known) + 1, str((GOLDEN / path).resolve())))
        return LoRARequest(known.lora_name, known.lora_int_id, known.lora_path, scale=scale)


@pytest.mark.parametrize("base", BASES)
def test_cases_and_mixes_of_a_base_in_one_batch(golden_tiny, base):
    check_all(golden_tiny / "bases" / base)


def test_steps_of_many_tokens_in_the_other_layout(golden_tiny, monkeypatch):
    """Some of these have as many tokens as the model has features, so that no shape tells the layouts apart."""
    monkeypatch.setattr(programs, "TOKENS_FIRST_FROM", 16)
    check_all(golden_tiny / "bases" / "tied", max_num_seqs=16, max_num_batched_tokens=48)


def check_all(folder, **config):
    """Serves the cases and mixes of a base in one batch."""
    base, engine = folder.name, make_engine(folder, max_extra_vocab=8, **config)
    recorder, loras = LogitsRecorder(engine), Loras()
    jobs, wanted = [], []
    for kind in ("cases", "mixes"):
        for name, entry in MANIFEST[kind].items():
            if entry["base"] != base:
                continue
            mix = [loras.get(part["path"], part["scale"]) for part in entry.get("adapters", ())]
            expected = load_file(GOLDEN / entry["path"] / "expected.safetensors")
            for i in range(sum(key.startswith("prompt.") for key in expected)):
                prompt, tokens = expected[f"prompt.{i}"].tolist(), expected[f"greedy.{i}"].tolist()
                lora = mix if kind == "mixes" else loras.get(entry["path"])
                jobs.append(Request(prompt, greedy(len(tokens)), lora))  # type: ignore[arg-type]
                wanted.append((f"{name}, prompt {i}", expected[f"logits.{i}"], tokens))
    outputs = run_all(engine, jobs)
    for number, (output, (what, logits, tokens)) in enumerate(zip(outputs, wanted, strict=True)):
        assert list(output.outputs[0].token_ids) == tokens, what
        got = recorder.take(number)[: len(logits)]
        np.testing.assert_allclose(got, logits, rtol=0, atol=2e-3, err_msg=what)


@pytest.mark.parametrize("base", ["tied", "untied", "biased"])
def test_bfloat16_errs_as_peft_itself_does(golden_tiny, base):
    """Over all adapters of a base the logits err no more than PEFT itself in bfloat16, and none half as much again."""
    engine = make_engine(golden_tiny / "bases" / base, dtype="bfloat16", max_extra_vocab=8)
    recorder, loras = LogitsRecorder(engine), Loras()
    own, peft, names = [], [], []
    for name, entry in MANIFEST["bfloat16"].items():
        folder = GOLDEN / entry["case"]
        config = json.loads((folder / "adapter_config.json").read_text())
        if not config["base_model_name_or_path"].endswith(f"/{base}"):
            continue
        expected = load_file(folder / "expected.safetensors")
        count = sum(key.startswith("prompt.") for key in expected)
        run_all(
            engine,
            [Request(expected[f"prompt.{i}"].tolist(), greedy(1), loras.get(entry["case"])) for i in range(count)],
        )
        errors = [recorder.take(i) - expected[f"logits.{i}"] for i in range(count)]
        own.append(np.mean(np.concatenate(errors) ** 2) ** 0.5)
        peft.append(entry["rms_error"])
        names.append(name)
    assert len(names) >= 2
    found = dict(zip(names, zip(own, peft, strict=True), strict=True))
    assert np.linalg.norm(own) <= np.linalg.norm(peft), found
    assert np.all(np.array(own) < 1.5 * np.array(peft)), found
