"""The leader's record of the locations of every rank's snapshots over all nodes, and of the nodes that have replicas.

Rule: Snapshots are read on the node where their rank ran. If that node is lost, they are read from the replica, if it
is complete. Without a complete replica they are lost. The locations that a generation reads are fixed at its start,
because its own ranks may run on other nodes. If the generation restarts before all its ranks have a snapshot, it reads
from the same locations: a rank that moved to another node has no snapshot there yet.

Nodes receive the locations as pairs [address, number of consecutive ranks], in order of rank. The number of pairs
equals the number of nodes, not of ranks. Each node expands them into the table that its ranks read (shared_files.py).
So the start message of a rank does not contain the locations of other ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshwright.core.snapshots import LOST_LOCATION, REMOTE_PREFIX

LocationRuns = Sequence[tuple[str, int]]
"""The address of a node, empty if the snapshots are lost, and the number of consecutive ranks to which it applies."""


class SnapshotLocations:
    """Tracks the locations. A node is identified by the address of its snapshot server."""

    def __init__(self) -> None:
        """Starts without any node."""
        self.alive: set[str] = set()
        """The connected nodes."""
        self._homes: dict[str, Sequence[str]] = {}
        self._next: tuple[str, Sequence[str]] | None = None
        """The nodes on which the ranks of this generation run, until all ranks have snapshots there."""
        self._written: set[str] = set()
        """The keys under which all ranks have written at least one snapshot."""
        self._mirrors: dict[str, dict[int, str]] = {}

    def start(self, homes: Sequence[str], key: str, source: str) -> LocationRuns:
        """Records that ranks start at `homes` with snapshots under `key`. Returns the locations of the snapshots under
        `source`."""
        found = self._found(source) or [""] * len(homes)
        at_first = [at or home for at, home in zip(found, homes, strict=True)] if key == source else homes
        self._homes = {saved: lived for saved, lived in self._homes.items() if saved == source} | {key: at_first}
        self._mirrors = {saved: mirrors for saved, mirrors in self._mirrors.items() if saved in (key, source)}
        self._written &= {key, source}
        self._next = key, homes
        return [(at, len(list(ranks))) for at, ranks in itertools.groupby(found)]

    def _found(self, key: str) -> list[str]:
        homes, mirrors = self._homes.get(key, ()), self._mirrors.get(key, {})
        return [
            next((at for at in (home, mirrors.get(rank, "")) if at in self.alive), "")
            for rank, home in enumerate(homes)
        ]

    @property
    def is_settled(self) -> bool:
        """Whether all ranks of this generation have written a snapshot."""
        return self._next is None

    def settle(self) -> None:
        """Records that every rank of this generation has written a snapshot on the node where it runs."""
        assert self._next is not None
        (key, homes), self._next = self._next, None
        self._homes[key] = homes
        self._written.add(key)

    def has(self, key: str) -> bool:
        """Returns whether all ranks have written snapshots under `key`, and each snapshot or its replica is
        available."""
        return key in self._written and all(self._found(key))

    def is_safe(self, key: str) -> bool:
        """Returns whether snapshots under `key` survive the loss of a node: they have replicas, or only one node has
        ranks."""
        return key in self._mirrors or len(set(self._homes.get(key, ()))) <= 1

    def mirrored(self, key: str, mirrors: Mapping[int, str]) -> None:
        """Records that the snapshots of all ranks at one step have replicas."""
        self._mirrors[key] = dict(mirrors)

    def forget(self) -> None:
        """Discards the replicas, which a rollback has made invalid."""
        self._mirrors.clear()


def ranks_stored_at(runs: LocationRuns, here: str) -> Iterator[int]:
    """Yields the ranks whose snapshots are read at the node with the address `here`."""
    ranks = itertools.count()
    for at, count in runs:
        for rank in itertools.islice(ranks, count):
            if at == here:
                yield rank


def resolve_locations(runs: LocationRuns, key: str, here: str, own: Callable[[int], str]) -> Iterator[str]:
    """Yields the locations at which a rank on the node `here` reads the snapshots under `key`, for every rank in order.
    `own` returns the local path of a rank's snapshots.

    >>> runs = [("10.0.0.1:5", 1), ("10.0.0.2:5", 2), ("", 1)]
    >>> list(resolve_locations(runs, "ab", "10.0.0.1:5", lambda rank: f"/{rank}"))
    ['/0', 'at:10.0.0.2:5/ab/1', 'at:10.0.0.2:5/ab/2', 'nowhere:']
    """
    ranks = itertools.count()
    for at, count in runs:
        for rank in itertools.islice(ranks, count):
            yield own(rank) if at == here else f"{REMOTE_PREFIX}{at}/{key}/{rank}" if at else LOST_LOCATION
