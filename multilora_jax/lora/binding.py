"""Gives every tensor of an adapter its place in the base, or refuses the adapter: names, config and shapes are checked
against each other before any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multilora_jax.lora.adapter_files import TensorEntry, listing, refuse
from multilora_jax.lora.config import PeftConfig, contradiction, unsupported
from multilora_jax.lora.tensor_names import (
    EMBED,
    FINAL_NORM,
    HEAD,
    INPUT_NORM,
    POST_NORM,
    Place,
    Slot,
    TensorKind,
    TensorName,
    classify,
    projection_path,
)
from multilora_jax.lora.vocabulary import VOCAB_PATHS, token_rows
from multilora_jax.memory.geometry import MODULES

if TYPE_CHECKING:
    from multilora_jax.models.config import ModelConfig

_WEIGHTS = (TensorKind.WEIGHT, TensorKind.SAVED_WEIGHT)


@dataclass(frozen=True)
class Binding:
    """Where the tensors of one adapter belong.

    Attributes:
        slots: slot of each tensor by its name in the file.
        paths: dotted name, as the file has it, of every module with A and B.
        rank: the largest rank of any module, 0 where none has A and B.
        vocab_size: rows of the embedding and of the head as the adapter has them, at least the base's.
    """

    slots: dict[str, Slot]
    paths: dict[Place, str]
    rank: int
    vocab_size: int


def bind(
    tensors: Mapping[str, TensorEntry],
    config: PeftConfig,
    model_config: ModelConfig,
    *,
    max_lora_rank: int,
    max_extra_vocab: int,
) -> Binding:
    """Binds all tensors; raises AdapterError with the reasons that load_adapter lists."""
    names = {name: classify(name) for name in tensors}
    _check_names(names, config, model_config.num_layers)
    slots, paths = _slots(names)
    _check_pairs(slots, paths)
    _check_features(slots, config, model_config)
    _check_saved_modules(slots, config, model_config.num_layers)
    entries = {slot: tensors[name] for name, slot in slots.items()}
    vocab_size = _check_shapes(entries, config, model_config, max_extra_vocab)
    rank = _check_ranks(entries, paths, config, max_lora_rank)
    lora_paths = {place: path for place, path in paths.items() if (TensorKind.LORA_A, *place) in entries}
    return Binding(slots, lora_paths, rank, vocab_size)


def _check_names(names: Mapping[str, TensorName], config: PeftConfig, num_layers: int) -> None:
    if not names:
        refuse("empty_adapter", "the adapter holds no tensors")
    full = [name for name, parsed in names.items() if parsed.kind in _WEIGHTS and parsed.module in MODULES]
    if full:
        raise unsupported("modules_to_save", f"the file holds {listing(full)}")
    unbound = [n for n, parsed in names.items() if parsed.kind is TensorKind.UNKNOWN or parsed.layer >= num_layers]
    if unbound:
        refuse(
            "unbound_tensors",
            f"these tensors belong to nothing in the base, whose layers are 0 to {num_layers - 1} and whose "
            f"projections are {', '.join(MODULES)}: {listing(unbound)}; was it trained on another base?",
        )
    adapters = sorted({parsed.adapter for parsed in names.values() if parsed.adapter is not None})
    if len(adapters) > 1:
        refuse(
            "ambiguous_tensors", f"the file holds several adapters ({listing(adapters)}): save each in its own folder"
        )


def _slots(names: Mapping[str, TensorName]) -> tuple[dict[str, Slot], dict[Place, str]]:
    """(slot of each tensor, dotted name of each place); each slot is filled once, under one name of its module."""
    slots: dict[str, Slot] = {}
    taken: set[Slot] = set()
    paths: dict[Place, str] = {}
    for name, parsed in names.items():
        place = parsed.layer, parsed.module
        if parsed.slot in taken or paths.setdefault(place, parsed.module_path) != parsed.module_path:
            where = parsed.module if parsed.layer < 0 else f"layer {parsed.layer} {parsed.module}"
            refuse("ambiguous_tensors", f"{where} is given twice, by {name[:200]!r} and by another tensor")
        slots[name] = parsed.slot
        taken.add(parsed.slot)
    return slots, paths


def _places(slots: Mapping[str, Slot], *kinds: TensorKind) -> dict[Place, str]:
    """Places that have a tensor of one of the kinds, each with the tensor's name."""
    return {(layer, module): name for name, (kind, layer, module) in slots.items() if kind in kinds}


