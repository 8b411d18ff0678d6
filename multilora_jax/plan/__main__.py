"""The planner's command: `python -m multilora_jax.plan --config FILE [--compile --device h200 --tp 4]`.

Needs no device: the model's configuration is read, its weights are not.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from absl import flags as absl_flags
from jax.sharding import Mesh

from multilora_jax import flags
from multilora_jax.adapters.host_base import read_model_config
from multilora_jax.adapters.make import TARGETS
from multilora_jax.config import EngineConfig
from multilora_jax.engine import devices
from multilora_jax.engine.own_rows import OwnRows
from multilora_jax.engine.rank_rows import ROW_BLOCK, row_buckets
from multilora_jax.errors import ConfigError
from multilora_jax.models.config import ModelConfig
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.plan.arithmetic import Plan, Sizes, make_plan
from multilora_jax.plan.compiled import CompiledStep, compile_step
from multilora_jax.plan.layer_table import layer_collectives, table_text
from multilora_jax.plan.report import plan_text, step_text
from multilora_jax.plan.target import (
    MEMORY_GB,
    StepSizes,
    assumed,
    lora_backend,
    target_mesh,
    target_programs,
    target_spec,
)

DEFAULT_UTILIZATION = 0.9
"""Share of a device's memory that is planned with, where the configuration does not say."""


def define_flags() -> None:
    """Defines the configuration's flags and the planner's own."""
    flags.define_flags()
    absl_flags.DEFINE_bool("compile", False, "Compile the largest step for the mesh and read what it takes.")
    absl_flags.DEFINE_integer(
        "compile_layers", 0,
        "Layers of the compiled step, a divisor of the model's; the others are counted like them. By default all.",
        lower_bound=0,
    )  # fmt: skip
    absl_flags.DEFINE_enum("device", "h200", tuple(MEMORY_GB), "What to plan for, and to compile for.")
    absl_flags.DEFINE_integer(
        "tp", None, "Devices that share one model; by default tensor_parallel_size.", lower_bound=1
    )
    absl_flags.DEFINE_float("memory_gb", None, "Memory of each device in GB (10^9 bytes); by default the device's own.")
    absl_flags.DEFINE_integer("num_adapters", 0, "Adapters that shall lie in the pool together.", lower_bound=0)
    absl_flags.DEFINE_integer("rank", 16, "Their rank.", lower_bound=1)
    absl_flags.DEFINE_enum("targets", "all", tuple(TARGETS), "Projections that they have.")
    absl_flags.DEFINE_bool("collectives", False, "Print what adapters of rank 8 to 128 add to one layer's collectives.")
    absl_flags.DEFINE_string("json", None, "Write everything to this file.")


def read_model(config: EngineConfig) -> ModelConfig:
    """The model's sizes, from model_shape where there is one; no weights are read."""
    if config.model_shape:
        return ModelConfig.from_hf(dict(config.model_shape), config.base_name)
    return read_model_config(config.model)


def plan_of(config: EngineConfig, model: ModelConfig, f: Any) -> tuple[Plan, Sizes, str]:
    """(plan, sizes of the largest step, compute type) of a configuration and the planner's flags."""
    tp, dtype = f.tp or config.tensor_parallel_size, config.dtype
    if dtype == "auto":
        dtype = "float32" if f.device == "cpu" else "bfloat16"
    most = config.max_rank_rows if config.enable_lora else 0
    one = model.geometry(2, config.page_tokens, tp, dtype)
    in_place = bool(most) and lora_backend(f.device, config.kernel_backend, one, dtype) != "xla"
    buckets = row_buckets(most, fine=f.device == "cpu" and not in_place) if most else []
    length = devices.max_model_len(config, model)
    rows, next_rows = (*buckets[::-1], 0, 0)[:2]
    sizes = Sizes(config.max_num_seqs, config.max_num_batched_tokens, length, rows, next_rows, config.prefill_block)
    memory_gb = f.memory_gb or MEMORY_GB[f.device]
    num_pages = config.pool_pages
    if config.pool_memory_gib is not None:
        num_pages = int(config.pool_memory_gib * 2**30) // one.page_bytes
    if num_pages is None and memory_gb is None:
        raise ConfigError(
            "the size of the pool is open: give pool_pages, pool_memory_gib, or memory_gb of the device",
            reason="missing_key", param="memory_gb",
        )  # fmt: skip
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION
    plan = make_plan(
        model, tp, dtype, sizes, num_pages=num_pages, usable_bytes=memory_gb and int(memory_gb * 1e9 * share),
        page_tokens=config.page_tokens, extra_vocab=config.max_extra_vocab if config.enable_lora else 0,
        quantization=config.quantization, num_adapters=f.num_adapters, rank=f.rank, modules=TARGETS[f.targets],
        in_place=in_place, max_lora_rank=own_rows_of(config, f),
    )  # fmt: skip
    return plan, sizes, dtype


