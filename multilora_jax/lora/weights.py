"""A PEFT adapter folder, checked whole and read into float32 arrays: served exactly or refused by name.

Checks run from cheap to dear: the folder, the config, the names and shapes in the file's header, and only then the
weights themselves, tensor by tensor.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from multilora_jax.errors import AdapterError, NotFoundError
from multilora_jax.lora.config import PeftConfig, unsupported
from multilora_jax.lora.tensor_names import TensorKind, TensorName, classify
from multilora_jax.memory.geometry import MODULES
from multilora_jax.safetensors_file import (
    FileError,
    FileFault,
    SafetensorsFile,
    TensorInfo,
    open_regular,
    refuse_lfs_pointer,
)

if TYPE_CHECKING:
    from multilora_jax.models.config import ModelConfig

CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG_BYTES = 16 * 2**20
"""Far above any real adapter_config.json, even with a rank for every module of a large model."""

ModuleKey = tuple[int, str]
"""(layer, module), the module being one of memory.geometry.MODULES."""


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """A checked adapter; a module that is absent has no delta.

    Attributes:
        path: folder that it came from, empty for one made in memory.
        digest: SHA-256 (hex) of the weights file and of the config fields that change the result.
        rank: the largest rank of any module.
        config: the adapter's config.
        a: float32 [r, in] of each module.
        b: float32 [out, r] of each module.
        scale: factor on `B A x` of each module.
    """

    path: str
    digest: str
    rank: int
    config: PeftConfig
    a: dict[ModuleKey, np.ndarray] = field(repr=False)
    b: dict[ModuleKey, np.ndarray] = field(repr=False)
    scale: dict[ModuleKey, float] = field(repr=False)


@dataclass
class _Pair:
    """The two header entries of one module."""

    path: str
    a: TensorInfo | None = None
    b: TensorInfo | None = None


def load_adapter(path: str, model_config: ModelConfig, *, max_lora_rank: int) -> AdapterWeights:
    """Reads and checks a PEFT LoRA adapter (adapter_config.json and adapter_model.safetensors).

    Args:
        path: the folder.
        model_config: the base that the adapter must fit.
        max_lora_rank: ranks above it are refused.

    Raises:
        NotFoundError: no such folder (`adapter_path_not_found`) or a file missing in it (`adapter_file_not_found`).
        AdapterError: the adapter cannot be served exactly. Reasons: `bad_adapter_config`,
            `unsupported_adapter_feature`, `pickle_weights`, `sharded_weights`, `lfs_pointer`, `corrupt_weights`,
            `unsupported_dtype`, `unbound_tensors`, `ambiguous_tensors`, `incomplete_tensors`, `empty_adapter`,
            `empty_tensor`, `shape_mismatch`, `rank_mismatch`, `rank_too_large`, `nan_weights`.
    """
    if not os.path.isdir(path):
        raise NotFoundError(
            f"adapter folder {path[:500]!r} does not exist: give a local folder that holds {CONFIG_FILE}",
            reason="adapter_path_not_found", param="lora_path",
        )  # fmt: skip
    config = _read_config(os.path.join(path, CONFIG_FILE))
    weights_path = os.path.join(path, WEIGHTS_FILE)
    if not os.path.lexists(weights_path):
        _refuse_other_formats(path)
    digest = hashlib.sha256(config.canonical_json() + b"\n")
    with _refusing(weights_path):
        file = SafetensorsFile(weights_path)
        names = {name: classify(name) for name in file.tensors}
        pairs = _bind(file.tensors.values(), names, model_config.num_layers)
        rank = _check_shapes(pairs, config, model_config, max_lora_rank)
        a: dict[ModuleKey, np.ndarray] = {}
        b: dict[ModuleKey, np.ndarray] = {}
        for info, array in file.read_all(digest):
            if not np.isfinite(array).all():
                raise AdapterError(
                    f"tensor {info.name!r} holds NaN or infinite values", reason="nan_weights", param="lora_path"
                )
            name = names[info.name]
            (a if name.kind is TensorKind.LORA_A else b)[name.layer, name.module] = array
    scale = {key: config.scale_of(pair.path) for key, pair in pairs.items()}
    return AdapterWeights(path, digest.hexdigest(), rank, config, a, b, scale)


_REASONS: dict[FileFault, str] = {
    "not_found": "adapter_file_not_found",
    "not_regular": "corrupt_weights",
    "lfs_pointer": "lfs_pointer",
    "corrupt": "corrupt_weights",
    "unsupported_dtype": "unsupported_dtype",
}


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Turns what is wrong with the adapter's file `path` into the error that refuses the adapter."""
    name = os.path.basename(path)
    try:
        yield
    except FileError as error:
        refusal, message = AdapterError, f"{name}: {error.message}"
        if error.kind == "not_found":
            refusal, message = NotFoundError, f"cannot open {path[:500]}: {error.message}"
        elif error.kind == "corrupt":
            message = f"{name} is damaged: {error.message}; copy or save it again"
        raise refusal(message, reason=_REASONS[error.kind], param="lora_path") from None


