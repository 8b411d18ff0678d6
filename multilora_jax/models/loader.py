"""Checkpoint tensors to sharded device arrays, one parameter at a time.

Each parameter is one record: its shape, how it is split over the mesh, and the checkpoint tensors it is made of.
Loading, dummy weights and sharding all follow from the records, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from multilora_jax.models.checkpoint import Checkpoint, expected_shapes
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.llama import Llama
from multilora_jax.models.quantised import QuantWeight, quantise
from multilora_jax.models.rope import rope_tables
from multilora_jax.models.shards import place

MODEL_AXIS = "model"
"""Mesh axis of tensor parallelism."""


@dataclass(frozen=True)
class ParamRecord:
    """One parameter.

    Attributes:
        name: its key in Llama's `top` or in a layer.
        sources: checkpoint tensors laid end to end along axis 0, within each shard.
        rows: rows of each source; a single source may have fewer than the parameter, which ends in zeros then.
        shape: whole shape.
        spec: how it is split over the mesh.
        scale: standard deviation of dummy weights; 0 draws ones (a norm).
        quantised: whether it is a QuantWeight, rounded from the checkpoint's own values.
    """

    name: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]
    shape: tuple[int, ...]
    spec: P
    scale: float
    quantised: bool = False

    @property
    def partition(self) -> Any:
        """PartitionSpec, or a QuantWeight of them: scales are split with the outputs."""
        return QuantWeight(self.spec, P(self.spec[0])) if self.quantised else self.spec

    def place_of(self, source: str, tp: int) -> tuple[int, int]:
        """First row of a source in each of `tp` shards of the parameter, and how many rows it has there."""
        index = self.sources.index(source)
        return sum(self.rows[:index]) // tp, self.rows[index] // tp


def layer_records(spec: LlamaSpec, layer: int) -> list[ParamRecord]:
    """The parameters of one layer."""
    c = spec.config
    D, F, Q, KV = c.hidden_size, c.ffn_size, c.q_dim, spec.geometry.kv_dim
    column, row = P(MODEL_AXIS, None), P(None, MODEL_AXIS)
    prefix = f"model.layers.{layer}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = tuple(f"{attention}{n}_proj" for n in "qkv")
    gate_up = (f"{mlp}gate_proj", f"{mlp}up_proj")
    weights = [
        ("qkv", qkv, (Q, KV, KV), D, column, c.attention_bias, P(MODEL_AXIS)),
        ("o", (f"{attention}o_proj",), (D,), Q, row, c.attention_bias, P()),
        ("gate_up", gate_up, (F, F), D, column, c.mlp_bias, P(MODEL_AXIS)),
        ("down", (f"{mlp}down_proj",), (D,), F, row, c.mlp_bias, P()),
    ]
    records = [
        ParamRecord("input_norm", (f"{prefix}input_layernorm.weight",), (D,), (D,), P(), 0),
        ParamRecord("post_norm", (f"{prefix}post_attention_layernorm.weight",), (D,), (D,), P(), 0),
    ]
    for name, modules, rows, width, split, biased, bias_split in weights:
        shape = (sum(rows), width)
        sources = tuple(f"{m}.weight" for m in modules)
        records.append(ParamRecord(name, sources, rows, shape, split, width**-0.5, spec.quantization is not None))
        if biased:
            sources = tuple(f"{m}.bias" for m in modules)
            records.append(ParamRecord(f"{name}_bias", sources, rows, shape[:1], bias_split, 0.02))
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

    Tensors are read, joined, cast or quantised, and handed to the device one parameter at a time.
    """
    rng, shapes = np.random.default_rng(seed), expected_shapes(spec.config)

    def build(records: Iterable[ParamRecord]) -> dict[str, Any]:
        made = {}
        for record in records:
            if checkpoint is None:
                tensors = (_dummy(shapes[source], record.scale, rng) for source in record.sources)
            else:
                tensors = (checkpoint.tensor(source) for source in record.sources)
            heads = (repeat_heads(spec, *pair) for pair in zip(record.sources, tensors, strict=True))
            whole = _join(spec, record, heads)
            placed = jax.tree.map(
                lambda p: NamedSharding(mesh, p), record.partition, is_leaf=lambda p: isinstance(p, P)
            )
            made[record.name] = jax.tree.map(place, quantise(whole) if record.quantised else whole, placed)
        return made

    top = build(top_records(spec))
    for name, table in zip(("cos", "sin"), rope_tables(spec.config, max_len), strict=True):
        top[name] = place(table, NamedSharding(mesh, P()))
    layers = [build(layer_records(spec, layer)) for layer in progress(range(spec.config.num_layers))]
    return Llama(spec, top, layers)


def repeat_heads(spec: LlamaSpec, source: str, tensor: np.ndarray) -> np.ndarray:
    """A checkpoint tensor with the outputs of k_proj and v_proj as the shards hold them, see PoolGeometry."""
    module = source.split(".")[-2]
    return spec.geometry.repeat_heads(module, tensor.T).T


def _join(spec: LlamaSpec, record: ParamRecord, tensors: Iterable[np.ndarray]) -> np.ndarray:
    """Lays a parameter's tensors together; where axis 0 is split, each shard's part of every tensor."""
    out = np.empty(record.shape, np.float32 if record.quantised else spec.dtype)
    if len(record.sources) == 1:
        out[: record.rows[0]] = next(iter(tensors))
        out[record.rows[0] :] = 0
        return out
    tp = spec.geometry.tp if len(record.spec) and record.spec[0] == MODEL_AXIS else 1
    shards = out.reshape(tp, record.shape[0] // tp, *record.shape[1:])
    start = 0
    for tensor in tensors:
        part = tensor.reshape(tp, tensor.shape[0] // tp, *tensor.shape[1:])
        shards[:, start : start + part.shape[1]] = part
        start += part.shape[1]
    return out


def _dummy(shape: tuple[int, ...], scale: float, rng: np.random.Generator) -> np.ndarray:
    """Random values of deviation `scale`, drawn in the order of the tensors, so that every tp gives one model."""
    return rng.standard_normal(shape, np.float32) * np.float32(scale) if scale else np.ones(shape, np.float32)
