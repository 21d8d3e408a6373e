"""The simulated machines of virtual_cluster.py: anonymous files, links, the leader's waiting, snapshot servers,
mirrors, and ranks in place of the fork server."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from meshwright.core.ipc import IpcMessage, message_line, parse_message
from meshwright.core.snapshots import (
    HEADER_BYTES,
    HISTORIES_PER_GENERATION,
    PINNED_STEPS_FIELD,
    REMOTE_PREFIX,
    SNAPSHOT_SLOTS_MULTI_NODE,
    SnapshotHeader,
)
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.proc_stats import ProcStats
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_replication import ReplicationRequest

if TYPE_CHECKING:
    from virtual_cluster import Cluster

LATENCY, COPY = 0.001, 0.5
"""Seconds of a line on its way, and of a mirror."""


class Files:
    """Replaces the system's anonymous files of one supervisor. Numbers are unique over all supervisors."""

    def __init__(self, cluster: Cluster) -> None:
        self.all, self.own, self.most = cluster.files, set[int](), 0
        self._numbers, self._owners = cluster.numbers, cluster.owners

    def _open(self, file: SimpleNamespace) -> int:
        number = next(self._numbers)
        self.all[number] = file
        self.own.add(number)
        self._owners[number] = self
        self.most = max(self.most, len(self.own))
        return number

    def memfd_create(self, name: str) -> int:
        return self._open(SimpleNamespace(st_size=0, text=b"", steps=[], pasts={}, kept=(0, 0)))

    def dup(self, number: int) -> int:
        if number not in self.all:
            raise OSError("closed")
        return self._open(self.all[number])

    def fstat(self, number: int) -> SimpleNamespace:
        return self.all[number]

    def ftruncate(self, number: int, size: int) -> None:
        self.all[number].st_size = size

    def pwrite(self, number: int, data: bytes, at: int) -> None:
        if at == PINNED_STEPS_FIELD * 8:
            self.all[number].kept = tuple(array("Q", data))
        else:
            self.all[number].text = data

    def pread(self, number: int, size: int, at: int) -> bytes:
        """Returns the header of a snapshot file, in the layout of core/snapshots.py."""
        file, words = self.all[number], bytearray(HEADER_BYTES)
        if file.st_size >= HEADER_BYTES:
            header = SnapshotHeader(memoryview(words).cast("Q"))
            header.lay(b"", 0, len(file.steps))
            for slot, step in enumerate(file.steps):
                header.name(slot, step, 0, 0, file.pasts[step] * HISTORIES_PER_GENERATION)
        return bytes(words[at : at + size])

    def close(self, number: int) -> None:
        del self.all[number], self._owners[number]
        self.own.discard(number)


def copy(file: SimpleNamespace, step: int, past: int, slots: int = SNAPSHOT_SLOTS_MULTI_NODE) -> None:
    """Writes a snapshot over the oldest step that is not retained, as core/snapshots.py does. `past`: the generation
    that computed the step."""
    file.st_size, file.pasts[step] = HEADER_BYTES, past
    file.steps[:] = [each for each in file.steps if each < step]  # others are of before a rollback
    if len(file.steps) >= slots:
        file.steps.remove(min(each for each in file.steps if each not in file.kept))
    file.steps.append(step)


def address(number: int) -> str:
    """Returns the address of a node."""
    return f"10.{number // 65536}.{number // 256 % 256}.{number % 256}"


class End:
    """One end of a link between the leader and a node."""

    def __init__(self, cluster: Cluster, wake: Callable[[], None], handle: int) -> None:
        self.cluster, self.wake, self.handle = cluster, wake, handle
        self.hello: IpcMessage = {}
        self.other: End
        self.inbox: deque[bytes] = deque()
        self.is_closed = self.is_silent = False
        self.sent = self.largest = 0
        """Bytes, and those of the longest line."""

    def write(self, line: bytes) -> None:
        if self.is_closed:
            raise OSError("closed")
        self.sent, self.largest = self.sent + len(line), max(self.largest, len(line))
        if not self.is_silent:
            self.cluster.at(LATENCY, lambda: self.other.arrive(line))

    def arrive(self, line: bytes) -> None:
        self.inbox.append(line)
        self.wake()

    def send(self, message: IpcMessage) -> None:
        self.write(message_line(message))

    def read(self) -> tuple[list[IpcMessage], bool]:
        messages = [parse_message(line) for line in self.inbox]
        self.inbox.clear()
        return messages, not self.is_silent and (self.other.is_closed or self.is_closed)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            if not self.is_silent:
                self.cluster.at(LATENCY, self.other.wake)


