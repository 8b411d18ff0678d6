"""Keys about many devices and hosts."""

from __future__ import annotations

import pytest

from multilora_jax.config import EngineConfig
from multilora_jax.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hosts": 2}, "num_hosts needs coordinator: the HOST:PORT of host_rank 0"),
        ({"num_hosts": 2, "coordinator": "here"}, "coordinator must be HOST:PORT .* got 'here'"),
        ({"num_hosts": 2, "coordinator": "a:65535"}, "port below 65535"),
        ({"host_rank": 1}, "host_rank 1 is none of the 1 of num_hosts"),
        ({"coordinator": "a:1"}, "coordinator is for several hosts"),
        (
            {"num_hosts": 2, "coordinator": "a:1", "tensor_parallel_size": 3},
            "cannot be shared out evenly over num_hosts 2",
        ),
        (
            {"num_hosts": 2, "coordinator": "a:1", "tensor_parallel_size": 2, "data_parallel_size": 2},
            "data_parallel_size is for replicas on one host",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_dict({"model": "m", **options})


def test_two_hosts():
    options = {"num_hosts": 2, "host_rank": 1, "coordinator": "a:1", "tensor_parallel_size": 4}
    assert EngineConfig.from_dict({"model": "m", **options}).host_rank == 1
