"""Adapters that are handed over in memory: a tree of arrays, brought to the names and the layout of PEFT's files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from multilora_jax.lora.adapter_files import CONFIG_FILE, listing, refuse
from multilora_jax.lora.config import PeftConfig
from multilora_jax.lora.tensor_names import EMBED, PREFIX, TensorKind, classify
from multilora_jax.memory.geometry import MODULES
from multilora_jax.safetensors_file import Hasher

if TYPE_CHECKING:
    from multilora_jax.models.config import ModelConfig

_MAX_DEPTH = 50
"""Levels of a tree of arrays; models have fewer than ten. Beyond it the tree holds itself."""
_DTYPES = ("float16", "bfloat16", "float32", "float64")
# Flax's own LoRA layers: `lora_a` [in, r] and `lora_b` [r, out], perhaps inside a module called "lora".
_FLAX = re.compile(r"(.+?)(?:\.lora)?\.lora_([ab])(?:\.(?:weight|kernel))?")
# Linen calls the layers of a list by names of their own.
_LINEN_LAYER = re.compile(r"(?<![^.])layers_(?=[0-9]+\.)")
_PEFT_KERNEL = re.compile(r".+\.lora_(?:embedding_)?([AB])(?:\.[^.]+)?\.kernel")
_BARE_PEFT = re.compile(r".+\.lora_[AB](?:\.[^.]+)?(?<!\.weight)(?<!\.bias)")


@dataclass(frozen=True)
class NamedArray:
    """One array under PEFT's name, in PEFT's layout; `given` is the caller's name, perhaps of another layout."""

    name: str
    array: np.ndarray
    given: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


class ArraySource:
    """The tensors of an adapter in memory, as open_weights gives those of a file.

    Args:
        tree: names to arrays, flat or nested (mappings and lists, joined by dots; a leading "params" is dropped). The
            names are PEFT's with or without "base_model.model.", and lora_A and lora_B with or without ".weight";
            `lora_a` [in, r] and `lora_b` [r, out], with or without ".kernel", are transposed to lora_A and lora_B.
            Linen's layers_0 is layers.0. Leaves are whatever numpy can view: float32, float16, bfloat16 or float64.

    Attributes:
        tensors: by PEFT's name, in its order.

    Raises:
        AdapterError: `bad_arrays` (no tree, or an array that cannot be read), `unsupported_dtype`, or
            `ambiguous_tensors` where two leaves have one name, or where a name leaves the layout open.
    """

    def __init__(self, tree: Mapping[str, Any]):
        if not isinstance(tree, Mapping):
            what = f"params must be a mapping from names to arrays, not {type(tree).__name__}"
            refuse("bad_arrays", what, param="params")
        tensors: dict[str, NamedArray] = {}
        for path, leaf in _leaves(tree, ()):
            array = _as_numpy(path, leaf)
            if array.dtype.name not in _DTYPES:
                kind = array.dtype.name
                refuse("unsupported_dtype", f"{listing([path])} is no array of {', '.join(_DTYPES)} but of {kind}")
            name, array = _peft_style(path.removeprefix("params."), array)
            if name in tensors:
                refuse("ambiguous_tensors", f"two arrays are called {listing([name])}")
            tensors[name] = NamedArray(name, array, path)
        self.tensors = dict(sorted(tensors.items()))

    def read_all(self, hasher: Hasher) -> Iterator[tuple[NamedArray, np.ndarray]]:
        """Yields every array once, as a float32 copy; feeds names, shapes and copies to `hasher`."""
        for named in self.tensors.values():
            with np.errstate(over="ignore"):  # a double beyond float32 becomes infinite, which is refused
                copy = np.array(named.array, np.float32, order="C", copy=True)
            hasher.update(repr((named.name, named.shape)).encode("utf-8", "backslashreplace"))
            hasher.update(copy.reshape(-1).view(np.uint8))
            yield named, copy


