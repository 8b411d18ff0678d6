"""Runs golden_tiny on one and on two of three virtual devices and prints what it saw as JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=3 python -m tests.engine.tensor_parallel_worker GOLDEN_TINY ODD_MODEL

ODD_MODEL is a model folder whose vocabulary is no whole number of units.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from multilora_jax.engine.row_buffers import RowBuffers
from multilora_jax.errors import ConfigError
from multilora_jax.request import LoRARequest, SamplingParams
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_engine, run_all, tokens_of

NEW_TOKENS = 24


def row_layers(runner):
    """The buffers of rank rows, per layer."""
    assert isinstance(runner.rows, RowBuffers)
    return runner.rows.layers


def run_base(golden: Path, base: str, tp: int) -> tuple[list[list[int]], list[np.ndarray], dict[str, Any]]:
    """(tokens, logits of every position, facts) of all cases of a base in one mixed batch."""
    engine = make_engine(golden / "bases" / base, tensor_parallel_size=tp)
    recorder = LogitsRecorder(engine)
    manifest = json.loads((golden / "manifest.json").read_text())
    loras: list[LoRARequest | None] = [None]
    for number, (name, case) in enumerate(manifest["cases"].items(), 1):
        if case["base"] == base:
            lora = LoRARequest(name, number, str(golden / "cases" / name))
            engine.add_lora(lora)
            loras.append(lora)
    requests, expected = [], []
    for lora in loras:
        folder = golden / (f"bases/{base}" if lora is None else f"cases/{lora.name}")
        file = load_file(folder / "expected.safetensors")
        for i in (2, 1):
            requests.append(Request(file[f"prompt.{i}"].tolist(), greedy(NEW_TOKENS), lora))
            expected.append((file[f"greedy.{i}"].tolist(), file[f"logits.{i}"]))
    tokens = tokens_of(run_all(engine, requests))
    logits = [recorder.take(number) for number in range(len(requests))]
    runner = engine.runner
    facts: dict[str, Any] = {
        "num_adapters": len(loras) - 1,
        "tokens_match": tokens == [greedy_tokens for greedy_tokens, _ in expected],
        "error": max(
            float(np.abs(got[: len(wanted)] - wanted).max()) for got, (_, wanted) in zip(logits, expected, strict=True)
        ),
        "pool_shards": sorted({shard.data.shape for shard in runner.pool.addressable_shards}),
        "pool_devices": len({shard.device for shard in runner.pool.addressable_shards}),
        "embed_shards": sorted({s.data.shape for s in runner.params["top"]["embed"].addressable_shards}),
        "a_qkv_shards": sorted({s.data.shape for s in row_layers(runner)[0].a_qkv.addressable_shards}),
        "pages_wrong": pages_wrong(engine),
    }
    return tokens, logits, facts


def pages_wrong(engine: Any) -> int:
    """(page, shard) pairs whose bits in the pool are not the adapter's slice for that shard."""
    wrong = 0
    for shard in engine.runner.pool.addressable_shards:
        data = np.asarray(shard.data)
        t = (shard.index[2].start or 0) // data.shape[2]
        for adapter in engine.cache.residents():
            pages = engine.adapters.host.get(adapter)
            for page, page_id in zip(pages, engine.cache.pages_of(adapter), strict=True):
                wrong += not (data[:, page_id] == page[:, t]).all()
            wrong += not pages[:, :, t].any()  # zeros would prove nothing
    return wrong


def refusal(golden: Path, tp: int) -> dict[str, Any]:
    try:
        make_engine(golden / "bases" / "tied", tensor_parallel_size=tp)
    except ConfigError as error:
        return {"reason": error.reason, "param": error.param, "message": error.message}
    return {}


def odd_model(folder: Path, **options: Any) -> dict[str, Any]:
    """How greedy and sampled texts of random weights compare on one and on two devices."""
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True)
    requests = [Request([3, 258, 9], greedy(8)), Request([7], greedy(8)), Request([7], sampled)]
    texts, logits = [], []
    for tp in (1, 2):
        engine = make_engine(folder, tensor_parallel_size=tp, load_format="dummy", **options)
        recorder = LogitsRecorder(engine)
        texts.append(tokens_of(run_all(engine, requests)))
        logits.append(np.concatenate([recorder.take(number) for number in range(len(requests))]))
    return {
        "same_tokens": texts[0] == texts[1],
        "sampled_differs_from_greedy": texts[0][1] != texts[0][2],
        "difference": float(np.abs(logits[0] - logits[1]).max()),
        "embed_shards": sorted(
            {s.data.shape for s in jax.tree.leaves(engine.runner.params["top"]["embed"])[0].addressable_shards}
        ),
    }


def main() -> None:
    golden = Path(sys.argv[1])
    result: dict[str, Any] = {"num_devices": len(jax.devices())}
    one_tokens, one_logits, _ = run_base(golden, "tied", 1)
    tokens, logits, facts = run_base(golden, "tied", 2)
    facts["same_tokens"] = tokens == one_tokens
    facts["difference"] = max(float(np.abs(a - b).max()) for a, b in zip(logits, one_logits, strict=True))
    result["tied"] = facts
    result["refused"] = refusal(golden, 3)
    result["odd"] = odd_model(Path(sys.argv[2]))
    result["int8"] = odd_model(Path(sys.argv[2]), quantization="int8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
