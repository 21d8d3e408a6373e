"""Where the copies of each rank lie, over all nodes, and who has mirrors of them: the leader's knowledge.

Rule: copies are read where their rank ran. When that node is gone they are read from its mirror, if one is whole, and
else they are lost. What a
generation goes on from is settled once, when it starts: its own ranks may live elsewhere. Until all of its ranks have
made a copy, another start reads
where this one read: a rank that lives on another node than before has nothing there yet.

Nodes hear of it in runs, [address, ranks], in order of rank: as many as there are nodes, however many ranks these have.
Each node makes of them the
table that its ranks read (holdings.py), so that no start of a rank says where the copies of other ranks lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshwright.core.snapshots import LOST_LOCATION, REMOTE_PREFIX

LocationRuns = Sequence[tuple[str, int]]
"""An address, empty where copies are lost, and for how many of the next ranks it stands."""


class SnapshotLocations:
    """Nodes go by the address at which they lend."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        """The nodes that are there."""
        self._homes: dict[str, Sequence[str]] = {}
        self._next: tuple[str, Sequence[str]] | None = None
        """Where the ranks of this generation live, until they have copies there."""
        self._written: set[str] = set()
        """Keys under which all ranks have made a copy."""
        self._mirrors: dict[str, dict[int, str]] = {}

    def start(self, homes: Sequence[str], key: str, source: str) -> LocationRuns:
        """Ranks begin to live at `homes`, with copies under `key`. Where those of `source` are read."""
        found = self._found(source) or [""] * len(homes)
        at_first = [at or home for at, home in zip(found, homes, strict=True)] if key == source else homes
        self._homes = {kept: lived for kept, lived in self._homes.items() if kept == source} | {key: at_first}
        self._mirrors = {kept: mirrors for kept, mirrors in self._mirrors.items() if kept in (key, source)}
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
        """Whether all ranks of this generation have made a copy."""
        return self._next is None

    def settle(self) -> None:
        """All ranks of this generation have made a copy where they live."""
        assert self._next is not None
        (key, homes), self._next = self._next, None
        self._homes[key] = homes
        self._written.add(key)

    def has(self, key: str) -> bool:
        """Whether all ranks have made copies under `key`, and these or their mirrors are there."""
        return key in self._written and all(self._found(key))

    def is_safe(self, key: str) -> bool:
        """Whether the loss of a node leaves copies under `key`: there are mirrors, or only one node has ranks."""
        return key in self._mirrors or len(set(self._homes.get(key, ()))) <= 1

    def mirrored(self, key: str, mirrors: Mapping[int, str]) -> None:
        """A step of all ranks is kept twice from here on."""
        self._mirrors[key] = dict(mirrors)

    def forget(self) -> None:
        """Mirrors are of a past that is no longer the run's."""
        self._mirrors.clear()


def ranks_stored_at(runs: LocationRuns, here: str) -> Iterator[int]:
    """The ranks whose copies are read at the node that lends at `here`."""
    ranks = itertools.count()
    for at, count in runs:
        for rank in itertools.islice(ranks, count):
            if at == here:
                yield rank


def resolve_locations(runs: LocationRuns, key: str, here: str, own: Callable[[int], str]) -> Iterator[str]:
    """Where a rank of the node that lends at `here` finds the copies under `key` of every rank; `own` gives those of
    the node itself.

    >>> list(resolve_locations([("10.0.0.1:5", 1), ("10.0.0.2:5", 2), ("", 1)], "ab", "10.0.0.1:5", lambda rank: f"/{rank}"))
    ['/0', 'at:10.0.0.2:5/ab/1', 'at:10.0.0.2:5/ab/2', 'nowhere:']
    """
    ranks = itertools.count()
    for at, count in runs:
        for rank in itertools.islice(ranks, count):
            yield own(rank) if at == here else f"{REMOTE_PREFIX}{at}/{key}/{rank}" if at else LOST_LOCATION
