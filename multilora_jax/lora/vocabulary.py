"""Which rows of embed_tokens and lm_head an adapter replaces, by PEFT's rules.

PEFT replaces rows in three ways: a module of modules_to_save becomes a weight of its own; a weight that the file holds
beside what was trained on it (a frozen copy, or a matrix of a resized vocabulary) is loaded into the base; and
trainable tokens replace single rows. On a base that ties the two modules the second way changes both of them, the third
does too unless lm_head has tokens of its own, and the first does not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from multilora_jax.lora.adapter_files import refuse
from multilora_jax.lora.config import PeftConfig, contradiction, unsupported
from multilora_jax.lora.tensor_names import EMBED, HEAD, Slot, TensorKind

if TYPE_CHECKING:
    from multilora_jax.models.config import ModelConfig

VOCAB_PATHS = {EMBED: f"model.{EMBED}", HEAD: HEAD}
"""Dotted names of the two modules."""

_FIELD = "trainable_token_indices"


def token_rows(slots: Collection[Slot], config: PeftConfig, model_config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Token ids whose rows are replaced one by one, in the order of the rows, for EMBED and for HEAD.

    Raises:
        AdapterError: the config names another module, or the config and the tensors there are contradict each other.
    """
    ids: dict[str, tuple[int, ...]] = {EMBED: (), HEAD: ()}
    for name, tokens in config.trainable_token_indices:
        module = next((m for m, path in VOCAB_PATHS.items() if path == name or path.endswith(f".{name}")), None)
        if module is None:
            raise unsupported(_FIELD, f"it names {name[:200]!r}, which is neither embed_tokens nor lm_head")
        if ids[module]:
            raise contradiction(_FIELD, f"it names {module} twice")
        ids[module] = tokens
    if model_config.tie_word_embeddings and ids[EMBED] and ids[HEAD] != ids[EMBED]:
        if ids[HEAD] and config.ensure_weight_tying:
            raise contradiction(_FIELD, "embed_tokens and lm_head have other tokens, and ensure_weight_tying is on")
        ids[HEAD] = ids[HEAD] or ids[EMBED]
    for module in (EMBED, HEAD):
        held = (TensorKind.TOKENS, -1, module) in slots
        if held and not ids[module]:
            raise contradiction(_FIELD, f"it names no tokens of {module}, and the file holds rows of them")
        if ids[module] and not held and not (module == HEAD and _is_shared(ids, model_config)):
            raise contradiction(_FIELD, f"it names tokens of {module}, and the file holds no rows of them")
    return ids


def _is_shared(ids: Mapping[str, tuple[int, ...]], model_config: ModelConfig) -> bool:
    """Whether lm_head's rows are embed_tokens' own."""
    return model_config.tie_word_embeddings and ids[EMBED] == ids[HEAD]


