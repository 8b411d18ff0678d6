"""Starting an engine: the model on its devices, the pool, and the budgets that follow from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tqdm import tqdm

from multilora_jax.config import EngineConfig
from multilora_jax.engine import devices
from multilora_jax.engine.host_memory import release_freed_memory
from multilora_jax.engine.hosts import check_devices, connect
from multilora_jax.engine.model_runner import ModelRunner
from multilora_jax.engine.step_plan import SchedulerConfig
from multilora_jax.errors import ConfigError
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.models.checkpoint import open_checkpoint
from multilora_jax.models.checkpoint.dummy import check_shape, dummy_model
from multilora_jax.models.checkpoint.orbax import OrbaxCheckpoint
from multilora_jax.models.config import ModelConfig
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.loader import load_llama
from multilora_jax.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """What an engine is built around.

    Attributes:
        model_config, geometry: of the model and its pool.
        tokenizer: the base's, None for a model without one.
        max_model_len: context in tokens.
        scheduling: budgets of a step.
        runner: parameters, pool and programs.
    """

    model_config: ModelConfig
    geometry: PoolGeometry
    tokenizer: Tokenizer | None
    max_model_len: int
    scheduling: SchedulerConfig
    runner: ModelRunner


def load_model(config: EngineConfig, *, progress: bool, replica: int = -1) -> LoadedModel:
    """Reads the model and makes its pool.

    Args:
        config: see EngineConfig.
        progress: show progress bars.
        replica: which of data_parallel_size; it says which devices. -1: the only one.

    Raises:
        ConfigError, NotFoundError: the model cannot be served so.
    """
    if replica < 0 and config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size {config.data_parallel_size} is for the server: one engine runs one replica",
            reason="bad_value", param="data_parallel_size",
        )  # fmt: skip
    hosts = connect(config)
    devices.set_compilation_cache(config.compilation_cache_dir)
    check_devices(config)
    mesh = devices.make_mesh(config.tensor_parallel_size, max(0, replica), config.data_parallel_size)
    dummy = config.load_format == "dummy"
    checkpoint = None if dummy else open_checkpoint(config.model, progress=progress)
    if checkpoint is None:
        model_config, tokenizer = dummy_model(config.model, config.base_name, config.model_shape, config.tokenizer)
    else:
        model_config, tokenizer = checkpoint.config, checkpoint.load_tokenizer(config.tokenizer)
        check_shape(model_config, config.model_shape, config.model)
    if config.quantization is None and isinstance(checkpoint, OrbaxCheckpoint):
        config = replace(config, quantization=checkpoint.quantization)  # its weights are what they are
    max_model_len = devices.max_model_len(config, model_config)
    dtype = devices.choose_dtype(config.dtype)
    lora_backend, tp = "xla", config.tensor_parallel_size
    if config.enable_lora:
        unit = model_config.geometry(2, config.page_tokens, tp, dtype).unit
        lora_backend = devices.lora_backend(config.kernel_backend, unit // tp, dtype)
    num_pages = devices.pool_pages(config, model_config, dtype, max_model_len, mesh, lora_backend != "xla")
    if hosts is not None:  # a probe, or the memory of one host, must not decide for itself alone
        agreed = hosts.agree(config, {"dtype": dtype, "num_pages": num_pages})
        dtype, num_pages = agreed["dtype"], agreed["num_pages"]
    extra_vocab = config.max_extra_vocab if config.enable_lora else 0
    geometry = model_config.geometry(num_pages, config.page_tokens, tp, dtype, extra_vocab)
    spec = LlamaSpec(
        model_config,
        geometry,
        config.prefill_block,
        devices.features_first(dtype) and lora_backend == "xla",
        "model" if tp > 1 else None,
        config.quantization,
        devices.attention_groups(),
        devices.blocks_from(dtype),
        devices.pieces_from(),
        devices.attention_backend(config.kernel_backend, model_config, dtype, config.page_tokens),
        devices.interprets(config.kernel_backend),
        lora_backend,
    )
    model = load_llama(
        spec, max_model_len, mesh, checkpoint, seed=config.seed,
        progress=lambda layers: tqdm(layers, desc="Loading", unit="layer", disable=not progress),
    )  # fmt: skip
    release_freed_memory()  # what reading the checkpoint took
    runner = ModelRunner(
        model,
        mesh,
        max_num_seqs=config.max_num_seqs,
        max_prompt_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_rank_rows=config.max_rank_rows if config.enable_lora else 0,
        max_lora_rank=config.max_lora_rank,
        paced=config.target_step_ms is not None,
    )
    runner.join(hosts)
    prompt_sizes = tuple(shape.num_prompt_tokens for shape in runner.shapes if shape.num_prompt_tokens)
    scheduling = SchedulerConfig.of(config, prompt_sizes)
    return LoadedModel(model_config, geometry, tokenizer, max_model_len, scheduling, runner)
