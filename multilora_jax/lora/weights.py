"""A PEFT adapter, checked whole and read into float32 arrays: served exactly or refused by name.

Checks run from cheap to dear: the folder, the config, the names and shapes of the tensors, and only then the weights
themselves, tensor by tensor.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from multilora_jax.errors import AdapterError
from multilora_jax.lora.adapter_files import (
    TensorSource,
    listing,
    open_weights,
    read_config,
    read_tokenizer_files,
)
from multilora_jax.lora.arrays import ArraySource, check_forms, config_of
from multilora_jax.lora.binding import Binding, bind
from multilora_jax.lora.config import PeftConfig
from multilora_jax.lora.folders import check_folder
from multilora_jax.lora.pacing import pause_point
from multilora_jax.lora.tensor_names import EMBED, FINAL_NORM, HEAD, INPUT_NORM, POST_NORM, Slot, TensorKind
from multilora_jax.lora.vocabulary import VOCAB_PATHS, replaced_rows
from multilora_jax.memory.geometry import MODULES
from multilora_jax.safetensors_file import Hasher

if TYPE_CHECKING:
    from multilora_jax.models.config import ModelConfig

ModuleKey = tuple[int, str]
"""(layer, module), the module being one of memory.geometry.MODULES."""
NormKey = tuple[int, str]
"""(layer, "input" or "post"): the norm before attention and the one before the MLP."""


@dataclass(frozen=True, eq=False)
class VocabWeights:
    """What an adapter holds for embed_tokens or for lm_head; every part may be absent.

    V' is the adapter's vocabulary, D the hidden size, r the rank here.

    Attributes:
        a, b: float32; embed_tokens: a [r, V'], b [D, r]; lm_head: a [r, D], b [V', r]. Both or neither.
        scale: factor on `B A`, 0 without them.
        magnitude: DoRA's float32 magnitudes, embed_tokens [D], lm_head [V'].
        lora_bias: float32 [V'] added with lm_head's B (so it is scaled too).
        row_ids: int32 [n], ascending ids of the tokens whose rows of the base are replaced; None replaces none.
        rows: float32 [n, D], what replaces them.
    """

    a: np.ndarray | None = None
    b: np.ndarray | None = None
    scale: float = 0.0
    magnitude: np.ndarray | None = None
    lora_bias: np.ndarray | None = None
    row_ids: np.ndarray | None = None
    rows: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """A checked adapter: PEFT's own numbers, in float32; what is absent changes nothing.

    Attributes:
        path: folder that it came from, empty for one made in memory.
        digest: SHA-256 (hex) of everything that changes the result.
        rank: the largest rank of any module, embed_tokens and lm_head included; 0 where no module has A and B.
        config: the adapter's config.
        a: [r, in] of each module.
        b: [out, r] of each module.
        scale: factor on `B A x` of each module.
        vocab_size: V', the base's vocabulary or the larger one that the adapter was trained with.
        lora_bias: [out] of each module that adds one to B's product (scaled like it).
        bias: [out] of each module whose base bias it replaces.
        magnitude: [out] of each DoRA module.
        norms: [D] that replaces the weight of a layer's norm, by (layer, "input") and (layer, "post").
        final_norm: [D] that replaces the last norm's weight.
        embed, head: embed_tokens and lm_head.
        tokenizer_folder: `path` where the folder brings a tokenizer.json.
        chat_template: the Jinja source that the folder brings.
        warnings: what is odd about it but served.
    """

    path: str
    digest: str
    rank: int
    config: PeftConfig
    a: dict[ModuleKey, np.ndarray] = field(repr=False)
    b: dict[ModuleKey, np.ndarray] = field(repr=False)
    scale: dict[ModuleKey, float] = field(repr=False)
    vocab_size: int
    lora_bias: dict[ModuleKey, np.ndarray] = field(default_factory=dict, repr=False)
    bias: dict[ModuleKey, np.ndarray] = field(default_factory=dict, repr=False)
    magnitude: dict[ModuleKey, np.ndarray] = field(default_factory=dict, repr=False)
    norms: dict[NormKey, np.ndarray] = field(default_factory=dict, repr=False)
    final_norm: np.ndarray | None = field(default=None, repr=False)
    embed: VocabWeights | None = field(default=None, repr=False)
    head: VocabWeights | None = field(default=None, repr=False)
    tokenizer_folder: str | None = None
    chat_template: str | None = field(default=None, repr=False)
    warnings: tuple[str, ...] = ()


def load_adapter(
    path: str,
    model_config: ModelConfig,
    *,
    max_lora_rank: int,
    max_extra_vocab: int = 0,
    base_name: str | None = None,
) -> AdapterWeights:
    """Reads and checks a PEFT LoRA adapter (adapter_config.json and the weights in any of their formats).

    Args:
        path: the folder.
        model_config: the base that the adapter must fit.
        max_lora_rank: ranks above it are refused.
        max_extra_vocab: most tokens that the adapter may add to the base's vocabulary.
        base_name: path or hub id of the base, if known; an adapter that names another gets a warning.

    Raises:
        NotFoundError: no such folder (`adapter_path_not_found`) or a file missing in it (`adapter_file_not_found`).
        AdapterError: the adapter cannot be served exactly. Reasons: `bad_adapter_config`,
            `unsupported_adapter_feature`, `contradictory_adapter`, `pickle_weights`, `sharded_weights`,
            `lfs_pointer`, `corrupt_weights`, `unsupported_dtype`, `bad_tokenizer`, `unbound_tensors`,
            `ambiguous_tensors`, `incomplete_tensors`, `empty_adapter`, `empty_tensor`, `shape_mismatch`,
            `rank_mismatch`, `rank_too_large`, `vocab_too_large`, `nan_weights`.
    """
    check_folder(path, path)
    config = read_config(path)
    source = open_weights(path)
    binding = bind(
        source.tensors, config, model_config, max_lora_rank=max_lora_rank, max_extra_vocab=max_extra_vocab
    )  # fmt: skip
    digest = _start_digest(config)
    has_tokenizer, chat_template = read_tokenizer_files(path, digest)
    parts = _read(source, binding, config, model_config, digest)
    warnings = [*_base_warnings(config, base_name), *_target_warnings(config, binding)]
    if not has_tokenizer and os.path.exists(os.path.join(path, "tokenizer.model")):
        warnings.append("its tokenizer.model is not used, since there is no tokenizer.json beside it: the base's is")
    return AdapterWeights(
        path=path, digest=digest.hexdigest(), rank=binding.rank, config=config, vocab_size=binding.vocab_size,
        tokenizer_folder=path if has_tokenizer else None, chat_template=chat_template, warnings=tuple(warnings),
        **parts,
    )  # fmt: skip


def weights_from_arrays(
    arrays: Mapping[str, Any],
    config: PeftConfig | Mapping[str, Any] | None,
    model_config: ModelConfig,
    *,
    max_lora_rank: int,
    max_extra_vocab: int = 0,
) -> AdapterWeights:
    """Checks an adapter that is in memory, as load_adapter does one in files, and copies its arrays.

    Args:
        arrays: names to arrays, flat or nested; see ArraySource for the names and layouts that are understood.
        config: as adapter_config.json has it; see config_of for what may be left out.
        model_config, max_lora_rank, max_extra_vocab: as for load_adapter.

    Raises:
        AdapterError: see load_adapter.
    """
    source = ArraySource(arrays)
    config = config_of(config, source)
    check_forms(source, model_config)
    binding = bind(
        source.tensors, config, model_config, max_lora_rank=max_lora_rank, max_extra_vocab=max_extra_vocab
    )  # fmt: skip
    digest = _start_digest(config)
    parts = _read(source, binding, config, model_config, digest)
    return AdapterWeights(
        path="", digest=digest.hexdigest(), rank=binding.rank, config=config, vocab_size=binding.vocab_size,
        warnings=tuple(_target_warnings(config, binding)), **parts,
    )  # fmt: skip


def _start_digest(config: PeftConfig) -> Any:
    return hashlib.sha256(config.canonical_json() + b"\n")


def _read(
    source: TensorSource, binding: Binding, config: PeftConfig, model_config: ModelConfig, hasher: Hasher
) -> dict[str, Any]:
    """The fields of AdapterWeights that hold arrays or scales; feeds the weights to `hasher`."""
    arrays: dict[Slot, np.ndarray] = {}
    for entry, array in source.read_all(hasher):
        pause_point()
        if not np.isfinite(array).all():
            raise AdapterError(
                f"tensor {entry.name!r} holds NaN or infinite values", reason="nan_weights", param="lora_path"
            )
        slot = binding.slots[entry.name]
        arrays[slot] = array.reshape(-1) if slot[0] is TensorKind.MAGNITUDE else array

    def of(kind: TensorKind) -> dict[ModuleKey, np.ndarray]:
        return {(layer, module): array for (k, layer, module), array in arrays.items() if k is kind and layer >= 0}

    norms = {
        (layer, module): array
        for (kind, layer, module), array in arrays.items()
        if kind in (TensorKind.WEIGHT, TensorKind.SAVED_WEIGHT) and module not in VOCAB_PATHS
    }
    scale = {place: config.scale_of(path) for place, path in binding.paths.items()}
    rows = replaced_rows(arrays, config, model_config, binding.vocab_size)
    return {
        "a": of(TensorKind.LORA_A),
        "b": of(TensorKind.LORA_B),
        "scale": {place: factor for place, factor in scale.items() if place[1] in MODULES},
        "lora_bias": of(TensorKind.LORA_BIAS),
        "bias": of(TensorKind.BIAS),
        "magnitude": of(TensorKind.MAGNITUDE),
        "norms": {(layer, _NORMS[module]): array for (layer, module), array in norms.items() if layer >= 0},
        "final_norm": norms.get((-1, FINAL_NORM)),
        "embed": _vocab(EMBED, arrays, scale.get((-1, EMBED), 0.0), rows),
        "head": _vocab(HEAD, arrays, scale.get((-1, HEAD), 0.0), rows),
    }


_NORMS = {INPUT_NORM: "input", POST_NORM: "post"}


def _vocab(
    module: str,
    arrays: Mapping[Slot, np.ndarray],
    scale: float,
    rows: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> VocabWeights | None:
    a, b, magnitude, lora_bias = (
        arrays.get((kind, -1, module))
        for kind in (TensorKind.LORA_A, TensorKind.LORA_B, TensorKind.MAGNITUDE, TensorKind.LORA_BIAS)
    )
    if a is None and module not in rows:
        return None
    row_ids, new_rows = rows.get(module, (None, None))
    return VocabWeights(a, b, scale, magnitude, lora_bias, row_ids, new_rows)


def _target_warnings(config: PeftConfig, binding: Binding) -> list[str]:
    """Says so where the config names none of the modules that there are weights for; the weights are served."""
    named = config.target_modules
    has_projections = any(module in MODULES for _, module in binding.paths)
    if (
        not named
        or not has_projections
        or any(f".{path}".endswith(f".{n}") for path in binding.paths.values() for n in named)
    ):
        return []
    return [
        f"its target_modules ({listing(named)}) are none of the modules that it has weights for: PEFT would ignore "
        "these weights, here they are served"
    ]


def _base_warnings(config: PeftConfig, base_name: str | None) -> list[str]:
    """Says so where the adapter plainly names another base; where its folder lies is of no interest."""
    named, served = (_last_part(name) for name in (config.base_model_name_or_path, base_name))
    if not named or not served or named.lower() == served.lower():
        return []
    if any(name.startswith("pypi:") or name.endswith(".gguf") for name in (named, served)):
        # A wheel and a GGUF file go by names of their own, made of some of the model's.
        ours, theirs = _words(served), _words(named)
        if not ours or not theirs or ours & theirs:
            return []
    return [f"it says that it was trained on {named[:200]!r}, and the base here is {served[:200]!r}"]


def _words(name: str) -> set[str]:
    """The words of a model's name by which it can be told: four or more characters, a letter among them."""
    words = re.split(r"[^0-9a-z]+", name.lower())
    return {word for word in words if len(word) >= 4 and not word.isdecimal()} - {"pypi", "gguf", "model"}


def _last_part(name: str | None) -> str:
    """The last component of a path or hub id; empty where that says nothing of the model."""
    part = re.split(r"[/\\]", (name or "").rstrip("/\\"))[-1]
    says_nothing = part in ("", ".", "..") or re.fullmatch(r"[0-9a-f]{40}", part)
    return "" if says_nothing else part