def replaced_rows(
    arrays: Mapping[Slot, np.ndarray], config: PeftConfig, model_config: ModelConfig, vocab_size: int
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The rows that are replaced in EMBED and in HEAD.

    Args:
        arrays: float32 by slot; the shapes have been checked.
        config, model_config: of the adapter and of the base.
        vocab_size: V', the adapter's vocabulary.

    Returns:
        by module (ids int32 [n], ascending; rows float32 [n, D]); a module without such rows is absent.

    Raises:
        AdapterError: two tensors say different things of one row (`ambiguous_tensors`), or nothing says what the row
            of an added token is (`incomplete_tensors`).
    """
    own, base = _own_weights(arrays, config, model_config), {}
    for module in (EMBED, HEAD):
        if module not in own:
            base[module] = _agreed(module, _get(arrays, TensorKind.BASE_WEIGHT, module), _plain(arrays, module))
        else:
            base[module] = _get(arrays, TensorKind.BASE_WEIGHT, module)
    if model_config.tie_word_embeddings:
        base = dict.fromkeys((EMBED, HEAD), _agreed("the tied embedding", base[EMBED], base[HEAD]))
    slots = arrays.keys()
    ids = token_rows(slots, config, model_config)
    rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for module in (EMBED, HEAD):
        tokens = _token_weights(arrays, module, ids, model_config)
        adapted = (TensorKind.LORA_A, -1, module) in slots
        if (module in own) + (tokens is not None) + adapted > 1:
            refuse("ambiguous_tensors", f"{module} is trained in two ways at once, which PEFT does not do either")
        if module not in own and (adapted or tokens is not None) and _plain(arrays, module) is not None:
            refuse("ambiguous_tensors", f"{module} is given whole, and trained besides")
        full = own.get(module, base[module])
        order = np.argsort(np.asarray(ids[module], np.int32))
        if full is not None:
            if tokens is not None:
                full = full.copy()
                full[list(ids[module])] = tokens
            rows[module] = np.arange(vocab_size, dtype=np.int32), full
        elif tokens is not None:
            rows[module] = np.asarray(ids[module], np.int32)[order], tokens[order]
    _check_added_rows(rows, model_config.vocab_size, vocab_size)
    return rows


def _get(arrays: Mapping[Slot, np.ndarray], kind: TensorKind, module: str) -> np.ndarray | None:
    return arrays.get((kind, -1, module))


def _plain(arrays: Mapping[Slot, np.ndarray], module: str) -> np.ndarray | None:
    """The whole weight that the file gives under the module's name; PEFT may write it twice."""
    return _agreed(
        module, _get(arrays, TensorKind.WEIGHT, module), _get(arrays, TensorKind.SAVED_WEIGHT, module)
    )  # fmt: skip


def _agreed(what: str, first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    if first is not None and second is not None and not np.array_equal(first, second):
        refuse("ambiguous_tensors", f"{what} is given twice, with different weights")
    return second if first is None else first


def _own_weights(
    arrays: Mapping[Slot, np.ndarray], config: PeftConfig, model_config: ModelConfig
) -> dict[str, np.ndarray]:
    """The weights that modules_to_save gives to EMBED and HEAD."""
    saved = {module for module, path in VOCAB_PATHS.items() if config.saves(path)}
    tied = config.ensure_weight_tying and model_config.tie_word_embeddings
    if tied and saved:
        saved = {EMBED, HEAD}
    own = {module: weight for module in saved if (weight := _plain(arrays, module)) is not None}
    adapted = [(TensorKind.LORA_A, -1, module) in arrays for module in (EMBED, HEAD)]
    if tied and (len(own) == 1 or any(adapted) != all(adapted)):
        refuse("incomplete_tensors", "ensure_weight_tying is on, and the file trains one of embed_tokens and lm_head")
    if tied:
        _agreed("the tied embedding", own.get(EMBED), own.get(HEAD))
    return own


def _token_weights(
    arrays: Mapping[Slot, np.ndarray], module: str, ids: Mapping[str, tuple[int, ...]], model_config: ModelConfig
) -> np.ndarray | None:
    """float32 [n, D], the rows of `ids[module]`."""
    rows = _get(arrays, TensorKind.TOKENS, module)
    if module == HEAD and ids[HEAD] and _is_shared(ids, model_config):
        return _agreed("the rows of the trained tokens", _get(arrays, TensorKind.TOKENS, EMBED), rows)
    return rows


def _check_added_rows(rows: Mapping[str, tuple[np.ndarray, np.ndarray]], base_size: int, vocab_size: int) -> None:
    added = np.arange(base_size, vocab_size)
    for module in (EMBED, HEAD):
        known = rows[module][0] if module in rows else np.zeros(0, np.int32)
        missing = np.setdiff1d(added, known)
        if len(missing):
            refuse(
                "incomplete_tensors",
                f"the adapter adds tokens {base_size} to {vocab_size - 1}, and the file does not hold {module}'s rows "
                f"of {len(missing)} of them, token {missing[0]} the first: train or save {module} too "
                "(target_modules, modules_to_save, or save_embedding_layers=True)",
            )
