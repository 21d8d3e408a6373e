"""Connections that were refused at the port for nodes, as lines for a person: one for each reason in EVERY seconds at
most.

The devices of several machines by one number each: those of the first, then those of every node in the order in which
they first came.

Promise: a node that is lost and comes back, by its name and number of devices, has the numbers that it had.

The ranks of several machines as one nursery, on the leader's side: those of this machine, and those of nodes that have
come (node.py).

Promises: ranks are given out in order, those of this machine first; a node whose connection ends, or that is silent for
SILENCE seconds, is gone, and so
are its ranks: each is told of once, with the node's name; a node may come or leave at any time, and `places` says how
many ranks there is room for.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from meshwright.core.cgroup_limits import raise_open_file_limit
from meshwright.core.ipc import IpcMessage
from meshwright.core.rendezvous_store import store_key_prefix
from meshwright.core.secure_channel import TOKEN_MISMATCH, TOKEN_VARIABLE, SecureChannel, encode_message
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.node import NODE_KEEPALIVE_SECONDS, NODE_TIMEOUT_SECONDS, TICK_SECONDS
from meshwright.elastic.proc_stats import ProcStats
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_locations import SnapshotLocations, ranks_stored_at, resolve_locations
from meshwright.elastic.snapshot_replication import ReplicationCoordinator

REFUSAL_LOG_SECONDS = 60.0
"""Seconds between two lines of the same reason."""


class RefusalLog:
    """Called with the reason and the address of each refused connection, from any thread; `say` gets the lines."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._counts: Counter[str] = Counter()
        self._next: dict[str, float] = {}
        self._lock = threading.Lock()

    def __call__(self, reason: str, host: str) -> None:
        with self._lock:
            self._counts[reason] += 1
            if (now := self._clock()) < self._next.get(reason, 0.0):
                return
            self._next[reason], count = now + REFUSAL_LOG_SECONDS, self._counts.pop(reason)
        if reason == TOKEN_MISMATCH:
            remedy = "start that node with the MESHWRIGHT_TOKEN of this run, or let it share the run folder"
            self._say(
                f"a node at {host} has another token and was refused ({count} since the last such line): {remedy}"
            )
        else:
            self._say(
                f"connections refused at the port for nodes: {count}, the last one from {host or 'an unknown address'}: {reason}"
            )


class NodeDevices(Protocol):
    """A node: its first slot, how many it has, and whether it has been asked to go."""

    first: int
    devices: int
    leaving: bool


NodeT = TypeVar("NodeT", bound=NodeDevices)


class DeviceIds:
    """`devices`: of the first machine."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._known: dict[int, tuple[str, int]] = {}

    def first_of(self, name: str, devices: int, held: Iterable[int]) -> int:
        """The first slot of a node that has come; `held`: those of nodes that are there."""
        there = set(held)
        before = (first for first, known in self._known.items() if known == (name, devices) and first not in there)
        first = next(before, self.devices + sum(count for _, count in self._known.values()))
        self._known[first] = (name, devices)
        return first

    def name_of(self, slot: int) -> str:
        """In words: the device as its machine counts it, and the machine.

        >>> seats = DeviceIds(2)
        >>> seats.first_of("b", 4, []), seats.first_of("c", 1, [2]), seats.first_of("b", 4, [6]), seats.name_of(3), seats.name_of(1)
        (2, 6, 2, '1 of node b', '1 of the first node')
        """
        first = max((first for first in self._known if first <= slot), default=0)
        return f"{slot - first} of node {self._known[first][0]}" if first else f"{slot} of the first node"

    def seated(self, world: int, slots: Sequence[int], nodes: Sequence[NodeT]) -> list[tuple[NodeT | None, int]]:
        """The machine of each of `world` new ranks, None for the first, and its device there. `slots`: those of all
        ranks; empty: all devices in
        order, but for those of nodes that are leaving, and where there are too few, the ranks that are left over go to
        the first machine.

        >>> DeviceIds(2).seated(4, (), [])
        [(None, 0), (None, 1), (None, 2), (None, 3)]
        """
        if slots:
            held = {slot: node for node in nodes for slot in range(node.first, node.first + node.devices)}
            return [(node := held.get(slot), slot - (node.first if node else 0)) for slot in slots]
        seats: list[tuple[NodeT | None, int]] = [(None, device) for device in range(self.devices)]
        seats += [(node, device) for node in nodes if not node.leaving for device in range(node.devices)]
        return seats[:world] + [(None, rank) for rank in range(len(seats), world)]

    def all_of(self, nodes: Sequence[NodeDevices]) -> tuple[int, ...]:
        """The slots of the first machine and of `nodes`, machine by machine."""
        there = [range(self.devices), *(range(node.first, node.first + node.devices) for node in nodes)]
        return tuple(slot for devices in there for slot in devices)


def node_of_device(nodes: Sequence[NodeT], slot: int) -> NodeT | None:
    """Whose slot it is; None: the first machine's."""
    return next((node for node in nodes if node.first <= slot < node.first + node.devices), None)