def _check_pairs(slots: Mapping[str, Slot], paths: Mapping[Place, str]) -> None:
    a, b = _places(slots, TensorKind.LORA_A), _places(slots, TensorKind.LORA_B)
    alone = [(a | b)[place] for place in a.keys() ^ b.keys()]
    for kind in (TensorKind.MAGNITUDE, TensorKind.LORA_BIAS):
        alone += [name for place, name in _places(slots, kind).items() if place not in a and place not in b]
    if alone:
        refuse(
            "incomplete_tensors",
            f"lora_A and lora_B must come in pairs, and these have no partner: {listing(sorted(alone))}",
        )


def _check_features(slots: Mapping[str, Slot], config: PeftConfig, model_config: ModelConfig) -> None:
    """Magnitudes and biases are there where the config says so, and nowhere else."""
    adapted = _places(slots, TensorKind.LORA_A)
    for field, kind, on in (
        ("use_dora", TensorKind.MAGNITUDE, config.use_dora),
        ("lora_bias", TensorKind.LORA_BIAS, config.lora_bias),
    ):
        found = _places(slots, kind)
        if found and not on:
            raise contradiction(field, f"it is off, and the file holds {listing(found.values())}")
        missing = [name for place, name in adapted.items() if place not in found]
        if on and missing:
            raise contradiction(field, f"it is on, and no such tensor goes with {listing(missing)}")
    biased = model_config.biased_modules
    found = _places(slots, TensorKind.BIAS)
    if found and config.bias == "none":
        raise contradiction("bias", f'it is "none", and the file holds {listing(found.values())}')
    if unbound := [name for (_, module), name in found.items() if module not in biased]:
        refuse("unbound_tensors", f"the base has no biases for {listing(unbound)}; was it trained on another base?")
    wanted = {(layer, module) for layer in range(model_config.num_layers) for module in biased}
    if config.bias == "lora_only":
        wanted &= adapted.keys()
    if config.bias != "none" and (missing := sorted(wanted - found.keys())):
        shown = listing(projection_path(*place) for place in missing)
        raise contradiction("bias", f'it is "{config.bias}", and the file holds none for {shown}')


def _check_saved_modules(slots: Mapping[str, Slot], config: PeftConfig, num_layers: int) -> None:
    """modules_to_save and the replaced weights are the same modules; the vocabulary may be there for its new size."""
    norms = {(-1, FINAL_NORM): "model.norm"}
    others = ["model", "model.layers"]
    for layer in range(num_layers):
        norms |= {(layer, norm): f"model.layers.{layer}.{norm}" for norm in (INPUT_NORM, POST_NORM)}
        others += [f"model.layers.{layer}{part}" for part in ("", ".self_attn", ".mlp")]
        others += [projection_path(layer, module) for module in MODULES]
    if unserved := [path for path in others if config.saves(path)]:
        raise unsupported("modules_to_save", f"it names {listing(unserved)}")
    servable = norms | {(-1, module): path for module, path in VOCAB_PATHS.items()}
    wanted = {place for place, path in servable.items() if config.saves(path)}
    found = _places(slots, *_WEIGHTS)
    if missing := sorted(wanted - found.keys()):
        raise contradiction("modules_to_save", f"the file holds no weight of {listing(servable[p] for p in missing)}")
    named = _places(slots, TensorKind.SAVED_WEIGHT).keys() | (found.keys() & norms.keys())
    if unnamed := sorted(named - wanted):
        raise contradiction("modules_to_save", f"it does not name {listing(servable[p] for p in unnamed)}")


def _vocab_rows(slot: Slot, shape: tuple[int, ...]) -> int | None:
    """Rows of the vocabulary that a tensor stands for; None where its shape has none."""
    kind, _, module = slot
    if kind in (*_WEIGHTS, TensorKind.BASE_WEIGHT) and module in VOCAB_PATHS and len(shape) == 2:
        return shape[0]
    if module == EMBED and kind is TensorKind.LORA_A and len(shape) == 2:
        return shape[1]
    if module == HEAD and kind is TensorKind.LORA_B and len(shape) == 2:
        return shape[0]
    if module == HEAD and kind in (TensorKind.MAGNITUDE, TensorKind.LORA_BIAS):
        return math.prod(shape)
    return None


