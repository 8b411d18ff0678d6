"""Models and adapters as sharded Orbax checkpoints, written once and restored straight into any sharding.

    from multilora_jax import checkpoints
    checkpoints.save("models/llama-3.1-8b", "models/llama-3.1-8b-orbax", dtype="bfloat16")
    model = checkpoints.restore("models/llama-3.1-8b-orbax", tensor_parallel_size=4)

The configuration takes such a folder as `model`, and `LoRARequest` takes an adapter's as its path.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from multilora_jax.engine import devices
from multilora_jax.engine.host_memory import peak_memory_bytes
from multilora_jax.errors import AdapterError, ConfigError
from multilora_jax.lora.adapter_files import CONFIG_FILE, TEMPLATE_FOLDER, open_weights, read_config
from multilora_jax.lora.folders import check_folder
from multilora_jax.models.checkpoint import Checkpoint, expected_shapes, open_checkpoint
from multilora_jax.models.checkpoint.folder import FolderCheckpoint
from multilora_jax.models.checkpoint.hf_config import write_hf_config
from multilora_jax.models.checkpoint.orbax import SCALE, OrbaxCheckpoint
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.llama import Llama
from multilora_jax.models.loader import load_llama
from multilora_jax.models.quantised import quantise
from multilora_jax.orbax_writer import FolderWriter
from multilora_jax.stored_tensors import DTYPES, checked_name

FLOATS = ("float32", "bfloat16", "float16")

GROUP_BYTES = 256 << 20
"""Bytes of tensors that are in memory together while a model is converted; two such groups at a time."""

_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Tensors of which a shard holds columns; of all others it holds rows, or the whole."""

_CARRIED = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter."""
    return os.path.lexists(os.path.join(folder, CONFIG_FILE))


def save(
    model: str | os.PathLike[str] | Checkpoint,
    out: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    group_bytes: int = GROUP_BYTES,
    progress: bool = False,
) -> None:
    """Writes a model as a folder that needs nothing else: weights, configuration, tokenizer, chat template.

    Tensors are read and converted while those before are written.

    Args:
        model: whatever the configuration takes as `model`, or a Checkpoint.
        out: folder to make.
        dtype: float32, bfloat16 or float16; auto keeps each tensor's own, float32 for one of a quantised file.
        quantization: "int8" rounds projections, embedding and head as the engine would, from the source's values.
        group_bytes: bytes of tensors that are written together.
        progress: shows a progress bar.

    Raises:
        ConfigError, NotFoundError: the model cannot be read, or not in this type.
        UserError: `out` exists or cannot be made.
    """
    if dtype not in ("auto", *FLOATS):
        raise ConfigError(f"dtype must be auto, {', '.join(FLOATS)}, not {dtype!r}", reason="bad_value", param="dtype")
    if quantization not in (None, "int8"):
        raise ConfigError(f"quantize must be int8, not {quantization!r}", reason="bad_value", param="quantize")
    checkpoint = open_checkpoint(model, progress=progress) if isinstance(model, str | os.PathLike) else model
    if isinstance(checkpoint, OrbaxCheckpoint) and checkpoint.quantization is not None:
        raise ConfigError(
            f"{checkpoint.source} is rounded to {checkpoint.quantization} already: convert what it was made from",
            reason="bad_value", param="model",
        )  # fmt: skip
    names = list(expected_shapes(checkpoint.config))
    by_columns = {name for name in names if name.endswith(_BY_COLUMNS)}
    with FolderWriter(out, "model") as writer:
        group: dict[str, np.ndarray] = {}
        for name in tqdm(names, desc="Converting", unit="tensor", disable=not progress):
            group |= _converted(name, checkpoint, dtype, quantization)
            if sum(tensor.nbytes for tensor in group.values()) >= group_bytes:
                writer.add(group, by_columns)
                group = {}
        if group:
            writer.add(group, by_columns)
        _carry(checkpoint, writer.folder)
        writer.say(source=checkpoint.source, dtype=dtype, quantization=quantization)


def _converted(name: str, checkpoint: Checkpoint, dtype: str, quantization: str | None) -> dict[str, np.ndarray]:
    """A tensor as it is stored, under its name; of 8 bits with its scales."""
    tensor = checkpoint.tensor(name)
    if quantization is not None and tensor.ndim == 2:
        rounded = quantise(tensor)
        return {name: rounded.values_OI, name + SCALE: rounded.scale_O}
    if dtype == "auto" or tensor.dtype == DTYPES[dtype]:
        return {name: tensor}
    with np.errstate(over="ignore"):
        cast = tensor.astype(DTYPES[dtype])
    if dtype == "float16" and np.isinf(cast).any() and not np.isinf(tensor).any():
        raise ConfigError(
            f"{checkpoint.source}: tensor {name} has values beyond float16's range: use bfloat16 or float32",
            reason="bad_value", param="dtype",
        )  # fmt: skip
    return {name: cast}


def _carry(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes what a model's folder has besides weights; copied from a folder, made for any other source."""
    if isinstance(checkpoint, FolderCheckpoint | OrbaxCheckpoint):
        for pattern in _CARRIED:
            for path in sorted(checkpoint.folder.glob(pattern)):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)
        if (checkpoint.folder / TEMPLATE_FOLDER).is_dir():
            shutil.copytree(checkpoint.folder / TEMPLATE_FOLDER, folder / TEMPLATE_FOLDER)
        return
    write_hf_config(checkpoint.config, folder)
    tokenizer = checkpoint.load_tokenizer()
    if tokenizer is not None:
        tokenizer.save(folder)


