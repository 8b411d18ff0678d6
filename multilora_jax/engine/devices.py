"""Choices that depend on the devices at hand: mesh, compute type, pool size, compilation cache."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from multilora_jax.config import EngineConfig
from multilora_jax.engine.cache_check import remove_cut_off
from multilora_jax.engine.rank_rows import row_buckets
from multilora_jax.errors import ConfigError
from multilora_jax.models.config import ModelConfig
from pallas_kernels.dispatch import current_device
from pallas_kernels.paged_attention.api import pick as pick_attention
from pallas_kernels.segmented_lora.api import pick as pick_lora
from pallas_kernels.segmented_lora.xla_blocks import BLOCKS_FROM
from pallas_kernels.segmented_lora.xla_pieces import PIECES_FROM

DEFAULT_CPU_POOL_BYTES = 1 << 30
"""Pool size where no size is configured and the device does not say how much memory it has."""

_STEP_RESERVE_BYTES = 1 << 30
"""Device memory left to a step's temporaries when the pool takes what remains."""

log = logging.getLogger(__name__)


def make_mesh(tensor_parallel_size: int, replica: int = 0, num_replicas: int = 1) -> Mesh:
    """Mesh ("data", "model") of one replica: row `replica` of the first devices laid out [num_replicas, tp]."""
    devices, tp = jax.devices(), tensor_parallel_size
    if len(devices) < tp * num_replicas:
        wanted, kind = tp * num_replicas, devices[0].platform
        copies = f" with data_parallel_size {num_replicas} needs {wanted} devices"
        virtual = f", or let the CPU stand for {wanted}: XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        raise ConfigError(
            f"tensor_parallel_size {tp}{copies if num_replicas > 1 else ' needs as many devices'}, jax sees "
            f"{len(devices)} ({kind}): lower it{virtual if kind == 'cpu' else ''}",
            reason="too_few_devices", param="data_parallel_size" if num_replicas > 1 else "tensor_parallel_size",
        )  # fmt: skip
    grid = np.asarray(devices[: tp * num_replicas]).reshape(num_replicas, tp)
    return Mesh(grid[replica : replica + 1], ("data", "model"))


def choose_dtype(dtype: str) -> str:
    """Resolves "auto": bfloat16 on accelerators, on a CPU whichever type a probe finds faster."""
    if dtype != "auto":
        return dtype
    if jax.default_backend() != "cpu":
        return "bfloat16"
    return "bfloat16" if _probe("bfloat16", False) < 0.9 * _probe("float32", True) else "float32"


