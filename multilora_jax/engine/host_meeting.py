"""How the hosts of one model find each other: connections from each to the first (host only, no jax)."""

from __future__ import annotations

import socket
import time

from multilora_jax.engine import wire
from multilora_jax.errors import ConfigError

RETRY_S = 0.2
"""Between attempts to reach the first host, which may not have been started yet."""


def accept_hosts(address: tuple[str, int], num_hosts: int, deadline: float) -> dict[int, socket.socket]:
    """Waits, on the first host, for all others; their connections by host_rank.

    Args:
        address: to listen at.
        num_hosts: all of them, this one too.
        deadline: time.monotonic() seconds.

    Raises:
        OSError: they did not come in time, or the address cannot be listened at.
        ConfigError: two have one host_rank.
    """
    peers: dict[int, socket.socket] = {}
    with socket.create_server(address) as server:
        while len(peers) < num_hosts - 1:
            server.settimeout(max(0.1, deadline - time.monotonic()))
            connection, _ = server.accept()
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                rank = wire.receive(connection)[0]["rank"]
            except (wire.ConnectionLost, ValueError, KeyError):
                connection.close()  # somebody else's
                continue
            if rank in peers or not 0 < rank < num_hosts:
                raise ConfigError(f"two hosts have host_rank {rank}", reason="bad_value", param="host_rank")
            connection.settimeout(None)
            wire.keep_alive(connection)
            peers[rank] = connection
    return peers


def reach_host(address: tuple[str, int], rank: int, deadline: float) -> socket.socket:
    """The connection of host `rank` to the first. Raises OSError where there is none by the deadline."""
    while True:
        try:
            connection = socket.create_connection(address, timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
    connection.settimeout(None)
    wire.keep_alive(connection)
    wire.send(connection, wire.encode({"rank": rank}))
    return connection
