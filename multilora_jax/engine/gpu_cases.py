"""The engine's own programs of a Llama-3-8B-shaped model, to be compiled for H200s with no GPU present.

    python -m pallas_kernels.gpu_check multilora_jax.engine.gpu_cases --table multilora_jax/engine/gpu_steps.csv

A decode step is `begin`, `layers` (all of them) and `finish`. The pool is donated and must come back in place, nothing
may copy it, and attention and adapters must be Pallas kernels: this is what would be lost unseen on a machine without a
GPU. On four devices each holds a quarter of the pool, and one sum of the projections is all that adapters add.
`--sweep` compiles every program with all 32 layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from multilora_jax.engine.batch import BatchShape, table_width
from multilora_jax.engine.programs import Programs
from multilora_jax.lora.layout import Reach
from multilora_jax.memory.pool import POOL_SPEC
from multilora_jax.models.config import ModelConfig, RopeConfig
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.loader import param_shapes
from pallas_kernels.gpu_check import Case

LLAMA_3_8B = ModelConfig(
    name="llama-3-8b", vocab_size=128_256, hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    ffn_size=14_336, rms_norm_eps=1e-5, rope=RopeConfig(theta=500_000.0), max_position_embeddings=8192,
)  # fmt: skip

DECODE = BatchShape(0, 0, 64)
"""64 sequences, a token each."""

MIXED = BatchShape(512, 80, 64)
"""The same beside 512 tokens of prompts."""

ROWS = 1024
"""Rank rows: 64 adapters of rank 16."""

NUM_PAGES = 20_000
"""A pool of 42 GB: more elements than 32 bits number."""

_PREFILL_BLOCK, _MAX_LEN = 32, 8192


FEW_LAYERS = 4
"""Of the cases beside the decode step: layers are alike, and compiling goes by their number."""


def _model(layers: int) -> ModelConfig:
    return replace(LLAMA_3_8B, num_layers=layers)


def _programs(mesh: Mesh, tp: int, layers: int, backend: str) -> Programs:
    geometry = _model(layers).geometry(NUM_PAGES, 16, tp, "bfloat16", 256)
    spec = LlamaSpec(
        _model(layers), geometry, _PREFILL_BLOCK, features_first=False, axis_name="model" if tp > 1 else None,
        attention_groups=(1 << 30, 1 << 30), attention_backend=backend, lora_backend=backend,
    )  # fmt: skip
    shape = (layers, NUM_PAGES, geometry.page_elements)
    pool: Any = jax.ShapeDtypeStruct(shape, geometry.storage_dtype, sharding=NamedSharding(mesh, POOL_SPEC))
    params = param_shapes(spec, _MAX_LEN, mesh)
    return Programs(spec, mesh, params, pool, table_width(_MAX_LEN, geometry), ROWS, MIXED.num_rows)


def _case(tp: int, layers: int, *key: Any, kernels: tuple[str, ...] = (), temp: int, backend: str = "triton") -> Case:
    geometry = _model(layers).geometry(NUM_PAGES, 16, tp, "bfloat16", 256)
    copied = rf"= u16\[{layers},{NUM_PAGES},{geometry.page_elements // tp}\]\S* copy\("
    return Case(
        None, mesh=((1, tp), ("data", "model")), lower=lambda mesh: _programs(mesh, tp, layers, backend).lower(*key),
        expect=kernels, forbid=(copied,), max_temp_bytes=temp, check_limits=False,
        min_alias_bytes=NUM_PAGES * geometry.page_bytes // tp if key[0] == "layers" else 0,
    )  # fmt: skip


def _cases(tp: int, layers: dict[str, int]) -> dict[str, Case]:
    """Those of one number of devices, the programs by name with so many layers."""
    attention, lora = ("paged_attention_decode",), ("lora_shrink", "lora_expand")
    plain = Reach.PROJECTIONS
    wanted: dict[str, tuple[tuple[Any, ...], tuple[str, ...], int]] = {
        "begin, 64 adapters": (("begin", DECODE, ROWS, False), (), 1),
        "decode 64, base": (("layers", DECODE, 0, plain), attention, 256),
        "decode 64, 64 adapters": (("layers", DECODE, ROWS, plain), attention + lora, 256),
        "decode 64, DoRA and norms": (("layers", DECODE, ROWS, Reach.EXTENDED), attention + lora, 256),
        "decode 64 + prompts 512, 64 adapters": (
            ("layers", MIXED, ROWS, plain), (*attention, "paged_attention_prompt", *lora), 768
        ),
        "finish": (("finish", DECODE, False), (), 128),
    }  # fmt: skip
    device = f"H200 x {tp}" if tp > 1 else "H200"
    return {
        f"{device}, {layers[name]} layers, {name}": _case(tp, layers[name], *key, kernels=kernels, temp=mib << 20)
        for name, (key, kernels, mib) in wanted.items()
        if name in layers
    }


def cases() -> dict[str, Case]:
    """The decode step whole, on one device and on four; the others with a few layers."""
    few = dict.fromkeys(_NAMES, FEW_LAYERS)
    step: tuple[str, ...] = ("decode 64, base", "decode 64, 64 adapters")
    whole = dict.fromkeys(step, LLAMA_3_8B.num_layers)
    return _cases(1, few | whole) | _cases(4, few | whole) | _by_name()


def _by_name() -> dict[str, Case]:
    """What runs with kernel_backend mosaic_gpu alone."""
    kernels = ("paged_attention_decode", "paged_attention_prompt", "lora_shrink", "lora_expand")
    key = ("layers", MIXED, ROWS, Reach.PROJECTIONS)
    case = _case(1, FEW_LAYERS, *key, kernels=kernels, temp=768 << 20, backend="mosaic_gpu")
    return {f"H200, {FEW_LAYERS} layers, decode 64 + prompts 512, 64 adapters, mosaic_gpu": case}


def sweep() -> dict[str, Case]:
    """All of them with all layers: on two cores half an hour."""
    whole = dict.fromkeys(_NAMES, LLAMA_3_8B.num_layers)
    return _cases(1, whole) | _cases(4, whole)


_NAMES: tuple[str, ...] = (
    "begin, 64 adapters", "decode 64, base", "decode 64, 64 adapters", "decode 64, DoRA and norms",
    "decode 64 + prompts 512, 64 adapters", "finish",
)  # fmt: skip
