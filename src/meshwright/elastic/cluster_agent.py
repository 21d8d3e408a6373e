"""Manages the ranks of all machines of a run on several machines: those of the leader (the first machine, where the
supervisor runs) and those of the connected nodes (node.py). The supervisor uses it in place of a LocalAgent.

Guarantees:
- Ranks are assigned to machines in order, to the leader's machine first.
- A node is lost if its connection ends or if it is silent for NODE_TIMEOUT_SECONDS. Each rank of a lost node is
  reported once as failed, with the name of the node.
- A node may join or leave at any time. `places` is the current number of devices.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.core.cgroup_limits import raise_open_file_limit
from meshwright.core.ipc import IpcMessage, message_line
from meshwright.core.messages import Message
from meshwright.core.rendezvous_store import store_key_prefix
from meshwright.core.secure_channel import TOKEN_MISMATCH, TOKEN_VARIABLE, SecureChannel
from meshwright.elastic.devices import DeviceIds, node_of_device
from meshwright.elastic.leader_snapshots import LeaderSnapshots
from meshwright.elastic.local_agent import LocalAgent, ReadinessPoller
from meshwright.elastic.node import NODE_KEEPALIVE_SECONDS, NODE_TIMEOUT_SECONDS, TICK_SECONDS
from meshwright.elastic.proc_stats import ProcStats
from meshwright.elastic.shared_files import SharedFileStore, SnapshotLocations, ranks_stored_at, resolve_locations
from meshwright.elastic.snapshot_inventory import AdoptedSnapshots, AdoptionPolicy

REFUSAL_LOG_SECONDS = 60.0
"""The minimum time between two lines about refusals for one reason."""


class RefusalLog:
    """Reports connections that the listener for nodes has refused, with at most one line per reason every
    REFUSAL_LOG_SECONDS. Any thread may call it, with the reason and the address. `say` receives the lines."""

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
                    "a node at {host} was refused, because its token differs ({count} since the last such line): "
                    "{remedy}",
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


LEADER_PLANNING_SECONDS = 300.0
"""The leader handles no messages while it plans. If planning takes longer than this, the leader's keepalive messages
stop, and nodes then count the leader as lost."""

MAX_HEARTBEATS_PER_SECOND = 800.0
"""All nodes together send at most this number of heartbeat messages per second. With more than 40 nodes, each node
therefore sends less often than every TICK_SECONDS."""

COALESCE_MIN_NODES, COALESCE_SECONDS = 100, 0.02
"""With more nodes than COALESCE_MIN_NODES, there is always a message to read. So the leader waits COALESCE_SECONDS
before it reads, in order to handle the messages of several nodes together."""

LEADER_KEEPALIVE_SECONDS = NODE_TIMEOUT_SECONDS / 5
"""The leader sends a message to each node at least this often."""


@dataclass(eq=False)
class _NodeConnection:
    name: str
    link: SecureChannel
    devices: int
    heard: float
    first: int = -1
    """The first device id of the node (devices.py). The ids of its devices are consecutive."""
    lender: str = ""
    """The address of the node's snapshot server."""
    copies: Any = None
    """The inventory of the snapshots that the node has retained from a lost leader (snapshot_inventory.py)."""
    ranks: dict[int, int] = field(default_factory=dict)
    """The living ranks of this node. The value is the generation of the rank."""
    leaving: bool = False
    is_lost: bool = False


class EventInbox:
    """Passes messages from other threads to the event loop of a leader, and wakes the loop."""

    def __init__(self, poller: ReadinessPoller) -> None:
        self.poller = poller
        self._queue: queue.SimpleQueue[tuple[socket.socket | None, IpcMessage]] = queue.SimpleQueue()
        self.gathered: list[IpcMessage] = []
        """The events that the loop has gathered, but that nobody has handled yet."""
        self.unheard: deque[tuple[_NodeConnection, IpcMessage | None]] = deque()
        """The messages of nodes that were read, but not handled yet. None is the end of a connection."""
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        poller.add(self._woken.fileno(), None)

    def put(self, message: IpcMessage, end: socket.socket | None = None) -> None:
        """Queues a message. Any thread may call it. `end`: the socket of a node that has just connected, or None."""
        self._queue.put((end, message))
        with contextlib.suppress(BlockingIOError):  # the socket is full, so that the loop wakes anyway
            self._waker.send(b"1")

    def take(self) -> Iterator[tuple[socket.socket | None, IpcMessage]]:
        """Yields the messages queued since the last call, as pairs (socket, message). The socket is that of a node that
        has just connected, otherwise None."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while not self._queue.empty():
            yield self._queue.get()

    def close(self) -> None:
        """Closes the poller and the descriptors."""
        for part in (self.poller, self._woken, self._waker):
            part.close()


class RemoteRanks:
    """The ranks of the nodes. `at`: the node of each rank."""

    def __init__(self) -> None:
        self.at: dict[int, _NodeConnection] = {}
        self.local: list[int] = []
        """The ranks on the leader's machine."""
        self._stats: dict[int, ProcStats] = {}

    def node_of(self, rank: int) -> _NodeConnection | None:
        """Returns the connected node that runs `rank`, or None for a rank on the leader's machine or on a lost node."""
        node = self.at.get(rank)
        return node if node is not None and not node.is_lost and rank in node.ranks else None

    def hear(self, rows: Sequence[Sequence[Any]]) -> None:
        """Records the process statistics that a node has sent. `rows`: for each process, the rank and the fields of
        ProcStats."""
        self._stats |= {_remote_process_id(rank): ProcStats(*stats) for rank, *stats in rows}

    def stats(self, process: int) -> ProcStats:
        """Returns the statistics of a rank by its id from `_remote_process_id`."""
        return self._stats.get(process, ProcStats())


