"""Replicates in-memory snapshots between nodes, so that they survive the loss of a node. Each node runs a
`SnapshotServer` and a `SnapshotReplicator`, the leader also a `ReplicationCoordinator`.

`SnapshotServer` serves the snapshots of its node. Clients (ranks and replicators of other nodes) read the memory over
the network and never write to it. A request is one line, {"key", "rank", "begin", "size"}. The response is one line,
{"size", "whole"}, followed by `size` bytes. `whole` is the total size of the memory. At the end of the memory, the
server sends fewer bytes than requested. If the memory does not exist, it sends none. The listener authenticates clients
(core/secure_channel.py).

`SnapshotReplicator` copies the newest complete snapshots of another node's ranks (a replica), while training continues.
A node stores the replica of at most one other node. Guarantees:
- The header of a replica names a snapshot only when all bytes of the snapshot are present and match the digest that the
  rank wrote. Until then the previous snapshot stays valid.
- A replica is stored and served like a local snapshot (shared_files.py). It needs memory for two snapshots.

`ReplicationCoordinator` decides which step the nodes replicate, in rounds. Guarantees:
- After the first complete round, there is always a step for which every rank has a snapshot, and a replica of it on
  another node. This includes the ranks of the leader.
- Ranks overwrite this step only when the next replicated step is complete everywhere. The loss of a node costs the
  steps since the replicated step. If the leader is lost, the next leader finds the snapshots and replicas of the other
  nodes (snapshot_inventory.py).

A round replicates the newest step of rank 0. The nodes with ranks form a ring, the leader first. Each node copies the
snapshots of the node before it in the ring. The leader copies those of the last node, even if it has no ranks itself.
If a step is overwritten before it is copied, later rounds request a step further ahead, at most MAX_STEPS_AHEAD. After
ROUNDS_BEFORE_SHRINK complete rounds in a row, this distance shrinks by one step. As many late rounds in a row at the
maximum distance are reported, once until a round is complete. After a round the links are idle for
as long as the copy took. While a round waits for its step, it does not load the links. Let the distance be `ahead`
steps, and let a copy take the time of c steps. Then the loss of a node costs at most ahead + 3 c steps. If a copy takes
less than half a step, the loss costs at most one step.
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
    ROW_BYTES,
    ROW_SUMS_KEY,
    SNAPSHOT_TIMEOUT_SECONDS,
    SnapshotClient,
    SnapshotHeader,
    history_of,
    is_index,
    rewrite_history,
)
from meshwright.elastic.shared_files import SharedFileStore, SnapshotLocations

OpenSnapshot = Callable[[str, int], int | None]
"""A function that gets the key of a store and a rank. It returns a new descriptor of the rank's snapshot file, which
the caller closes, or None if there is no file. (The store may close its own descriptor at any time.)"""


class SnapshotServer:
    """Serves the files that `find` returns. `host`: the address to listen on; the system chooses the port. `token`: the
    secret that clients must know. If a thread fails, `failed` receives a line."""

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
            return  # the client has disconnected or is silent, or its request is malformed
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
"""The time between two checks for a snapshot of the requested step."""

FETCH_BYTES = 4 << 20
"""The maximum size of one read."""

REPLICA_SLOTS = 2
"""The number of snapshot slots in the file of a replica."""


class StreamDigest:
    """The digest of a slot whose bytes are read in order. `row_sums`: whether an accelerator has written the slot
    ([Note: row sums] in checkpoint/memory_checkpoint.py)."""

    def __init__(self, row_sums: bool) -> None:
        self._hash, self._columns = xxhash.xxh3_64(), None
        if row_sums:
            import numpy as np

            self._columns = np.zeros(ROW_BYTES // 8, np.int64)

    def update(self, part: memoryview) -> None:
        """Adds the next bytes: whole rows, unless these are the last bytes."""
        if self._columns is None:
            self._hash.update(part)
            return
        import numpy as np

        words = np.frombuffer(bytes(part) + bytes(-len(part) % ROW_BYTES), np.int64).reshape(-1, ROW_BYTES // 8)
        self._hash.update(words.sum(1).data)
        self._columns += words.sum(0)

    def finish(self, state: memoryview) -> int:
        """Returns the digest of the slot with the run state `state`."""
        if self._columns is not None:
            self._hash.update(self._columns.data)
        self._hash.update(state)
        return self._hash.intdigest()


class ReplicationRequest(NamedTuple):
    """A request to copy the snapshots of `step` in the store `key` from the snapshot server at `address`. `number`
    identifies the request. `files`: by rank, the descriptor of the replica's file, which the replicator closes."""

    number: int
    key: str
    step: int
    address: str
    files: Mapping[int, int]


