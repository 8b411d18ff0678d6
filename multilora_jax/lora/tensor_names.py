"""What a tensor of an adapter file is, read off its name alone.

Every kind that PEFT saves for a Llama is told apart here, so that a kind which is not served is refused by name and a
name that means nothing is refused as such: no tensor is ever skipped.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from multilora_jax.memory.geometry import MODULES

EMBED, HEAD = "embed_tokens", "lm_head"
"""The two modules of the vocabulary; their layer is -1."""
INPUT_NORM, POST_NORM, FINAL_NORM = "input_layernorm", "post_attention_layernorm", "norm"
"""The norms: two of each layer and the last one, whose layer is -1."""
_BLOCK = {module: "self_attn" if module[0] in "qkvo" else "mlp" for module in MODULES}


class TensorKind(enum.Enum):
    """Kinds of tensors; their place is a projection, embed_tokens, lm_head or a norm."""

    LORA_A = enum.auto()
    LORA_B = enum.auto()
    LORA_BIAS = enum.auto()
    MAGNITUDE = enum.auto()
    """DoRA's."""
    BIAS = enum.auto()
    """Replaces a bias of the base."""
    WEIGHT = enum.auto()
    """Replaces a whole weight, under the module's own name."""
    SAVED_WEIGHT = enum.auto()
    """The same, under the name that PEFT's wrapper of modules_to_save has inside the model."""
    BASE_WEIGHT = enum.auto()
    """embed_tokens' or lm_head's own weight, which PEFT saves beside what it trained on it."""
    TOKENS = enum.auto()
    """Rows that replace those of trainable_token_indices."""
    UNKNOWN = enum.auto()


Place = tuple[int, str]
"""(layer, module): one of MODULES, INPUT_NORM or POST_NORM; with layer -1 EMBED, HEAD or FINAL_NORM."""
Slot = tuple[TensorKind, int, str]
"""(kind, layer, module): what one tensor of a file fills."""


@dataclass(frozen=True)
class TensorName:
    """A classified name.

    Attributes:
        kind: what the tensor is.
        module_path: dotted name of its module as the config's patterns see it; empty for UNKNOWN.
        layer, module: its place.
        adapter: the adapter's name inside the key ("default"), empty in files written by save_pretrained; None for
            kinds that never carry one.
    """

    kind: TensorKind
    module_path: str = ""
    layer: int = -1
    module: str = ""
    adapter: str | None = None

    @property
    def slot(self) -> Slot:
        return self.kind, self.layer, self.module


PREFIX = "base_model.model."
"""Every name in a file that PEFT wrote begins with this."""
_UNKNOWN = TensorName(TensorKind.UNKNOWN)
_LAYER = r"(?:model\.)?layers\.(0|[1-9][0-9]{0,5})"
_PROJECTION = re.compile(rf"{_LAYER}\.(self_attn|mlp)\.([a-z]+_proj)")
_LAYER_NORM = re.compile(rf"{_LAYER}\.({INPUT_NORM}|{POST_NORM})")
_TOP = re.compile(rf"(?:model\.)?({EMBED}|{FINAL_NORM})|({HEAD})")

# An adapter's name may stand where PEFT has it inside the model; "weight" is no such name.
_NAME = r"(?:\.(?!weight$)([^.]+))?"
_SUFFIXES = [
    (TensorKind.LORA_A, re.compile(rf"(.+)\.lora_A{_NAME}\.weight")),
    (TensorKind.LORA_B, re.compile(rf"(.+)\.lora_B{_NAME}\.weight")),
    (TensorKind.LORA_A, re.compile(rf"(.+)\.lora_embedding_A{_NAME}")),
    (TensorKind.LORA_B, re.compile(rf"(.+)\.lora_embedding_B{_NAME}")),
    (TensorKind.LORA_BIAS, re.compile(r"(.+)\.lora_B(?:\.([^.]+))?\.bias")),
    (TensorKind.MAGNITUDE, re.compile(rf"(.+)\.lora_magnitude_vector{_NAME}(?:\.weight)?")),
    (TensorKind.TOKENS, re.compile(rf"(.+)\.token_adapter\.trainable_tokens_delta{_NAME}")),
    (TensorKind.BASE_WEIGHT, re.compile(r"(.+?)\.(?:token_adapter\.)?(?:base_layer|original_module)\.weight()")),
    (TensorKind.SAVED_WEIGHT, re.compile(rf"(.+)\.modules_to_save{_NAME}\.weight")),
    (TensorKind.BIAS, re.compile(r"(.+?)(?:\.base_layer)?\.bias()")),
    (TensorKind.WEIGHT, re.compile(r"(.+)\.weight()")),
]
_NEVER_NAMED = (TensorKind.BASE_WEIGHT, TensorKind.BIAS, TensorKind.WEIGHT)


def projection_path(layer: int, module: str) -> str:
    """Dotted name of a projection in a Llama causal language model ("model.layers.0.self_attn.q_proj")."""
    return f"model.layers.{layer}.{_BLOCK[module]}.{module}"


def _place(path: str) -> Place | None:
    if (match := _PROJECTION.fullmatch(path)) and _BLOCK.get(match[3]) == match[2]:
        return int(match[1]), match[3]
    if match := _LAYER_NORM.fullmatch(path):
        return int(match[1]), match[2]
    if match := _TOP.fullmatch(path):
        return -1, match[1] or match[2]
    return None


def _fits(kind: TensorKind, module: str, embedding_style: bool) -> bool:
    """Whether PEFT ever gives a module of this kind such a tensor."""
    if kind in (TensorKind.LORA_A, TensorKind.LORA_B):
        return embedding_style if module == EMBED else not embedding_style and (module in MODULES or module == HEAD)
    if kind is TensorKind.LORA_BIAS:
        return module in MODULES or module == HEAD
    if kind is TensorKind.MAGNITUDE:
        return module in MODULES or module in (EMBED, HEAD)
    if kind is TensorKind.BIAS:
        return module in MODULES
    if kind in (TensorKind.TOKENS, TensorKind.BASE_WEIGHT):
        return module in (EMBED, HEAD)
    return True


def classify(key: str) -> TensorName:
    """Kind and place of the tensor called `key` in an adapter file."""
    if not key.startswith(PREFIX):
        return _UNKNOWN
    name = key.removeprefix(PREFIX)
    for kind, pattern in _SUFFIXES:
        match = pattern.fullmatch(name)
        place = _place(match[1]) if match else None
        if match and place and _fits(kind, place[1], ".lora_embedding_" in name):
            return TensorName(kind, match[1], *place, None if kind in _NEVER_NAMED else match[2] or "")
    return _UNKNOWN
