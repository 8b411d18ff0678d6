"""One model over the devices of several hosts: host 0 schedules, and every host runs the same programs in lockstep.

A program over all devices runs only if every process calls it, in the same order. Host 0 has the requests, the
scheduler and the books; the others have parameters, pool and compiled programs, and repeat its calls. What a call needs
is a program's key, the numbers of the device arrays that it reads, and the host's own inputs: of a step that is one
packed batch of a few KB, so nothing but the step's plan crosses the network. Pages of adapters are cut, so that each
host gets the slices of its own devices only.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from multilora_jax.config import EngineConfig
from multilora_jax.config_api import ApiConfig
from multilora_jax.config_server import ServerConfig
from multilora_jax.engine import wire
from multilora_jax.engine.host_meeting import accept_hosts, reach_host
from multilora_jax.engine.program_keys import decode_key, encode_key
from multilora_jax.errors import ConfigError, UnavailableError

log = logging.getLogger(__name__)

CONNECT_S = 120.0
"""Seconds that hosts wait for each other at the start."""

_SERVER_KEYS = (f.name for part in (ApiConfig, ServerConfig) for f in fields(part))
OWN_KEYS = frozenset(
    (
        "host_rank", "host", "port", "api_keys", "admin_keys", "compilation_cache_dir", "lora_modules",
        "adapter_roots", "max_connections", "client_timeout_s", "page", *_SERVER_KEYS,
    )
)  # fmt: skip
"""Keys that may differ between hosts: those about what the first alone does."""


class HostLostError(UnavailableError):
    """A host that shares the model is gone; its part of the model is, too."""

    def __init__(self, rank: int, num_hosts: int, why: str):
        super().__init__(
            f"host {rank} of {num_hosts} was lost ({why}): the model cannot be served without its part; restart all "
            "hosts",
            reason="host_lost",
        )
        self.rank, self.why = rank, why


class Hosts:
    """The connection of this process to the others, and the arrays that all have under one number.

    Args:
        config: with num_hosts above 1.
    """

    def __init__(self, config: EngineConfig):
        self.rank, self.num_hosts = config.host_rank, config.num_hosts
        host, _, port = str(config.coordinator).rpartition(":")
        self._address = host, int(port) + 1
        self._peers: list[socket.socket] = []
        self._lock = threading.RLock()  # messages and calls of one order, whichever thread they come from
        self._numbers: dict[int, int] = {}  # by id() of a live array
        self._arrays: dict[int, Any] = {}  # the followers'
        self._next = 0
        self._dropped: deque[int] = deque()
        self._mesh: Mesh | None = None
        self._gather: Any = None
        self._on_lost: Callable[[HostLostError], None] | None = None
        self.lost: HostLostError | None = None
        self._stopped = False

    # ---- start -------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Meets the other hosts. Raises ConfigError where they cannot be reached within CONNECT_S."""
        deadline = time.monotonic() + CONNECT_S
        try:
            if self.rank == 0:
                peers = accept_hosts(self._address, self.num_hosts, deadline)
                self._peers = [peers[rank] for rank in sorted(peers)]
            else:
                self._peers = [reach_host(self._address, self.rank, deadline)]
        except OSError as error:
            raise ConfigError(
                f"the {self.num_hosts} hosts did not meet at {self._address[0]}:{self._address[1]} within "
                f"{CONNECT_S:.0f} s ({error}): check coordinator, and that each was started with its own host_rank",
                reason="hosts_unreachable", param="coordinator",
            ) from error  # fmt: skip
        for rank, peer in enumerate(self._peers, 1) if self.rank == 0 else ():
            threading.Thread(target=self._watch, args=(rank, peer), name=f"host {rank}", daemon=True).start()

    def agree(self, config: EngineConfig, found: dict[str, Any]) -> dict[str, Any]:
        """What host 0 found, on every host.

        Raises:
            ConfigError: a host was started with another configuration.
        """
        own = {key: value for key, value in config.to_dict().items() if key not in OWN_KEYS}
        own = json.loads(json.dumps(own))
        if self.rank == 0:
            self._broadcast(wire.encode({"config": own, "found": found}))
            return found
        header, _ = wire.receive(self._peers[0])
        for key, value in header["config"].items():
            if own[key] != value:
                raise ConfigError(
                    f"{key} is {own[key]!r} here and {value!r} on host 0: start every host with the same configuration",
                    reason="conflicting_keys", param=key,
                )  # fmt: skip
        return header["found"]

    def join(self, mesh: Mesh, arrays: Any) -> None:
        """Numbers the arrays that every host has made by itself; from now on all change in lockstep."""
        self._mesh = mesh
        self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
        self._number(arrays)

    # ---- host 0 ------------------------------------------------------------------------------------------------

    def on_lost(self, callback: Callable[[HostLostError], None]) -> None:
        """Calls back, once and from another thread, when a host is lost."""
        with self._lock:
            self._on_lost = callback
        if self.lost is not None:
            callback(self.lost)

    def compile(self, key: tuple[Any, ...]) -> None:
        """Has the others compile a program too."""
        self._broadcast(wire.encode({"op": "compile", "key": encode_key(key)}))

    def call(self, key: tuple[Any, ...], program: Any, *args: Any) -> Any:
        """Runs a program on every host; its arguments are device arrays or numpy arrays, its results numbered."""
        leaves = jax.tree.leaves(args)
        codes = [self._numbers[id(leaf)] if isinstance(leaf, jax.Array) else -1 for leaf in leaves]
        own = [np.asarray(leaf) for leaf, code in zip(leaves, codes, strict=True) if code < 0]
        split = key[0] == "write_page"
        with self._lock:
            self._check_together()
            header = {"op": "call", "key": encode_key(key), "args": codes, "drop": self._take_dropped()}
            for rank, peer in enumerate(self._peers, 1):
                self._send(rank, peer, wire.encode(header, [self._part(a, rank) if split else a for a in own]))
            try:
                placed = iter([self._place(a, split) for a in own])
                leaves = [next(placed) if code < 0 else leaf for leaf, code in zip(leaves, codes, strict=True)]
                result = program(*jax.tree.unflatten(jax.tree.structure(args), leaves))
            except Exception as error:  # the others ran it: from now on arrays would go by different numbers
                self._lose(0, f"{type(error).__name__}: {error}"[:1000])
                raise
            self._number(result)
        return result

    def put(self, tree: Any) -> Any:
        """Places a tree of numpy arrays, whole, on every device of every host."""
        leaves, structure = jax.tree.flatten(tree)
        leaves = [np.asarray(leaf) for leaf in leaves]
        with self._lock:
            self._check_together()
            self._broadcast(wire.encode({"op": "put", "drop": self._take_dropped()}, leaves))
            placed = jax.tree.unflatten(structure, [self._place(leaf, False) for leaf in leaves])
            self._number(placed)
        return placed

    def fetch(self, array: jax.Array) -> np.ndarray:
        """The whole of an array that is split over the hosts."""
        with self._lock:
            self._check_together()
            self._broadcast(wire.encode({"op": "gather", "args": [self._numbers[id(array)]]}))
            whole = self._gather(array)
        return np.asarray(whole)

    def stop(self) -> None:
        """Ends the other hosts."""
        self._stopped = True
        for peer in self._peers:
            try:
                wire.send(peer, wire.encode({"op": "stop"}))
            except wire.ConnectionLost:
                continue

    def _check_together(self) -> None:
        """Raises HostLostError once a host is lost: what needs all of them would never return."""
        if self.lost is not None:
            raise HostLostError(self.lost.rank, self.num_hosts, self.lost.why)

    def _broadcast(self, data: bytes) -> None:
        with self._lock:
            for rank, peer in enumerate(self._peers, 1):
                self._send(rank, peer, data)

    def _send(self, rank: int, peer: socket.socket, data: bytes) -> None:
        try:
            wire.send(peer, data)
        except wire.ConnectionLost as error:
            self._lose(rank, str(error))
            raise HostLostError(rank, self.num_hosts, str(error)) from error

    def _watch(self, rank: int, peer: socket.socket) -> None:
        try:
            why = wire.receive(peer)[0].get("error", "it stopped")
        except (wire.ConnectionLost, ValueError) as error:
            why = str(error)
        self._lose(rank, why)

    def _lose(self, rank: int, why: str) -> None:
        with self._lock:
            if self._stopped or self.lost is not None:
                return
            self.lost = HostLostError(rank, self.num_hosts, why)
            callback = self._on_lost
        log.error("%s", self.lost.message)
        if callback is not None:
            callback(self.lost)

    def _take_dropped(self) -> list[int]:
        return [self._dropped.popleft() for _ in range(len(self._dropped))]

    # ---- the others --------------------------------------------------------------------------------------------

    def follow(self, programs: Any) -> int:
        """Repeats what host 0 does until it stops; the exit status."""
        peer = self._peers[0]
        while True:
            try:
                header, arrays = wire.receive(peer)
            except (wire.ConnectionLost, ValueError) as error:
                log.error("host 0 was lost (%s): this host ends", error)
                return 1
            if header["op"] == "stop":
                log.info("host 0 stopped: this host ends")
                return 0
            try:
                self._repeat(programs, header, arrays)
            except Exception as error:  # whatever it is, host 0 has to hear of it
                log.exception("a step failed on this host")
                wire.send(peer, wire.encode({"error": f"{type(error).__name__}: {error}"[:1000]}))
                return 1

    def _repeat(self, programs: Any, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        for number in header.get("drop", ()):
            self._arrays.pop(number, None)
        op = header["op"]
        if op == "put":
            self._number([self._place(array, False) for array in arrays])
        elif op == "gather":
            self._gather(self._arrays[header["args"][0]])
        else:
            key = decode_key(header["key"])
            program = programs.get(*key)
            if op == "call":
                own = iter(arrays)
                split = key[0] == "write_page"
                leaves = [self._place(next(own), split) if code < 0 else self._arrays[code] for code in header["args"]]
                args, kwargs = jax.tree.unflatten(program.in_tree, leaves)
                self._number(program(*args, **kwargs))

    # ---- shared ------------------------------------------------------------------------------------------------

    def _number(self, tree: Any) -> None:
        """Gives the arrays of a tree the next numbers, the same on every host."""
        for leaf in jax.tree.leaves(tree):
            number, self._next = self._next, self._next + 1
            if self.rank:
                self._arrays[number] = leaf
            else:
                self._numbers[id(leaf)] = number
                weakref.finalize(leaf, self._forget, id(leaf), number).atexit = False

    def _forget(self, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self._dropped.append(number)

    def _part(self, array: np.ndarray, rank: int) -> np.ndarray:
        """Of a page uint[L, E] the columns of one host's devices; anything else as it is."""
        if array.ndim != 2:
            return array
        width = array.shape[1] // self.num_hosts
        return array[:, rank * width : (rank + 1) * width]

    def _place(self, array: np.ndarray, split: bool) -> jax.Array:
        """A host array on all devices: whole on each, or a page over them, of which a follower has its own part."""
        assert self._mesh is not None
        if not split or array.ndim != 2:
            sharding = NamedSharding(self._mesh, P())
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
        sharding = NamedSharding(self._mesh, P(None, "model"))
        part = self._part(array, 0) if self.rank == 0 else array
        width, first = part.shape[1], self.rank * part.shape[1]

        def slices(index: Any) -> np.ndarray:
            return part[:, index[1].start - first : index[1].stop - first]

        return jax.make_array_from_callback((len(part), width * self.num_hosts), sharding, slices)


def connect(config: EngineConfig) -> Hosts | None:
    """Meets the other hosts and starts jax over all of them; None where there is one. Call it before jax starts."""
    if config.num_hosts == 1:
        return None
    hosts = Hosts(config)
    hosts.connect()
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM, which has to end a server
    jax.distributed.initialize(
        config.coordinator, config.num_hosts, config.host_rank, initialization_timeout=int(CONNECT_S)
    )  # fmt: skip
    return hosts


def check_devices(config: EngineConfig) -> None:
    """Raises ConfigError where tensor_parallel_size is not all the devices of all hosts."""
    if config.num_hosts > 1 and jax.device_count() != config.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size {config.tensor_parallel_size} must be all {jax.device_count()} devices of the "
            f"{config.num_hosts} hosts ({jax.local_device_count()} of them here)",
            reason="bad_value", param="tensor_parallel_size",
        )  # fmt: skip


def exit_without(status: int) -> None:
    """Ends the process at once: threads that wait for a lost host never come back."""
    logging.shutdown()
    os._exit(status)
