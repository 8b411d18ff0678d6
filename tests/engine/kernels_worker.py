"""Serves cases of golden_tiny by interpreted kernels on two virtual devices and prints how far off it is as JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m tests.engine.kernels_worker GOLDEN_TINY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from multilora_jax.request import LoRARequest
from pallas_kernels.segmented_lora import pallas_triton
from tests.engine.tensor_parallel_worker import own_sizes
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_engine, run_all

CASES = ["dora_qv_rslora", "all_linear_string"]
PLAIN = ["all_linear_string", "mlp_only"]


def main() -> None:
    golden = Path(sys.argv[1])
    pallas_triton.SHRINK_PROGRAMS = 2  # each costs in the interpreter
    engine = make_engine(
        golden / "bases" / "untied", kernel_backend="triton", tensor_parallel_size=2, max_num_seqs=4, max_rank_rows=64,
        pool_pages=96, max_model_len=128,
    )  # fmt: skip
    recorder = LogitsRecorder(engine)
    loras = {name: LoRARequest(name, n, str(golden / "cases" / name)) for n, name in enumerate(CASES + PLAIN, 1)}
    errors = []
    for names in (CASES, PLAIN):  # DoRA makes a step sum all rows; without it each token's own are
        asked: list[Any] = [None, *(loras[name] for name in names)]
        files = [golden / (f"cases/{lora.name}" if lora else "bases/untied") / "expected.safetensors" for lora in asked]
        wanted = [load_file(file) for file in files]
        requests = [Request(w["prompt.1"].tolist(), greedy(2), lora) for w, lora in zip(wanted, asked, strict=True)]
        run_all(engine, requests)
        for number, w in enumerate(wanted):
            errors.append(float(np.abs(recorder.take(number)[: len(w["logits.1"])] - w["logits.1"]).max()))
    spec = engine.runner.spec
    facts: dict[str, Any] = {"lora": spec.lora_backend, "attention": spec.attention_backend, "shards": spec.geometry.tp}
    facts["own_rows"] = own_sizes(engine)
    print(json.dumps({"errors": errors, **facts}))


if __name__ == "__main__":
    main()
