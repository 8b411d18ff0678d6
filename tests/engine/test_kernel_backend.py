"""A whole engine whose attention and adapters are Pallas kernels, interpreted, beside XLA's and PEFT's own numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.errors import ConfigError
from multilora_jax.models import projections
from multilora_jax.request import LoRARequest
from pallas_kernels.segmented_lora import pallas_triton
from tests.tiny_engine import (
    LogitsRecorder,
    Request,
    greedy,
    make_adapter,
    make_engine,
    run_all,
    tiny_engine,
    tokens_of,
)

# Interpreted, each program of a grid costs: small batches, a small pool, few programs.
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_rank_rows": 64, "pool_pages": 96, "max_model_len": 128}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(pallas_triton, "SHRINK_PROGRAMS", 2)


def scaled(lora: LoRARequest, scale: float) -> LoRARequest:
    return LoRARequest(lora.lora_name, lora.lora_int_id, lora.lora_path, scale=scale)


def answers(tmp_path, backend):
    """Tokens of prompts of several lengths: the base, ranks 3 and 20, a weighted mix; chunks beside decodes."""
    engine = tiny_engine(kernel_backend=backend, **SIZES)
    how = ", interpreted" if backend == "triton" else ""
    assert f"attention by {backend}, adapters by {backend}{how}" in engine.describe()
    assert (engine.stats().attention_backend, engine.stats().lora_backend) == (backend, backend)
    low, high = make_adapter(tmp_path / f"{backend}-low", engine, 3, 1), make_adapter(tmp_path / backend, engine, 20, 2)
    loras = [low, None, high, [scaled(low, 0.5), scaled(high, -0.7)], high]
    prompts = ["Hello", "a prompt of more than two pages of the pool " * 2, "x", "one more", "Hello"]
    requests = [Request(prompt, greedy(5), lora) for prompt, lora in zip(prompts, loras, strict=True)]
    return tokens_of(run_all(engine, requests))


def test_kernels_answer_as_xla_does(tmp_path, monkeypatch):
    """What the XLA path of adapters is made of is not there meanwhile."""
    with monkeypatch.context() as without:
        without.setattr(projections, "LayerDeltas", None)
        found = answers(tmp_path, "triton")
    assert found == answers(tmp_path, "xla")
    assert found[0] != found[4]


@pytest.mark.slow
def test_adapters_are_no_rows_of_buffers(tmp_path, monkeypatch):
    """What the XLA path is made of is not missed after an adapter's pages have changed either."""
    monkeypatch.setattr(projections, "LayerDeltas", None)
    engine = tiny_engine(kernel_backend="triton", **SIZES | {"pool_pages": 14})
    loras = [make_adapter(tmp_path / f"a{seed}", engine, 8, seed) for seed in range(4)]
    first = [run_all(engine, [Request("Hello", greedy(3), lora)]) for lora in loras]
    again = [run_all(engine, [Request("Hello", greedy(3), lora)]) for lora in reversed(loras)]
    assert engine.stats().adapter_evictions > 0
    assert [tokens_of(one) for one in first] == [tokens_of(one) for one in reversed(again)]
    assert len({str(tokens_of(one)) for one in first}) > 1


CASES = ["dora_qv_rslora", "embed_lm_head", "modules_to_save_embed", "trainable_tokens", "all_linear_string"]


def test_peft_s_numbers(golden_tiny):
    """Ranks by module, DoRA, norms, embedding and head, base tokens, all in one batch: a prompt's logits are PEFT's."""
    engine = make_engine(golden_tiny / "bases" / "untied", kernel_backend="triton", **SIZES)
    recorder = LogitsRecorder(engine)
    loras: list[Any] = [None, *(LoRARequest(n, i, str(golden_tiny / "cases" / n)) for i, n in enumerate(CASES, 1))]
    files = [
        golden_tiny / (f"cases/{lora.name}" if lora else "bases/untied") / "expected.safetensors" for lora in loras
    ]
    wanted = [load_file(file) for file in files]
    run_all(engine, [Request(w["prompt.1"].tolist(), greedy(1), lora) for w, lora in zip(wanted, loras, strict=True)])
    for number, (lora, expected) in enumerate(zip(loras, wanted, strict=True)):
        logits = recorder.take(number)[: len(expected["logits.1"])]
        np.testing.assert_allclose(logits, expected["logits.1"], rtol=0, atol=2e-3, err_msg=str(lora))


@pytest.mark.slow
def test_nothing_compiles_after_warm_up(tmp_path):
    engine = tiny_engine(
        narrow=False, kernel_backend="triton", **SIZES | {"max_num_seqs": 2, "max_rank_rows": 16}, max_lora_rank=16
    )
    engine.runner.shapes = [engine.runner.shapes[0], engine.runner.shapes[-1]]
    engine.warm_up()
    loras = [make_adapter(tmp_path / f"rank{rank}", engine, rank, rank) for rank in (1, 8, 16)]
    for lora in [*loras, None, loras[0]]:
        run_all(engine, [Request("Hello", greedy(2), lora), Request("x", greedy(2))])
    assert engine.stats().compilations == 0


def test_what_no_kernel_runs_is_named():
    with pytest.raises(ConfigError, match="kernel_backend mosaic_gpu does not run here"):
        tiny_engine(kernel_backend="mosaic_gpu")
