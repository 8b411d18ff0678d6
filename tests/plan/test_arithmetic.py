"""The planner's arithmetic against published sizes, and against the step compiled for this machine's CPU."""

from __future__ import annotations

import dataclasses

import pytest

from multilora_jax.errors import ConfigError
from multilora_jax.memory.geometry import MODULES, NUM_ATTENTION
from multilora_jax.models.loader import param_shapes
from multilora_jax.plan.arithmetic import Sizes, adapter_pages, make_plan, row_bytes, weight_bytes
from multilora_jax.plan.compiled import compile_step
from multilora_jax.plan.target import (
    StepSizes,
    nbytes_per_device,
    target_mesh,
    target_programs,
    target_spec,
)
from tests.plan.models import LLAMA_8B, LLAMA_13B, LLAMA_70B, SMALL

SIZES = Sizes(max_num_seqs=64, max_num_batched_tokens=512)
QKVO = MODULES[:NUM_ATTENTION]


def plan(model, tp, memory_gb, **options):
    return make_plan(model, tp, "bfloat16", SIZES, usable_bytes=int(memory_gb * 1e9), **options)


@pytest.mark.parametrize(
    ("model", "attention", "everything"),
    [
        (LLAMA_8B, 1_703_936, 5_242_880), (LLAMA_13B, 3_276_800, 7_823_360), (LLAMA_70B, 8_192_000, 25_886_720),
    ],
)  # fmt: skip
def test_bytes_of_a_rank(model, attention, everything):
    """Parameters of a rank row in 16 bits, on q k v o and on all seven; pages round up once for a whole adapter."""
    g = model.geometry(2, 16, 1, "bfloat16")
    assert row_bytes(g, 1) == everything
    for modules, nbytes in ((QKVO, attention), (MODULES, everything)):
        pages = adapter_pages(g, 16, modules)
        assert pages == -(-16 * nbytes // g.page_bytes)


def test_8b_with_300_adapters_fits_80_gb():
    """All seven projections of 300 adapters of rank 16, and room for 64 long texts."""
    found = plan(LLAMA_8B, 1, 80, num_adapters=300, rank=16)
    assert found.weights == pytest.approx(16.06e9, rel=0.002)
    assert found.num_adapters * found.adapter_pages * found.page_bytes == pytest.approx(25.2e9, rel=0.02)
    assert found.peak <= 80e9
    assert found.kv_tokens > 64 * 2048


def test_13b_with_200_adapters_fits_48_gb():
    """Of the attention's projections; those of all seven do not fit, and the plan says so."""
    found = plan(LLAMA_13B, 1, 48, num_adapters=200, rank=16, modules=QKVO)
    assert found.peak <= 48e9
    assert found.kv_tokens > 1000
    assert plan(LLAMA_13B, 1, 48, num_adapters=200, rank=16).kv_tokens == -1


def test_70b_on_eight_devices():
    found = plan(LLAMA_70B, 8, 80, num_adapters=300, rank=16)
    assert found.weights == pytest.approx(137.95e9 / 8, rel=0.01)
    assert found.peak <= 80e9
    assert found.kv_tokens > 0
    base, *adapters = found.exchanges
    assert (base.count, base.nbytes) == (160, 64 * 8192 * 4)
    assert sum(e.nbytes for e in adapters) == 7 * 64 * 512 * 4
    assert base.sent == pytest.approx(160 * 64 * 8192 * 4 * 2 * 7 / 8)


def test_70b_on_one_device_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="no room for a pool on each of 1 devices: use more devices"):
        plan(LLAMA_70B, 1, 80)


def test_sixteen_devices_hold_each_kv_head_twice():
    eight, sixteen = (plan(LLAMA_70B, tp, 80) for tp in (8, 16))
    assert sixteen.page_bytes == 2 * eight.page_bytes
    assert sixteen.exchanges[0].nbytes == eight.exchanges[0].nbytes
    with pytest.raises(ConfigError, match="tensor_parallel_size 12 does not divide .* use one of 1, 2, 4, 8, 16, 32"):
        plan(LLAMA_70B, 12, 80)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_as_they_are_described(quantization, tied):
    model = dataclasses.replace(SMALL, tie_word_embeddings=tied, attention_bias=tied, mlp_bias=tied)
    spec = target_spec("cpu", model, 64, 1, "float32", quantization=quantization)
    described = param_shapes(spec, 4096, target_mesh("cpu", 1))
    assert weight_bytes(model, spec.geometry, 4096, quantization) == nbytes_per_device(described)


def test_the_compiled_step_takes_what_was_planned():
    """Peak within 3 %, of a pool small enough that nothing hides behind it."""
    sizes = Sizes(8, 64, 512, 64, 0)
    mesh, spec = target_mesh("cpu", 1), target_spec("cpu", SMALL, 256, 1, "float32")
    found = make_plan(SMALL, 1, "float32", sizes, num_pages=256)
    programs, shapes, buckets = target_programs(spec, mesh, StepSizes(8, 64, 512, 64))
    step = compile_step(programs, shapes[-1], buckets[-1])
    assert found.peak == pytest.approx(step.peak, rel=0.03)
    layers = step.programs[1]
    assert layers.aliased >= found.pool  # in place
    assert layers.temporaries < found.pool / 4
    assert step.peak > found.weights + found.pool
    assert all(not program.collectives for program in step.programs)
