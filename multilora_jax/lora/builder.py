"""From an adapter's files, or its arrays, to what is served of it: read, checked, as deltas, packed in pages."""

from __future__ import annotations

import hashlib
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np

from multilora_jax.chat_template import check_template
from multilora_jax.errors import AdapterError, UserError
from multilora_jax.lora.adapter import AdapterVersion
from multilora_jax.lora.adapter_files import read_tokenizer_files
from multilora_jax.lora.deltas import AdapterDeltas, BaseTensors, to_deltas
from multilora_jax.lora.folders import check_size
from multilora_jax.lora.packing import pack
from multilora_jax.lora.weights import AdapterWeights, load_adapter
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from multilora_jax.models.config import ModelConfig


class AdapterBuilder:
    """Makes adapters for one base and one pool. Safe from any thread; keeps no adapter.

    Args:
        model_config: the base that adapters must fit.
        geometry: the pool they are packed for.
        base: the base's own tensors, which deltas are taken against.
        max_lora_rank: larger ranks are refused.
        max_extra_vocab: most tokens that an adapter may add.
        base_name: path or hub id of the base, if known; an adapter that names another gets a warning.
        base_tokenizer: the base's, None where it has none.
        max_bytes: an adapter whose files have more is refused unread; None for any size.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        geometry: PoolGeometry,
        base: BaseTensors,
        *,
        max_lora_rank: int,
        max_extra_vocab: int = 0,
        base_name: str | None = None,
        base_tokenizer: Tokenizer | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._model_config = model_config
        self._geometry = geometry
        self._base = base
        self._max_lora_rank = max_lora_rank
        self._max_extra_vocab = max_extra_vocab
        self._base_name = base_name
        self._base_template = None if base_tokenizer is None else base_tokenizer.chat_template
        self._tokenizers = SharedTokenizers(base_tokenizer)

    def read(self, folder: str, known: AdapterVersion | None = None) -> tuple[AdapterVersion, np.ndarray]:
        """Reads an adapter folder.

        Args:
            folder: of PEFT's layout.
            known: what was there before, where only its pages are wanted again.

        Returns:
            The version (`known` itself where given) and its pages [num_pages, L, TP, E/TP].

        Raises:
            AdapterError: the content is not that of `known` (`adapter_changed`).
            NotFoundError, AdapterError, ConfigError: see `check_size`, `load_adapter`, `to_deltas`, `pack`,
                `own_template`, `Tokenizer.from_folder`.
        """
        if self._max_bytes is not None:
            check_size(folder, self._max_bytes)
        weights = load_adapter(
            folder, self._model_config, max_lora_rank=self._max_lora_rank, max_extra_vocab=self._max_extra_vocab,
            base_name=self._base_name,
        )  # fmt: skip
        if known is not None and weights.digest != known.digest:
            raise AdapterError(
                f"the files in {folder[:500]!r} are not those that were loaded (SHA-256 {weights.digest[:12]}, it was "
                f"{known.digest[:12]}): put the old ones back, or load the new ones with load_inplace",
                reason="adapter_changed", param="lora_path",
            )  # fmt: skip
        return self.build(weights, known)

    def build(self, weights: AdapterWeights, known: AdapterVersion | None = None) -> tuple[AdapterVersion, np.ndarray]:
        """The same from checked arrays; raises as `to_deltas`, `pack`, `own_template` and `Tokenizer.from_folder`."""
        deltas = to_deltas(weights, self._model_config, self._base, self._geometry.vocab_rows, self._geometry.dtype)
        packed = pack(deltas, self._geometry)
        if known is not None:
            return known, packed.pages
        folder = weights.tokenizer_folder
        template = own_template(weights.chat_template, self._base_template)
        tokenizer = None if folder is None else self._tokenizers.of_folder(folder)
        version = AdapterVersion(
            digest=weights.digest,
            layout=packed.layout,
            base_model=weights.config.base_model_name_or_path,
            tokenizer=tokenizer,
            chat_template=template,
            warnings=(
                *weights.warnings,
                *delta_warnings(deltas),
                *tokenizer_warnings(tokenizer, weights.vocab_size),
            ),
        )
        return version, packed.pages


def own_template(template: str | None, base_template: str | None) -> str | None:
    """The template that an adapter brings, checked; None where it brings none or the base's.

    Raises:
        AdapterError: it does not compile (`bad_chat_template`).
    """
    if template is None or template == base_template:
        return None
    try:
        check_template(template)
    except UserError as error:
        raise AdapterError(error.message, reason="bad_chat_template", param="lora_path") from error
    return template


def delta_warnings(deltas: AdapterDeltas) -> list[str]:
    """Says so where nothing in an adapter can change a result."""
    if not deltas.adds_nothing:
        return []
    return ["its delta is zero: it changes nothing, as an adapter that was never trained"]


def tokenizer_warnings(tokenizer: Tokenizer | None, vocab_size: int) -> list[str]:
    """Says so where an adapter's own tokenizer has tokens beyond the adapter's vocabulary.

    That is no error: a padding token that no text gives rise to often lies there.
    """
    beyond = 0 if tokenizer is None else tokenizer.num_ids_from(vocab_size)
    if not beyond:
        return []
    return [
        f"its tokenizer has {beyond} tokens with ids of {vocab_size} or more, which the model does not have: text that "
        "holds them is refused"
    ]


class SharedTokenizers:
    """Tokenizers of adapter folders, one object for all folders with the same files. Safe from any thread.

    A tokenizer of a large vocabulary takes tens of megabytes, and most adapters bring a copy of their base's.

    Args:
        base: the base's, None where it has none.
    """

    def __init__(self, base: Tokenizer | None) -> None:
        self._base = base
        self._lock = threading.Lock()
        # By digest of the files; the base itself stands for files that say the same as it.
        self._known: weakref.WeakValueDictionary[str, Tokenizer] = weakref.WeakValueDictionary()

    def of_folder(self, folder: str) -> Tokenizer | None:
        """The tokenizer of a folder; None where it has none, or one that treats text as the base's does.

        Raises:
            AdapterError, ConfigError: see `read_tokenizer_files` and `Tokenizer.from_folder`.
        """
        hasher = hashlib.sha256()
        read_tokenizer_files(folder, hasher)
        digest = hasher.hexdigest()
        with self._lock:
            found = self._known.get(digest)
        if found is None:
            # Not under the lock, so that nobody waits for another's tokenizer; of two made at once one is kept.
            made = Tokenizer.from_folder(folder)
            if made is None:
                return None
            if self._base is not None and made.fingerprint() == self._base.fingerprint():
                made = self._base
            with self._lock:
                found = self._known.setdefault(digest, made)
        return None if found is self._base else found
