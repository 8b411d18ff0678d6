"""Kernels inside a shard_map: each of two devices reads its slice of every rank row, and one sum joins them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_two_devices_give_peft_s_numbers(golden_tiny):
    """The base, adapters on all projections and DoRA, in one batch."""
    command = [sys.executable, "-W", "error", "-m", "tests.engine.kernels_worker", str(golden_tiny)]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["lora"], seen["attention"], seen["shards"]) == ("triton", "triton", 2)
    assert max(seen["errors"]) < 2e-3, seen
    assert seen["own_rows"] == [0, 16]
