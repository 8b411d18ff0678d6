"""Two virtual devices against one, in a process of their own (the number of devices is fixed when jax starts)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def seen(golden_tiny, configs, tmp_path_factory):
    """What tensor_parallel_worker.py printed."""
    odd = tmp_path_factory.mktemp("odd")
    config = json.loads((configs / "tiny_model" / "config.json").read_text())
    odd_config = config | {"vocab_size": 259, "eos_token_id": 257, "attention_bias": True, "mlp_bias": True}
    (odd / "config.json").write_text(json.dumps(odd_config))
    command = [sys.executable, "-W", "error", "-m", "tests.engine.tensor_parallel_worker", str(golden_tiny), str(odd)]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["num_devices"] == 3
    return result


def test_two_devices_give_what_one_gives(seen):
    facts = seen["tied"]
    assert facts["same_tokens"]
    assert facts["difference"] < 2e-4


def test_two_devices_give_the_reference(seen):
    facts = seen["tied"]
    assert (facts["num_adapters"], facts["tokens_match"]) == (19, True)
    assert facts["error"] < 2e-3


def test_pool_parameters_and_rank_rows_are_split(seen):
    facts = seen["tied"]
    assert (facts["pool_shards"], facts["pool_devices"]) == ([[2, 512, 512]], 2)  # of [2, 512, 1024]
    assert facts["embed_shards"] == [[256, 64]]  # of 256 tokens and room for 256 more
    assert facts["a_qkv_shards"] == [[32, 32, 24]]  # blocks of 8 rows, of [32, 64, 24]


def test_every_shard_holds_its_slice_of_an_adapter_s_pages(seen):
    assert seen["tied"]["pages_wrong"] == 0


def test_three_devices_cannot_split_two_kv_heads(seen):
    refused = seen["refused"]
    assert (refused["reason"], refused["param"]) == ("tensor_parallel_size", "tensor_parallel_size")
    assert refused["message"] == "tensor_parallel_size 3 does not divide the model's num_kv_heads 2"


# In 8 bits each shard of o and down has fixed-point steps of its own for its activations.
@pytest.mark.parametrize(("model", "allowed"), [("odd", 2e-4), ("int8", 2e-3)])
def test_biases_an_odd_vocabulary_and_random_weights(seen, model, allowed):
    """They, and sampled texts, do not depend on the number of devices."""
    facts = seen[model]
    assert facts["embed_shards"] == [[272, 64]]  # of 259 + 256 tokens, rounded up to units of 32
    assert facts["same_tokens"]
    assert facts["sampled_differs_from_greedy"]
    assert facts["difference"] < allowed
