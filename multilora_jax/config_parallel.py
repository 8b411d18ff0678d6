"""The configuration's keys about many devices and many hosts, and what they must be together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multilora_jax.config_values import key_info
from multilora_jax.errors import ConfigError

if TYPE_CHECKING:
    from multilora_jax.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The part of EngineConfig about how the model is spread over devices and hosts."""

    # Many devices and hosts
    tensor_parallel_size: int = field(
        default=1, metadata=key_info("Devices that the model and the pool are split over.", low=1)
    )
    data_parallel_size: int = field(
        default=1,
        metadata=key_info(
            "Replicas of the model in this process, each on tensor_parallel_size devices of its own with its own pool "
            "and scheduler. A request goes to a replica that has its adapter, unless that one is full.",
            low=1,
        ),
    )
    num_hosts: int = field(
        default=1,
        metadata=key_info(
            "Processes, one on each host, that share one model over all their devices (tensor_parallel_size of them). "
            "Each is started with the same configuration but for host_rank.",
            low=1,
        ),
    )
    host_rank: int = field(
        default=0, metadata=key_info("Which of them this process is; 0 serves HTTP and schedules.", low=0)
    )
    coordinator: str | None = field(
        default=None,
        metadata=key_info(
            "HOST:PORT of host_rank 0 at which the processes find each other; the port after it is used too."
        ),
    )


def check_parallel(config: EngineConfig) -> None:
    """Raises ConfigError, naming a key, where the keys contradict each other."""

    def refuse(message: str, param: str, reason: str = "bad_value") -> None:
        raise ConfigError(message, reason=reason, param=param)

    hosts, rank, where = config.num_hosts, config.host_rank, config.coordinator
    if rank >= hosts:
        refuse(f"host_rank {rank} is none of the {hosts} of num_hosts, which count from 0", "host_rank")
    if hosts == 1:
        if where is not None:
            refuse("coordinator is for several hosts: give num_hosts, or leave it out", "coordinator")
        return
    if where is None:
        refuse("num_hosts needs coordinator: the HOST:PORT of host_rank 0", "coordinator", "missing_key")
        return
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65535:
        refuse(f"coordinator must be HOST:PORT with a port below 65535, got {where!r}", "coordinator")
    if config.tensor_parallel_size % hosts:
        refuse(
            f"tensor_parallel_size {config.tensor_parallel_size} devices cannot be shared out evenly over num_hosts "
            f"{hosts}", "tensor_parallel_size",
        )  # fmt: skip
    if config.data_parallel_size > 1:
        refuse(
            "data_parallel_size is for replicas on one host: start one server for each group of num_hosts",
            "data_parallel_size", "conflicting_keys",
        )  # fmt: skip
