"""Checkpoint tensors to sharded device arrays, one parameter at a time.

Each parameter is one record: its shape, how it is split over the mesh, and the checkpoint tensors it is made of.
Loading, dummy weights and sharding all follow from the records, so they cannot disagree.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from multilora_jax.errors import ConfigError
from multilora_jax.models.checkpoint import Checkpoint
from multilora_jax.models.checkpoint.orbax import OrbaxCheckpoint
from multilora_jax.models.dummy import draw_parameter
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.llama import Llama
from multilora_jax.models.quantised import QuantWeight, quantise
from multilora_jax.models.restore import begin_restore
from multilora_jax.models.rope import rope_tables
from multilora_jax.models.shards import place

MODEL_AXIS = "model"
"""Mesh axis of tensor parallelism."""

_LAYERS_AHEAD = 2
"""Layers that are being read while one is handed to the device, where reading goes on by itself."""
_MOST_READERS = 16
"""Threads that read an Orbax checkpoint, two for each core at most: half of them may wait for the disk."""


@dataclass(frozen=True)
class ParamRecord:
    """One parameter.

    Attributes:
        name: its key in Llama's `top` or in a layer.
        sources: checkpoint tensors laid end to end along axis 0, within each shard.
        rows: rows of each source as the shards hold them; a single source may have fewer than the parameter, which
            ends in zeros then.
        shape: whole shape.
        spec: how it is split over the mesh.
        scale: standard deviation of dummy weights; 0 draws ones (a norm).
        quantised: whether it is a QuantWeight, rounded from the checkpoint's own values.
        copies: neighbouring shards that hold the same rows of each source (KV heads of which there are fewer than
            shards), which count in `rows` once for each; by default 1 of every source.
    """

    name: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    spec: P
    scale: float
    quantised: bool = False
    copies: tuple[int, ...] = ()

    @property
    def partition(self) -> Any:
        """PartitionSpec, or a QuantWeight of them: scales are split with the outputs."""
        return QuantWeight(self.spec, P(self.spec[0])) if self.quantised else self.spec

    def place_of(self, source: str, tp: int) -> tuple[int, int]:
        """First row of a source in each of `tp` shards of the parameter, and how many rows it has there."""
        index = self.sources.index(source)
        return sum(self.rows[:index]) // tp, self.rows[index] // tp

    def copies_of(self, source: str) -> int:
        """Neighbouring shards that hold the same rows of a source."""
        return self.copies[self.sources.index(source)] if self.copies else 1


def layer_records(spec: LlamaSpec, layer: int) -> list[ParamRecord]:
    """The parameters of one layer."""
    c = spec.config
    D, F, Q, KV = c.hidden_size, c.ffn_size, c.q_dim, spec.geometry.kv_dim
    repeat = (1, spec.geometry.kv_repeat, spec.geometry.kv_repeat)
    column, row = P(MODEL_AXIS, None), P(None, MODEL_AXIS)
    prefix = f"model.layers.{layer}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = tuple(f"{attention}{n}_proj" for n in "qkv")
    gate_up = (f"{mlp}gate_proj", f"{mlp}up_proj")
    biased = c.biased_modules
    weights = [
        ("qkv", qkv, (Q, KV, KV), D, column, "q_proj" in biased, P(MODEL_AXIS)),
        ("o", (f"{attention}o_proj",), (D,), Q, row, "o_proj" in biased, P()),
        ("gate_up", gate_up, (F, F), D, column, c.mlp_bias, P(MODEL_AXIS)),
        ("down", (f"{mlp}down_proj",), (D,), F, row, c.mlp_bias, P()),
    ]
    records = [
        ParamRecord("input_norm", (f"{prefix}input_layernorm.weight",), (D,), (D,), P(), 0),
        ParamRecord("post_norm", (f"{prefix}post_attention_layernorm.weight",), (D,), (D,), P(), 0),
    ]
    if c.qk_norm:
        size = (c.head_dim,)
        records += [ParamRecord(f"{n}_norm", (f"{attention}{n}_norm.weight",), size, size, P(), 0) for n in "qk"]
    for name, modules, rows, width, split, biased, bias_split in weights:
        shape = (sum(rows), width)
        sources = tuple(f"{m}.weight" for m in modules)
        copies = repeat if name == "qkv" else ()
        rounded = spec.quantization is not None
        records.append(ParamRecord(name, sources, rows, shape, split, width**-0.5, rounded, copies))
        if biased:
            sources = tuple(f"{m}.bias" for m in modules)
            records.append(ParamRecord(f"{name}_bias", sources, rows, shape[:1], bias_split, 0.02, copies=copies))
    return records


def top_records(spec: LlamaSpec) -> list[ParamRecord]:
    """The parameters outside the layers; the vocabulary is padded to whole units, which the shards divide."""
    c, split, quantised = spec.config, P(MODEL_AXIS, None), spec.quantization is not None
    rows, shape, width = (c.vocab_size,), (spec.geometry.vocab_rows, c.hidden_size), (c.hidden_size,)
    records = [
        ParamRecord("embed", ("model.embed_tokens.weight",), rows, shape, split, 1.0, quantised),
        ParamRecord("final_norm", ("model.norm.weight",), width, width, P(), 0),
    ]
    if not c.tie_word_embeddings:
        scale = c.hidden_size**-0.5
        records.append(ParamRecord("lm_head", ("lm_head.weight",), rows, shape, split, scale, quantised))
    return records


def param_specs(spec: LlamaSpec) -> dict[str, Any]:
    """PartitionSpecs in the structure of Llama.params()."""
    top = {record.name: record.partition for record in top_records(spec)} | {"cos": P(), "sin": P()}
    layers = [{r.name: r.partition for r in layer_records(spec, layer)} for layer in range(spec.config.num_layers)]
    return {"top": top, "layers": layers}


def param_shapes(spec: LlamaSpec, max_len: int, mesh: Mesh) -> dict[str, Any]:
    """Llama.params() described and placed on a mesh, for programs that are compiled without a model."""

    def shaped(shape: tuple[int, ...], dtype: Any, split: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, split))

    def parameter(record: ParamRecord) -> Any:
        if not record.quantised:
            return shaped(record.shape, spec.dtype, record.spec)
        values = shaped(record.shape, np.int8, record.spec)
        return QuantWeight(values, shaped(record.shape[:1], np.float32, record.partition.scale_O))

    def described(records: Iterable[ParamRecord]) -> dict[str, Any]:
        return {record.name: parameter(record) for record in records}

    table = shaped((max_len, spec.config.head_dim // 2), np.float32, P())
    layers = [described(layer_records(spec, layer)) for layer in range(spec.config.num_layers)]
    return {"top": described(top_records(spec)) | {"cos": table, "sin": table}, "layers": layers}


def load_llama(
    spec: LlamaSpec,
    max_len: int,
    mesh: Mesh,
    checkpoint: Checkpoint | None,
    *,
    seed: int = 0,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Llama:
    """Builds the model on a mesh.

    Args:
        spec: static description.
        max_len: positions to prepare rotary tables for.
        mesh: devices; parameters are split over its MODEL_AXIS.
        checkpoint: where tensors come from; None draws dummy weights from `seed`.
        progress: wraps the iteration over layers, for a progress bar.

    Tensors are read, joined, cast or quantised, and handed to the device one parameter at a time; those of an Orbax
    checkpoint are read into their shards, some layers ahead.
    """
    tp = spec.geometry.tp
    if isinstance(checkpoint, OrbaxCheckpoint):
        _check_rounding(spec, checkpoint)

    def begin(record: ParamRecord) -> Callable[[], Any]:
        """A function that gives the parameter; where that can go on by itself, it has begun."""
        if checkpoint is None:
            return functools.partial(draw_parameter, record, spec.dtype, mesh, tp, seed)
        if isinstance(checkpoint, OrbaxCheckpoint) and (checkpoint.quantization or not record.quantised):
            return begin_restore(record, spec.dtype, mesh, tp, checkpoint, readers)
        return functools.partial(_read, record, spec, mesh, checkpoint)

    def begin_all(records: Iterable[ParamRecord]) -> dict[str, Callable[[], Any]]:
        return {record.name: begin(record) for record in records}

    ahead: deque[dict[str, Callable[[], Any]]] = deque()
    waiting = iter(range(spec.config.num_layers))
    built: list[dict[str, Any]] = []

    def build() -> None:
        for layer in itertools.islice(waiting, _LAYERS_AHEAD + 1 - len(ahead)):
            ahead.append(begin_all(layer_records(spec, layer)))
        built.append({name: made() for name, made in ahead.popleft().items()})

    readers = ThreadPoolExecutor(min(2 * (os.cpu_count() or 1), _MOST_READERS))  # starts threads as there is work
    try:
        ahead.append(begin_all(top_records(spec)))
        build()
        for name, table in zip(("cos", "sin"), rope_tables(spec.config, max_len), strict=True):
            built[0][name] = place(table, NamedSharding(mesh, P()))
        for _ in progress(range(spec.config.num_layers)):
            build()
    finally:
        readers.shutdown(cancel_futures=True)
    return Llama(spec, built[0], built[1:])


def _check_rounding(spec: LlamaSpec, checkpoint: OrbaxCheckpoint) -> None:
    if checkpoint.quantization is not None and spec.quantization != checkpoint.quantization:
        raise ConfigError(
            f"{checkpoint.source}: its weights are in {checkpoint.quantization}: set quantization to "
            f"{checkpoint.quantization}, or convert the original without --quantize",
            reason="bad_value", param="quantization",
        )  # fmt: skip


def _read(record: ParamRecord, spec: LlamaSpec, mesh: Mesh, checkpoint: Checkpoint) -> Any:
    """A parameter of tensors that are read whole."""
    whole = _join(spec, record, (checkpoint.tensor(source) for source in record.sources))
    placed = jax.tree.map(lambda p: NamedSharding(mesh, p), record.partition, is_leaf=lambda p: isinstance(p, P))
    return jax.tree.map(place, quantise(whole) if record.quantised else whole, placed)


def _join(spec: LlamaSpec, record: ParamRecord, tensors: Iterable[np.ndarray]) -> np.ndarray:
    """Lays a parameter's tensors together; where axis 0 is split, each shard's part of every tensor."""
    out = np.empty(record.shape, np.float32 if record.quantised else spec.dtype)
    if len(record.sources) == 1:
        out[: record.rows[0]] = next(iter(tensors))
        out[record.rows[0] :] = 0
        return out
    tp = spec.geometry.tp if len(record.spec) and record.spec[0] == MODEL_AXIS else 1
    shards = out.reshape(tp, record.shape[0] // tp, *record.shape[1:])
    for source, tensor in zip(record.sources, tensors, strict=True):
        first, length = record.place_of(source, tp)
        part = tensor.reshape(-1, length, *tensor.shape[1:])
        copies = record.copies_of(source)
        shards[:, first : first + length] = part if copies == 1 else np.repeat(part, copies, 0)
    return out
