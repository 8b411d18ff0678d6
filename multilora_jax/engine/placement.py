"""Which replica a request goes to (host only, no jax): adapters keep to few replicas, so that each pool holds its own.

A request goes to the least loaded of the replicas that have had its adapter, so its weights are there already. Where
all of those are full, and another has a free seat, it goes there instead, which then has the adapter too; a replica
that has not been sent an adapter for long forgets it. An adapter that none has goes to the replica that has the fewest
requests, among equals the one that has the fewest adapters. (Punica's router, arXiv 2310.18547 section 5, sends to the
fullest replica with room so that others can be given back; replicas of one process are all there anyway.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence


class Placement:
    """Remembers which replicas have which adapters. Not thread-safe.

    Args:
        num_replicas: how many there are.
        seats: requests that one replica runs at once.
        max_homes: adapters that a replica is taken to have; the one sent there longest ago is forgotten beyond it.
    """

    def __init__(self, num_replicas: int, seats: int, max_homes: int = 4096):
        self._seats = seats
        self._max_homes = max_homes
        self._homes: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(num_replicas)]

    def homes(self, name: str) -> list[int]:
        """The replicas that have had an adapter."""
        return [replica for replica, names in enumerate(self._homes) if name in names]

    def choose(self, names: Collection[str], loads: Sequence[int]) -> int:
        """The replica for a request, which has its adapters from now on.

        Args:
            names: adapters of the request; none for the base.
            loads: requests that each replica has, those that wait among them.
        """
        everybody = range(len(self._homes))

        def rank(replica: int) -> tuple[int, int, int]:
            return loads[replica], len(self._homes[replica]), replica

        most = max(sum(name in self._homes[replica] for name in names) for replica in everybody)
        holders = [r for r in everybody if sum(name in self._homes[r] for name in names) == most] if most else everybody
        chosen = min(holders, key=rank)
        if loads[chosen] >= self._seats:
            other = min(everybody, key=rank)
            if loads[other] < self._seats:
                chosen = other
        for name in names:
            self.settle(name, chosen)
        return chosen

    def settle(self, name: str, replica: int) -> None:
        """A replica has an adapter from now on."""
        homes = self._homes[replica]
        homes[name] = None
        homes.move_to_end(name)
        if len(homes) > self._max_homes:
            homes.popitem(last=False)

    def forget(self, name: str) -> None:
        """An adapter was withdrawn."""
        for homes in self._homes:
            homes.pop(name, None)
