"""The leader's record of the nodes that have each rank's snapshots and their replicas.

Rule: The snapshots of a rank are read from the node where the rank ran. If this node is lost, they are read from a
complete replica; without one they are lost. The locations from which a generation reads are fixed at its start, because
its ranks may run on other nodes than before. If it fails before all its ranks have a snapshot, the next generation
reads from the same locations, since a rank on a new node has no snapshot there yet.

Nodes receive the locations as pairs [address, number of consecutive ranks], in order of rank. There is one pair per
node, not per rank. Each node expands the pairs into the table that its ranks read (shared_files.py). So the start
message of a rank does not contain the locations of other ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshwright.core.snapshots import LOST_LOCATION, REMOTE_PREFIX

LocationRuns = Sequence[tuple[str, int]]
"""Pairs of a node's address ('' if the snapshots are lost) and the number of consecutive ranks whose snapshots it
has."""


class SnapshotLocations:
    """Tracks the locations. A node is identified by the address of its snapshot server."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        """The addresses of the connected nodes."""
        self._homes: dict[str, Sequence[str]] = {}
        self._next: tuple[str, Sequence[str]] | None = None
        """The key, and the node of each rank of this generation, until all ranks have snapshots on their nodes. Then
        None."""
        self._written: set[str] = set()
        """The keys under which all ranks have written a snapshot."""
        self._mirrors: dict[str, dict[int, str]] = {}

    def start(self, homes: Sequence[str], key: str, source: str) -> LocationRuns:
        """Records that ranks start on the nodes `homes` (by rank) and write snapshots under `key`. Returns the
        locations of the snapshots under `source`."""
        found = self._found(source) or [""] * len(homes)
        at_first = [at or home for at, home in zip(found, homes, strict=True)] if key == source else homes
        self._homes = {saved: lived for saved, lived in self._homes.items() if saved == source} | {key: at_first}
        self._mirrors = {saved: mirrors for saved, mirrors in self._mirrors.items() if saved in (key, source)}
        self._written &= {key, source}
        self._next = key, homes
        return [(at, len(list(ranks))) for at, ranks in itertools.groupby(found)]

    def adopt(self, key: str, places: Sequence[Sequence[str]]) -> None:
        """Records that nodes have snapshots under `key` from before this leader. `places` has the nodes of each rank;
        the first two are used."""
        self._homes[key] = [nodes[0] for nodes in places]
        self._mirrors[key] = {rank: nodes[1] for rank, nodes in enumerate(places) if len(nodes) > 1}
        self._written.add(key)

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
        """Records that every rank of this generation has written a snapshot on its node."""
        assert self._next is not None
        (key, homes), self._next = self._next, None
        self._homes[key] = homes
        self._written.add(key)

    def has(self, key: str) -> bool:
        """Returns whether all ranks have written snapshots under `key`, and each rank's snapshot or its replica is
        available."""
        return key in self._written and all(self._found(key))

    def is_safe(self, key: str) -> bool:
        """Returns whether snapshots under `key` survive the loss of a node: they have replicas, or all ranks run on one
        node."""
        return key in self._mirrors or len(set(self._homes.get(key, ()))) <= 1

    def mirrored(self, key: str, mirrors: Mapping[int, str]) -> None:
        """Records that the snapshots of all ranks at one step have replicas. `mirrors` maps each rank to the address of
        the node with the replica."""
        self._mirrors[key] = dict(mirrors)

    def forget(self) -> None:
        """Forgets the replicas, because a rollback has made them invalid."""
        self._mirrors.clear()


def ranks_stored_at(runs: LocationRuns, here: str) -> Iterator[int]:
    """Yields the ranks whose snapshots are read from the node with the address `here`."""
    ranks = itertools.count()
    for at, count in runs:
        for rank in itertools.islice(ranks, count):
            if at == here:
                yield rank


def resolve_locations(runs: LocationRuns, key: str, here: str, own: Callable[[int], str]) -> Iterator[str]:
    """Yields, for every rank in order, the location from which ranks on the node `here` read its snapshots under `key`.
    `own` returns the local path of a rank's snapshots.

    >>> runs = [("10.0.0.1:5", 1), ("10.0.0.2:5", 2), ("", 1)]
    >>> list(resolve_locations(runs, "ab", "10.0.0.1:5", lambda rank: f"/{rank}"))
    ['/0', 'at:10.0.0.2:5/ab/1', 'at:10.0.0.2:5/ab/2', 'nowhere:']
    """
    ranks = itertools.count()
    for at, count in runs:
        for rank in itertools.islice(ranks, count):
            yield own(rank) if at == here else f"{REMOTE_PREFIX}{at}/{key}/{rank}" if at else LOST_LOCATION
