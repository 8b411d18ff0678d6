"""The files of a PEFT adapter folder: which there are, and the tensors of the weights whatever their format.

Weights are read from adapter_model.safetensors, from the shards that adapter_model.safetensors.index.json lists, from
adapter_model.bin, or from an Orbax checkpoint that `convert` wrote, the first of these that exists. A .bin is read by a
reader that cannot run code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import numpy as np

from multilora_jax.errors import AdapterError, NotFoundError
from multilora_jax.lora.config import PeftConfig
from multilora_jax.lora.orbax_files import OrbaxAdapterFile, orbax_files
from multilora_jax.safetensors_file import (
    FileError,
    FileFault,
    Hasher,
    SafetensorsFile,
    open_regular,
    refuse_lfs_pointer,
)
from multilora_jax.stored_tensors import MANIFEST_FILE, is_stored
from multilora_jax.torch_file import TorchFile
from multilora_jax.torch_pickle import UnsafePickleError

CONFIG_FILE, WEIGHTS_FILE, PICKLE_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
INDEX_FILE = "adapter_model.safetensors.index.json"
TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
_TOKENIZER_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, "special_tokens_map.json", TEMPLATE_FILE)
MAX_JSON_BYTES = 16 * 2**20
"""Far above any real config or index, even with a rank for every module of a large model."""
MAX_TOKENIZER_BYTES = 256 * 2**20
"""Far above any real tokenizer.json."""


class TensorEntry(Protocol):
    """What a file says of one tensor before it is read."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class TensorSource(Protocol):
    """Tensors by name, read once from the first to the last."""

    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...

    def read_all(self, hasher: Hasher) -> Iterator[tuple[TensorEntry, np.ndarray]]:
        """Yields every tensor once, as float32 of its shape; feeds what it reads to `hasher`."""
        ...


def refuse(reason: str, message: str, param: str = "lora_path") -> NoReturn:
    """Raises the AdapterError that refuses an adapter for its files or tensors."""
    raise AdapterError(message, reason=reason, param=param)