def _probe(dtype: str, features_first: bool) -> float:
    """Seconds of a chain of small-batch products, the work that bounds decoding."""
    weights = [jnp.full((1024, 1024), 1e-3, dtype) for _ in range(8)]
    x = jnp.ones((1024, 8) if features_first else (8, 1024), dtype)

    def chain(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for w in weights:
            if features_first:
                y = jax.lax.dot_general(w, x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            else:
                y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            x = y.astype(x.dtype)
        return x

    run = jax.jit(chain)
    run(x, weights).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        run(x, weights).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def features_first(dtype: str) -> bool:
    """Whether activations are laid out [features, T] (see models.layers)."""
    return jax.default_backend() == "cpu" and dtype == "float32"


def attention_groups() -> tuple[int, int]:
    """LlamaSpec.attention_groups: a few rows at a time on a CPU, where rows of one group wait for its longest and more
    at a time gain nothing; all at a time on accelerators, which are not filled by less."""
    return (16, 4) if jax.default_backend() == "cpu" else (1 << 30, 1 << 30)


def blocks_from(dtype: str) -> int:
    """LlamaSpec.blocks_from."""
    return BLOCKS_FROM if features_first(dtype) else 0


def pieces_from() -> int:
    """LlamaSpec.pieces_from: many small products, one after another, are a CPU's way and no accelerator's."""
    return PIECES_FROM if jax.default_backend() == "cpu" else 0


def interprets(kernel_backend: str) -> bool:
    """Whether Pallas kernels run in their interpreter: asked for by name where there is no accelerator, as tests do."""
    return kernel_backend == "triton" and jax.default_backend() == "cpu" and current_device().capability is None


def attention_backend(kernel_backend: str, model: ModelConfig, dtype: str, page_tokens: int = 16) -> str:
    """LlamaSpec.attention_backend: a Pallas implementation on GPUs that have one, XLA elsewhere, or as configured.

    What the mosaic_gpu kernel does not take (float32, other head sizes) the triton one does beside the adapters'.

    Raises:
        ConfigError: the one that was asked for does not run here.
    """
    pick = functools.partial(pick_attention, model.head_dim, dtype, page_tokens=page_tokens)
    if kernel_backend == "mosaic_gpu":
        try:
            return pick(kernel_backend)
        except NotImplementedError:
            kernel_backend = "triton"
    return _picked(kernel_backend, pick)


def lora_backend(kernel_backend: str, unit: int, dtype: str) -> str:
    """LlamaSpec.lora_backend, likewise.

    Args:
        unit: elements of a unit of the pool that a shard holds.
    """
    return _picked(kernel_backend, functools.partial(pick_lora, unit, dtype))


def _picked(kernel_backend: str, pick: Callable[..., str]) -> str:
    try:
        wanted = None if kernel_backend == "auto" else kernel_backend
        return pick(wanted, interpret=interprets(kernel_backend))
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"kernel_backend {kernel_backend} does not run here: {error}", reason="bad_value", param="kernel_backend"
        ) from error


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens of the context: as configured, by default the model's own limit.

    Raises:
        ConfigError: more than the model was made for; only `dynamic` rotary embedding stretches.
    """
    asked, own = config.max_model_len, model.max_position_embeddings
    if asked is not None and asked > own and model.rope.rope_type != "dynamic":
        raise ConfigError(
            f"max_model_len {asked} is more than the model's max_position_embeddings {own}: lower it",
            reason="bad_value", param="max_model_len",
        )  # fmt: skip
    return own if asked is None else asked


def pool_pages(
    config: EngineConfig, model: ModelConfig, dtype: str, max_model_len: int, mesh: Mesh, in_place: bool = False
) -> int:
    """Pages of the pool from whichever size the configuration gives; `in_place`: no rank rows are copied.

    Raises:
        ConfigError: the size does not hold a single page.
    """
    if config.pool_pages is not None:
        return config.pool_pages
    tp = config.tensor_parallel_size
    one = model.geometry(2, config.page_tokens, tp, dtype)
    if config.pool_memory_gib is not None:
        size = int(config.pool_memory_gib * 2**30)
    else:
        stats = mesh.devices.flat[0].memory_stats() or {}
        limit = stats.get("bytes_limit")
        if limit is None:
            wanted = (config.max_num_seqs * one.pages_for_tokens(max_model_len) + 1) * one.page_bytes
            size = min(wanted, DEFAULT_CPU_POOL_BYTES)
        else:
            weights = model.weight_bytes(one.storage_dtype.itemsize, config.quantization) // tp
            if config.enable_lora and not in_place:  # the buffers in use, and those that are filled beside them
                buckets = row_buckets(config.max_rank_rows, fine=False)
                weights += sum(buckets[-2:]) * one.rank_row_bytes // tp
            share = config.gpu_memory_utilization if config.gpu_memory_utilization is not None else 0.9
            size = int((limit * share - weights - _STEP_RESERVE_BYTES) * tp)
    pages = size // one.page_bytes
    if pages < 2:
        raise ConfigError(
            f"the pool would have {size} bytes but one page takes {one.page_bytes}, and at least two are needed: "
            "raise pool_memory_gib, pool_pages or gpu_memory_utilization",
            reason="pool_too_small", param="pool_memory_gib",
        )  # fmt: skip
    return pages


def set_compilation_cache(folder: str | None) -> Path:
    """Keeps compiled programs between starts; an already configured cache of the process is left alone."""
    configured = getattr(jax.config, "jax_compilation_cache_dir", None)
    if configured and folder is None:
        return Path(configured)
    root = os.environ.get("MULTILORA_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "multilora_jax"
    )
    path = Path(folder or os.path.join(root, "xla"))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a full disk, or one that may not be written to: slower, but no reason not to serve
        log.warning("compiled programs are not kept: %s", error)
        return path
    if configured != str(path):  # once a process
        remove_cut_off(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