def _as_numpy(path: str, leaf: Any) -> np.ndarray:
    try:
        return np.asarray(leaf)
    # Each array library has errors of its own, for arrays whose memory was given up and for those it only traces.
    except Exception as error:
        refuse(
            "bad_arrays",
            f"{listing([path])} cannot be read: {str(error)[:500] or type(error).__name__}; give arrays that hold "
            "their values, and not after a call that they were donated to",
            param="params",
        )


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if len(path) > _MAX_DEPTH:
        refuse(
            "bad_arrays",
            f"the tree of arrays is more than {_MAX_DEPTH} levels deep at {listing(['.'.join(path)])}: does it hold "
            "itself?",
            param="params",
        )
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
    name = _LINEN_LAYER.sub("layers.", name)
    if match := _PEFT_KERNEL.fullmatch(name):
        side = match[1]
        mine, other = ("[r, in]", "[in, r]") if side == "A" else ("[out, r]", "[r, out]")
        refuse(
            "ambiguous_tensors",
            f"{listing([name])} has PEFT's name and Flax's leaf, which are of different layouts: call it "
            f"lora_{side}.weight if it is {mine}, lora_{side.lower()}.kernel if it is {other}",
        )
    if match := _FLAX.fullmatch(name):
        side, array = match[2].upper(), array.T
        is_embedding = match[1].split(".")[-1] == EMBED
        name = f"{match[1]}.lora_embedding_{side}" if is_embedding else f"{match[1]}.lora_{side}.weight"
    elif _BARE_PEFT.fullmatch(name):
        name += ".weight"
    return name if name.startswith(PREFIX) else PREFIX + name, array


def check_forms(source: ArraySource, model_config: ModelConfig) -> None:
    """Checks, for messages in the caller's words, that names are of an accepted form and projections not transposed.

    Raises:
        AdapterError: `unbound_tensors`, `shape_mismatch`.
    """
    unknown = [tensor.given for name, tensor in source.tensors.items() if classify(name).kind is TensorKind.UNKNOWN]
    if unknown:
        refuse(
            "unbound_tensors",
            f"these names are not understood: {listing(unknown)}. Names are paths such as "
            "model.layers.0.self_attn.q_proj.lora_A with [r, in] and ...lora_B with [out, r], as PEFT has them, or "
            "...lora_a with [in, r] and ...lora_b with [r, out], as Flax has them; layers_0 may stand for layers.0, "
            f"and the projections are {', '.join(MODULES)}",
        )
    for name, tensor in source.tensors.items():
        parsed, shape = classify(name), tensor.shape
        if parsed.kind not in _SIDES or parsed.module not in MODULES or len(shape) != 2:
            continue
        in_dim, out_dim = model_config.module_dims(parsed.module)
        side, axis, layout = _SIDES[parsed.kind]
        dim = in_dim if side == "A" else out_dim
        if shape[axis] != dim and shape[1 - axis] == dim:
            dim_name = layout[axis]
            if _FLAX.search(tensor.given):
                side, layout, shape = side.lower(), layout[::-1], shape[::-1]
            refuse(
                "shape_mismatch",
                f"{listing([tensor.given])} has shape {shape}, and lora_{side} is [{', '.join(layout)}], where "
                f"{dim_name} is {dim} here: transpose it",
            )


_SIDES = {TensorKind.LORA_A: ("A", 1, ("r", "in")), TensorKind.LORA_B: ("B", 0, ("out", "r"))}
"""PEFT's letter, the axis that is the projection's own, and what the axes are."""


def config_of(config: PeftConfig | Mapping[str, Any] | None, source: ArraySource) -> PeftConfig:
    """The config of an adapter in memory.

    Args:
        config: as adapter_config.json has it. `peft_type` may be left out; `r` may where all modules have one rank;
            `lora_alpha` may not, since the weights do not tell it and the scale is proportional to it. Numbers may be
            numpy's or JAX's.

    Raises:
        AdapterError: `bad_adapter_config`, `unsupported_adapter_feature`.
    """
    if isinstance(config, PeftConfig):
        return config
    if config is not None and not isinstance(config, Mapping):
        refuse(
            "bad_adapter_config",
            f"config must be a mapping with the fields of {CONFIG_FILE}, not {type(config).__name__}",
            param="config",
        )
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
    raw = {"peft_type": "LORA", **{name: _plain(value) for name, value in config.items()}}
    if raw.get("r") is None and not raw.get("rank_pattern") and len(ranks) == 1:
        raw["r"] = ranks.pop()
    return PeftConfig.from_dict(raw)


def _plain(value: Any) -> Any:
    """Numbers of an array library, as training code has them, as Python's."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return np.asarray(value).item() if hasattr(value, "dtype") and getattr(value, "shape", None) == () else value