def _read_config(path: str) -> PeftConfig:
    with _refusing(path):
        with open_regular(path) as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        refuse_lfs_pointer(text)
    if len(text) > MAX_CONFIG_BYTES:
        raise AdapterError(
            f"{CONFIG_FILE} is larger than {MAX_CONFIG_BYTES} bytes", reason="bad_adapter_config", param="lora_path"
        )
    return PeftConfig.from_json(text)


def _refuse_other_formats(path: str) -> None:
    if os.path.lexists(os.path.join(path, PICKLE_FILE)):
        raise AdapterError(
            f"the folder has only {PICKLE_FILE}, a pickle, which may run code when it is opened: convert it where you "
            f'trust it, with safetensors.torch.save_file(torch.load("{PICKLE_FILE}", weights_only=True), '
            f'"{WEIGHTS_FILE}")',
            reason="pickle_weights", param="lora_path",
        )  # fmt: skip
    if glob.glob("adapter_model*-of-*.safetensors", root_dir=path):
        raise AdapterError(
            f"the weights are split over several files, which PEFT cannot load either: join them in {WEIGHTS_FILE}",
            reason="sharded_weights", param="lora_path",
        )  # fmt: skip


def _listing(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    shown = ", ".join(repr(name[:200]) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _bind(tensors: Collection[TensorInfo], names: dict[str, TensorName], num_layers: int) -> dict[ModuleKey, _Pair]:
    """Gives every tensor its (layer, module), or raises AdapterError."""
    if not tensors:
        raise AdapterError("the adapter holds no tensors", reason="empty_adapter", param="lora_path")
    for kind in TensorKind:
        found = [name for name, parsed in names.items() if parsed.kind is kind]
        if found and kind not in (TensorKind.LORA_A, TensorKind.LORA_B, TensorKind.UNKNOWN):
            raise unsupported(kind.value, f"the file holds {_listing(found)}")
    unbound = [n for n, parsed in names.items() if parsed.kind is TensorKind.UNKNOWN or parsed.layer >= num_layers]
    if unbound:
        raise AdapterError(
            f"these tensors belong to no projection of the base, whose layers are 0 to {num_layers - 1} and whose "
            f"projections are {', '.join(MODULES)}: {_listing(unbound)}; was it trained on another base?",
            reason="unbound_tensors", param="lora_path",
        )  # fmt: skip
    adapters = sorted({parsed.adapter for parsed in names.values()})
    if len(adapters) > 1:
        raise AdapterError(
            f"the file holds several adapters ({_listing(adapters)}): save each in its own folder",
            reason="ambiguous_tensors", param="lora_path",
        )  # fmt: skip
    pairs: dict[ModuleKey, _Pair] = {}
    for info in tensors:
        name = names[info.name]
        pair = pairs.setdefault((name.layer, name.module), _Pair(name.module_path))
        side = "a" if name.kind is TensorKind.LORA_A else "b"
        if getattr(pair, side) is not None or pair.path != name.module_path:
            raise AdapterError(
                f"layer {name.layer} {name.module} is given twice, by {info.name!r} and by another tensor",
                reason="ambiguous_tensors", param="lora_path",
            )  # fmt: skip
        setattr(pair, side, info)
    alone = [info.name for pair in pairs.values() if (info := pair.a or pair.b) and not (pair.a and pair.b)]
    if alone:
        raise AdapterError(
            f"lora_A and lora_B must come in pairs, and these have no partner: {_listing(alone)}",
            reason="incomplete_tensors", param="lora_path",
        )  # fmt: skip
    return pairs


def _check_shapes(
    pairs: dict[ModuleKey, _Pair], config: PeftConfig, model_config: ModelConfig, max_lora_rank: int
) -> int:
    """Checks every shape against the base and the config; returns the largest rank."""
    largest = 0
    for (_, module), pair in pairs.items():
        assert pair.a is not None
        assert pair.b is not None
        for info in (pair.a, pair.b):
            if len(info.shape) != 2 or 0 in info.shape:
                raise AdapterError(
                    f"tensor {info.name!r} has shape {info.shape}, not that of a matrix: was it saved from sharded "
                    "training (ZeRO-3, FSDP) without gathering the weights?",
                    reason="empty_tensor", param="lora_path",
                )  # fmt: skip
        rank, in_dim, out_dim = pair.a.shape[0], *model_config.module_dims(module)
        for info, wanted in ((pair.a, (rank, in_dim)), (pair.b, (out_dim, rank))):
            if info.shape != wanted:
                raise AdapterError(
                    f"tensor {info.name!r} has shape {info.shape} where the base and rank {rank} need {wanted}; was "
                    "it trained on another base?",
                    reason="shape_mismatch", param="lora_path",
                )  # fmt: skip
        if rank > max_lora_rank:
            raise AdapterError(
                f"tensor {pair.a.name!r} has rank {rank}, above max_lora_rank {max_lora_rank}: start the server with "
                f"max_lora_rank of at least {rank}",
                reason="rank_too_large", param="lora_path",
            )  # fmt: skip
        if rank != config.rank_of(pair.path):
            raise AdapterError(
                f"tensor {pair.a.name!r} has rank {rank} but adapter_config.json gives that module rank "
                f"{config.rank_of(pair.path)}, so its scale is in doubt: mend r or rank_pattern",
                reason="rank_mismatch", param="r",
            )  # fmt: skip
        largest = max(largest, rank)
    return largest
