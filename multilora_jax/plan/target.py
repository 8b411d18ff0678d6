"""Meshes to plan for: of devices that are not there, or of this machine's CPUs; and the step's programs on them.

Nothing is allocated: parameters, pool and row buffers are shapes, so that a model of any size can be planned anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from multilora_jax.engine import devices
from multilora_jax.engine.batch import BatchShape, batch_shapes, table_width
from multilora_jax.engine.programs import Programs
from multilora_jax.engine.rank_rows import row_buckets
from multilora_jax.errors import ConfigError
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.memory.pool import POOL_SPEC
from multilora_jax.models.config import ModelConfig
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.loader import MODEL_AXIS, param_shapes
from pallas_kernels import dispatch
from pallas_kernels.gpu_check.targets import H200, missing

MEMORY_GB = {"cpu": None, "h200": 141.0}
"""Devices that can be compiled for, and their memory in GB (10^9 bytes)."""


@dataclass(frozen=True)
class StepSizes:
    """The largest step, as in the configuration keys of these names.

    Attributes:
        max_num_seqs, max_num_batched_tokens, max_model_len, max_rank_rows: see EngineConfig.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 256
    max_model_len: int = 4096
    max_rank_rows: int = 512


def target_mesh(device: str, tp: int) -> Mesh:
    """Mesh ("data", "model") of shape (1, tp).

    Args:
        device: one of MEMORY_GB.

    Raises:
        ConfigError: this Python cannot compile for the device (`missing_compiler`), or the machine has too few CPUs.
    """
    if device == "cpu":
        return devices.make_mesh(tp)
    if reason := missing():
        raise ConfigError(
            f"nothing can be compiled for {device} here: {reason}; without --compile the plan is arithmetic",
            reason="missing_compiler", param="compile",
        )  # fmt: skip
    topology = topologies.get_topology_desc("", platform="cuda", target_config=H200, topology=f"1x1x{tp}")
    return topologies.make_mesh(topology, (1, tp), ("data", "model"))


@contextlib.contextmanager
def assumed(device: str, mesh: Mesh) -> Iterator[None]:
    """Lets everything that asks for the device see the target."""
    if device == "cpu":
        yield
        return
    # From jax 0.11 on Pallas reads the kind of GPU off the ambient mesh.
    with jax.set_mesh(mesh), dispatch.assume_device(dispatch.H200):
        yield


def lora_backend(device: str, kernel_backend: str, geometry: PoolGeometry, dtype: str) -> str:
    """LlamaSpec.lora_backend of an engine on such devices."""
    with contextlib.nullcontext() if device == "cpu" else dispatch.assume_device(dispatch.H200):
        return devices.lora_backend(kernel_backend, geometry.unit // geometry.tp, dtype)


def target_spec(
    device: str,
    model: ModelConfig,
    num_pages: int,
    tp: int,
    dtype: str,
    *,
    page_tokens: int = 16,
    prefill_block: int = 32,
    extra_vocab: int = 256,
    quantization: str | None = None,
    kernel_backend: str = "auto",
    enable_lora: bool = True,
) -> LlamaSpec:
    """The spec that an engine on such devices would have; see `engine.start.load_model`."""
    geometry = model.geometry(num_pages, page_tokens, tp, dtype, extra_vocab)
    axis_name, cpu = (MODEL_AXIS if tp > 1 else None), device == "cpu"
    with contextlib.nullcontext() if cpu else dispatch.assume_device(dispatch.H200):
        attention = devices.attention_backend(kernel_backend, model, dtype, page_tokens)
        interprets = devices.interprets(kernel_backend)
    lora = lora_backend(device, kernel_backend, geometry, dtype) if enable_lora else "xla"
    everything = 1 << 30
    return LlamaSpec(
        model, geometry, prefill_block, cpu and devices.features_first(dtype) and lora == "xla", axis_name,
        quantization, attention_groups=devices.attention_groups() if cpu else (everything, everything),
        blocks_from=devices.blocks_from(dtype) if cpu else 0, pieces_from=devices.pieces_from() if cpu else 0,
        attention_backend=attention, interpret=interprets, lora_backend=lora,
    )  # fmt: skip


def target_programs(spec: LlamaSpec, mesh: Mesh, sizes: StepSizes) -> tuple[Programs, list[BatchShape], list[int]]:
    """(programs, sizes of steps, sizes of row buffers) of an engine on the mesh."""
    g, shapes = spec.geometry, batch_shapes(sizes.max_num_seqs, sizes.max_num_batched_tokens, spec.prefill_block)
    pool: Any = jax.ShapeDtypeStruct(
        (g.num_layers, g.num_pages, g.page_elements), g.storage_dtype, sharding=NamedSharding(mesh, POOL_SPEC)
    )
    fine = mesh.devices.flat[0].platform == "cpu" and not spec.in_place
    buckets = row_buckets(sizes.max_rank_rows, fine=fine) if sizes.max_rank_rows else []
    params = param_shapes(spec, sizes.max_model_len, mesh)
    max_rows = max(shape.num_rows for shape in shapes)
    width = table_width(sizes.max_model_len, g)
    return Programs(spec, mesh, params, pool, width, max((0, *buckets)), max_rows), shapes, buckets


def nbytes_per_device(tree: Any) -> int:
    """Bytes that the shapes of a tree take on each device."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
