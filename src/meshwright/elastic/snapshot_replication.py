"""Replicates in-memory snapshots between nodes: a snapshot server and a replicator on each node, and a coordinator on
the leader.

`SnapshotServer` serves the snapshots of one node to the ranks of other nodes. Clients read the memory over the network
and never write to it. A request is one line, {"key", "rank", "begin", "size"}. The response is one line, {"size",
"whole"}, followed by `size` bytes. `whole` is the total size of the memory. At the end of the memory, the server sends
fewer bytes than requested; if the memory does not exist, it sends none. The listener authenticates clients
(core/secure_channel.py).

A replica contains the newest complete snapshots of the ranks of another node, so that they survive the loss of that
node. A node stores the replica of at most one other node and fetches it while training continues.

Guarantees of a replica:
- Its header names a snapshot only when all bytes of the snapshot are present and match the digest that the rank wrote.
  Until then the previous snapshot stays valid.
- It is stored and served like a local snapshot (shared_files.py). It needs memory for two snapshots.

`ReplicationCoordinator` decides which step has replicas and which step is replicated next.

Guarantees of the coordinator:
- After the first complete round, there is always a step of which every rank has a snapshot, and a replica on another
  node. This includes the ranks of the leader.
- Ranks overwrite this step only when the next replicated step is complete everywhere. The loss of a node costs the
  steps since then. If the leader is lost, the next leader finds the snapshots and replicas of the other nodes
  (snapshot_inventory.py).

Rule: The step to replicate is the newest step of rank 0. The nodes with ranks form a ring, the leader first. The
snapshots of each node are copied by the next node, and those of the last node by the leader, also if it has no ranks.
If a step is overwritten before it is copied, later rounds request a step further ahead, at most MAX_STEPS_AHEAD. After
ROUNDS_BEFORE_SHRINK complete rounds in a row, this distance shrinks by one step. After a round the links are idle for
as long as the copy took. While a round waits for a step, it does not load the links. With a distance of `ahead` steps
and copies that take c steps, the loss of a node costs at most ahead + 3 c steps. Where a copy takes less than half a
step, it costs at most one.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import xxhash

from meshwright.core.background_thread import start_background_thread
from meshwright.core.connection_listener import MAX_UNAUTHENTICATED_BYTES
from meshwright.core.ipc import HeartbeatField, IpcMessage, parse_message
from meshwright.core.messages import Message
from meshwright.core.secure_channel import SecureListener, detect_dead_peer
from meshwright.core.snapshots import (
    HEADER_BYTES,
    SNAPSHOT_TIMEOUT_SECONDS,
    SnapshotClient,
    SnapshotHeader,
    history_of,
    rewrite_history,
)
from meshwright.elastic.shared_files import SharedFileStore, SnapshotLocations

OpenSnapshot = Callable[[str, int], int | None]
"""A function (key of a store, rank) that opens the snapshot file of the rank again. It returns a new descriptor,
because the store may close its own at any time. The caller closes the new descriptor."""


class SnapshotServer:
    """Serves the files that `find` returns, on a separate address. If a thread fails, `failed` receives a line."""

    def __init__(
        self, host: str, token: str, find: OpenSnapshot, failed: Callable[[str], None] = lambda line: None
    ) -> None:
        self._find, self._failed = find, failed
        self._door = SecureListener(host, 0, token, {}, self._serve)
        self.address = f"{self._door.host}:{self._door.port}"

    def _serve(self, end: socket.socket, _: IpcMessage) -> None:
        start_background_thread("lender", lambda: self._lend(end), self._failed, restarts=False)

    def _lend(self, end: socket.socket) -> None:
        try:
            detect_dead_peer(end, SNAPSHOT_TIMEOUT_SECONDS)
            with end, end.makefile("rb") as lines:
                while line := lines.readline(MAX_UNAUTHENTICATED_BYTES):
                    self._answer(end, parse_message(line))
        except (OSError, ValueError, KeyError, TypeError):
            return  # the client disconnected or is silent, or its request is malformed
        finally:
            end.close()

    def _answer(self, end: socket.socket, request: IpcMessage) -> None:
        file = self._find(str(request["key"]), int(request["rank"]))
        try:
            whole = os.fstat(file).st_size if file is not None else 0
            begin = int(request["begin"])
            size = max(0, min(int(request["size"]), whole - begin)) if begin >= 0 else 0
            end.sendall(json.dumps({"size": size, "whole": whole}).encode() + b"\n")
            while size and file is not None:
                sent = os.sendfile(end.fileno(), file, begin, size)
                begin, size = begin + sent, size - sent
        finally:
            if file is not None:
                os.close(file)

    def close(self) -> None:
        """Stops accepting connections."""
        self._door.close()


POLL_SECONDS = 0.005
"""Seconds between two checks for a snapshot of the requested step."""

FETCH_BYTES = 4 << 20
"""The number of bytes that one request reads."""

REPLICA_SLOTS = 2
"""The number of snapshot slots in the file of a replica."""


class ReplicationRequest(NamedTuple):
    """A request to copy the snapshots of `step` from the snapshot server at `address`. `files` maps each rank to the
    open file of its replica, which is closed afterwards."""

    number: int
    key: str
    step: int
    address: str
    files: Mapping[int, int]


class SnapshotReplicator:
    """Copies snapshots of another node in a background thread. After each request it calls `done` with four values: the
    request number, whether the copy is complete, the seconds of copying, and what failed. The last value is '' if the
    step was only overwritten."""

    def __init__(self, token: str, done: Callable[[int, bool, float, str], None]) -> None:
        self._token, self._done = token, done
        self._orders: queue.SimpleQueue[ReplicationRequest | None] = queue.SimpleQueue()
        self._latest: ReplicationRequest | None = None
        self._ranks: deque[Collection[int]] = deque(maxlen=2)
        self._clients: dict[tuple[str, str, int], SnapshotClient] = {}
        self._seconds = 0.0
        self._names = threading.Lock()
        """Held while a snapshot is named, so that none is named after `close`."""
        start_background_thread("mirror", self._run, self._fail)

    def order(self, order: ReplicationRequest) -> None:
        """Queues a request. If the previous request is still in progress, it is cancelled."""
        self._latest = order
        self._ranks.append(order.files.keys())
        self._orders.put(order)

    @property
    def ranks(self) -> set[int]:
        """The ranks of the last two requests. The replicas of the earlier request are needed until those of the later
        one are complete."""
        return {rank for ranks in self._ranks for rank in ranks}

    def close(self) -> None:
        """Cancels the request in progress and ends the thread. No snapshot becomes complete afterwards."""
        with self._names:
            self._latest = None
        self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._seconds, why = 0.0, ""
            try:
                whole = all(self._copy(order, rank, file) for rank, file in order.files.items())
            except Exception as error:  # the node is lost or silent, or its response is not a snapshot
                whole, why = False, " ".join(f"{order.address}: {type(error).__name__}: {error}".split())
                self._clients.clear()
            finally:
                for file in order.files.values():
                    os.close(file)
            if order is self._latest:
                self._done(order.number, whole, self._seconds, why)

    def _fail(self, line: str) -> None:
        """Ends the request in progress because the thread itself has failed."""
        if (order := self._latest) is not None:
            self._done(order.number, False, self._seconds, line)

    def _copy(self, order: ReplicationRequest, rank: int, file: int) -> bool:
        shared_fds = self._reached(order, rank)
        there = self._await(order, shared_fds)
        if there is None:
            return False
        began = time.monotonic()
        try:
            return self._fill(order, rank, file, shared_fds, there)
        finally:
            self._seconds += time.monotonic() - began

    def _fill(
        self, order: ReplicationRequest, rank: int, file: int, client: SnapshotClient, there: SnapshotHeader
    ) -> bool:
        index = client.fetch(HEADER_BYTES, there.index_size)
        if os.fstat(file).st_size != there.whole:
            os.ftruncate(file, 0)
            os.ftruncate(file, there.whole)
        with (
            mmap.mmap(file, there.whole) as memory,
            memoryview(memory) as view,
            view[:HEADER_BYTES] as first,
            first.cast("Q") as words,
        ):
            here = SnapshotHeader(words)
            if here.layout != there.layout:
                words[:] = memoryview(bytes(HEADER_BYTES)).cast("Q")
                here.lay(index, there.size, len(there.slots))
                view[HEADER_BYTES : HEADER_BYTES + len(index)] = index
            if order.step in here.steps and there.is_digest(order.step, here.digest(order.step), index):
                # an earlier round, cancelled by a lost node, has copied it; ranks may have repeated the step since then
                rewrite_history(here, order.step, history_of(there, order.step))
                return True
            here.forget(order.step - 1)  # this step and later steps of the replica predate a rollback
            slot, digest = here.take(REPLICA_SLOTS), xxhash.xxh3_64()
            (begin, size), to = (there.place_of_data(order.step), there.size), here.begin(slot)
            for at in range(0, size, FETCH_BYTES):
                if order is not self._latest:
                    return False
                with view[to + at : to + min(at + FETCH_BYTES, size)] as part:
                    client.fill(begin + at, part)
                    digest.update(part)
            (begin, size), to = there.place_of_state(order.step), to + there.place_of_state(order.step)[0] - begin
            with view[to : to + size] as part:
                client.fill(begin, part)
                digest.update(part)
            if not there.is_digest(order.step, digest.intdigest(), index):
                return False
            with self._names:
                if order is not self._latest:
                    return False
                here.name(slot, order.step, digest.intdigest(), size, history_of(there, order.step))
        return True

    def _reached(self, order: ReplicationRequest, rank: int) -> SnapshotClient:
        place = order.address, order.key, rank
        if place not in self._clients:
            self._clients = {saved: shared_fds for saved, shared_fds in self._clients.items() if saved[:2] == place[:2]}
            self._clients[place] = SnapshotClient(order.address, self._token, order.key, rank)
        return self._clients[place]

    def _await(self, order: ReplicationRequest, client: SnapshotClient) -> SnapshotHeader | None:
        """Waits for the requested step, and returns the header of the snapshot file that contains it. Returns None if
        the step was overwritten or the request was cancelled."""
        while order is self._latest:
            words = client.fetch(0, HEADER_BYTES)
            head = SnapshotHeader(memoryview(words.ljust(HEADER_BYTES, b"\0")).cast("Q"))
            if head.is_laid and order.step in head.steps:
                return head
            if head.is_laid and max(head.steps, default=0) > order.step:
                return None
            time.sleep(POLL_SECONDS)
        return None


MAX_STEPS_AHEAD, ROUNDS_BEFORE_SHRINK = 64, 8
ROUND_TIMEOUT_SECONDS = 600.0
"""Seconds after which a round is cancelled if its step exists and has not been copied. Then the next round begins."""

RETRY_SECONDS = 1.0
"""Seconds between a failed round and the next round."""


class ReplicatedNode(Protocol):
    """A node, as the coordinator needs it: its name, the address of its snapshot server and its ranks."""

    name: str
    lender: str
    ranks: dict[int, int]


class ReplicationCoordinator:
    """Coordinates replication rounds. `tell` sends a message to a node. `mirror` is the replicator of the leader's
    node, and `here` is the address of the leader's snapshot server.

    After a failed round the next round begins. Of several failed rounds in a row, only the first is reported
    (`take_reports`).
    """

    def __init__(
        self,
        here: str,
        homes: SnapshotLocations,
        mirror: SnapshotReplicator,
        tell: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.here, self.homes, self._mirror, self._tell, self._clock = here, homes, mirror, tell, clock
        self._holdings: SharedFileStore | None = None
        self._numbers = itertools.count()
        self._waits: set[int] = set()
        self._reports: list[IpcMessage] = []
        self._why = ""
        """What failed in the current round. `_is_degraded`: whether a failure was reported."""
        self._is_degraded = False
        self._there = 0.0
        """The time at which the step of the current round was first available, or 0."""
        self._where: dict[int, str] = {}
        self._failed = False
        self._whole = self._step = self._ahead = self._calm = 0
        self._seconds = self._next = 0.0

    def begin(self, holdings: SharedFileStore) -> None:
        """Starts a generation whose snapshots are stored in `holdings`."""
        if self._holdings is not holdings:
            self._whole = 0
        self._holdings = holdings
        self._waits.clear()

    def forget(self) -> None:
        """Discards all replicas, because the run rolled back to an earlier step."""
        self.homes.forget()
        self._whole = 0
        self._waits.clear()

    def look(self, nodes: Sequence[ReplicatedNode], others: int, own: Sequence[int] = ()) -> None:
        """Starts the next round when none is in progress and there is a newer step to replicate. `others` is the number
        of ranks on other nodes, `own` the ranks of the leader."""
        holdings = self._holdings
        if holdings is None or not holdings.is_open:
            return
        newest = holdings.pulse(0).read(HeartbeatField.snapshot_step)
        if newest and not self.homes.is_settled and holdings.snapshot_step:
            self.homes.settle()
        if self._waits:
            self._limit_round(newest)
        if self._waits or self._clock() < self._next:
            return
        if not newest or newest + self._ahead <= self._whole:
            return
        holders = [node for node in nodes if node.ranks and node.lender]
        if not others or sum(len(node.ranks) for node in holders) != others:
            return
        self._seconds, self._step, self._failed, self._where = 0.0, newest + self._ahead, False, {}
        self._why, self._there = "", 0.0
        saved = [self._whole, self._step]
        holdings.keep(saved)
        for node in nodes:
            self._tell(node, do="keep", key=holdings.key, steps=saved)
        ring = [(self.here, sorted(own))] if own else []
        ring += [(node.lender, sorted(node.ranks)) for node in holders]
        copiers = [*(holders if own else holders[1:]), None]
        for (address, ranks), behind in zip(ring, copiers, strict=True):
            number = next(self._numbers)
            self._waits.add(number)
            self._where |= dict.fromkeys(ranks, behind.lender if behind is not None else self.here)
            message = {"key": holdings.key, "number": number, "step": self._step, "address": address, "ranks": ranks}
            if behind is None:
                self._order_here(message, holdings)
            else:
                self._tell(behind, do="mirror", **message)

    def _order_here(self, message: IpcMessage, holdings: SharedFileStore) -> None:
        try:
            self._mirror.order(replication_request(message, holdings))
        except OSError as error:  # no descriptor is left here: training continues without this round
            self.heard({"number": message["number"], "whole": False, "seconds": 0.0, "why": str(error)})

    def heard(self, message: IpcMessage) -> None:
        """Handles the result of one replication request."""
        if message["number"] not in self._waits:
            return
        self._waits.remove(message["number"])
        self._failed = self._failed or not message["whole"]
        self._why = self._why or str(message.get("why", ""))
        self._seconds = max(self._seconds, float(message["seconds"]))
        if self._waits:
            return
        self._next = self._clock() + self._seconds
        if self._failed and self._why:
            self._degrade(self._why)
        elif self._failed:
            self._ahead, self._calm = min(self._ahead + 1, MAX_STEPS_AHEAD), 0
        elif self._holdings is not None:
            self._calm += 1
            if self._calm == ROUNDS_BEFORE_SHRINK:
                self._ahead, self._calm = max(self._ahead - 1, 0), 0
            self._whole = self._step
            self.homes.mirrored(self._holdings.key, self._where)
            if self._is_degraded:
                self._is_degraded = False
                line = Message("snapshots are mirrored again, at step {step}", step=self._step)
                self._reports.append({"event": "notice", "line": line})

    def _limit_round(self, newest: int) -> None:
        """Cancels the current round if its step has been available for ROUND_TIMEOUT_SECONDS."""
        if newest < self._step:
            return
        self._there = self._there or self._clock()
        if self._clock() > self._there + ROUND_TIMEOUT_SECONDS:
            self._waits.clear()
            self._degrade(Message("not done after {seconds:.0f} s", seconds=ROUND_TIMEOUT_SECONDS))

    def _degrade(self, why: str) -> None:
        self._next = self._clock() + max(self._seconds, RETRY_SECONDS)
        if not self._is_degraded:
            self._is_degraded = True
            since = Message("step {saved}", saved=self._whole) if self._whole else Message("the last checkpoint")
            line = Message(
                "snapshots are not mirrored: a lost node now costs the steps since {since} ({why})",
                since=since,
                why=why,
            )
            self._reports.append({"event": "degraded", "line": line, "decision": Message("tried again")})

    def take_reports(self) -> list[IpcMessage]:
        """Returns the reports since the last call: replication has failed, or works again."""
        reports, self._reports = self._reports, []
        return reports

    @property
    def ranks(self) -> set[int]:
        """The ranks whose snapshots the leader's node replicates."""
        return self._mirror.ranks

    def close(self) -> None:
        """Closes the replicator of this node."""
        self._mirror.close()

    def lost(self) -> None:
        """Cancels the current round after the loss of a node."""
        self._waits.clear()


def replication_request(message: IpcMessage, holdings: SharedFileStore) -> ReplicationRequest:
    """Returns the request that a message describes, with the files of this node."""
    files: dict[int, int] = {}
    try:
        for rank in message["ranks"]:
            files[rank] = holdings.mirrored(rank)
    except OSError:
        for file in files.values():
            os.close(file)
        raise
    return ReplicationRequest(message["number"], message["key"], message["step"], message["address"], files)
