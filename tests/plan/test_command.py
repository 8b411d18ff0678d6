"""The planner's command refuses what no device has, in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAN = [sys.executable, "-m", "multilora_jax.plan", "--config", "configs/tiny.yaml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory-gb", "nan"], "memory_gb nan must be a finite number above 0"),
        (["--num-adapters", "1", "--rank", "100"], "rank 100 is above max_lora_rank 64"),
        (["--tp", "0"], "tp: 0 is not a positive integer"),
        (["--json", "/nonexistent/x"], "json: cannot write '/nonexistent/x': No such file or directory"),
    ],
)
def test_absurd_arguments_are_refused(words, message):
    done = subprocess.run([*PLAN, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
