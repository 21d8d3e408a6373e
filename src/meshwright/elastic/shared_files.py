"""Owns the memory files of ranks (in-memory snapshots and heartbeat rows), and records on which nodes snapshots are.
The supervisor and the agents that start ranks use it.

`SharedFileStore` creates the files. They are anonymous files (memfd), which exist as long as any process has them open.
So they survive a rank, because the supervisor's process keeps them open. Ranks open them by the path of its descriptor.
When the supervisor ends, the memory is freed, and only the checkpoint on disk remains. A system without anonymous files
has no in-memory snapshots.

On this machine there are files only for its own ranks, and for the ranks whose snapshots it replicates. So the number
of open files does not grow with the world size. Another file, the location table, has a line for each rank with the
location of its snapshots. A start message contains only the path of this table, so its size does not depend on the
world size.

`SnapshotLocations` is the leader's record of the nodes that have each rank's snapshots and replicas. The snapshots of a
rank are read from the node where the rank ran. If this node is lost, they are read from a complete replica, or they are
lost if there is no replica. The locations from which a generation reads are fixed at its start, because its ranks may
run on other nodes than before. If it fails before all its ranks have a snapshot, the next generation reads from the
locations of the failed one.

Nodes receive the locations as pairs (address, number of consecutive ranks) in order of rank: a pair per node, not per
rank. Each node expands the pairs into the location table.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import secrets
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshwright.core.ipc import HEARTBEAT_FIELDS, Heartbeat, HeartbeatField, RankPhase, open_heartbeats
from meshwright.core.snapshots import (
    HEADER_BYTES,
    LOST_LOCATION,
    PINNED_STEPS_FIELD,
    REMOTE_PREFIX,
    SnapshotHeader,
    SnapshotVersion,
    versions_of,
)


class SharedFileStore:
    """The memory files of the ranks under one plan (a set of snapshots). `key` identifies the set on all nodes."""

    system: Any = os
    """The module with the system calls. The simulated cluster of the tests replaces it."""

    def __init__(self, world: int, adopted: tuple[str, Sequence[int]] | None = None) -> None:
        """Creates the heartbeat file and the location table for `world` ranks.

        `adopted`: the key and the open files of a killed supervisor (snapshot_adoption.py). The last of these files is
        the heartbeat file, the others have the snapshots by rank. `close` closes them too.
        """
        self.world, self.key = world, secrets.token_hex(8)
        self.is_open = hasattr(self.system, "memfd_create")
        self._files: dict[int, int] = {}
        self._table = self._pulse = -1
        if adopted is not None:
            self.key, (*files, self._pulse) = adopted[0], adopted[1]
            self._files = dict(enumerate(files))
        elif self.is_open:
            self._pulse = self.system.memfd_create(f"meshwright-pulse-{self.key}")
            self.system.ftruncate(self._pulse, world * HEARTBEAT_FIELDS * 8)
        if self.is_open:
            self._table = self.system.memfd_create("meshwright-places")
        self.memory = self._opened()
        self._words = self.memory.cast("B").cast("Q")

    def _opened(self) -> memoryview:
        return open_heartbeats(_fd_path(self._pulse), self.world)

    # --- snapshots

    def source(self, rank: int) -> str:
        """Returns the path of a rank's snapshots on this machine, or LOST_LOCATION if there are none."""
        return _fd_path(self._files[rank]) if rank in self._files else LOST_LOCATION

    def table(self, places: Iterable[str]) -> str:
        """Writes the location table for the ranks that start next, and returns its path ('' without anonymous files).
        It overwrites the previous table. `places`: the location of each rank's snapshots."""
        if self._table >= 0:
            text = "".join(f"{place}\n" for place in places).encode()
            self.system.ftruncate(self._table, 0)
            self.system.pwrite(self._table, text, 0)
        return _fd_path(self._table)

    def file(self, rank: int) -> int:
        """Returns the descriptor of the file with a rank's snapshots. Creates the file if it does not exist. Raises
        OSError if this store is closed."""
        if not self.is_open:
            raise OSError("these snapshots are closed")
        if rank not in self._files:
            self._files[rank] = self.system.memfd_create(f"meshwright-copies-{self.key}-{rank}")
        return self._files[rank]

    def all_files(self) -> list[str]:
        """Returns the paths of the snapshots of all ranks, then that of the heartbeats. All ranks must be on this
        machine."""
        return [_fd_path(file) for file in (*map(self.file, range(self.world)), self._pulse)]

    def lend(self, rank: int) -> int:
        """Returns a duplicate of the descriptor of a rank's snapshots, which the caller must close. Raises OSError if
        this machine does not have the file."""
        if rank not in self._files:
            raise OSError("these snapshots are not on this machine")
        return self.system.dup(self._files[rank])

    def mirrored(self, rank: int) -> int:
        """Creates the file for the replica of another machine's rank, and returns a duplicate of its descriptor, which
        the caller must close."""
        self.file(rank)
        return self.lend(rank)

    def keep(self, steps: Sequence[int]) -> None:
        """Pins the two `steps`: ranks do not overwrite their snapshots of these steps (core/snapshots.py)."""
        for file in self._files.values():
            if self.system.fstat(file).st_size >= HEADER_BYTES:
                self.system.pwrite(file, array("Q", steps).tobytes(), PINNED_STEPS_FIELD * 8)

    def release(self, needed: Collection[int]) -> None:
        """Closes the files of all ranks that are not in `needed`."""
        for rank in self._files.keys() - set(needed):
            self.system.close(self._files.pop(rank))

    def places(self, rank: int) -> dict[str, Any]:
        """Returns the paths of a rank's memory files on this machine, as fields of its start message."""
        own = _fd_path(self.file(rank)) if self.is_open else ""
        return {"pulse": _fd_path(self._pulse), "own": own, "key": self.key}

    # --- heartbeats

    def pulse(self, rank: int) -> Heartbeat:
        """Returns the heartbeat row of a rank."""
        return Heartbeat(self.memory, rank)

    def column(self, word: HeartbeatField) -> list[int]:
        """Returns the field `word` of all heartbeat rows, by rank."""
        return self._words[word::HEARTBEAT_FIELDS].tolist()

    def place(self, rank: int) -> dict[str, Any]:
        """Returns rank, step and phase of a rank's last heartbeat, as fields of an event. For rank -1, which denotes
        all ranks, it returns an empty dict."""
        if rank < 0:
            return {}
        pulse = self.pulse(rank)
        return {
            "rank": rank,
            "phase": RankPhase(pulse.read(HeartbeatField.phase)).name,
            "step": pulse.read(HeartbeatField.step),
        }

    @property
    def snapshot_step(self) -> int:
        """Returns the newest step for which every rank of this generation has reported a snapshot."""
        return min(self.column(HeartbeatField.snapshot_step)) if self.is_open else 0

    def begin(self, ranks: Iterable[int] | None = None) -> None:
        """Resets the heartbeat rows of `ranks` (None: of all ranks) before a new generation. Snapshots do not
        change."""
        for rank in range(self.world) if ranks is None else ranks:
            first = rank * HEARTBEAT_FIELDS
            for word in (HeartbeatField.step, HeartbeatField.phase, HeartbeatField.waits, HeartbeatField.snapshot_step):
                self._words[first + word] = 0
            self._words[first + HeartbeatField.beat] += 1

    def row(self, rank: int) -> bytes:
        """Returns the bytes of the heartbeat row of a rank."""
        return bytes(self._words[rank * HEARTBEAT_FIELDS : (rank + 1) * HEARTBEAT_FIELDS])

    def heard(self, rows: Sequence[tuple[int, str]]) -> None:
        """Updates the heartbeat rows of other machines' ranks. `rows`: from `pack_heartbeats`."""
        for rank, run in rows:
            words = memoryview(base64.b64decode(run)).cast("Q")
            self._words[rank * HEARTBEAT_FIELDS : rank * HEARTBEAT_FIELDS + len(words)] = words

    def written(self, seconds: float) -> None:
        """Records in all heartbeat rows that the overlapped save has ended. `seconds`: its duration, or 0 if it
        failed."""
        for rank in range(self.world):
            row = self.pulse(rank).row
            row[HeartbeatField.saved] = round(seconds * 1e6) or row[HeartbeatField.saved]
            row[HeartbeatField.busy] = 0

    def close(self) -> None:
        """Closes all files."""
        files = [*self._files.values(), *(file for file in (self._table, self._pulse) if file >= 0)]
        # Other threads duplicate the descriptors, so the fields must be cleared before the files are closed.
        self._files, self._table, self._pulse, self.is_open = {}, -1, -1, False
        for file in files:
            with contextlib.suppress(OSError):
                self.system.close(file)


