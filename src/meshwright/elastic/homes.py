"""Where the copies of each rank lie, over all nodes, and who has mirrors of them: the leader's knowledge.

Rule: copies are read where their rank ran. When that node is gone they are read from its mirror, if one is whole, and else they are lost. What a
generation goes on from is settled once, when it starts: its own ranks may live elsewhere.

Nodes hear of it in runs, [address, ranks], in order of rank: as many as there are nodes, however many ranks these have. Each node makes of them the
table that its ranks read (holdings.py), so that no start of a rank says where the copies of other ranks lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshwright.base.lent import AT, NOWHERE

Runs = Sequence[tuple[str, int]]
"""An address, empty where copies are lost, and for how many of the next ranks it stands."""


class Homes:
    """Nodes go by the address at which they lend."""

    def __init__(self) -> None:
        self._homes: dict[str, Sequence[str]] = {}
        self._mirrors: dict[str, dict[int, str]] = {}

    def start(self, homes: Sequence[str], alive: set[str], key: str, source: str) -> Runs:
        """Ranks begin to live at `homes`, with copies under `key`. Where those of `source` are read, at nodes that are `alive`."""
        before = self._homes.get(source, [""] * len(homes))
        mirrors = self._mirrors.get(source, {})
        found = [next((at for at in (home, mirrors.get(rank, "")) if at in alive), "") for rank, home in enumerate(before)]
        self._homes = {kept: lived for kept, lived in self._homes.items() if kept == source} | {key: homes}
        self._mirrors = {kept: mirrors for kept, mirrors in self._mirrors.items() if kept in (key, source)}
        return [(at, len(list(ranks))) for at, ranks in itertools.groupby(found)]

    def mirrored(self, key: str, mirrors: Mapping[int, str]) -> None:
        """A step of all ranks is kept twice from here on."""
        self._mirrors[key] = dict(mirrors)

    def forget(self) -> None:
        """Mirrors are of a past that is no longer the run's."""
        self._mirrors.clear()


def ranks_at(runs: Runs, here: str) -> Iterator[int]:
    """The ranks whose copies are read at the node that lends at `here`."""
    ranks = itertools.count()
    for at, count in runs:
        for rank in itertools.islice(ranks, count):
            if at == here:
                yield rank


def places(runs: Runs, key: str, here: str, own: Callable[[int], str]) -> Iterator[str]:
    """Where a rank of the node that lends at `here` finds the copies under `key` of every rank; `own` gives those of the node itself.

    >>> list(places([("10.0.0.1:5", 1), ("10.0.0.2:5", 2), ("", 1)], "ab", "10.0.0.1:5", lambda rank: f"/{rank}"))
    ['/0', 'at:10.0.0.2:5/ab/1', 'at:10.0.0.2:5/ab/2', 'nowhere:']
    """
    ranks = itertools.count()
    for at, count in runs:
        for rank in itertools.islice(ranks, count):
            yield own(rank) if at == here else f"{AT}{at}/{key}/{rank}" if at else NOWHERE
