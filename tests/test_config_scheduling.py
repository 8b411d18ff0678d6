"""The configuration's keys about who is served when."""

from __future__ import annotations

from typing import get_args

import pytest

from multilora_jax.config import EngineConfig
from multilora_jax.config_scheduling import PolicyName
from multilora_jax.engine.policies import POLICIES, PolicyConfig
from multilora_jax.errors import ConfigError


def refusal(values: dict) -> ConfigError:
    with pytest.raises(ConfigError) as info:
        EngineConfig.from_dict(values)
    return info.value


def test_defaults():
    config = EngineConfig(model="m")
    assert (config.scheduling_policy, config.max_overtakes, config.fair_weights) == ("fcfs", 64, {})


def test_the_word_for_a_policy():
    error = refusal({"model": "m", "scheduling_policy": "fifo"})
    assert "one of fcfs, lcfs, cluster, fair, abort, deadline, got 'fifo'" in error.message


def test_every_word_has_its_policy():
    assert tuple(POLICIES) == get_args(PolicyName)


@pytest.mark.parametrize("policy", ["abort", "deadline"])
def test_an_objective_is_needed(policy):
    error = refusal({"model": "m", "scheduling_policy": policy})
    assert (error.reason, error.param) == ("missing_key", "first_token_objective_s")
    assert f"{policy} needs first_token_objective_s" in error.message
    assert EngineConfig(model="m", scheduling_policy=policy, first_token_objective_s=2).first_token_objective_s == 2


@pytest.mark.parametrize("value", [{"a": 1, "b c": 2.5}, ["a=1", "b c=2.5"]])
def test_weights(value):
    assert EngineConfig(model="m", fair_weights=value).fair_weights == {"a": 1.0, "b c": 2.5}


@pytest.mark.parametrize(
    ("value", "reason", "words"),
    [
        ({"a": 0}, "bad_value", "the weight of 'a' must be above 0, got 0"),
        ({"a": "1"}, "bad_type", "fair_weights: the value of 'a' must be a number, got '1'"),
        ({3: 1}, "bad_type", "the name 3 must be a non-empty string"),
        (["a=x"], "bad_type", "entries are name=number"),
        (["a=1", "a=2"], "bad_value", "names an entry twice"),
        ("a", "bad_type", "a mapping of name to number"),
    ],
)
def test_bad_weights(value, reason, words):
    error = refusal({"model": "m", "fair_weights": value})
    assert error.reason == reason
    assert words in error.message


def test_what_the_policies_take_are_keys():
    config = PolicyConfig.of(EngineConfig(model="m", scheduling_policy="cluster", cluster_adapters=3))
    assert (config.scheduling_policy, config.cluster_adapters, config.max_num_seqs) == ("cluster", 3, 32)