class SnapshotReplicator:
    """Copies snapshots of another node in a background thread. After each request it calls `done` with the request
    number, whether the copy is complete, the seconds of copying, and an error text. The text is '' if the step was
    overwritten before it was copied."""

    def __init__(self, token: str, done: Callable[[int, bool, float, str], None]) -> None:
        self._token, self._done = token, done
        self._orders: queue.SimpleQueue[ReplicationRequest | None] = queue.SimpleQueue()
        self._latest: ReplicationRequest | None = None
        self._ranks: deque[Collection[int]] = deque(maxlen=2)
        self._clients: dict[tuple[str, str, int], SnapshotClient] = {}
        self._seconds = 0.0
        self._names = threading.Lock()
        """The lock for naming a snapshot in a header, so that none is named after `close`."""
        start_background_thread("mirror", self._run, self._fail)

    def order(self, order: ReplicationRequest) -> None:
        """Queues a request. This cancels the previous request if it is in progress."""
        self._latest = order
        self._ranks.append(order.files.keys())
        self._orders.put(order)

    @property
    def ranks(self) -> set[int]:
        """Returns the ranks of the last two requests. The replicas of the earlier request are needed until those of the
        last request are complete."""
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
        """Reports the request in progress as failed, since the thread itself has failed with `line`."""
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
        if not is_index(there, index):
            return False
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
                # A cancelled round has already copied this step. Ranks may have repeated the step, with equal results.
                rewrite_history(here, order.step, history_of(there, order.step))
                return True
            here.forget(order.step - 1)  # if the replica has this step or a later one, it is from before a rollback
            slot, digest = here.take(REPLICA_SLOTS), StreamDigest(bool(json.loads(index).get(ROW_SUMS_KEY)))
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
                found = digest.finish(part)
            if not there.is_digest(order.step, found, index):
                return False
            with self._names:
                if order is not self._latest:
                    return False
                here.name(slot, order.step, found, size, history_of(there, order.step))
        return True

    def _reached(self, order: ReplicationRequest, rank: int) -> SnapshotClient:
        place = order.address, order.key, rank
        if place not in self._clients:
            self._clients = {saved: shared_fds for saved, shared_fds in self._clients.items() if saved[:2] == place[:2]}
            self._clients[place] = SnapshotClient(order.address, self._token, order.key, rank)
        return self._clients[place]

    def _await(self, order: ReplicationRequest, client: SnapshotClient) -> SnapshotHeader | None:
        """Waits until the other node has a snapshot of the requested step. Returns the header of its file, or None if
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
"""If the step of a round has existed for this time and is not copied, the round is cancelled and the next one begins.
"""

RETRY_SECONDS = 1.0
"""The minimum time between a failed round and the next round."""


class ReplicatedNode(Protocol):
    """A node other than the leader's. `lender`: the address of its snapshot server. `ranks`: its living ranks."""

    name: str
    lender: str
    ranks: dict[int, int]