class ClusterAgent(LocalAgent):
    """Manages the ranks of all machines. It runs on the leader's machine ("this machine")."""

    def __init__(
        self,
        logs: Path,
        warm: Sequence[str],
        host: str,
        port: int,
        token: str,
        devices: int,
        before: LocalAgent | None = None,
        nodes: int = 0,
    ) -> None:
        """Starts the fork server of this machine and listens on `host` and `port` for at most `nodes` nodes, which must
        know `token`. `logs`: the folder of log files. `devices`: the number of devices of this machine. `warm` and
        `before`: as for LocalAgent."""
        raise_open_file_limit(devices, nodes)
        super().__init__(logs / "fork-server.log", warm, {"MESHWRIGHT_ADDRESS": host, TOKEN_VARIABLE: token}, before)
        outside = self.outside
        self.devices = devices
        self.nodes: list[_NodeConnection] = []
        self._seats, self._remote = DeviceIds(devices), RemoteRanks()
        self.name_of = self._seats.name_of
        self._store: tuple[int, str] = (0, "")
        """The port and the secret of the rendezvous store, which the fork server of this machine runs."""
        self._inbox = EventInbox(outside.waiting())
        self._looked = outside.clock()
        self._over = threading.Event()
        self.homes: SnapshotLocations = SnapshotLocations()
        self._snapshots = LeaderSnapshots(outside, host, token, self.homes, self._inbox.put, _tell)
        me, refusals = {"logs": str(logs), "warm": list(warm)}, RefusalLog(self._refused)
        self._door = outside.door(
            host, port, token, me, lambda end, hello: self._inbox.put(hello, end), refusals, nodes
        )
        outside.repeat(lambda: _send_keepalives(self), LEADER_KEEPALIVE_SECONDS, self._over, self._degraded)

    @property
    def host(self) -> str:
        """Returns the address on which the leader listens for nodes."""
        return str(self._door.host)

    @property
    def port(self) -> int:
        """Returns the port on which the leader listens for nodes."""
        return self._door.port

    def _refused(self, line: str) -> None:
        self._inbox.put({"event": "refusal", "line": line})

    def _degraded(self, line: str) -> None:
        self._inbox.put({"event": "degraded", "line": line})

    # --- nodes

    @property
    def slots(self) -> tuple[int, ...]:  # type: ignore[override]
        """Returns the ids of all devices, except those of nodes that are leaving."""
        return self._seats.all_of([node for node in self.nodes if not node.leaving])

    def _lose(self, node: _NodeConnection, why: str, silent: float = 0.0) -> list[IpcMessage]:
        if node.is_lost:
            return []
        node.is_lost = True
        with contextlib.suppress(OSError):
            self._inbox.poller.remove(node.link.handle)
        with contextlib.suppress(OSError):
            node.link.close()
        if node not in self.nodes:
            return []
        self.nodes.remove(node)
        self.homes.alive.discard(node.lender)
        self._snapshots.rounds.lost()
        words = Message("was on node {node}, which {why}", node=node.name, why=why)
        lost = [
            {
                "event": "ended",
                "rank": rank,
                "generation": number,
                "status": -signal.SIGKILL,
                "words": words,
                "silent": silent,
            }
            for rank, number in node.ranks.items()
        ]
        return [*lost, {"event": "node_lost", "name": node.name, "why": why}]

    # --- the interface of LocalAgent

    def command(self, do: str, rank: int, **more: Any) -> None:
        """Sends a command to the fork server of the machine that runs `rank`, or that has the device to measure."""
        node = self._remote.node_of(rank)
        if do == "start" and "slot" in more["payload"]:  # the command measures the device `slot`
            node = node_of_device(self.nodes, slot := more["payload"]["slot"])
            more["local"] = [slot - (node.first if node else 0), 1]
        if node is None:
            super().command(do, rank, **more)
        else:
            _tell(node, do=do, rank=rank, **more)

    def start(
        self,
        what: IpcMessage,
        logs: Sequence[str],
        slots: Sequence[int],
        holdings: SharedFileStore,
        source: SharedFileStore,
    ) -> None:
        """Starts a rank for each log file in `logs`, as LocalAgent does. Each node with ranks gets two messages: the
        locations of the snapshots in `source`, and the description of its ranks."""
        here, nodes, number = (
            self._snapshots.server.address,
            {id(node): node for node in self.nodes},
            what["generation"],
        )
        homes = self._seats.seated(len(logs), slots, self.nodes)
        ranks: dict[int, list[tuple[int, int, str]]] = {place: [] for place in (id(None), *nodes)}
        for rank, (node, device) in enumerate(homes):
            ranks[id(node)].append((rank, device, logs[rank]))
        lenders = [node.lender if node else here for node, _ in homes]
        runs = self.homes.start(lenders, holdings.key, source.key)
        self._remote.at = {rank: node for rank, (node, _) in enumerate(homes) if node}
        self._remote.local = [rank for rank, (node, _) in enumerate(homes) if not node]
        job = self._snapshots.job
        settled = message_line({"do": "sources", "key": holdings.key, "source": source.key, "runs": runs, "job": job})
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
                _write(node, settled)
                _tell(node, do="start", **more, ranks=ranks[place], here=min(len(ranks[place]), node.devices))
        if holdings is source:
            holdings.release({*ranks_stored_at(runs, here), *self._snapshots.rounds.ranks})
        table = holdings.table(resolve_locations(runs, source.key, here, source.source))
        most = min(len(ranks[id(None)]), self.devices)
        for rank, device, log in ranks[id(None)]:
            memory = {"sources": table, "single_node": False, **holdings.places(rank)}
            super().command("start", rank, **what, log=log, local=[device, most], memory=memory)

    def adopt(self, policy: AdoptionPolicy | None) -> tuple[AdoptedSnapshots | None, list[str]]:
        """Adopts the snapshots that this machine and the connected nodes have retained from a lost leader
        (leader_snapshots.py)."""
        inventories = {node.lender: node.copies for node in self.nodes if node.copies}
        return self._snapshots.adopt(policy, inventories)

    def hold(self, holdings: SharedFileStore) -> None:
        """Registers `holdings`, which the snapshot server of this machine serves from now on."""
        self._snapshots.hold(holdings)

    def released(self) -> None:
        """Disconnects the nodes that are leaving and have no ranks, since their snapshots are no longer needed."""
        for node in [node for node in self.nodes if node.leaving and not node.ranks]:
            _tell(node, do="end", code=75, line=Message("this node left; the others go on"))

    def events(self, timeout: float) -> list[IpcMessage]:
        """Waits at most `timeout` seconds and returns the new events of all machines. It also admits new nodes, detects
        lost nodes and starts rounds of snapshot replication. After an OSError, the next call returns the events that
        had been read before the error."""
        self._gather(timeout)
        events, self._inbox.gathered = self._inbox.gathered, []
        return events

    def _gather(self, timeout: float) -> None:
        linger = COALESCE_SECONDS if len(self.nodes) > COALESCE_MIN_NODES else 0.0
        ready = self._inbox.poller.wait(timeout, linger, *(() if self.ended else (self.handle,)))
        local = super().events(0)
        self._inbox.gathered += local
        for event in local:
            if event["event"] == "ready":
                self._store = event["port"], event["secret"]
            elif event["event"] == "said" and (
                event["message"]["kind"] == "spike" or event["message"].get("source") in ("", "disk")
            ):
                self._snapshots.rounds.forget()
        _admit(self)
        now, before = self.outside.clock(), self._looked
        self._looked = now
        self._snapshots.rounds.look(self.nodes, len(self._remote.at), self._remote.local)
        for node in filter(None, ready):
            messages, ended = node.link.read()
            node.heard = now if messages else node.heard
            self._inbox.unheard += [(node, message) for message in messages]
            if ended:
                self._inbox.unheard.append((node, None))
        while self._inbox.unheard:
            node, message = self._inbox.unheard.popleft()
            self._inbox.gathered += (
                self._lose(node, Message("is gone")) if message is None else self._hear(node, message)
            )
        self._inbox.gathered += self._snapshots.rounds.take_reports()
        is_due = int(10 * now) != int(10 * before)  # timeouts are checked ten times a second, not after each message
        for node in [node for node in self.nodes if now > node.heard + NODE_TIMEOUT_SECONDS] if is_due else ():
            why = Message("has been silent for {seconds:.0f} s", seconds=NODE_TIMEOUT_SECONDS)
            self._inbox.gathered += self._lose(node, why, now - node.heard)

    def _hear(self, node: _NodeConnection, event: IpcMessage) -> list[IpcMessage]:
        if event["event"] == "lends":
            # The node joins only now, when the address of its snapshot server is known. Otherwise the snapshots of
            # ranks on the node could not be located.
            node.copies = event.get("copies")
            node.lender, node.first = (
                event["address"],
                self._seats.first_of(node.name, node.devices, [other.first for other in self.nodes]),
            )
            self.nodes.append(node)
            self.homes.alive.add(node.lender)
            self.nodes.sort(key=lambda node: node.link.hello["order"])
            return [{"event": "node_joined", "name": node.name, "devices": node.devices}]
        if event["event"] == "mirrored":
            self._snapshots.rounds.heard(event)
            return []
        if event["event"] == "ready":
            return []  # not needed: a pipe buffers the commands to a fork server that is not ready yet
        if event["event"] == "node_leaving":
            node.leaving = True
        elif event["event"] == "started":
            event["pid"] = _remote_process_id(event["rank"])
        # Only an exit in the current generation removes the rank: a rank of an earlier generation had the same index.
        elif event["event"] == "ended" and node.ranks.get(event["rank"]) == event["generation"]:
            del node.ranks[event["rank"]]
        elif event["event"] == "pulse":
            self._remote.hear(event["signs"])
        return [event | {"name": node.name}]

    def signs(self, process: int) -> ProcStats:
        """Returns the statistics of a rank's process. A negative id denotes a process on a node."""
        return self._remote.stats(process) if process < 0 else super().signs(process)

    @property
    def is_blind(self) -> bool:
        """Returns whether the messages of a node are overdue. A node sends at least one message every
        NODE_KEEPALIVE_SECONDS. The limit here is shorter than the `patience` of the hang detector, so that no rank is
        blamed for a broken link."""
        heard = self.outside.clock() - 1.5 * max(NODE_KEEPALIVE_SECONDS, len(self.nodes) / MAX_HEARTBEATS_PER_SECOND)
        return any(node.heard < heard for node in self.nodes)

    def again(self) -> None:
        """Restarts the fork servers of all machines."""
        super().again()
        for node in self.nodes:
            _tell(node, do="again")

    def end(self, code: int, line: str) -> None:
        """Sends all nodes the exit code and the last line of the run, so that they end."""
        for node in self.nodes:
            _tell(node, do="end", code=code, line=line)

    def dissolve(self) -> None:
        """Closes the listener, all connections and the agent of this machine."""
        self._over.set()
        self._door.close()
        self._snapshots.close()
        for node in self.nodes:
            node.link.close()
        self.close()
        self._inbox.close()


