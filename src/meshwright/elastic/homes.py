"""Where the copies of each rank lie, over all nodes, and who has mirrors of them: the leader's knowledge.

Rule: copies are read where their rank ran. When that node is gone they are read from its mirror, if one is whole, and else they are lost. What a
generation goes on from is settled once, when its first rank starts: its own ranks may live elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.base.lent import AT, NOWHERE


class Homes:
    """Nodes go by the address at which they lend."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        self._homes: dict[str, list[str]] = {}
        self._mirrors: dict[str, dict[int, str]] = {}
        self._generation = -1
        self._sources: list[str] = []

    def start(self, rank: int, home: str, generation: int, world: int, key: str, source: str) -> list[str]:
        """A rank of `generation` lives at `home`. Places of the copies of `source`, as they are read there; empty for those of `home` itself."""
        if generation != self._generation:
            self._generation = generation
            before = self._homes.get(source, [""] * world)
            self._sources = [self._found(source, at, before_) for at, before_ in enumerate(before)]
            self._homes = {kept: homes for kept, homes in self._homes.items() if kept in (key, source)}
            self._mirrors = {kept: mirrors for kept, mirrors in self._mirrors.items() if kept in (key, source)}
        self._homes.setdefault(key, [""] * world)[rank] = home
        return ["" if at == home else f"{AT}{at}/{source}/{number}" if at else NOWHERE for number, at in enumerate(self._sources)]

    def _found(self, key: str, rank: int, home: str) -> str:
        mirror = self._mirrors.get(key, {}).get(rank, "")
        return next((place for place in (home, mirror) if place in self.alive), "")

    def mirrored(self, key: str, mirrors: Mapping[int, str]) -> None:
        """A step of all ranks is kept twice from here on."""
        self._mirrors[key] = dict(mirrors)

    def forget(self) -> None:
        """Mirrors are of a past that is no longer the run's."""
        self._mirrors.clear()