def stored_versions(store: SharedFileStore) -> dict[int, list[SnapshotVersion]]:
    """Returns, by rank, the versions of the complete snapshots in `store` on this machine."""
    found = {}
    for rank, file in store._files.items():
        words = store.system.pread(file, HEADER_BYTES, 0).ljust(HEADER_BYTES, b"\0")
        head = SnapshotHeader(memoryview(words).cast("Q"))
        if head.is_laid and (versions := sorted(versions_of(head))):
            found[rank] = versions
    return found


def pack_heartbeats(rows: Iterable[tuple[int, bytes]]) -> list[tuple[int, str]]:
    """Encodes heartbeat rows, given as (rank, bytes) in order, for a message. Returns, for each sequence of consecutive
    ranks, the first rank and their rows in base64.

    >>> [(rank, len(words)) for rank, words in pack_heartbeats([(3, bytes(64)), (4, bytes(64)), (6, bytes(64))])]
    [(3, 172), (6, 88)]
    """
    runs: list[tuple[int, bytearray]] = []
    for rank, row in rows:
        if not runs or rank != runs[-1][0] + len(runs[-1][1]) // len(row):
            runs.append((rank, bytearray()))
        runs[-1][1].extend(row)
    return [(rank, base64.b64encode(words).decode()) for rank, words in runs]


