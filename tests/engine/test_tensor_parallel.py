"""Several of eight virtual devices against one, in processes of their own (jax fixes their number when it starts)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.make_tiny_model import CONFIG

ROOT = Path(__file__).parent.parent.parent


def worker_env(num_devices: int) -> dict[str, str]:
    """The environment of a process with so many virtual devices."""
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def run_worker(golden: Path, folder: Path, part: str, timeout_s: float) -> dict:
    """What tensor_parallel_worker.py printed."""
    changes = {
        "odd": {"vocab_size": 259, "eos_token_id": 257, "attention_bias": True, "mlp_bias": True},
        "eight": {"num_attention_heads": 8, "num_key_value_heads": 8},
        "grouped": {"num_attention_heads": 8, "attention_bias": True},
    }
    for name, change in changes.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(CONFIG | change))
    command = [sys.executable, "-W", "error", "-m", "tests.engine.tensor_parallel_worker"]
    done = subprocess.run(
        [*command, str(golden), str(folder), part], cwd=ROOT, env=worker_env(8), capture_output=True, text=True,
        timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["num_devices"] == 8
    return result


def check_golden(facts, where: object = ""):
    """Equal to one device and to the reference, the pool split and every page's slice where it belongs."""
    assert facts["same_tokens"], where
    assert facts["difference"] < 2e-4, where
    assert facts["tokens_match"], where
    assert facts["pages_wrong"] == 0, where
    assert facts["pool_devices"] > 1, where


def check_dummy(facts, allowed=2e-4):
    assert facts["same_tokens"]
    assert facts["same_ranks"]
    assert facts["sampled_differs_from_greedy"]
    assert facts["difference"] < allowed
    assert facts["logprob_difference"] < allowed


def check_sampling(facts):
    assert facts["same_tokens"]
    assert facts["distinct"] == 2  # with edits and without
    assert facts["same_ranks"]
    assert facts["error"] < 1e-5
    assert facts["largest_collective"] <= facts["rows_by_vocabulary"] / 8  # the best 20 of each shard


@pytest.fixture(scope="module")
def seen(golden_tiny, tmp_path_factory):
    return run_worker(golden_tiny, tmp_path_factory.mktemp("models"), "quick", 1400)


@pytest.mark.parametrize("tp", ["2", "4"])  # four devices hold each of the two KV heads twice
def test_several_devices_give_what_one_gives(seen, tp):
    facts = seen["tied"][tp]
    check_golden(facts)
    assert facts["num_adapters"] == 1
    assert facts["error"] < 2e-3


def test_pool_parameters_and_rank_rows_are_split(seen):
    facts = seen["tied"]["2"]
    assert (facts["pool_shards"], facts["pool_devices"]) == ([[2, 512, 512]], 2)  # of [2, 512, 1024]
    assert facts["embed_shards"] == [[256, 64]]  # of 256 tokens and room for 256 more
    assert facts["a_qkv_shards"] == [[32, 32, 24]]  # blocks of 8 rows, of [32, 64, 24]
    facts = seen["tied"]["4"]
    assert (facts["pool_shards"], facts["pool_devices"]) == ([[2, 512, 512]], 4)  # one KV head on each
    assert facts["embed_shards"] == [[128, 64]]
    assert facts["a_qkv_shards"] == [[32, 16, 24]]


def test_three_devices_cannot_split_four_heads(seen):
    refused = seen["refused"]
    assert (refused["reason"], refused["param"]) == ("tensor_parallel_size", "tensor_parallel_size")
    message = "tensor_parallel_size 3 does not divide the model's num_attention_heads 4: use one of 1, 2, 4"
    assert refused["message"] == message


def test_a_split_vocabulary_is_sampled_like_a_whole_one(seen):
    check_sampling(seen["sampling"]["8"])


@pytest.mark.slow
def test_every_case_of_a_base_and_two_replicas_of_four_devices(golden_tiny, tmp_path):
    seen = run_worker(golden_tiny, tmp_path, "every_tied", 3000)
    for tp, facts in seen["tied"].items():
        check_golden(facts, tp)
        assert facts["num_adapters"] == 19
        assert facts["error"] < 2e-3
    assert sorted(seen["two by four"]) == ["4/0", "4/1"]
    for where, facts in seen["two by four"].items():
        check_golden(facts, where)
    for where, facts in seen["own rows"].items():
        check_golden(facts, where)
        assert 8 in facts["own_rows"]  # a third of the tokens are the base's; steps of more rows sum all of them
    facts = seen["replicated"]
    assert facts["right"] == [True] * 12
    assert facts["devices"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    one, other = map(set, facts["resident"])
    assert one
    assert other
    assert not one & other  # each adapter on one replica


@pytest.mark.slow
def test_every_other_golden_base(golden_tiny, tmp_path):
    seen = run_worker(golden_tiny, tmp_path, "every_base", 3000)
    for base, by_size in seen["bases"].items():
        for tp, facts in by_size.items():
            check_golden(facts, (base, tp))


@pytest.mark.slow
def test_random_weights_on_up_to_eight_devices(golden_tiny, tmp_path):
    """Sampled texts do not depend on the number of devices either."""
    seen = run_worker(golden_tiny, tmp_path, "random_models", 3000)
    for model in ("eight", "grouped"):
        check_dummy(seen[model])
    # In 8 bits each shard of o and down has fixed-point steps of its own for its activations.
    for model, allowed in (("odd", 2e-4), ("int8", 2e-3)):
        assert seen[model]["embed_shards"] == [[272, 64]]  # of 259 + 256 tokens, rounded up to units of 32
        check_dummy(seen[model], allowed)
    for facts in seen["sampling"].values():
        check_sampling(facts)


@pytest.mark.slow
def test_smollm2_on_three_devices(golden_tiny, tmp_path):
    """Nine heads and three KV heads; differences of float32 sums are seen beside logits of 20 and more."""
    facts = run_worker(golden_tiny, tmp_path, "smollm2", 3000)["smollm2"]
    assert facts["same_tokens"]
    assert facts["distinct"] == 3
    assert facts["difference"] < 2e-4


@pytest.mark.slow
def test_whatever_a_request_asks_for():
    """Prefix cache, prompt lookup, grammars and mixes of adapters, on more devices and by replicas."""
    command = [sys.executable, "-W", "error", "-m", "tests.engine.parallel_features_worker"]
    done = subprocess.run(command, cwd=ROOT, env=worker_env(4), capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    one = seen["1"]
    assert json.loads(one["texts"][0])["name"] in ("ann", "bob")
    assert re.fullmatch("[a-f]{4}-[0-9]{3}", one["texts"][1])
    assert one["texts"][2] in ("left", "right")
    assert len(set(map(tuple, one["tokens"][:5]))) == 5
    for where in ("1", "2", "4", "own rows"):
        facts = seen[where]
        assert facts["tokens"] == one["tokens"], where
        assert facts["same_again"], where
        assert facts["prefix_hits"] == one["prefix_hits"] > 0, where
        assert facts["proposed"] == one["proposed"] >= facts["accepted"] == one["accepted"] > 0, where
    assert one["own_rows"] == [0]
    assert 16 in seen["own rows"]["own_rows"]
    assert seen["replicas"] == one["tokens"]
    first, second = seen["int8"]
    assert first["tokens"] == second["tokens"]
