"""Fixtures of the adapter tests: the tiny base, and folders written without the code under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from multilora_jax.errors import UserError
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.builder import AdapterBuilder
from multilora_jax.lora.host_tier import HostTier
from multilora_jax.lora.reader import AdapterReader
from multilora_jax.lora.registry import AdapterRegistry
from multilora_jax.memory.geometry import MODULES
from multilora_jax.models.config import ModelConfig

HIDDEN, Q_DIM, KV_DIM, FFN, LAYERS = 64, 64, 32, 96, 2
DIMS = {
    "q_proj": (HIDDEN, Q_DIM), "k_proj": (HIDDEN, KV_DIM), "v_proj": (HIDDEN, KV_DIM), "o_proj": (Q_DIM, HIDDEN),
    "gate_proj": (HIDDEN, FFN), "up_proj": (HIDDEN, FFN), "down_proj": (FFN, HIDDEN),
}  # fmt: skip


def hf_config(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 256,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": FFN, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 512, "tie_word_embeddings": True,
    }  # fmt: skip
    return config | changes


@pytest.fixture(scope="session")
def model_config() -> ModelConfig:
    """The `tied` base: two layers, hidden 64, 4 query and 2 kv heads of 16, ffn 96."""
    return ModelConfig.from_hf(hf_config(), "tiny", None)


@pytest.fixture(scope="session")
def make_model_config() -> Callable[..., ModelConfig]:
    """Builds the tiny base with some fields of its config.json changed."""
    return lambda **changes: ModelConfig.from_hf(hf_config(**changes), "tiny", None)


def tensors(
    rank: int = 8,
    modules: tuple[str, ...] = ("q_proj", "v_proj"),
    layers: tuple[int, ...] = (0, 1),
    ranks: dict[tuple[int, str], int] | None = None,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """A file's tensors under the names that PEFT gives them."""
    rng, result = np.random.default_rng(seed), {}
    for layer in layers:
        for module in modules:
            r, (in_dim, out_dim) = (ranks or {}).get((layer, module), rank), DIMS[module]
            block = "self_attn" if MODULES.index(module) < 4 else "mlp"
            name = f"base_model.model.model.layers.{layer}.{block}.{module}"
            result[f"{name}.lora_A.weight"] = rng.standard_normal((r, in_dim), np.float32)
            result[f"{name}.lora_B.weight"] = rng.standard_normal((out_dim, r), np.float32)
    return result


def write_adapter(
    folder: Path, weights: dict[str, np.ndarray] | None = None, *, drop: tuple[str, ...] = (), **config: Any
) -> Path:
    """Writes a PEFT folder; `config` overrides or adds fields of adapter_config.json, `drop` leaves some out."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none",
        "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "nowhere/none", "inference_mode": True,
    } | config  # fmt: skip
    kept = {key: value for key, value in fields.items() if key not in drop}
    (folder / "adapter_config.json").write_text(json.dumps(kept), encoding="utf-8")
    save_file(tensors() if weights is None else weights, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def peft_tensors() -> Callable[..., dict[str, np.ndarray]]:
    return tensors


@pytest.fixture
def peft_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a PEFT folder called by its first argument under tmp_path (see write_adapter)."""
    return lambda name="adapter", *args, **kwargs: write_adapter(tmp_path / name, *args, **kwargs)


class NoTensors:
    """A base for adapters that are LoRA alone, which need none of its tensors."""

    def tensor(self, name: str) -> np.ndarray | None:
        raise AssertionError(name)


@pytest.fixture
def make_builder(model_config: ModelConfig) -> Callable[..., AdapterBuilder]:
    """Builds adapters for the tiny base with ranks up to 16."""
    geometry = model_config.geometry(num_pages=64, page_tokens=16, tp=1, dtype="float32")
    return lambda **options: AdapterBuilder(model_config, geometry, NoTensors(), max_lora_rank=16, **options)


@pytest.fixture
def host() -> HostTier:
    return HostTier()


@pytest.fixture
def make_registry(
    make_builder: Callable[..., AdapterBuilder], host: HostTier
) -> Iterator[Callable[..., AdapterRegistry]]:
    """Builds a registry for the tiny base that reads into `host`."""
    reader = AdapterReader(make_builder(), host)
    yield lambda *args, **kwargs: AdapterRegistry(reader, *args, **kwargs)
    reader.close()


@pytest.fixture
def registry(make_registry: Callable[..., AdapterRegistry]) -> AdapterRegistry:
    return make_registry(base_names=("base",))


@pytest.fixture(scope="session")
def outcome() -> Callable[..., Adapter | str]:
    """Calls a method of a registry; returns its result, or the reason of its refusal."""

    def run(call: Callable[..., Adapter], *args: Any) -> Adapter | str:
        try:
            return call(*args)
        except UserError as error:
            return error.reason

    return run
