"""One host of two in a process of its own: python -m tests.engine.multi_host_worker RANK COORDINATOR MODEL ADAPTERS

Both hosts have as many virtual devices as XLA_FLAGS says. Host 0 answers requests and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.engine.start import load_model
from multilora_jax.request import LoRARequest
from tests.tiny_engine import SIZES, Request, greedy, narrowed, run_all, tokens_of


def leader(config: EngineConfig, golden: Path) -> dict[str, Any]:
    engine = narrowed(LLMEngine(config, progress=False))
    hosts = engine.runner.programs.hosts
    assert hosts is not None
    loras = [LoRARequest(name, n, str(golden / "cases" / name)) for n, name in enumerate(("all_linear", "dora"), 1)]
    for lora in loras:
        engine.add_lora(lora)  # dora reads the base's own weights, of both hosts
    prompt = [5, 17, 200, 31, 7, 99, 250]
    outputs = run_all(engine, [Request(prompt, greedy(24), lora) for lora in (None, *loras)])
    read = engine.runner.read_pages(engine.cache.pages_of(engine.list_loras()[0]))
    packed = engine.adapters.host.get(engine.list_loras()[0])
    facts = {
        "tokens": tokens_of(outputs),
        "pages_whole": packed is not None and bool(np.array_equal(read, packed)),
        "pool_shards_here": sorted(shard.data.shape for shard in engine.runner.pool.addressable_shards),
        "live_numbers": len(hosts._numbers),
        "dropped": hosts._next - len(hosts._numbers),
    }
    hosts.stop()
    return facts


def main() -> int:
    rank, coordinator, golden = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    keys = {
        **SIZES, "model": str(golden / "bases" / "tied"), "tensor_parallel_size": int(sys.argv[4]), "num_hosts": 2,
        "host_rank": rank, "coordinator": coordinator,
    }  # fmt: skip
    config = EngineConfig.from_dict(keys)
    if rank == 0:
        print(json.dumps(leader(config, golden)), flush=True)
        return 0
    runner = load_model(config, progress=False).runner
    assert runner.programs.hosts is not None
    return runner.programs.hosts.follow(runner.programs)


if __name__ == "__main__":
    sys.exit(main())
