"""The agent of the leader in a multi-node run. It manages the ranks of its own machine and those of the connected nodes
(node.py).

`RefusalLog` reports connections that the node port refused, with at most one line per reason in REFUSAL_LOG_SECONDS.

`DeviceIds` numbers the devices of all machines. The devices of the first machine come first. Those of every other node
follow in the order in which the nodes first connected.

Guarantees:
- A node that is lost and returns with the same name and device count gets the device ids that it had.
- Ranks are placed in order, on this machine first.
- A node counts as lost, together with its ranks, when its connection ends or when it sends nothing for
  NODE_TIMEOUT_SECONDS. Each of these ranks is reported once, with the name of the node.
- A node may join or leave at any time. `places` is the number of ranks that fit.
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
from meshwright.core.messages import Message
from meshwright.core.rendezvous_store import store_key_prefix
from meshwright.core.secure_channel import TOKEN_MISMATCH, TOKEN_VARIABLE, SecureChannel, encode_message
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.node import NODE_KEEPALIVE_SECONDS, NODE_TIMEOUT_SECONDS, TICK_SECONDS
from meshwright.elastic.proc_stats import ProcStats
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_locations import SnapshotLocations, ranks_stored_at, resolve_locations
from meshwright.elastic.snapshot_replication import ReplicationCoordinator

REFUSAL_LOG_SECONDS = 60.0
"""Minimum seconds between two lines with the same reason."""


class RefusalLog:
    """Counts refused connections. Any thread may call it, with the reason and the address. `say` receives the lines."""

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
            remedy = Message("start that node with the MESHWRIGHT_TOKEN of this run, or let it share the run folder")
            self._say(
                Message(
                    "a node at {host} has another token and was refused ({count} since the last such line): {remedy}",
                    host=host,
                    count=count,
                    remedy=remedy,
                )
            )
        else:
            self._say(
                Message(
                    "connections refused at the port for nodes: {count}, the last one from {host}: {reason}",
                    count=count,
                    host=host or Message("an unknown address"),
                    reason=reason,
                )
            )


class NodeDevices(Protocol):
    """A node as `DeviceIds` sees it: its first device id, its number of devices, and whether it is leaving."""

    first: int
    devices: int
    leaving: bool


NodeT = TypeVar("NodeT", bound=NodeDevices)


class DeviceIds:
    """Assigns ids to the devices of all machines. `devices` is the number of devices of the first machine."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._known: dict[int, tuple[str, int]] = {}

    def first_of(self, name: str, devices: int, taken: Iterable[int]) -> int:
        """Returns the first device id of a node that has joined. `taken` contains the first device ids of the connected
        nodes."""
        there = set(taken)
        before = (first for first, known in self._known.items() if known == (name, devices) and first not in there)
        first = next(before, self.devices + sum(count for _, count in self._known.values()))
        self._known[first] = (name, devices)
        return first

    def name_of(self, slot: int) -> str:
        """Returns a readable name of a device: its index on its machine, and the machine.

        >>> seats = DeviceIds(2)
        >>> first_ids = seats.first_of("b", 4, []), seats.first_of("c", 1, [2]), seats.first_of("b", 4, [6])
        >>> (*first_ids, seats.name_of(3), seats.name_of(1))
        (2, 6, 2, '1 of node b', '1 of the first node')
        """
        first = max((first for first in self._known if first <= slot), default=0)
        return (
            Message("{slot} of node {known}", slot=slot - first, known=self._known[first][0])
            if first
            else Message("{slot} of the first node", slot=slot)
        )

    def seated(self, world: int, slots: Sequence[int], nodes: Sequence[NodeT]) -> list[tuple[NodeT | None, int]]:
        """Returns the machine (None for the first) and the local device of each of `world` new ranks.

        `slots` contains the device ids of all ranks. If it is empty, ranks take all devices in order, except those of
        nodes that are leaving. Ranks without a device go to the first machine.

        >>> DeviceIds(2).seated(4, (), [])
        [(None, 0), (None, 1), (None, 2), (None, 3)]
        """
        if slots:
            stored = {slot: node for node in nodes for slot in range(node.first, node.first + node.devices)}
            return [(node := stored.get(slot), slot - (node.first if node else 0)) for slot in slots]
        seats: list[tuple[NodeT | None, int]] = [(None, device) for device in range(self.devices)]
        seats += [(node, device) for node in nodes if not node.leaving for device in range(node.devices)]
        return seats[:world] + [(None, rank) for rank in range(len(seats), world)]

    def all_of(self, nodes: Sequence[NodeDevices]) -> tuple[int, ...]:
        """Returns the device ids of the first machine and of `nodes`, machine by machine."""
        there = [range(self.devices), *(range(node.first, node.first + node.devices) for node in nodes)]
        return tuple(slot for devices in there for slot in devices)


