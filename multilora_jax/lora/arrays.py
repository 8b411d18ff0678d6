"""Adapters that are handed over in memory: a tree of arrays, brought to the names and the layout of PEFT's files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from multilora_jax.lora.adapter_files import listing, refuse
from multilora_jax.lora.config import PeftConfig
from multilora_jax.lora.tensor_names import EMBED, PREFIX
from multilora_jax.safetensors_file import Hasher

_DTYPES = ("float16", "bfloat16", "float32", "float64")
# Flax's own LoRA layers: `lora_a` [in, r] and `lora_b` [r, out], perhaps inside a module called "lora".
_FLAX = re.compile(r"(.+?)(?:\.lora)?\.lora_([ab])(?:\.(?:weight|kernel))?")
_BARE_PEFT = re.compile(r".+\.lora_[AB](?:\.[^.]+)?(?<!\.weight)(?<!\.bias)")


@dataclass(frozen=True)
class NamedArray:
    """One array under PEFT's name, in PEFT's layout."""

    name: str
    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


class ArraySource:
    """The tensors of an adapter in memory, as open_weights gives those of a file.

    Args:
        tree: names to arrays, flat or nested (mappings and lists, joined by dots; a leading "params" is dropped). The
            names are PEFT's with or without "base_model.model.", and lora_A and lora_B with or without ".weight";
            `lora_a` [in, r] and `lora_b` [r, out] are transposed to lora_A and lora_B. Leaves are whatever numpy can
            view: float32, float16, bfloat16 or float64.

    Attributes:
        tensors: by PEFT's name, in its order.

    Raises:
        AdapterError: `unsupported_dtype`, or `ambiguous_tensors` where two leaves have one name.
    """

    def __init__(self, tree: Mapping[str, Any]):
        tensors: dict[str, NamedArray] = {}
        for path, leaf in _leaves(tree, ()):
            array = np.asarray(leaf)
            if array.dtype.name not in _DTYPES:
                kind = array.dtype.name
                refuse("unsupported_dtype", f"{listing([path])} is no array of {', '.join(_DTYPES)} but of {kind}")
            name, array = _peft_style(path.removeprefix("params."), array)
            if name in tensors:
                refuse("ambiguous_tensors", f"two arrays are called {listing([name])}")
            tensors[name] = NamedArray(name, array)
        self.tensors = dict(sorted(tensors.items()))

    def read_all(self, hasher: Hasher) -> Iterator[tuple[NamedArray, np.ndarray]]:
        """Yields every array once, as a float32 copy; feeds names, shapes and copies to `hasher`."""
        for named in self.tensors.values():
            with np.errstate(over="ignore"):  # a double beyond float32 becomes infinite, which is refused
                copy = np.array(named.array, np.float32, order="C", copy=True)
            hasher.update(repr((named.name, named.shape)).encode("utf-8", "backslashreplace"))
            hasher.update(copy.reshape(-1).view(np.uint8))
            yield named, copy


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        yield ".".join(path), tree
        return
    for key, value in items:
        yield from _leaves(value, (*path, str(key)))


def _peft_style(name: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    if match := _FLAX.fullmatch(name):
        side, array = match[2].upper(), array.T
        is_embedding = match[1].split(".")[-1] == EMBED
        name = f"{match[1]}.lora_embedding_{side}" if is_embedding else f"{match[1]}.lora_{side}.weight"
    elif _BARE_PEFT.fullmatch(name):
        name += ".weight"
    return name if name.startswith(PREFIX) else PREFIX + name, array


def config_of(config: PeftConfig | Mapping[str, Any] | None, source: ArraySource) -> PeftConfig:
    """The config of an adapter in memory.

    Args:
        config: as adapter_config.json has it. `peft_type` may be left out; `r` may where all modules have one rank;
            `lora_alpha` may not, since the weights do not tell it and the scale is proportional to it.

    Raises:
        AdapterError: `bad_adapter_config`, `unsupported_adapter_feature`.
    """
    if isinstance(config, PeftConfig):
        return config
    if config is None or config.get("lora_alpha") is None:
        refuse(
            "bad_adapter_config",
            "config must have lora_alpha, by which the scale is lora_alpha / r: give at least "
            '{"lora_alpha": ...}, with lora_alpha equal to r for a scale of 1',
            param="config",
        )
    ranks = {
        tensor.shape[0]
        for name, tensor in source.tensors.items()
        if re.search(r"\.lora_(?:embedding_)?A\b", name) and tensor.shape
    }
    raw = {"peft_type": "LORA", **config}
    if raw.get("r") is None and not raw.get("rank_pattern") and len(ranks) == 1:
        raw["r"] = ranks.pop()
    return PeftConfig.from_dict(raw)
