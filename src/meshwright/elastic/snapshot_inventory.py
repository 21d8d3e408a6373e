"""Describes the in-memory snapshots that nodes retain when the leader of their run is lost. The next leader uses these
inventories to resume the run from the snapshots.

Guarantees:
- A node that loses its leader ends its ranks, then retains its snapshots and replicas for RETAINED_SECONDS. When it
  joins the next leader, it reports them over the authenticated connection (`RetainedSnapshots.inventory`).
- The leader adopts the newest version for which the nodes have a snapshot of every rank (`newest_complete_version`). A
  version is a step of one execution ([Note: history] in core/snapshots.py). So snapshots of different executions, plans
  or runs are never combined. Ranks compare versions and digests again before they read.
- Snapshots of another run, job or version of Meshwright are not adopted. A line reports the reason.
- An inventory comes from another machine, so it is checked and limited in size. If it is invalid, none of its snapshots
  is adopted.

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
"""A node retains its snapshots for this time without a leader that reads them."""

MAX_SETS, MAX_RANKS, MAX_VERSIONS, MAX_WORLD = 2, 2**12, 8, 2**20
"""The maximum numbers in an inventory: sets of snapshots, ranks in a set, versions of a rank, and ranks of a plan. A
set has the snapshots of all ranks under one plan."""

MAX_KEY_LENGTH = 64


class AdoptionPolicy(NamedTuple):
    """The settings for snapshots that outlive their supervisor. `seconds`: how long they outlive it. `job`: a digest of
    the job, on several machines also of the run. `adopts`: whether this run resumes from the snapshots of a killed
    supervisor. `retained`: the snapshots that this node has from a lost leader."""

    seconds: float
    job: str
    adopts: bool = True
    retained: RetainedSnapshots | None = None


class AdoptedSnapshots(NamedTuple):
    """What a killed supervisor has left. `generation`: its last one. `holdings`: its set of snapshots. `same`: whether
    the job has not changed. `seconds`: the time since the kill."""

    generation: int
    holdings: SharedFileStore
    same: bool
    seconds: float

    def sets(self, fresh: SharedFileStore) -> tuple[SharedFileStore | None, SharedFileStore]:
        """Returns the set that the next generation reads and the set that it writes. If the job has not changed, it
        reads and writes the adopted set: the first result is then None, and `fresh` is closed."""
        if not self.same:
            return self.holdings, fresh
        fresh.close()
        return None, self.holdings


@dataclass(frozen=True)
class RetainedSnapshots:
    """The snapshots of a node that has lost its leader. `sets`: by key. `job`: the digest from the lost leader.
    `until`: the time when they are closed."""

    sets: dict[str, SharedFileStore]
    job: str
    until: float

    def inventory(self) -> IpcMessage:
        """Returns the message that describes the retained snapshots to the next leader."""
        newest = list(self.sets.items())[-MAX_SETS:]
        sets = [
            {"key": key, "world": stored.world, "ranks": list(stored_versions(stored).items())[:MAX_RANKS]}
            for key, stored in newest
            if stored.is_open
        ]
        return {"version": __version__, "job": self.job, "sets": sets}

    def close(self) -> None:
        """Closes all retained snapshots."""
        for stored in self.sets.values():
            stored.close()
        self.sets.clear()


class RetainedSet(NamedTuple):
    """The snapshots of one set on one node. `world`: the number of ranks of the plan that wrote the set. `ranks`: the
    versions by rank, for those ranks whose snapshots are on the node."""

    world: int
    ranks: dict[int, list[SnapshotVersion]]


SnapshotInventory = dict[str, RetainedSet]
"""The snapshots on one node, by the key of the set."""


def read_inventory(message: Any, job: str) -> tuple[SnapshotInventory | None, str]:
    """Returns the inventory in `message` and '', or None and the reason why its snapshots are not adopted. `job`: the
    digest of the current job and run.

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
    """A version for which there is a snapshot of every rank. `key`: of the set. `places`: for each rank, the addresses
    of the nodes with its snapshot."""

    key: str
    version: SnapshotVersion
    places: list[list[str]]

    @property
    def generation(self) -> int:
        """Returns the generation that wrote the version."""
        return self.version[0] // HISTORIES_PER_GENERATION


def newest_complete_version(found: Mapping[str, SnapshotInventory]) -> CompleteVersion | None:
    """Returns the newest version for which the nodes together have a snapshot of every rank, or None. `found`: the
    inventory of each node, by address. The addresses of a rank are in the order of `found`.

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
