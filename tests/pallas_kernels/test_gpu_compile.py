"""Kernels compile for an H200 with no GPU present: no spills, registers and shared memory within the recorded limits.

Runs under this Python if it has the extra gpu-check, else under the one that GPU_CHECK_PYTHON names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_segmented_lora():
    output = compile_cases("pallas_kernels.segmented_lora.gpu_cases")
    assert output.count("lora_shrink") >= 5
    assert output.count("lora_expand") >= 5


def test_paged_attention():
    """The shapes of two models, a decode and a prompt kernel each, and those that put parts together."""
    output = compile_cases("pallas_kernels.paged_attention.gpu_cases", "--only", "(smollm2-135m|llama-3-8b)/bfloat16$")
    assert len(re.findall("paged_attention_(decode|prompt)_parts", output)) == 4
    assert len(re.findall("paged_attention_(decode|prompt)_combine", output)) == 4


@pytest.mark.slow
def test_every_model_and_type_of_paged_attention():
    compile_cases("pallas_kernels.paged_attention.gpu_cases")


@pytest.mark.slow
def test_the_benchmark():
    """Its decode step has the kernels in it, updates the pool in place and has no large temporaries."""
    compile_cases("pallas_kernels.bench.gpu_cases")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["triton"])
def test_every_model_type_and_plan_of_segmented_lora(implementation):
    compile_cases("pallas_kernels.segmented_lora.gpu_cases", "--sweep", "--only", f"^{implementation}")