class LeaderWaits:
    """Replaces the leader's waiting for lines: while the leader waits, the rest of the cluster continues."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._ends: dict[int, Any] = {}
        cluster.waiting = self
        self.ready: dict[int, None] = {}
        self.is_awake = False
        self._last: list[int] = []

    def _unread(self, handle: int) -> bool:
        return bool(self._ends[handle].link.inbox)

    def add(self, handle: int, what: Any) -> None:
        self._ends[handle] = what

    def remove(self, handle: int) -> None:
        del self._ends[handle]
        self.ready.pop(handle, None)

    def wait(self, timeout: float, linger: float, *also: int) -> list[Any]:
        cluster = self.cluster
        cluster.stopwatch(False)
        # An end that nobody has read from stays readable.
        self.ready |= dict.fromkeys(handle for handle in self._last if handle in self._ends and self._unread(handle))
        cluster.run(cluster.now + timeout, lambda: bool(self.ready) or self.is_awake)
        if linger and (self.ready or self.is_awake):
            cluster.run(cluster.now + linger, lambda: False)
        cluster.stopwatch(True)
        self._last = [handle for handle in self.ready if handle in self._ends]
        found = [self._ends[handle] for handle in self._last]
        self.ready, self.is_awake = {}, False
        return found

    def close(self) -> None:
        pass


class Lender:
    def __init__(self, cluster: Cluster, host: str, find: Callable[[str, int], int | None]) -> None:
        self.address, self.cluster = f"{host}:{next(cluster.numbers)}", cluster
        cluster.lenders[self.address] = find

    def close(self) -> None:
        self.cluster.lenders.pop(self.address, None)


class Mirror:
    """Copies the requested snapshots. A copy takes COPY seconds."""

    def __init__(self, cluster: Cluster, files: Files, done: Callable[[int, bool, float], None]) -> None:
        self.cluster, self.files, self.done, self.latest = cluster, files, done, None
        self._ranks: deque[Any] = deque(maxlen=2)

    @property
    def ranks(self) -> set[int]:
        return {rank for ranks in self._ranks for rank in ranks}

    def order(self, order: ReplicationRequest) -> None:
        self.latest = order
        self._ranks.append(order.files.keys())
        self._look(order)

    def _look(self, order: ReplicationRequest) -> None:
        steps = [self.cluster.steps_at(f"{REMOTE_PREFIX}{order.address}/{order.key}/{rank}") for rank in order.files]
        if order is not self.latest or not all(steps):
            self._end(order, None)
        elif all(order.step in found for found in steps):
            self.cluster.at(COPY, lambda: self._end(order, order.step))
        elif any(max(found) > order.step for found in steps):
            self._end(order, None)
        else:
            self.cluster.at(0.1, lambda: self._look(order))

    def _end(self, order: ReplicationRequest, step: int | None) -> None:
        whole = step is not None and self.cluster.lenders.get(order.address) is not None
        places = {rank: f"{REMOTE_PREFIX}{order.address}/{order.key}/{rank}" for rank in order.files}
        pasts = {rank: dict(map(reversed, self.cluster.versions_at(place))).get(step) for rank, place in places.items()}
        whole = whole and None not in pasts.values()
        for rank, number in order.files.items():
            if whole and order is self.latest:
                copy(self.files.all[number], order.step, pasts[rank], 2)
            self.files.close(number)
        if order is self.latest:
            self.done(order.number, whole, COPY if whole else 0.0)

    def close(self) -> None:
        self.latest = None


@dataclass
class Rank:
    """A simulated rank and its supervisor."""

    agent: Any
    start: IpcMessage
    pid: int
    is_frozen: bool = False
    pulse: Any = None
    file: Any = None

    @property
    def rank(self) -> int:
        return int(self.start["rank"])


class Ranks(LocalAgent):
    """Replaces the fork server."""

    cluster: Cluster
    wake: Callable[[], None]
    held: Callable[[str], SharedFileStore]
    files: Files

    def _open(self) -> None:
        """The fork server of `hung_opens` more starts, in all supervisors, never answers."""
        self.ended, self.inbox, self.hangs = False, deque(), self.cluster.hung_opens > 0
        if self.hangs:
            self.cluster.hung_opens -= 1
        else:
            self.inbox.append({"event": "ready", "port": 1, "secret": "ab"})
        self.store_hangs = False
        self.children: dict[int, Rank] = {}

    def say(self, **event: Any) -> None:
        self.inbox.append(event)
        self.wake()

    def command(self, do: str, rank: int, **more: Any) -> None:
        if self.hangs:
            return
        if do == "start":
            child = self.children[rank] = Rank(self, {"rank": rank, **more}, next(self.cluster.numbers))
            self.say(event="started", rank=rank, generation=more["generation"], pid=child.pid)
            self.cluster.started(child)
        elif do == "signal" and rank in self.children:
            self.cluster.at(self.cluster.killing, lambda: self.die(rank, -int(more["signal"])))
        elif do == "tell" and rank in self.children:
            self.cluster.stops = "stop" in more["message"]

    def die(self, rank: int, status: int) -> None:
        child = self.children.pop(rank, None)
        if child is not None:
            self.say(event="ended", rank=rank, generation=child.start["generation"], status=status)

    def events(self, timeout: float) -> list[IpcMessage]:
        found = list(self.inbox)
        self.inbox.clear()
        return found

    @property
    def handle(self) -> int:
        return 0

    def signs(self, process: int) -> ProcStats:
        return ProcStats("S", 0.5, 100.0, 1e6)

    def clear(self) -> bool:
        return False

    def close(self) -> None:
        self.children.clear()
        self.ended = True
