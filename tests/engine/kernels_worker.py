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
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_engine, run_all

CASES = ["dora_qv_rslora", "all_linear_string"]


def main() -> None:
    golden = Path(sys.argv[1])
    pallas_triton.SHRINK_PROGRAMS = 2  # each costs in the interpreter
    engine = make_engine(
        golden / "bases" / "untied", kernel_backend="triton", tensor_parallel_size=2, max_num_seqs=4, max_rank_rows=64,
        pool_pages=96, max_model_len=128,
    )  # fmt: skip
    recorder = LogitsRecorder(engine)
    loras: list[Any] = [None, *(LoRARequest(n, i, str(golden / "cases" / n)) for i, n in enumerate(CASES, 1))]
    files = [golden / (f"cases/{lora.name}" if lora else "bases/untied") / "expected.safetensors" for lora in loras]
    wanted = [load_file(file) for file in files]
    run_all(engine, [Request(w["prompt.1"].tolist(), greedy(2), lora) for w, lora in zip(wanted, loras, strict=True)])
    errors = [
        float(np.abs(recorder.take(number)[: len(w["logits.1"])] - w["logits.1"]).max())
        for number, w in enumerate(wanted)
    ]
    spec = engine.runner.spec
    facts = {"lora": spec.lora_backend, "attention": spec.attention_backend, "shards": spec.geometry.tp}
    print(json.dumps({"errors": errors, **facts}))


if __name__ == "__main__":
    main()