def listing(names: Iterable[str], limit: int = 5) -> str:
    """The first few of a stranger's names, cut and quoted."""
    names = list(names)
    shown = ", ".join(repr(name[:200]) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def weight_files(folder: str) -> list[str]:
    """Paths of every file that loading the adapter in `folder` may open, whether it exists or not.

    No file is opened. Whoever may load only from some folders checks where each path leads, links followed.
    """
    names = {CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, PICKLE_FILE, *_TOKENIZER_FILES, TEMPLATE_FOLDER}
    names |= {name for name in _names_in(folder) if name.endswith(".safetensors")}
    names |= {os.path.join(TEMPLATE_FOLDER, name) for name in _names_in(os.path.join(folder, TEMPLATE_FOLDER))}
    return [os.path.join(folder, name) for name in sorted(names)] + orbax_files(folder)


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except (OSError, ValueError):
        return []


_REASONS: dict[FileFault, str] = {
    "not_found": "adapter_file_not_found",
    "not_regular": "corrupt_weights",
    "lfs_pointer": "lfs_pointer",
    "corrupt": "corrupt_weights",
    "unsupported_dtype": "unsupported_dtype",
}


@contextmanager
def refusing(path: str) -> Iterator[None]:
    """Turns what is wrong with the adapter's file `path` into the error that refuses the adapter."""
    name = os.path.basename(path)
    try:
        yield
    except UnsafePickleError as error:
        raise AdapterError(
            f"{name} is refused: {error.message}. Nothing of it was run. Convert it where you trust it, with "
            f'safetensors.torch.save_file(torch.load("{PICKLE_FILE}", weights_only=True), "{WEIGHTS_FILE}")',
            reason="pickle_weights", param="lora_path",
        ) from None  # fmt: skip
    except FileError as error:
        refusal, message = AdapterError, f"{name}: {error.message}"
        if error.kind == "not_found":
            refusal, message = NotFoundError, f"cannot open {path[:500]}: {error.message}"
        elif error.kind == "corrupt":
            message = f"{name} is damaged: {error.message}; copy or save it again"
        raise refusal(message, reason=_REASONS[error.kind], param="lora_path") from None


def _read(path: str, limit: int, reason: str) -> bytes:
    with refusing(path):
        with open_regular(path) as file:
            text = file.read(limit + 1)
        refuse_lfs_pointer(text)
    if len(text) > limit:
        refuse(reason, f"{os.path.basename(path)} is larger than {limit} bytes")
    return text


def read_config(folder: str) -> PeftConfig:
    """adapter_config.json; raises what PeftConfig.from_json and the opening of a file do."""
    return PeftConfig.from_json(_read(os.path.join(folder, CONFIG_FILE), MAX_JSON_BYTES, "bad_adapter_config"))


class _Files:
    """The tensors of one or more files of weights."""

    def __init__(self, files: Mapping[str, SafetensorsFile | TorchFile | OrbaxAdapterFile]):
        self._files = files
        self.tensors: dict[str, TensorEntry] = {
            name: entry for file in files.values() for name, entry in file.tensors.items()
        }  # fmt: skip

    def read_all(self, hasher: Hasher) -> Iterator[tuple[TensorEntry, np.ndarray]]:
        for path, file in self._files.items():
            with refusing(path):
                yield from file.read_all(hasher)


def open_weights(folder: str) -> TensorSource:
    """The weights in `folder`, with their names and shapes read and their layout checked.

    Raises:
        NotFoundError: there are none (`adapter_file_not_found`).
        AdapterError: `lfs_pointer`, `corrupt_weights`, `unsupported_dtype`, `pickle_weights` (a .bin that asks for
            more than tensors), `sharded_weights` (the shards and their index do not fit together).
    """
    single, index, pickled = (os.path.join(folder, name) for name in (WEIGHTS_FILE, INDEX_FILE, PICKLE_FILE))
    if not os.path.lexists(single) and os.path.lexists(index):
        return _open_shards(folder, index)
    if not os.path.lexists(single) and os.path.lexists(pickled):
        with refusing(pickled):
            return _Files({pickled: TorchFile(pickled)})
    if not os.path.lexists(single) and is_stored(folder):
        manifest = os.path.join(folder, MANIFEST_FILE)
        with refusing(manifest):
            return _Files({manifest: OrbaxAdapterFile(folder)})
    if not os.path.lexists(single):
        shards = sorted(name for name in _names_in(folder) if name.endswith(".safetensors") and "-of-" in name)
        if shards:
            refuse("sharded_weights", f"the folder has {listing(shards)} but no {INDEX_FILE}, which lists the shards")
    with refusing(single):
        return _Files({single: SafetensorsFile(single)})


def _open_shards(folder: str, index: str) -> TensorSource:
    try:
        content = json.loads(_read(index, MAX_JSON_BYTES, "sharded_weights"))
    except (ValueError, RecursionError):
        refuse("sharded_weights", f"{INDEX_FILE} is not valid JSON")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        refuse("sharded_weights", f"{INDEX_FILE} has no weight_map")
    shards = set(weight_map.values()) if all(isinstance(shard, str) for shard in weight_map.values()) else {""}
    for shard in shards:
        # A name that could lead out of the folder, or to a file that weight_files does not list, is no shard.
        if shard != os.path.basename(shard) or not shard.endswith(".safetensors") or "\0" in shard:
            refuse("sharded_weights", f"{INDEX_FILE} names {listing([shard])}, which is no file of this folder")
    files: dict[str, SafetensorsFile | TorchFile] = {}
    for shard in sorted(shards):
        path = os.path.join(folder, shard)
        with refusing(path):
            files[path] = SafetensorsFile(path)
        listed = {name for name, place in weight_map.items() if place == shard}
        if wrong := sorted(listed ^ files[path].tensors.keys()):
            refuse("sharded_weights", f"{INDEX_FILE} and {shard} disagree on which tensors it holds: {listing(wrong)}")
    return _Files(files)


def read_tokenizer_files(folder: str, hasher: Hasher) -> tuple[bool, str | None]:
    """Looks at the tokenizer and the chat template that the folder brings, and feeds their bytes to `hasher`.

    Returns:
        (whether there is a tokenizer.json, the source of the default chat template).

    Raises:
        AdapterError: `bad_tokenizer`, or what is wrong with a file.
    """
    names = [*_TOKENIZER_FILES]
    names += [os.path.join(TEMPLATE_FOLDER, name) for name in sorted(_names_in(os.path.join(folder, TEMPLATE_FOLDER)))]
    texts: dict[str, bytes] = {}
    for name in names:
        path = os.path.join(folder, name)
        # Other entries of the folder of templates are not read; all else that is there must be a file.
        if os.path.isfile(path) or (os.path.lexists(path) and not _is_ignored(name)):
            texts[name] = _read(path, MAX_TOKENIZER_BYTES, "bad_tokenizer")
            hasher.update(repr((name, len(texts[name]))).encode("utf-8", "backslashreplace"))
            hasher.update(texts[name])
    return TOKENIZER_FILE in texts, _chat_template(texts)


def _is_ignored(name: str) -> bool:
    return name.startswith(TEMPLATE_FOLDER) and not name.endswith(".jinja")


def _chat_template(texts: Mapping[str, bytes]) -> str | None:
    """The default template; a file of its own wins over the entry in tokenizer_config.json."""
    name = TEMPLATE_FILE if TEMPLATE_FILE in texts else TOKENIZER_CONFIG_FILE
    if name not in texts:
        return None
    try:
        text = texts[name].decode("utf-8")
        if name == TEMPLATE_FILE:
            return text
        config = json.loads(text)
    except (ValueError, RecursionError):
        refuse("bad_tokenizer", f"{name} cannot be read as {'text' if name == TEMPLATE_FILE else 'JSON'}")
    return _default_template(config.get("chat_template") if isinstance(config, dict) else None)


def _default_template(entry: Any) -> str | None:
    """One template, or the one called "default" of several."""
    if isinstance(entry, list):
        named = [item for item in entry if isinstance(item, dict) and item.get("name") == "default"]
        entry = named[-1].get("template") if named else None
    if isinstance(entry, dict):
        entry = entry.get("default")
    return entry if isinstance(entry, str) else None