LEADER_PLANNING_SECONDS = 300.0
"""Seconds that a leader may plan, in which it hears nobody."""

MAX_HEARTBEATS_PER_SECOND = 800.0
"""Messages a second in which signs of life of all nodes come, at most: of more than 40 nodes each one says them less
often than every TICK."""

COALESCE_MIN_NODES, COALESCE_SECONDS = 100, 0.02
"""Of more nodes than so many there is always one that says something: what the others say within so many seconds is
heard with it."""

LEADER_KEEPALIVE_SECONDS = NODE_TIMEOUT_SECONDS / 5
"""Seconds between two words to each node in any case."""


@dataclass(eq=False)
class _NodeConnection:
    name: str
    link: SecureChannel
    devices: int
    heard: float
    first: int = -1
    """Its first slot: devices of all machines are counted on, and a node that comes back has the numbers that it
    had."""
    lender: str = ""
    ranks: dict[int, int] = field(default_factory=dict)
    """Living ranks here and their generation."""
    leaving: bool = False
    is_lost: bool = False


class ClusterAgent(LocalAgent):
    """`devices`: of this machine. `token` admits the nodes, at the door that this opens at `host` and `port`."""

    def __init__(
        self,
        logs: Path,
        warm: Sequence[str],
        host: str,
        port: int,
        token: str,
        devices: int,
        before: LocalAgent | None = None,
    ) -> None:
        raise_open_file_limit(devices)
        super().__init__(logs / "zygote.log", warm, {"MESHWRIGHT_ADDRESS": host, TOKEN_VARIABLE: token}, before)
        outside = self.outside
        self.devices, self.host = devices, host
        self.nodes: list[_NodeConnection] = []
        self._seats = DeviceIds(devices)
        self.name_of = self._seats.name_of
        self._at: dict[int, _NodeConnection] = {}
        """The node of each rank that is not of this machine."""
        self._store: tuple[int, str] = (0, "")
        """Port and secret of that of the ranks."""
        self._came: queue.SimpleQueue[tuple[socket.socket | None, IpcMessage]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._ends = outside.waiting()
        self._ends.add(self._woken.fileno(), None)
        self._shared: dict[str, SharedFileStore] = {}
        self._signs: dict[int, ProcStats] = {}
        self._looked = outside.clock()
        self._over = threading.Event()
        self._lender = outside.lender(host, token, self._file)
        self.homes: SnapshotLocations = SnapshotLocations()
        self.homes.alive.add(self._lender.address)
        mirror = outside.mirror(
            token,
            lambda *how: self._wake(dict(zip(("number", "whole", "seconds"), how, strict=True), event="mirrored")),
        )
        self._mirrors = ReplicationCoordinator(self._lender.address, self.homes, mirror, self._tell, outside.clock)
        refusals = RefusalLog(lambda line: self._wake({"event": "refusal", "line": line}))
        self._door = outside.door(
            host,
            port,
            token,
            {"logs": str(logs), "warm": list(warm)},
            lambda end, hello: self._wake(hello, end),
            refusals,
        )
        self.port = self._door.port
        outside.repeat(lambda: _send_keepalives(self), LEADER_KEEPALIVE_SECONDS, self._over)

    # --- who is there
    # ---------------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._seats.all_of([node for node in self.nodes if not node.leaving])

    def _wake(self, message: IpcMessage, end: socket.socket | None = None) -> None:
        """From the threads of the door, with the end of a node that has come or a line about one that was refused, and
        of the mirror."""
        self._came.put((end, message))
        self._waker.send(b"1")

    def _admit(self) -> list[IpcMessage]:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        events: list[IpcMessage] = []
        while not self._came.empty():
            end, hello = self._came.get()
            if end is None:
                if hello["event"] == "refusal":
                    events.append(hello)
                else:
                    self._mirrors.heard(hello)
                continue
            try:
                name, devices, _ = str(hello["name"]), int(hello["devices"]), hello["order"] + 0
            except (
                KeyError,
                TypeError,
                ValueError,
            ):  # it has the token and is no node, such as one that is looking for copies
                end.close()
                continue
            node = _NodeConnection(name, self.outside.link(end, hello), devices, self.outside.clock())
            self._ends.add(node.link.handle, node)
        return events

    def _lose(self, node: _NodeConnection, why: str) -> list[IpcMessage]:
        self._ends.remove(node.link.handle)
        node.link.close()
        if node not in self.nodes:
            return []
        self.nodes.remove(node)
        node.is_lost = True
        self.homes.alive.discard(node.lender)
        self._mirrors.lost()
        words = f"its node {node.name} {why}"
        lost = [
            {"event": "ended", "rank": rank, "generation": number, "status": -signal.SIGKILL, "words": words}
            for rank, number in node.ranks.items()
        ]
        return [*lost, {"event": "node_lost", "name": node.name, "why": why}]

    def _node_of(self, rank: int) -> _NodeConnection | None:
        node = self._at.get(rank)
        return node if node is not None and not node.is_lost and rank in node.ranks else None

    # --- as a nursery
    # ---------------------------------------------------------------------------------------------------------

    def command(self, do: str, rank: int, **more: Any) -> None:
        node = self._node_of(rank)
        if do == "start" and "slot" in more["payload"]:  # it is to measure this device
            node = node_of_device(self.nodes, slot := more["payload"]["slot"])
            more["local"] = [slot - (node.first if node else 0), 1]
        if node is None:
            super().command(do, rank, **more)
        else:
            self._tell(node, do=do, rank=rank, **more)

    def start(
        self,
        what: IpcMessage,
        logs: Sequence[str],
        slots: Sequence[int],
        holdings: SharedFileStore,
        source: SharedFileStore,
    ) -> None:
        """One message for each node, which says of its own ranks alone how they start; and the same line for all of
        them, where the copies of `source` lie."""
        here, nodes, number = self._lender.address, {id(node): node for node in self.nodes}, what["generation"]
        homes = self._seats.seated(len(logs), slots, self.nodes)
        ranks: dict[int, list[tuple[int, int, str]]] = {place: [] for place in (id(None), *nodes)}
        for rank, (node, device) in enumerate(homes):
            ranks[id(node)].append((rank, device, logs[rank]))
        lenders = [node.lender if node else here for node, _ in homes]
        runs = self.homes.start(lenders, holdings.key, source.key)
        self._at = {rank: node for rank, (node, _) in enumerate(homes) if node}
        settled = encode_message({"do": "sources", "key": holdings.key, "source": source.key, "runs": runs})
        (port, secret), every = self._store, max(TICK_SECONDS, len(self.nodes) / MAX_HEARTBEATS_PER_SECOND)
        more: IpcMessage = {
            **what,
            "every": every,
            "key": holdings.key,
            "store": [self.host, port, store_key_prefix(secret, number)],
        }
        for place, node in nodes.items():
            if ranks[place]:
                node.ranks |= {rank: number for rank, *_ in ranks[place]}
                self._write(node, settled)
                self._tell(node, do="start", **more, ranks=ranks[place], here=min(len(ranks[place]), node.devices))
        if holdings is source:
            holdings.release({*ranks_stored_at(runs, here), *self._mirrors.ranks})
        table = holdings.table(resolve_locations(runs, source.key, here, source.source))
        most = min(len(ranks[id(None)]), self.devices)
        for rank, device, log in ranks[id(None)]:
            memory = {"sources": table, "beside": False, **holdings.places(rank)}
            super().command("start", rank, **what, log=log, local=[device, most], memory=memory)

    def hold(self, holdings: SharedFileStore) -> None:
        """What of this machine may be lent."""
        self._shared = {key: held for key, held in self._shared.items() if held.is_open} | {holdings.key: holdings}
        self._mirrors.begin(holdings)

    def released(self) -> None:
        for node in [node for node in self.nodes if node.leaving and not node.ranks]:
            self._tell(node, do="end", code=75, line="this node left; the others go on")

    def _file(self, key: str, rank: int) -> int | None:
        with contextlib.suppress(KeyError, OSError):  # of ranks that are no more
            return self._shared[key].lend(rank)
        return None

    def events(self, timeout: float) -> list[IpcMessage]:
        linger = COALESCE_SECONDS if len(self.nodes) > COALESCE_MIN_NODES else 0.0
        ready = self._ends.wait(timeout, linger, *(() if self.ended else (self.handle,)))
        events = [*super().events(0), *self._admit()]
        for event in events:
            if event["event"] == "ready":
                self._store = event["port"], event["secret"]
            elif event["event"] == "said" and (
                event["message"]["kind"] == "spike" or event["message"].get("source") in ("", "disk")
            ):
                self._mirrors.forget()
        now, before = self.outside.clock(), self._looked
        self._looked = now
        self._mirrors.look(self.nodes, len(self._at))
        for node in filter(None, ready):
            messages, ended = node.link.read()
            node.heard = now if messages else node.heard
            for message in messages:
                events.extend(self._hear(node, message))
            if ended:
                events.extend(self._lose(node, "is gone"))
        is_due = int(10 * now) != int(10 * before)  # ten times a second, however often a node says something
        for node in [node for node in self.nodes if now > node.heard + NODE_TIMEOUT_SECONDS] if is_due else ():
            events.extend(self._lose(node, f"has been silent for {NODE_TIMEOUT_SECONDS:.0f} s"))
        return events

    def _hear(self, node: _NodeConnection, event: IpcMessage) -> list[IpcMessage]:
        if event["event"] == "lends":
            # not before this a node is there: ranks that it is given sooner would have copies that nobody finds
            node.lender, node.first = (
                event["address"],
                self._seats.first_of(node.name, node.devices, [other.first for other in self.nodes]),
            )
            self.nodes.append(node)
            self.homes.alive.add(node.lender)
            self.nodes.sort(key=lambda node: node.link.hello["order"])
            return [{"event": "node_joined", "name": node.name, "devices": node.devices}]
        if event["event"] == "mirrored":
            self._mirrors.heard(event)
            return []
        if event["event"] == "ready":
            return []  # what it is told meanwhile waits in its pipe
        if event["event"] == "node_leaving":
            node.leaving = True
        elif event["event"] == "started":
            event["pid"] = _remote_process_id(event["rank"])
        elif (
            event["event"] == "ended" and node.ranks.get(event["rank"]) == event["generation"]
        ):  # else another one has its place by now
            del node.ranks[event["rank"]]
        elif event["event"] == "pulse":
            self._signs |= {_remote_process_id(rank): ProcStats(*signs) for rank, *signs in event["signs"]}
        return [event | {"name": node.name}]

    def signs(self, process: int) -> ProcStats:
        return self._signs.get(process, ProcStats()) if process < 0 else super().signs(process)

    @property
    def is_blind(self) -> bool:
        """A node says a word every ALIVE seconds at least. Sooner than the least patience, which else blames ranks for
        a link that is down."""
        heard = self.outside.clock() - 1.5 * max(NODE_KEEPALIVE_SECONDS, len(self.nodes) / MAX_HEARTBEATS_PER_SECOND)
        return any(node.heard < heard for node in self.nodes)

    def again(self) -> None:
        super().again()
        for node in self.nodes:
            self._tell(node, do="again")

    def _tell(self, node: _NodeConnection, **message: Any) -> None:
        self._write(node, encode_message(message))

    def _write(self, node: _NodeConnection, line: bytes) -> None:
        with contextlib.suppress(OSError):  # one that is gone is noticed by `events`
            node.link.write(line)

    def end(self, code: int, line: str) -> None:
        """The run is over: nodes end as it did."""
        for node in self.nodes:
            self._tell(node, do="end", code=code, line=line)

    def dissolve(self) -> None:
        self._over.set()
        self._door.close()
        self._lender.close()
        self._mirrors.close()
        for node in self.nodes:
            node.link.close()
        self.close()
        self._ends.close()
        self._woken.close()
        self._waker.close()


def _send_keepalives(fleet: ClusterAgent) -> None:
    """From a thread of its own: nodes hear that the leader lives while it plans, though not for ever."""
    line = encode_message({"do": "alive"})
    for node in list(fleet.nodes) if fleet.outside.clock() < fleet._looked + LEADER_PLANNING_SECONDS else ():
        with contextlib.suppress(ValueError):  # its connection was closed in this moment
            fleet._write(node, line)


def _remote_process_id(rank: int) -> int:
    """In the place of a process of another machine."""
    return -rank - 2