def _admit(fleet: ClusterAgent) -> None:
    """Handles the messages of other threads, among them the nodes that have connected."""
    for end, hello in fleet._inbox.take():
        if end is None:
            if hello["event"] in ("refusal", "degraded"):
                fleet._inbox.gathered.append(hello)
            else:
                fleet._snapshots.rounds.heard(hello)
            continue
        try:
            name, devices, _ = str(hello["name"]), int(hello["devices"]), hello["order"] + 0
        # An authenticated client need not be a node: a snapshot client may connect to the wrong port.
        except (KeyError, TypeError, ValueError):
            end.close()
            continue
        try:
            node = _NodeConnection(name, fleet.outside.link(end, hello), devices, fleet.outside.clock())
            fleet._inbox.poller.add(node.link.handle, node)
        except OSError as error:  # the node has disconnected, or no descriptor is left; the node will try again
            end.close()
            line = Message("node {node} was not admitted: {reason}", node=name, reason=error.strerror)
            fleet._inbox.gathered.append({"event": "refusal", "line": line})


def _tell(node: _NodeConnection, **message: Any) -> None:
    _write(node, message_line(message))


def _write(node: _NodeConnection, line: bytes) -> None:
    with contextlib.suppress(OSError):  # the node may be lost, which `events` detects
        node.link.write(line)


def _send_keepalives(fleet: ClusterAgent) -> None:
    """Sends a keepalive message to each node. A separate thread calls it, so that nodes do not count the leader as lost
    while it plans. It sends nothing if the leader's loop has not run for LEADER_PLANNING_SECONDS."""
    line = message_line({"do": "alive"})
    for node in list(fleet.nodes) if fleet.outside.clock() < fleet._looked + LEADER_PLANNING_SECONDS else ():
        with contextlib.suppress(ValueError):  # the main thread has closed the connection
            _write(node, line)


def _remote_process_id(rank: int) -> int:
    """Returns the negative number that represents the process id of a rank on a node."""
    return -rank - 2
