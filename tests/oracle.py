"""An independent Llama in numpy: float64, no cache, adapters merged into the weights. Reads files by itself.

It shares no code with the package, so both being wrong in the same way is unlikely. What an adapter does is worked out
from PEFT's files as the weights that the model has with it, and only then compared with the base.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy then knows bfloat16 by name, which safetensors asks for
import numpy as np
from safetensors.numpy import load_file

Deltas = Mapping[str, np.ndarray]
"""Tensor name (model.layers.0.self_attn.q_proj.weight; a module's name stands for its weight) to what an adapter adds
to it; of the embedding and the head it may have more rows than the base."""

EMBED, HEAD = "model.embed_tokens", "lm_head"


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
        if self.tied:
            self.tensors[f"{HEAD}.weight"] = self.tensors[f"{EMBED}.weight"]

    @classmethod
    def from_folder(cls, folder: Path, **options: Any) -> Oracle:
        tensors: dict[str, np.ndarray] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            tensors |= load_file(path)
        return cls(json.loads((folder / "config.json").read_text()), tensors, **options)

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings"))

    def logits(self, token_ids: list[int], deltas: Deltas | None = None) -> np.ndarray:
        """float64[T, V]: the logits after each token."""
        c, w, rounded = self.config, self.tensors, self.rounded
        D, N = c["hidden_size"], c["num_attention_heads"]
        K, H, T = c.get("num_key_value_heads", N), c.get("head_dim") or D // N, len(token_ids)
        angle_TH2 = np.arange(T)[:, None] * inverse_frequencies(c, H)
        cos, sin = np.cos(angle_TH2)[:, None], np.sin(angle_TH2)[:, None]

        def tensor(name: str) -> Any:
            own, changes = w.get(name), deltas or {}
            change = changes.get(name, changes.get(name.removesuffix(".weight")))
            if own is None or change is None:
                return own if change is None else change
            return _grown(own, len(change)) + _grown(change, len(own))

        def linear(module: str, x: np.ndarray) -> np.ndarray:
            bias = tensor(f"{module}.bias")
            return x @ tensor(f"{module}.weight").T + (0 if bias is None else bias)

        def norm(module: str, x: np.ndarray) -> np.ndarray:
            scale = np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"])
            return rounded(x / scale * tensor(f"{module}.weight"))

        def turn(x_TNH: np.ndarray) -> np.ndarray:
            first, second = x_TNH[..., : H // 2], x_TNH[..., H // 2 :]
            return rounded(np.concatenate([first * cos - second * sin, second * cos + first * sin], -1))

        x = tensor(f"{EMBED}.weight")[token_ids]
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
        return linear(HEAD, norm("model.norm", x))

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


def mix(parts: Iterable[tuple[Deltas, float]]) -> dict[str, np.ndarray]:
    """The sum of several adapters' deltas, each times its factor."""
    total: dict[str, np.ndarray] = {}
    for deltas, factor in parts:
        for name, delta in deltas.items():
            old = total.get(name, np.zeros_like(delta))
            total[name] = _grown(old, len(delta)) + factor * _grown(delta, len(old))
    return total


def _grown(array: np.ndarray, length: int) -> np.ndarray:
    """With rows of zeros up to `length`, if it has fewer."""
    return np.pad(array, [(0, max(0, length - len(array))), *[(0, 0)] * (array.ndim - 1)])


def read_deltas(folder: Path, base: Oracle | None = None) -> dict[str, np.ndarray]:
    """What the adapter of a PEFT folder adds to each tensor of its base.

    `base` may be left out for an adapter that has nothing but LoRA on projections.
    """
    config = json.loads((folder / "adapter_config.json").read_text())
    raw: dict[str, np.ndarray] = {}
    for path in folder.glob("adapter_model*.safetensors"):
        for key, tensor in load_file(path).items():
            raw[key.removeprefix("base_model.model.")] = tensor.astype(np.float64)
    with_adapter = _Effective(config, raw, {} if base is None else base.tensors, base is not None and base.tied)
    return with_adapter.deltas()


class _Effective:
    """The tensors that a model has with an adapter, as PEFT computes with them.

    A tied model has one parameter for both ends, so what replaces that (a copy of it in the file) replaces both, and so
    do trained tokens; modules_to_save and LoRA take part at the end they are given for.
    """

    def __init__(
        self, config: dict[str, Any], raw: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray], tied: bool
    ):
        self.config, self.raw, self.base, self.tied = config, raw, base, tied
        self.tensors = dict(base)
        self.changes: dict[str, np.ndarray] = {}  # of tensors that the base lacks, or that nobody gave

    def deltas(self) -> dict[str, np.ndarray]:
        for key, tensor in self.raw.items():
            self._replace(key, tensor)
        self._train_tokens()
        for key in self.raw:
            if key.endswith((".lora_A.weight", ".lora_embedding_A")):
                self._adapt(key)
        for name, tensor in self.tensors.items():
            old = self.base.get(name, np.zeros(0))
            if tensor is not old:
                self.changes[name] = tensor - (_grown(old, len(tensor)) if len(old) else 0)
        return self.changes

    def _replace(self, key: str, tensor: np.ndarray) -> None:
        name = key.replace(".token_adapter", "").replace(".base_layer", "")
        if name not in self.base or ".original_module." in key:
            return
        module = name.removesuffix(".weight")
        self.tensors[name] = tensor
        saved = any(module.endswith(target) for target in self.config.get("modules_to_save") or ())
        if self.tied and module in (EMBED, HEAD) and not saved:
            self.tensors[f"{EMBED}.weight"] = self.tensors[f"{HEAD}.weight"] = tensor

    def _train_tokens(self) -> None:
        indices = self.config.get("trainable_token_indices") or {}
        if isinstance(indices, list):
            indices = {"embed_tokens": indices}
        for end, other in ((EMBED, HEAD), (HEAD, EMBED)):
            own = next((ids for target, ids in indices.items() if end.endswith(target)), None)
            if own is None and self.tied:
                own = next((ids for target, ids in indices.items() if other.endswith(target)), None)
            if own is None:
                continue
            key = ".token_adapter.trainable_tokens_delta"
            name = f"{end}.weight"
            self.tensors[name] = self.tensors[name].copy()
            self.tensors[name][own] = self.raw[end + key] if end + key in self.raw else self.raw[other + key]

    def _adapt(self, key: str) -> None:
        module, _, kind = key.removesuffix(".weight").rpartition(".")
        embedding = kind == "lora_embedding_A"
        a, b = self.raw[key], self.raw[key.replace("_A", "_B")]
        r = self._pick("rank_pattern", module, self.config["r"])
        alpha = self._pick("alpha_pattern", module, self.config["lora_alpha"])
        assert len(a) == r, (module, r, a.shape)
        scale = alpha / math.sqrt(r) if self.config.get("use_rslora") else alpha / r
        name, change = f"{module}.weight", scale * (b @ a)
        change = change.T if embedding else change
        magnitude = self.raw.get(f"{module}.lora_magnitude_vector")
        if name in self.tensors:
            changed = self.tensors[name] + change
            if magnitude is not None:
                # One magnitude per output of a linear layer, and per hidden unit of an embedding.
                axis = 0 if embedding else 1
                factor = magnitude / np.sqrt((changed * changed).sum(axis))
                changed = changed * (factor if embedding else factor[:, None])
            self.tensors[name] = changed
        else:
            assert magnitude is None
            self.changes[name] = change
        lora_bias = self.raw.get(f"{module}.lora_B.bias")
        if lora_bias is not None:
            self.tensors[f"{module}.bias"] = self.tensors.get(f"{module}.bias", 0) + scale * lora_bias

    def _pick(self, field: str, module: str, default: float) -> float:
        matches = (v for key, v in (self.config.get(field) or {}).items() if re.match(rf"(.*\.)?({key})$", module))
        return next(matches, default)