def node_of_device(nodes: Sequence[NodeT], slot: int) -> NodeT | None:
    """Returns the node that owns a device id, or None for a device of the first machine."""
    return next((node for node in nodes if node.first <= slot < node.first + node.devices), None)


LEADER_PLANNING_SECONDS = 300.0
"""Seconds for which a leader may plan without receiving any message."""

MAX_HEARTBEATS_PER_SECOND = 800.0
"""Maximum heartbeat messages per second of all nodes together. With more than 40 nodes, each sends less often than
every TICK_SECONDS."""

COALESCE_MIN_NODES, COALESCE_SECONDS = 100, 0.02
"""With more nodes than this, some node always has a message. The leader then waits COALESCE_SECONDS, to handle the
messages of several nodes in the same round."""

LEADER_KEEPALIVE_SECONDS = NODE_TIMEOUT_SECONDS / 5
"""Maximum seconds between two messages to each node."""


@dataclass(eq=False)
class _NodeConnection:
    name: str
    link: SecureChannel
    devices: int
    heard: float
    first: int = -1
    """The first device id of the node. The ids of a node are consecutive. A node that returns gets the ids that it
    had."""
    lender: str = ""
    ranks: dict[int, int] = field(default_factory=dict)
    """The living ranks of this node, with the generation of each."""
    leaving: bool = False
    is_lost: bool = False