def _check_shapes(
    entries: Mapping[Slot, TensorEntry], config: PeftConfig, model_config: ModelConfig, max_extra_vocab: int
) -> int:
    """Checks every shape against the base and the config; returns the adapter's vocabulary."""
    for (kind, _, _), entry in entries.items():
        is_matrix = len(entry.shape) == 2 or kind not in (TensorKind.LORA_A, TensorKind.LORA_B)
        if not is_matrix or 0 in entry.shape:
            refuse(
                "empty_tensor",
                f"tensor {entry.name!r} has shape {entry.shape}, which is empty or no matrix: was it saved from "
                "sharded training (ZeRO-3, FSDP) without gathering the weights?",
            )
    tokens = token_rows(entries, config, model_config)
    rows = [rows for slot, entry in entries.items() if (rows := _vocab_rows(slot, entry.shape)) is not None]
    last = max((token for ids in tokens.values() for token in ids), default=-1)
    vocab_size = rows[0] if rows else max(model_config.vocab_size, last + 1)
    if last >= vocab_size:
        raise contradiction("trainable_token_indices", f"token {last} is none of the {vocab_size} in the weights")
    for (kind, layer, module), entry in entries.items():
        rank = entries[TensorKind.LORA_A, layer, module].shape[0] if kind is TensorKind.LORA_B else 0
        num_tokens = len(tokens[module]) if kind is TensorKind.TOKENS else 0
        wanted = _wanted_shape(kind, module, model_config, vocab_size, rank or entry.shape[0], num_tokens)
        flat = kind is TensorKind.MAGNITUDE and max(entry.shape, default=1) == math.prod(entry.shape)
        if ((math.prod(entry.shape),) if flat else entry.shape) != wanted:
            refuse(
                "shape_mismatch",
                f"tensor {entry.name!r} has shape {entry.shape} where the base, its config and its other tensors "
                f"need {wanted}; was it trained on another base?",
            )
    _check_vocab_size(vocab_size, model_config.vocab_size, max_extra_vocab)
    return vocab_size


def _wanted_shape(
    kind: TensorKind, module: str, model_config: ModelConfig, vocab_size: int, rank: int, num_tokens: int
) -> tuple[int, ...]:
    hidden = model_config.hidden_size
    if kind is TensorKind.TOKENS:
        return num_tokens, hidden
    if kind in (*_WEIGHTS, TensorKind.BASE_WEIGHT):
        return (vocab_size, hidden) if module in VOCAB_PATHS else (hidden,)
    vocab_dims = {EMBED: (vocab_size, hidden), HEAD: (hidden, vocab_size)}
    in_dim, out_dim = vocab_dims.get(module) or model_config.module_dims(module)
    return {TensorKind.LORA_A: (rank, in_dim), TensorKind.LORA_B: (out_dim, rank)}.get(kind, (out_dim,))


def _check_vocab_size(vocab_size: int, base_size: int, max_extra_vocab: int) -> None:
    extra = vocab_size - base_size
    if extra < 0:
        refuse(
            "shape_mismatch",
            f"the adapter was trained with a vocabulary of {vocab_size} tokens and the base has {base_size}: a smaller "
            "one is not served; was it trained on another base?",
        )
    if extra > max_extra_vocab:
        refuse(
            "vocab_too_large",
            f"the adapter adds {extra} tokens to the base's {base_size}, above max_extra_vocab {max_extra_vocab}: "
            f"start the server with max_extra_vocab of at least {extra}, if it was trained on this base",
        )


def _check_ranks(
    entries: Mapping[Slot, TensorEntry], paths: Mapping[Place, str], config: PeftConfig, max_lora_rank: int
) -> int:
    """Checks every rank against the limit and the config; returns the largest, 0 where there is none."""
    largest = 0
    for (kind, layer, module), entry in entries.items():
        if kind is not TensorKind.LORA_A:
            continue
        rank, wanted = entry.shape[0], config.rank_of(paths[layer, module])
        if rank > max_lora_rank:
            refuse(
                "rank_too_large",
                f"tensor {entry.name!r} has rank {rank}, above max_lora_rank {max_lora_rank}: start the server with "
                f"max_lora_rank of at least {rank}",
            )
        if rank != wanted:
            refuse(
                "rank_mismatch",
                f"tensor {entry.name!r} has rank {rank} but adapter_config.json gives that module rank {wanted}, so "
                "its scale is in doubt: mend r or rank_pattern",
                param="r",
            )
        largest = max(largest, rank)
    return largest
