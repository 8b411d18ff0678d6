"""Adapters made up on the spot, for tests and benchmarks, and the PEFT folder that any adapter can be saved as."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from multilora_jax.lora.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from multilora_jax.lora.config import PeftConfig
from multilora_jax.lora.layout import COMPUTE_DTYPES
from multilora_jax.lora.tensor_names import projection_path
from multilora_jax.lora.weights import AdapterWeights, ModuleKey
from multilora_jax.memory.geometry import MODULES

if TYPE_CHECKING:
    from multilora_jax.models.config import ModelConfig


def random_adapter_weights(
    model_config: ModelConfig,
    rank: int | Mapping[ModuleKey, int],
    modules: Iterable[str] = MODULES,
    *,
    layers: Iterable[int] | None = None,
    seed: int = 0,
    lora_alpha: float | None = None,
    delta_std: float = 0.02,
) -> AdapterWeights:
    """Gaussian A and B, both non-zero.

    Args:
        model_config: the base whose shapes are used.
        rank: one rank for all, or a rank of each (layer, module), which then says by itself which modules exist.
        modules, layers: the modules that get weights (all layers by default); unused where `rank` is a mapping.
        seed: the same seed gives the same adapter.
        lora_alpha: alpha of all modules; the rank (or the largest one) by default.
        delta_std: standard deviation of the entries of `scale * B A` (weights of trained bases have about 0.02 to 0.1).

    Returns:
        weights whose `path` is empty; the digest covers the content.
    """
    if isinstance(rank, int):
        wanted = range(model_config.num_layers) if layers is None else layers
        ranks = {(layer, module): rank for layer in wanted for module in modules}
    else:
        ranks = dict(rank)
    largest = max(ranks.values())
    alpha = float(largest if lora_alpha is None else lora_alpha)
    raw = {
        "peft_type": "LORA", "r": largest, "lora_alpha": alpha,
        "rank_pattern": {projection_path(*key): r for key, r in ranks.items() if r != largest},
    }  # fmt: skip
    config = PeftConfig.from_dict(raw)
    rng = np.random.default_rng(seed)
    a, b, scale = {}, {}, {}
    for key, r in ranks.items():
        in_dim, out_dim = model_config.module_dims(key[1])
        scale[key] = config.scale_of(projection_path(*key))
        # An entry of B A is a sum of r products: with A of deviation 1/sqrt(r), B's is that of the sum.
        a[key] = rng.standard_normal((r, in_dim), np.float32) / np.float32(np.sqrt(r))
        b[key] = rng.standard_normal((out_dim, r), np.float32) * np.float32(delta_std / (abs(scale[key]) or 1.0))
    return AdapterWeights("", _content_digest(config, a, b), largest, config, a, b, scale, model_config.vocab_size)


def _content_digest(config: PeftConfig, a: dict[ModuleKey, np.ndarray], b: dict[ModuleKey, np.ndarray]) -> str:
    digest = hashlib.sha256(config.canonical_json() + b"\n")
    for key in sorted(a):
        digest.update(repr((key, a[key].shape, b[key].shape)).encode())
        digest.update(a[key].tobytes())
        digest.update(b[key].tobytes())
    return digest.hexdigest()


def save_peft(weights: AdapterWeights, path: str, dtype: str = "float32") -> None:
    """Writes adapter_config.json and adapter_model.safetensors as PEFT does; makes the folder.

    Args:
        weights: an adapter of A and B only.
        path: the folder.
        dtype: type of the tensors in the file, "float32", "bfloat16" or "float16".

    Raises:
        ValueError: the adapter has more than A and B of projections; or the config's patterns, which may be anchored
            to other module names than those written here, would give a module another scale than it has.
    """
    config = weights.config
    more = {
        "lora_bias": weights.lora_bias, "bias": weights.bias, "magnitude": weights.magnitude, "norms": weights.norms,
        "final_norm": weights.final_norm, "embed": weights.embed, "head": weights.head,
        "chat_template": weights.chat_template,
    }  # fmt: skip
    if found := [name for name, part in more.items() if part is not None and not (isinstance(part, dict) and not part)]:
        raise ValueError(f"only A and B of projections are written, and this adapter has {', '.join(found)} too")
    if any(config.scale_of(projection_path(*key)) != scale for key, scale in weights.scale.items()):
        raise ValueError(
            "the adapter's rank_pattern or alpha_pattern does not fit the names that it would be saved under"
        )
    raw = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "bias": "none",
        "base_model_name_or_path": config.base_model_name_or_path,
        "target_modules": sorted({module for _, module in weights.a}),
        "r": config.r, "lora_alpha": config.lora_alpha, "use_rslora": config.use_rslora,
        "rank_pattern": {pattern.key: int(pattern.value) for pattern in config.rank_pattern},
        "alpha_pattern": {pattern.key: pattern.value for pattern in config.alpha_pattern},
    }  # fmt: skip
    tensors, stored = {}, COMPUTE_DTYPES[dtype]
    for key in weights.a:
        name = f"base_model.model.{projection_path(*key)}"
        tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(weights.a[key], stored)
        tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(weights.b[key], stored)
    os.makedirs(path, exist_ok=True)
    save_file(tensors, os.path.join(path, WEIGHTS_FILE), metadata={"format": "pt"})
    with open(os.path.join(path, CONFIG_FILE), "w", encoding="utf-8") as file:
        json.dump(raw, file, indent=2)