class ClusterAgent(LocalAgent):
    """Manages the ranks of all machines. `devices` is the device count of this machine. `token` authenticates nodes at
    the listener on `host` and `port`."""

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
        super().__init__(logs / "fork-server.log", warm, {"MESHWRIGHT_ADDRESS": host, TOKEN_VARIABLE: token}, before)
        outside = self.outside
        self.devices, self.host = devices, host
        self.nodes: list[_NodeConnection] = []
        self._seats = DeviceIds(devices)
        self.name_of = self._seats.name_of
        self._at: dict[int, _NodeConnection] = {}
        """The node of each rank that does not run on this machine."""
        self._store: tuple[int, str] = (0, "")
        """The port and the secret of the rendezvous store."""
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

    # --- nodes

    @property
    def slots(self) -> tuple[int, ...]:  # type: ignore[override]
        """The device ids of all machines, without those of nodes that are leaving."""
        return self._seats.all_of([node for node in self.nodes if not node.leaving])

    def _wake(self, message: IpcMessage, end: socket.socket | None = None) -> None:
        """Queues a message and wakes the event loop. It is called from threads: by the listener for a new or refused
        node, and by the replicator."""
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
            ):  # a client with the token that is not a node, e.g. a snapshot client
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
        words = Message("its node {node} {why}", node=node.name, why=why)
        lost = [
            {"event": "ended", "rank": rank, "generation": number, "status": -signal.SIGKILL, "words": words}
            for rank, number in node.ranks.items()
        ]
        return [*lost, {"event": "node_lost", "name": node.name, "why": why}]

    def _node_of(self, rank: int) -> _NodeConnection | None:
        node = self._at.get(rank)
        return node if node is not None and not node.is_lost and rank in node.ranks else None

    # --- the interface of LocalAgent

    def command(self, do: str, rank: int, **more: Any) -> None:
        """Sends a command to a fork server: that of the rank's machine, or that of the machine with the device to
        probe."""
        node = self._node_of(rank)
        if do == "start" and "slot" in more["payload"]:  # the command starts a probe of this device
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
        """Starts a rank for each of `logs`. Each node gets one message that describes only its own ranks, and the
        locations of the snapshots of `source`."""
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
            memory = {"sources": table, "single_node": False, **holdings.places(rank)}
            super().command("start", rank, **what, log=log, local=[device, most], memory=memory)

    def hold(self, holdings: SharedFileStore) -> None:
        """Registers the snapshots of this machine that the snapshot server may serve."""
        self._shared = {key: stored for key, stored in self._shared.items() if stored.is_open} | {
            holdings.key: holdings
        }
        self._mirrors.begin(holdings)

    def released(self) -> None:
        """Ends the nodes that are leaving and have no ranks any more."""
        for node in [node for node in self.nodes if node.leaving and not node.ranks]:
            self._tell(node, do="end", code=75, line=Message("this node left; the others go on"))

    def _file(self, key: str, rank: int) -> int | None:
        with contextlib.suppress(KeyError, OSError):  # a rank that no longer exists has no file
            return self._shared[key].lend(rank)
        return None

    def events(self, timeout: float) -> list[IpcMessage]:
        """Returns the events of all machines, after a wait of at most `timeout` seconds. Also detects lost nodes and
        starts snapshot replication."""
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
                events.extend(self._lose(node, Message("is gone")))
        is_due = int(10 * now) != int(10 * before)  # at most ten times a second, however often nodes send messages
        for node in [node for node in self.nodes if now > node.heard + NODE_TIMEOUT_SECONDS] if is_due else ():
            events.extend(
                self._lose(node, Message("has been silent for {seconds:.0f} s", seconds=NODE_TIMEOUT_SECONDS))
            )
        return events

    def _hear(self, node: _NodeConnection, event: IpcMessage) -> list[IpcMessage]:
        if event["event"] == "lends":
            # the node counts as joined only now: the snapshots of ranks placed on it earlier could not be located
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
            return []  # the pipe buffers commands sent before it is ready
        if event["event"] == "node_leaving":
            node.leaving = True
        elif event["event"] == "started":
            event["pid"] = _remote_process_id(event["rank"])
        elif (
            event["event"] == "ended" and node.ranks.get(event["rank"]) == event["generation"]
        ):  # not an exit of an earlier generation of this rank
            del node.ranks[event["rank"]]
        elif event["event"] == "pulse":
            self._signs |= {_remote_process_id(rank): ProcStats(*signs) for rank, *signs in event["signs"]}
        return [event | {"name": node.name}]

    def signs(self, process: int) -> ProcStats:
        """Returns the process statistics of a rank. A negative id denotes a process on another machine."""
        return self._signs.get(process, ProcStats()) if process < 0 else super().signs(process)

    @property
    def is_blind(self) -> bool:
        """Whether the messages of a node are overdue. Each node sends a message at least every NODE_KEEPALIVE_SECONDS.
        The limit is below the smallest `patience` of hang detection, so that no rank is blamed for a broken link."""
        heard = self.outside.clock() - 1.5 * max(NODE_KEEPALIVE_SECONDS, len(self.nodes) / MAX_HEARTBEATS_PER_SECOND)
        return any(node.heard < heard for node in self.nodes)

    def again(self) -> None:
        """Restarts the fork servers of all machines."""
        super().again()
        for node in self.nodes:
            self._tell(node, do="again")

    def _tell(self, node: _NodeConnection, **message: Any) -> None:
        self._write(node, encode_message(message))

    def _write(self, node: _NodeConnection, line: bytes) -> None:
        with contextlib.suppress(OSError):  # `events` detects that a node is lost
            node.link.write(line)

    def end(self, code: int, line: str) -> None:
        """Ends all nodes and passes them the exit code and the last line of the run."""
        for node in self.nodes:
            self._tell(node, do="end", code=code, line=line)

    def dissolve(self) -> None:
        """Closes the listener, all connections and the agent of this machine."""
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
    """Informs the nodes that the leader is alive while it plans, for at most LEADER_PLANNING_SECONDS. Runs in its own
    thread."""
    line = encode_message({"do": "alive"})
    for node in list(fleet.nodes) if fleet.outside.clock() < fleet._looked + LEADER_PLANNING_SECONDS else ():
        with contextlib.suppress(ValueError):  # another thread has closed the connection
            fleet._write(node, line)


def _remote_process_id(rank: int) -> int:
    """Returns the id that represents the process of a rank on another machine."""
    return -rank - 2