def save_adapter(adapter: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Writes a PEFT adapter as an Orbax checkpoint with the adapter's own types; its digest stays the same.

    Args:
        adapter: its folder.
        out: folder to make; any `lora_path` may name it.

    Raises:
        AdapterError, NotFoundError: the adapter's files cannot be read.
        UserError: `out` exists or cannot be made.
    """
    folder = os.fspath(adapter)
    check_folder(folder, folder)
    read_config(folder)
    source, recorder = open_weights(folder), _Recorder()
    tensors: dict[str, np.ndarray] = {}
    hashed: list[list[str]] = []
    for entry, array in source.read_all(recorder):
        *before, data = recorder.take()
        own: np.dtype = getattr(entry, "dtype", array.dtype)
        try:
            checked_name(entry.name)
        except ValueError as error:
            raise AdapterError(str(error), reason="unbound_tensors", param="lora_path") from None
        tensors[entry.name] = np.frombuffer(data, own).reshape(entry.shape)
        hashed.append([base64.b64encode(b"".join(before)).decode(), entry.name])
    with FolderWriter(out, "adapter") as writer:
        writer.add(tensors)
        for pattern in (CONFIG_FILE, *_CARRIED[2:]):
            for path in sorted(Path(folder).glob(pattern)):
                if path.is_file():
                    shutil.copyfile(path, writer.folder / path.name)
        if os.path.isdir(os.path.join(folder, TEMPLATE_FOLDER)):
            shutil.copytree(os.path.join(folder, TEMPLATE_FOLDER), writer.folder / TEMPLATE_FOLDER)
        writer.say(source=folder, hashed=hashed)


class _Recorder:
    """A hasher that keeps what it is fed: the last piece before a tensor comes are the tensor's bytes."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def update(self, data: Any, /) -> None:
        self._pieces.append(bytes(data))

    def take(self) -> list[bytes]:
        """What came since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces


def restore(
    model: str | os.PathLike[str] | Checkpoint,
    *,
    dtype: str = "auto",
    quantization: str | None = None,
    tensor_parallel_size: int = 1,
    max_len: int = 1,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Llama:
    """A model on this machine's devices, for `forward`; no pool, no engine. Takes whatever `model` may be.

    Args:
        model: an Orbax folder, each of whose shards is read by the process that holds it; or any other model.
        dtype: of the parameters; auto as the engine chooses.
        quantization: "int8"; that of an Orbax folder by default.
        tensor_parallel_size: devices to split it over.
        max_len: positions of its rotary tables.
        progress: wraps the iteration over layers.

    Raises:
        ConfigError, NotFoundError: it cannot be read, or not be split so.
    """
    checkpoint = open_checkpoint(model, progress=False) if isinstance(model, str | os.PathLike) else model
    kind = devices.choose_dtype(dtype)
    geometry = checkpoint.config.geometry(2, 16, tensor_parallel_size, kind)
    spec = LlamaSpec(
        checkpoint.config,
        geometry,
        features_first=devices.features_first(kind),
        axis_name="model" if tensor_parallel_size > 1 else None,
        quantization=quantization or getattr(checkpoint, "quantization", None),
    )
    return load_llama(spec, max_len, devices.make_mesh(tensor_parallel_size), checkpoint, progress=progress)


def measure(model: str, dtype: str, quantization: str | None) -> dict[str, Any]:
    """What restoring takes in this process, which should be fresh: seconds, peak bytes, and a digest of the result."""
    jax.devices()  # what starting jax takes is not restoring's
    import_bytes, start = peak_memory_bytes(), time.perf_counter()
    params = restore(model, dtype=dtype, quantization=quantization).params()
    jax.block_until_ready(params)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds, "peak_bytes": peak_memory_bytes(), "bytes_before": import_bytes, "digest": digest(params),
    }  # fmt: skip


def digest(params: Any) -> str:
    """SHA-256 (hex) of a tree of arrays, bit for bit."""
    hasher = hashlib.sha256()
    for path, leaf in _leaves(params):
        array = np.asarray(leaf)
        hasher.update(repr((path, array.dtype.name, array.shape)).encode())
        hasher.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()


def _leaves(params: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        yield jax.tree_util.keystr(path), leaf