def _fd_path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}" if file >= 0 else ""


LocationRuns = Sequence[tuple[str, int]]
"""The location of the snapshots of all ranks, in order of rank. Each pair has a node's address ('' if the snapshots are
lost) and the number of consecutive ranks whose snapshots are on that node."""


class SnapshotLocations:
    """The leader's record of the nodes that have snapshots, by the key of the set. A node is identified by the address
    of its snapshot server."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        """The addresses of the connected nodes."""
        self._homes: dict[str, Sequence[str]] = {}
        self._next: tuple[str, Sequence[str]] | None = None
        """The key and the node of each rank of this generation, until all ranks have a snapshot; then None."""
        self._written: set[str] = set()
        """The keys of the sets in which all ranks have a snapshot."""
        self._mirrors: dict[str, dict[int, str]] = {}

    def start(self, homes: Sequence[str], key: str, source: str) -> LocationRuns:
        """Records that ranks start on the nodes `homes` (by rank) and write snapshots to the set `key`. Returns the
        locations of the set `source`, from which they resume."""
        found = self._found(source) or [""] * len(homes)
        at_first = [at or home for at, home in zip(found, homes, strict=True)] if key == source else homes
        self._homes = {saved: lived for saved, lived in self._homes.items() if saved == source} | {key: at_first}
        self._mirrors = {saved: mirrors for saved, mirrors in self._mirrors.items() if saved in (key, source)}
        self._written &= {source}  # ranks that resume from another set have yet to write all snapshots of theirs
        self._next = key, homes
        return [(at, len(list(ranks))) for at, ranks in itertools.groupby(found)]

    def adopt(self, key: str, places: Sequence[Sequence[str]]) -> None:
        """Records that nodes have the set `key` from an earlier leader. `places`: for each rank, the nodes with its
        snapshot; the first two are used."""
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
        """Returns whether all ranks of this generation have a snapshot."""
        return self._next is None

    def settle(self) -> None:
        """Records that all ranks of this generation have a snapshot on their nodes."""
        assert self._next is not None
        (key, homes), self._next = self._next, None
        self._homes[key] = homes
        self._written.add(key)

    def has(self, key: str) -> bool:
        """Returns whether every rank has a snapshot in the set `key`, and each of these snapshots, or its replica, is
        on a connected node."""
        return key in self._written and all(self._found(key))

    def is_safe(self, key: str) -> bool:
        """Returns whether the set `key` has replicas on other nodes, or needs none because all ranks run on one
        node."""
        return key in self._mirrors or len(set(self._homes.get(key, ()))) <= 1

    def mirrored(self, key: str, mirrors: Mapping[int, str]) -> None:
        """Records that the snapshots of all ranks of one step have replicas. `mirrors`: by rank, the address of the
        node with the replica."""
        self._mirrors[key] = dict(mirrors)

    def forget(self) -> None:
        """Forgets all replicas, which a rollback has made invalid."""
        self._mirrors.clear()


def ranks_stored_at(runs: LocationRuns, here: str) -> Iterator[int]:
    """Yields the ranks whose snapshots are on the node with the address `here`."""
    ranks = itertools.count()
    for at, count in runs:
        for rank in itertools.islice(ranks, count):
            if at == here:
                yield rank


def resolve_locations(runs: LocationRuns, key: str, here: str, own: Callable[[int], str]) -> Iterator[str]:
    """Yields the lines of the location table of the node with the address `here`: for each rank in order, the location
    of its snapshots in the set `key`. `own` returns the local path of a rank's snapshots.

    >>> runs = [("10.0.0.1:5", 1), ("10.0.0.2:5", 2), ("", 1)]
    >>> list(resolve_locations(runs, "ab", "10.0.0.1:5", lambda rank: f"/{rank}"))
    ['/0', 'at:10.0.0.2:5/ab/1', 'at:10.0.0.2:5/ab/2', 'nowhere:']
    """
    ranks = itertools.count()
    for at, count in runs:
        for rank in itertools.islice(ranks, count):
            yield own(rank) if at == here else f"{REMOTE_PREFIX}{at}/{key}/{rank}" if at else LOST_LOCATION
