"""What a tensor of an adapter file is, read off its name alone.

Every kind that PEFT saves for a Llama is told apart here, so that a kind which is not served is refused by name and a
name that means nothing is refused as such: no tensor is ever skipped.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from multilora_jax.memory.geometry import MODULES

_BLOCK = {module: "self_attn" if module[0] in "qkvo" else "mlp" for module in MODULES}


class TensorKind(enum.Enum):
    """Kinds of tensors; the values are the fields of adapter_config.json that stand for the kinds not served."""

    LORA_A = enum.auto()
    LORA_B = enum.auto()
    VOCAB_LORA = "target_modules"
    DORA_MAGNITUDE = "use_dora"
    LORA_BIAS = "lora_bias"
    BASE_BIAS = "bias"
    FULL_WEIGHT = "modules_to_save"
    TRAINED_TOKENS = "trainable_token_indices"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class TensorName:
    """A classified name.

    Attributes:
        kind: what the tensor is.
        module_path: dotted name of its module as the config's patterns see it; empty where it is not needed.
        layer, module: which projection it belongs to (LORA_A and LORA_B only).
        adapter: the adapter's name inside the key ("default"), empty in files written by save_pretrained.
    """

    kind: TensorKind
    module_path: str = ""
    layer: int = -1
    module: str = ""
    adapter: str = ""


_PREFIX = "base_model.model."
_PROJECTION = re.compile(r"(?:model\.)?layers\.(0|[1-9][0-9]{0,5})\.(self_attn|mlp)\.([a-z]+_proj)")
_VOCAB = re.compile(r"(?:model\.)?embed_tokens|lm_head")
_NORM = re.compile(r"(?:model\.)?(?:layers\.[0-9]+\.(?:input|post_attention)_layernorm|norm)")
_LORA = re.compile(r"(.+)\.lora_([AB])(?:\.([^.]+))?\.(weight|bias)")
# Beside the adapter of an embedding PEFT saves that module's frozen weight as base_layer.weight.
_VOCAB_ONLY = re.compile(r"(.+)\.(?:lora_embedding_[AB](?:\.[^.]+)?|base_layer\.weight)")
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.[^.]+)?(?:\.weight)?")
_TOKENS = re.compile(r"(.+)\.token_adapter\.trainable_tokens_delta(?:\.[^.]+)?")
_BIAS = re.compile(r"(.+?)(?:\.base_layer)?\.bias")
_WEIGHT = re.compile(r"(.+?)(?:\.modules_to_save(?:\.[^.]+)?)?\.weight")


def projection_path(layer: int, module: str) -> str:
    """Dotted name of a projection in a Llama causal language model ("model.layers.0.self_attn.q_proj")."""
    return f"model.layers.{layer}.{_BLOCK[module]}.{module}"


def _projection(path: str) -> tuple[int, str] | None:
    match = _PROJECTION.fullmatch(path)
    if match is None or _BLOCK.get(match[3]) != match[2]:
        return None
    return int(match[1]), match[3]


def classify(key: str) -> TensorName:
    """Kind and place of the tensor called `key` in an adapter file."""
    unknown = TensorName(TensorKind.UNKNOWN)
    if not key.startswith(_PREFIX):
        return unknown
    name = key.removeprefix(_PREFIX)
    if match := _LORA.fullmatch(name):
        path, side, adapter, leaf = match[1], match[2], match[3] or "", match[4]
        place = _projection(path)
        if place is None:
            return TensorName(TensorKind.VOCAB_LORA) if _VOCAB.fullmatch(path) else unknown
        if leaf == "bias":
            return TensorName(TensorKind.LORA_BIAS) if side == "B" else unknown
        return TensorName(TensorKind.LORA_A if side == "A" else TensorKind.LORA_B, path, *place, adapter)
    if (match := _VOCAB_ONLY.fullmatch(name)) and _VOCAB.fullmatch(match[1]):
        return TensorName(TensorKind.VOCAB_LORA)
    if (match := _TOKENS.fullmatch(name)) and _VOCAB.fullmatch(match[1]):
        return TensorName(TensorKind.TRAINED_TOKENS)
    if (match := _MAGNITUDE.fullmatch(name)) and (_projection(match[1]) or _VOCAB.fullmatch(match[1])):
        return TensorName(TensorKind.DORA_MAGNITUDE)
    if (match := _BIAS.fullmatch(name)) and _projection(match[1]):
        return TensorName(TensorKind.BASE_BIAS)
    if match := _WEIGHT.fullmatch(name):
        path = match[1]
        if _projection(path) or _VOCAB.fullmatch(path) or _NORM.fullmatch(path):
            return TensorName(TensorKind.FULL_WEIGHT)
    return unknown
