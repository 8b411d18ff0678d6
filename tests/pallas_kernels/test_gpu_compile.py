"""Kernels compile for an H200 with no GPU present: no spills, registers and shared memory within the recorded limits.

Runs under this Python if it has the extra gpu-check, else under the one that GPU_CHECK_PYTHON names.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.gpu_check import Case
from pallas_kernels.gpu_check.targets import missing

ROOT = Path(__file__).parent.parent.parent
PYTHON = os.environ.get("GPU_CHECK_PYTHON", sys.executable)


def compile_cases(*arguments: str) -> str:
    """Output of the check, which must pass."""
    if sys.executable == PYTHON and (reason := missing()):
        pytest.skip(f"nothing can be compiled for a GPU: {reason}, or set GPU_CHECK_PYTHON")
    command = [PYTHON, "-m", "pallas_kernels.gpu_check", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_the_controls_fail():
    output = compile_cases("pallas_kernels.gpu_check.controls")
    assert output.count("ok   control_") == 8


def test_kernels_of_xla_beside_ours_are_held_to_no_limit():
    case = Case(None, kernels="^paged_attention")
    assert case.holds("paged_attention_decode")
    assert not case.holds("loop_pad_fusion")
    assert Case(None).holds("anything")
    assert not Case(None, check_limits=False).holds("anything")


def test_segmented_lora():
    output = compile_cases("pallas_kernels.segmented_lora.gpu_cases")
    assert output.count("lora_shrink") >= 5
    assert output.count("lora_expand") >= 5


def test_paged_attention():
    """The shapes of two models, a decode and a prompt kernel each, and those that put parts together."""
    output = compile_cases("pallas_kernels.paged_attention.gpu_cases", "--only", "(smollm2-135m|llama-3-8b)/bfloat16$")
    assert len(re.findall("paged_attention_(decode|prompt)_parts", output)) == 4
    assert len(re.findall("paged_attention_(decode|prompt)_combine", output)) == 4
    assert len(re.findall("paged_attention_(decode|prompt)_mosaic_gpu_kernel", output)) == 4


STEPS = ROOT / "multilora_jax" / "engine" / "gpu_steps.csv"
"""What was recorded of the engine's programs."""


def test_the_engine_s_decode_step():
    """Llama-3-8B's shape, 64 sequences and 64 adapters: the pool is aliased, nothing copies it, kernels do the rest."""
    name = "H200, 32 layers, decode 64, 64 adapters"
    output = compile_cases("multilora_jax.engine.gpu_cases", "--only", f"^{name}$")
    assert "lora_expand:128 lora_shrink:128 paged_attention_decode_combine:32 paged_attention_decode_parts:32" in output
    with STEPS.open(encoding="utf-8", newline="") as file:
        recorded = {row["case"]: row for row in csv.DictReader(file)}
    for column in ("arguments_mib", "aliased_mib"):
        assert f"{column} {recorded[name][column]};" in output


def test_the_recorded_steps_hold_the_pool_once():
    with STEPS.open(encoding="utf-8", newline="") as file:
        layers = [row for row in csv.DictReader(file) if float(row["aliased_mib"])]
    assert len(layers) == 9
    for row in layers:
        shards, num_layers = 4 if "x 4" in row["case"] else 1, 32 if "32 layers" in row["case"] else 4
        assert float(row["aliased_mib"]) >= 20_000 * num_layers / 16 / shards  # 64 KiB for each page and layer
        assert float(row["temporaries_mib"]) < 768
        assert ("lora_shrink" in row["pallas_launches"]) == ("base" not in row["case"])
        assert ("all-reduce" in row["collectives"]) == (shards > 1)


@pytest.mark.slow
def test_every_program_of_the_engine():
    compile_cases("multilora_jax.engine.gpu_cases")


@pytest.mark.slow
def test_every_model_and_type_of_paged_attention():
    compile_cases("pallas_kernels.paged_attention.gpu_cases")


@pytest.mark.slow
def test_the_benchmark():
    """Its decode step has the kernels in it, updates the pool in place and has no large temporaries."""
    compile_cases("pallas_kernels.bench.gpu_cases")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_every_model_type_and_plan_of_segmented_lora(implementation):
    compile_cases("pallas_kernels.segmented_lora.gpu_cases", "--sweep", "--only", f"^{implementation}")
