"""The in-memory snapshots that nodes retain when their leader is lost, and how the next leader adopts them.

Guarantees:
- A node that loses its leader ends its ranks, then retains its snapshots and replicas for RETAINED_SECONDS. It reports
  them to the next leader when it joins (`RetainedSnapshots.inventory`), over the authenticated connection.
- The leader adopts the newest version of which it finds a copy of every rank (`newest_complete_version`). A version is
  a step of one execution ([Note: history] in core/snapshots.py). So copies of different executions, plans or runs are
  never combined. Ranks compare versions and digests again before they read.
- Copies of another run, job or version of Meshwright are not adopted. A line reports the reason.
- An inventory is data of another machine: it is checked and limited in size. An invalid one counts as empty.

The next generation reads the adopted snapshots as after a change of the plan. They stay on their nodes until the new
snapshots are complete and have replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.core.ipc import IpcMessage
from meshwright.core.messages import Message
from meshwright.core.printable_text import escape_unprintable
from meshwright.core.snapshots import HISTORIES_PER_GENERATION, SnapshotVersion
from meshwright.core.version import __version__
from meshwright.elastic.shared_files import SharedFileStore, stored_versions

RETAINED_SECONDS = 300.0
"""Seconds for which a node retains its snapshots without a leader that reads them."""

MAX_SETS, MAX_RANKS, MAX_VERSIONS, MAX_WORLD = 2, 2**12, 8, 2**20
"""Limits of an inventory: sets of snapshots, ranks of a set, versions of a rank, and ranks of a plan."""

MAX_KEY_LENGTH = 64


class AdoptionPolicy(NamedTuple):
    """`seconds`: how long snapshots outlive a killed supervisor. `job`: a digest of the job that wrote them, on several
    machines also of the run. `adopts`: whether this run resumes from the snapshots of a killed supervisor. `retained`:
    the snapshots that this node had under a lost leader."""

    seconds: float
    job: str
    adopts: bool = True
    retained: RetainedSnapshots | None = None


class AdoptedSnapshots(NamedTuple):
    """The state that a killed supervisor left: its generation, one set of snapshots, whether the job is the `same`, and
    the seconds since the kill."""

    generation: int
    holdings: SharedFileStore
    same: bool
    seconds: float

    def sets(self, fresh: SharedFileStore) -> tuple[SharedFileStore | None, SharedFileStore]:
        """Returns the set that the next generation reads and the set that it writes. The first is None if both are the
        same set. Closes `fresh` if it is unused."""
        if not self.same:
            return self.holdings, fresh
        fresh.close()
        return None, self.holdings


@dataclass(frozen=True)
class RetainedSnapshots:
    """The snapshots of a node that has lost its leader, by the key of their set. `job` is the digest from the lost
    leader, `until` the time at which they are closed."""

    sets: dict[str, SharedFileStore]
    job: str
    until: float

    def inventory(self) -> IpcMessage:
        """Returns the message that describes them."""
        newest = list(self.sets.items())[-MAX_SETS:]
        sets = [
            {"key": key, "world": stored.world, "ranks": list(stored_versions(stored).items())[:MAX_RANKS]}
            for key, stored in newest
            if stored.is_open
        ]
        return {"version": __version__, "job": self.job, "sets": sets}

    def close(self) -> None:
        """Closes all of them."""
        for stored in self.sets.values():
            stored.close()
        self.sets.clear()


class RetainedSet(NamedTuple):
    """The snapshots of one set on one node. `world` is the number of ranks of the plan that wrote the set. `ranks` has
    the stored versions by rank; ranks that the node does not store are missing."""

    world: int
    ranks: dict[int, list[SnapshotVersion]]


SnapshotInventory = dict[str, RetainedSet]
"""The snapshots on one node, by the key of their set."""


def read_inventory(message: Any, job: str) -> tuple[SnapshotInventory | None, str]:
    """Returns the inventory in `message` and '', or None and the reason why its copies are not adopted.

    >>> good = {"version": __version__, "job": "a", "sets": [{"key": "k", "world": 2, "ranks": [[1, [[0, 5]]]]}]}
    >>> read_inventory(good, "a")
    ({'k': RetainedSet(world=2, ranks={1: [(0, 5)]})}, '')
    >>> read_inventory(good, "b")[0], read_inventory({**good, "sets": [{"key": "k", "world": 1}]}, "a")[0]
    (None, None)
    """
    try:
        if message["version"] != __version__:
            version = escape_unprintable(str(message["version"])[:MAX_KEY_LENGTH])
            return None, Message(
                "are of version {version}, but this is version {version_2}", version=version, version_2=__version__
            )
        if message["job"] != job:
            return None, Message("belong to another job or run")
        return {_text(each["key"]): _retained_set(each) for each in message["sets"][:MAX_SETS]}, ""
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return None, Message("cannot be read ({name}: {error})", name=type(error).__name__, error=error)


def _retained_set(each: Any) -> RetainedSet:
    world = _number(each["world"], MAX_WORLD)
    ranks = {
        _number(rank, world - 1): [(_number(history), _number(step)) for history, step in versions[:MAX_VERSIONS]]
        for rank, versions in each["ranks"][:MAX_RANKS]
    }
    return RetainedSet(world, ranks)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isalnum() or len(value) > MAX_KEY_LENGTH:
        raise ValueError(Message("invalid value"))
    return value


def _number(value: Any, most: int = 2**62) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(Message("invalid value"))
    return value


class CompleteVersion(NamedTuple):
    """A version of which every rank has a copy: for each rank the addresses of the nodes that have one."""

    key: str
    version: SnapshotVersion
    places: list[list[str]]

    @property
    def generation(self) -> int:
        """The generation that made the version."""
        return self.version[0] // HISTORIES_PER_GENERATION


def newest_complete_version(found: Mapping[str, SnapshotInventory]) -> CompleteVersion | None:
    """Returns the newest version of which the nodes together have a copy of every rank; None if there is none. `found`
    has the inventory of each node by its address. Nodes that come first are preferred.

    >>> here, there = RetainedSet(2, {0: [(0, 4), (0, 5)]}), RetainedSet(2, {0: [(0, 5)], 1: [(0, 4), (1, 5)]})
    >>> newest_complete_version({"a": {"k": here}, "b": {"k": there}})
    CompleteVersion(key='k', version=(0, 4), places=[['a'], ['b']])
    """
    worlds: dict[str, set[int]] = defaultdict(set)
    holders: dict[tuple[SnapshotVersion, str], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for address, inventory in found.items():
        for key, each in inventory.items():
            worlds[key].add(each.world)
            for rank, versions in each.ranks.items():
                for version in versions:
                    holders[version, key][rank].append(address)
    complete = [
        (version, key) for (version, key), ranks in holders.items() if worlds[key] == {len(ranks)} and version[1]
    ]
    if not complete:
        return None
    version, key = max(complete)
    ranks = holders[version, key]
    return CompleteVersion(key, version, [ranks[rank] for rank in range(len(ranks))])
