"""An independent Llama in numpy: float64, no cache, adapters merged into the weights. Reads files by itself.

It shares no code with the package, so both being wrong in the same way is unlikely.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Deltas = Mapping[str, np.ndarray]
"""Module path (model.layers.0.self_attn.q_proj) to what an adapter adds to its weight."""


class Oracle:
    """A base model.

    Args:
        config: parsed config.json; tensors: by Hugging Face name.
        rounded: applied to weights and to every activation that a program of a narrower type rounds; identity by
            default.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tensors: Mapping[str, np.ndarray],
        rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    ):
        self.config = config
        self.rounded = rounded
        self.tensors = {name: rounded(tensor.astype(np.float64)) for name, tensor in tensors.items()}

    @classmethod
    def from_folder(cls, folder: Path, **options: Any) -> Oracle:
        tensors: dict[str, np.ndarray] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            tensors |= load_file(path)
        return cls(json.loads((folder / "config.json").read_text()), tensors, **options)

    def logits(self, token_ids: list[int], deltas: Deltas | None = None) -> np.ndarray:
        """float64[T, V]: the logits after each token."""
        c, w, rounded = self.config, self.tensors, self.rounded
        D, N = c["hidden_size"], c["num_attention_heads"]
        K, H, T = c.get("num_key_value_heads", N), c.get("head_dim") or D // N, len(token_ids)
        angle_TH2 = np.arange(T)[:, None] * inverse_frequencies(c, H)
        cos, sin = np.cos(angle_TH2)[:, None], np.sin(angle_TH2)[:, None]

        def linear(module: str, x: np.ndarray) -> np.ndarray:
            weight = w[f"{module}.weight"]
            if deltas is not None and module in deltas:
                weight = weight + deltas[module]
            return x @ weight.T + w.get(f"{module}.bias", 0)

        def norm(module: str, x: np.ndarray) -> np.ndarray:
            scale = np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"])
            return rounded(x / scale * w[f"{module}.weight"])

        def turn(x_TNH: np.ndarray) -> np.ndarray:
            first, second = x_TNH[..., : H // 2], x_TNH[..., H // 2 :]
            return rounded(np.concatenate([first * cos - second * sin, second * cos + first * sin], -1))

        x = w["model.embed_tokens.weight"][token_ids]
        for layer in range(c["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            h = norm(f"{prefix}.input_layernorm", x)
            q = turn(linear(f"{prefix}.self_attn.q_proj", h).reshape(T, N, H))
            k = turn(linear(f"{prefix}.self_attn.k_proj", h).reshape(T, K, H))
            v = rounded(linear(f"{prefix}.self_attn.v_proj", h).reshape(T, K, H))
            attended = np.zeros((T, N, H))
            for head in range(N):
                score = q[:, head] @ k[:, head // (N // K)].T / math.sqrt(H)
                score[np.triu_indices(T, 1)] = -np.inf
                p = np.exp(score - score.max(-1, keepdims=True))
                attended[:, head] = p / p.sum(-1, keepdims=True) @ v[:, head // (N // K)]
            x = x + linear(f"{prefix}.self_attn.o_proj", rounded(attended.reshape(T, N * H)))
            h = norm(f"{prefix}.post_attention_layernorm", x)
            gate, up = linear(f"{prefix}.mlp.gate_proj", h), linear(f"{prefix}.mlp.up_proj", h)
            x = x + linear(f"{prefix}.mlp.down_proj", rounded(gate / (1 + np.exp(-gate)) * up))
        head = w["model.embed_tokens.weight" if c.get("tie_word_embeddings") else "lm_head.weight"]
        return norm("model.norm", x) @ head.T

    def check_greedy(self, prompt: list[int], output: list[int], deltas: Deltas | None = None) -> None:
        """Asserts that each output token is the most likely one, or a tie with it within what rounding decides."""
        logits = self.logits([*prompt, *output[:-1]], deltas)[len(prompt) - 1 :]
        behind = logits.max(-1) - logits[np.arange(len(output)), output]
        assert behind.max() < 1e-3, f"token {int(behind.argmax())} of {output} is {behind.max():.4f} behind the best"


def inverse_frequencies(config: dict[str, Any], head_dim: int) -> np.ndarray:
    """Radians per position of each pair of dimensions: plain, linear and llama3 RoPE."""
    freq = 1.0 / config.get("rope_theta", 10000.0) ** (np.arange(0, head_dim, 2) / head_dim)
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return freq
    if kind == "linear":
        return freq / scaling["factor"]
    assert kind == "llama3", kind
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    out = []
    for f in freq:
        turns = scaling["original_max_position_embeddings"] * f / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append(blend * f + (1 - blend) * f / scaling["factor"])
    return np.array(out)


def read_deltas(folder: Path) -> dict[str, np.ndarray]:
    """scale * B A of every module of a PEFT folder, float64[out, in]."""
    config = json.loads((folder / "adapter_config.json").read_text())
    raw, deltas = load_file(folder / "adapter_model.safetensors"), {}

    def pick(patterns: dict[str, float] | None, module: str, default: float) -> float:
        matches = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
        return next(matches, default)

    for name in raw:
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = raw[name].astype(np.float64), raw[name.replace("lora_A", "lora_B")].astype(np.float64)
            r = pick(config.get("rank_pattern"), module, config["r"])
            alpha = pick(config.get("alpha_pattern"), module, config["lora_alpha"])
            assert len(a) == r, (module, r, a.shape)
            deltas[module] = (alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r) * (b @ a)
    return deltas
