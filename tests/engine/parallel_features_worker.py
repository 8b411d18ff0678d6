"""What requests can ask for, on one device, on several and by two replicas; prints what each gave as JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.engine.parallel_features_worker
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.engine.own_rows import OwnRows
from multilora_jax.replicas import ReplicatedEngine
from multilora_jax.request import LoRARequest, SamplingParams
from multilora_jax.sampling_params import StructuredOutputsParams
from tests.tiny_engine import Request, greedy, make_adapter, run_all, tiny_engine, tokens_of

SCHEMA = {
    "type": "object", "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"enum": [7, 42]}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"prompt_lookup_tokens": 4, "prompt_lookup_min": 1, "max_rank_rows": 128}
REPEATING = [3, 1, 4, 1, 5, 9, 2, 6] * 6


def structured(**kind: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=120, structured_outputs=StructuredOutputsParams(**kind))


def requests_of(first: LoRARequest, second: LoRARequest) -> list[Request]:
    """Base, adapters and a mix of two; texts that repeat; grammars."""
    mix = [LoRARequest(lora.lora_name, lora.lora_int_id, scale=s) for lora, s in ((first, 0.5), (second, -1.5))]
    return [
        Request(REPEATING, greedy(12)), Request(REPEATING, greedy(12), first), Request(REPEATING, greedy(12), mix),
        Request([7, 8], greedy(12), mix), Request([7, 8], greedy(12), second),
        Request("who", structured(json=json.dumps(SCHEMA)), first),
        Request("who", structured(regex="[a-f]{4}-[0-9]{3}"), mix),
        Request("who", structured(choice=["left", "right"])),
        Request("who", SamplingParams(temperature=1.1, top_p=0.8, seed=7, max_tokens=12, ignore_eos=True), second),
    ]  # fmt: skip


def on_devices(folder: Path, tp: int, own_rank: int = 0, **options: Any) -> dict[str, Any]:
    engine = tiny_engine(tensor_parallel_size=tp, **OPTIONS, **options)
    engine.runner.own_rows = OwnRows(own_rank)
    first, second = (make_adapter(folder / f"{name}-{tp}-{own_rank}", engine, rank, seed)
                     for seed, (name, rank) in enumerate((("first", 8), ("second", 12)), 1))  # fmt: skip
    for lora in (first, second):
        engine.add_lora(lora)  # a mix names them without their folders
    tokens = tokens_of(run_all(engine, requests_of(first, second)))
    before = engine.stats().prefix_hits
    again = tokens_of(run_all(engine, requests_of(first, second)))
    stats = engine.stats()
    assert engine.tokenizer is not None
    layers = [key for key in engine.runner.programs._programs if key[0] == "layers"]
    return {
        "tokens": tokens, "same_again": again == tokens, "prefix_hits": stats.prefix_hits - before,
        "accepted": stats.accepted_tokens, "proposed": stats.proposed_tokens,
        "texts": [engine.tokenizer.decode(own) for own in tokens[5:8]],
        "own_rows": sorted({key[4] if len(key) > 4 else 0 for key in layers}),
    }  # fmt: skip


def by_replicas(folder: Path, tp: int) -> list[list[int]]:
    engines = [
        tiny_engine(tensor_parallel_size=tp, data_parallel_size=2, replica=replica, **OPTIONS) for replica in range(2)
    ]
    loras = [make_adapter(folder / f"{name}-replicas", engines[0], rank, seed)
             for seed, (name, rank) in enumerate((("first", 8), ("second", 12)), 1)]  # fmt: skip
    both = ReplicatedEngine([AsyncEngine(engine) for engine in engines])

    async def ask(number: int, request: Request) -> list[int]:
        tokens: list[int] = []
        stream = both.generate(request.prompt, request.params, str(number), lora_request=request.lora)
        async for output in stream:
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def ask_all() -> list[list[int]]:
        for lora in loras:
            await both.register_lora(lora)
        return await asyncio.gather(*(ask(number, each) for number, each in enumerate(requests_of(*loras))))

    tokens = asyncio.run(ask_all())
    both.shutdown(drain=False)
    for engine in engines:
        engine.check_integrity()
    return tokens


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result: dict[str, Any] = {str(tp): on_devices(folder, tp) for tp in (1, 2, 4)}
        result["own rows"] = on_devices(folder, 2, own_rank=16)
        result["int8"] = [on_devices(folder, tp, own_rank=n, quantization="int8") for n, tp in ((1, 1), (2, 2))]
        result["replicas"] = by_replicas(folder, 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