def spec_of(config: EngineConfig, model: ModelConfig, plan: Plan, dtype: str, f: Any) -> LlamaSpec:
    """The spec of a plan on its device."""
    return target_spec(
        f.device, model, plan.num_pages, f.tp or config.tensor_parallel_size, dtype, page_tokens=config.page_tokens,
        prefill_block=config.prefill_block, extra_vocab=config.max_extra_vocab if config.enable_lora else 0,
        quantization=config.quantization, kernel_backend=config.kernel_backend,
        enable_lora=config.enable_lora,
    )  # fmt: skip


def own_rows_of(config: EngineConfig, f: Any) -> int | None:
    """Most rank rows of an adapter, where the devices sum for each token those of its own adapter."""
    return None if f.device == "cpu" else -(-config.max_lora_rank // ROW_BLOCK) * ROW_BLOCK


def compiled(f: Any, mesh: Mesh, spec: LlamaSpec, sizes: Sizes, max_lora_rank: int | None) -> CompiledStep:
    """The largest step of a plan, compiled."""
    step = StepSizes(sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.max_model_len, sizes.max_rank_rows)
    with assumed(f.device, mesh):
        programs, shapes, buckets = target_programs(spec, mesh, step)
        if f.compile_layers:
            if spec.config.num_layers % f.compile_layers:
                raise ConfigError(
                    f"compile_layers {f.compile_layers} does not divide the model's {spec.config.num_layers} layers",
                    reason="bad_value", param="compile_layers",
                )  # fmt: skip
            programs.group = f.compile_layers
        rows = buckets[-1] if buckets else 0
        own_rows = OwnRows(max_lora_rank or 0).sizes(rows)[-1:] if spec.geometry.tp > 1 else []
        return compile_step(
            programs, shapes[-1], rows, lambda line: print(line, file=sys.stderr, flush=True), *own_rows
        )  # fmt: skip


def _check(config: EngineConfig, f: Any) -> None:
    """Refuses what no device has, and adapters that a server of this configuration would refuse."""
    if f.memory_gb is not None and not 0 < f.memory_gb < math.inf:
        raise ConfigError(
            f"memory_gb {f.memory_gb} must be a finite number above 0", reason="bad_value", param="memory_gb"
        )
    if f.num_adapters and f.rank > config.max_lora_rank:
        raise ConfigError(
            f"rank {f.rank} is above max_lora_rank {config.max_lora_rank}: raise that, or plan with a lower rank",
            reason="bad_value", param="rank",
        )  # fmt: skip


def main(_: list[str]) -> int:
    """Entry point: 0 if everything fits, 1 if it does not."""
    f = absl_flags.FLAGS
    config = flags.config_from_flags()
    _check(config, f)
    tp = f.tp or config.tensor_parallel_size
    jax.config.update("jax_platforms", "cpu")  # a device that is there must not be taken for the one planned for
    if f.device == "cpu":
        jax.config.update("jax_num_cpu_devices", tp)
    if f.compile or f.collectives:
        jax.config.update("jax_enable_compilation_cache", False)  # entries made for an absent device help nobody
    model = read_model(config)
    plan, sizes, dtype = plan_of(config, model, f)
    memory_gb = f.memory_gb or MEMORY_GB[f.device]
    print(plan_text(config.base_name, plan, sizes, tp, dtype, memory_gb))
    result: dict[str, Any] = {"model": config.base_name, "tp": tp, "dtype": dtype, "plan": asdict(plan)}
    peak = plan.peak
    if f.compile:
        step = compiled(
            f, target_mesh(f.device, tp), spec_of(config, model, plan, dtype, f), sizes, own_rows_of(config, f)
        )
        buffered = 0 if plan.in_place else plan.rows
        next_rows = buffered * sizes.next_rank_rows // max(1, sizes.max_rank_rows + sizes.next_rank_rows)
        print(step_text(step, plan, next_rows, tp))
        peak = max(peak, step.peak + next_rows)
        result["compiled"] = asdict(step) | {"peak": step.peak + next_rows}
    if f.collectives:
        mesh, spec = target_mesh(f.device, tp), spec_of(config, model, plan, dtype, f)
        print(table_text(layer_collectives(f.device, mesh, spec, config.max_num_seqs), config.max_num_seqs, tp))
    if f.json:
        try:
            Path(f.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"json: cannot write {f.json!r}: {error.strerror}", reason="bad_value", param="json"
            ) from None
    fits = plan.kv_tokens >= 0 and (memory_gb is None or peak <= memory_gb * 1e9)
    return 0 if fits else 1


if __name__ == "__main__":
    logging.getLogger("jax").setLevel(logging.WARNING)
    define_flags()
    flags.run(
        main,
        about="What a configuration takes of each device: weights, pool, temporaries and what the devices send each "
        "other; by arithmetic, and with --compile as the compiler has it, with no such device at hand.",
        example="python -m multilora_jax.plan --config configs/smollm2.yaml --compile --device cpu",
    )