class ReplicationCoordinator:
    """Coordinates replication rounds on the leader. `here`: the address of the leader's snapshot server. `homes`: the
    record of snapshot locations. `mirror`: the replicator of the leader's node. `tell` sends a message to a node.

    A failed round is followed by the next round. If several rounds in a row fail, only the first failure is reported
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
        """The error text of the current round, or ''."""
        self._is_degraded = False
        """Whether a failure was reported and no round has been complete since."""
        self._there = 0.0
        """The time when the step of the current round was first available, or 0."""
        self._where: dict[int, str] = {}
        self._failed = False
        self._whole = self._step = self._ahead = 0
        self._calm = 0
        """The number of complete rounds in a row, or minus the number of late rounds in a row at MAX_STEPS_AHEAD."""
        self._seconds = self._next = 0.0

    def begin(self, holdings: SharedFileStore) -> None:
        """Records that a generation starts, whose ranks write their snapshots to `holdings`."""
        if self._holdings is not holdings:
            self._whole = 0
        self._holdings = holdings
        self._waits.clear()

    def forget(self) -> None:
        """Discards all replicas after a rollback of the run, which has made them invalid."""
        self.homes.forget()
        self._whole = 0
        self._waits.clear()

    def look(self, nodes: Sequence[ReplicatedNode], others: int, own: Sequence[int] = ()) -> None:
        """Starts a round if none is in progress and there is a new step to replicate. The leader calls it several times
        a second. `others`: the number of ranks on other nodes. `own`: the ranks of the leader's node."""
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
        except OSError as error:  # the leader has no descriptor left, which must not end training
            self.heard({"number": message["number"], "whole": False, "seconds": 0.0, "why": str(error)})

    def heard(self, message: IpcMessage) -> None:
        """Handles the message `mirrored`, the result of one replication request."""
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
            self._count_overwritten()
        elif self._holdings is not None:
            self._calm = max(self._calm, 0) + 1
            if self._calm == ROUNDS_BEFORE_SHRINK:
                self._ahead, self._calm = max(self._ahead - 1, 0), 0
            self._whole = self._step
            self.homes.mirrored(self._holdings.key, self._where)
            if self._is_degraded:
                self._is_degraded = False
                line = Message("snapshots are mirrored again, at step {step}", step=self._step)
                self._reports.append({"event": "notice", "line": line})

    def _limit_round(self, newest: int) -> None:
        """Cancels the current round if its step has been available for ROUND_TIMEOUT_SECONDS. `newest`: the newest step
        of rank 0."""
        if newest < self._step:
            return
        self._there = self._there or self._clock()
        if self._clock() > self._there + ROUND_TIMEOUT_SECONDS:
            self._waits.clear()
            self._degrade(Message("not done after {seconds:.0f} s", seconds=ROUND_TIMEOUT_SECONDS))

    def _count_overwritten(self) -> None:
        """Counts a round whose step was overwritten before it was copied. The next round requests a step further ahead.
        ROUNDS_BEFORE_SHRINK such rounds in a row at MAX_STEPS_AHEAD are reported."""
        self._calm = min(self._calm, 0) - 1 if self._ahead == MAX_STEPS_AHEAD else 0
        self._ahead = min(self._ahead + 1, MAX_STEPS_AHEAD)
        if self._calm == -ROUNDS_BEFORE_SHRINK:
            why = Message(
                "in {rounds} rounds in a row, ranks overwrote their snapshots before they were copied",
                rounds=ROUNDS_BEFORE_SHRINK,
            )
            self._degrade(why)

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
        """Returns the new events for the log: replication has failed, or works again."""
        reports, self._reports = self._reports, []
        return reports

    @property
    def ranks(self) -> set[int]:
        """Returns the ranks whose replicas are on the leader's node."""
        return self._mirror.ranks

    def close(self) -> None:
        """Closes the replicator of the leader's node."""
        self._mirror.close()

    def lost(self) -> None:
        """Cancels the current round after the loss of a node."""
        self._waits.clear()


def replication_request(message: IpcMessage, holdings: SharedFileStore) -> ReplicationRequest:
    """Returns the request that `message` describes, with descriptors of the replicas' files in `holdings` on this node.
    Raises OSError if no descriptor is left."""
    files: dict[int, int] = {}
    try:
        for rank in message["ranks"]:
            files[rank] = holdings.mirrored(rank)
    except OSError:
        for file in files.values():
            os.close(file)
        raise
    return ReplicationRequest(message["number"], message["key"], message["step"], message["address"], files)
