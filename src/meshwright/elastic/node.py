"""Runs the ranks of one node in a run on several machines. `meshwright train` uses it on every machine except the
leader's. The leader's supervisor controls the ranks through a connection (cluster_agent.py).

Guarantees:
- The ranks of this node end if the leader closes the connection or is silent for NODE_TIMEOUT_SECONDS. So no
  disconnected part of the cluster continues separately.
- On SIGTERM the node informs the leader. The leader continues with the other nodes, and reads the snapshots of this
  node before the node ends.
- No process is left behind.
- If the leader is lost, the node retains its snapshots and replicas for the next leader (snapshot_inventory.py).

Messages from the leader:

    sources: key: the set of snapshots that ranks write; source, runs: the set from which they resume, and its locations
        (shared_files.py); job: the digest of job and run.
    start: the job of the ranks, and the index, device and log of each rank on this node.
    tell, signal: forwarded to the fork server (train/forkserver.py).
    again: kill all ranks with their fork server, since a rank may not end otherwise, and start a new fork server.
    mirror: number, key, step, address, ranks: replicate the snapshots of these ranks (snapshot_replication.py).
    keep: key, steps: ranks must not overwrite their snapshots of these steps.
    alive: has no content; the leader sends it periodically.
    end: the exit code and the last line of the run.

Messages from this node:

    lends: the address of the node's snapshot server; copies: the inventory of the snapshots that it has retained.
    started, said, ended, ready: as from a fork server.
    mirrored: the request number, whether all replicas are complete, the seconds of copying, and an error text.
    degraded: a line about a background thread that has failed.
    pulse: generation, the heartbeat rows that have changed, and the process statistics of each rank (proc_stats.py).
    node_leaving: the signal that requests this node to leave.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

from meshwright.core import storage
from meshwright.core.cgroup_limits import oom_kill_count, raise_open_file_limit
from meshwright.core.ipc import IpcMessage, wait_readable
from meshwright.core.messages import Message
from meshwright.core.secure_channel import SecureChannel
from meshwright.core.signals import stop_signal_handler
from meshwright.core.snapshots import LOST_LOCATION
from meshwright.elastic.failure import RankExit, failure_cause
from meshwright.elastic.local_agent import LocalAgent, SystemInterface
from meshwright.elastic.shared_files import (
    LocationRuns,
    SharedFileStore,
    pack_heartbeats,
    ranks_stored_at,
    resolve_locations,
)
from meshwright.elastic.snapshot_inventory import RETAINED_SECONDS, RetainedSnapshots
from meshwright.elastic.snapshot_replication import replication_request

TICK_SECONDS = 0.05
NODE_TIMEOUT_SECONDS = 15.0
"""Leader and node count each other as lost after this time without a message. An interruption of the link for a third
of this time has no consequences."""

NODE_KEEPALIVE_SECONDS = 1.0
"""A node sends at least one message in this time."""

LEADER_LOST_EXIT = (75, "")


class NodeAgent:
    """Runs the ranks of this node in one run. The hello message of the leader names the modules that the fork server
    imports, and the folder of log files."""

    outside = SystemInterface()

    def __init__(
        self,
        link: SecureChannel,
        host: str,
        token: str,
        number: int,
        environment: dict[str, str],
        warm: LocalAgent | None = None,
    ) -> None:
        """Starts the fork server, the snapshot server and the replicator of this node.

        `link`: the connection to the leader. `host`: the address of this node. `number`: its index. `environment`:
        additional environment variables of its ranks. `warm`: the agent from a lost leader, whose fork server may be
        reused.
        """
        raise_open_file_limit(0)
        self.every = TICK_SECONDS
        """The minimum seconds between two heartbeat messages."""
        self.link, self.number, self.environment = link, number, environment
        logs = Path(link.hello["logs"])
        with storage.failures_as_one_line(logs):
            storage.make_folder(logs)
        self.agent = self._local_agent(warm)
        self.lender = self.outside.lender(host, token, self._file, self._degraded)
        self.mirror = self.outside.mirror(token, self._was_mirrored)
        self.holdings: dict[str, SharedFileStore] = {}
        self.generation, self.key, self._job = -1, "", ""
        self.retained: RetainedSnapshots | None = None
        """The snapshots retained from an earlier, lost leader, until the current leader starts ranks. If the current
        leader is lost, `end` stores the snapshots for the next leader here."""
        self._sources: list[str] = []
        self.processes: dict[int, int] = {}
        self.leaving = ""
        """The name of the signal that made this node leave, or ''."""
        self._is_announced = False
        self._heard = self._said = self.outside.clock()
        self._rows: dict[int, bytes] = {}
        self._kills = oom_kill_count()

    def _local_agent(self, warm: LocalAgent | None = None) -> LocalAgent:
        hello = self.link.hello
        log = Path(hello["logs"]) / f"fork-server-{self.number}.log"
        return LocalAgent(log, hello["warm"], self.environment, warm)

    def _file(self, key: str, rank: int) -> int | None:
        with contextlib.suppress(KeyError, OSError):  # the requested snapshots were closed
            return self.holdings[key].lend(rank)
        return None

    def run(self) -> tuple[int, str]:
        """Runs until the run ends. Returns its exit code and its last line, or LEADER_LOST_EXIT if the leader is lost.
        In this case `agent` may still be open, so that the next leader can reuse it."""
        how = (1, "")
        try:
            with stop_signal_handler(self._on_signal):
                self.begin()
                while (found := self.turn()) is None:
                    self._wait()
                how = found
        except OSError:
            how = LEADER_LOST_EXIT
        finally:
            self.end(how)
        return how

    def begin(self) -> None:
        """Sends the address of the snapshot server of this node, and the inventory of its `retained` snapshots. Raises
        OSError if the leader is lost."""
        copies = {}
        if self.retained is not None:
            self.holdings = self.retained.sets
            self._free_retained()
        if self.retained is not None:
            copies = {"copies": self.retained.inventory()}
        self._say(event="lends", address=self.lender.address, **copies)

    def end(self, how: tuple[int, str]) -> None:
        """Closes connection, servers and snapshots, and ends the ranks. `how`: the result of `run`. If the leader was
        lost and this node is not leaving, the snapshots stay open for the next leader, and so does `agent` if it is
        reusable."""
        is_lost = how == LEADER_LOST_EXIT and not self.leaving
        if not is_lost or not self.agent.clear():
            self.agent.close()
        self.lender.close()
        self.mirror.close()
        if is_lost:
            until = self.outside.clock() + RETAINED_SECONDS
            retained = self.retained or RetainedSnapshots(self.holdings, self._job, until)
            self.retained = retained if retained.sets else None
        else:
            self._drop_snapshots()
        self.link.close()

    def _free_retained(self) -> None:
        """Closes the retained snapshots if their time is over."""
        if self.retained is not None and self.outside.clock() > self.retained.until:
            self._drop_snapshots()

    def _drop_snapshots(self) -> None:
        self.retained = None
        for holdings in self.holdings.values():
            holdings.close()
        self.holdings.clear()

    def _on_signal(self, number: int, _: Any) -> None:
        """Records the signal. The handler must not send, since it may have interrupted a send that has the lock of the
        connection."""
        self.leaving = self.leaving or signal.Signals(number).name

    def _wait(self) -> None:
        wait_readable(TICK_SECONDS, self.link.handle, *(() if self.agent.ended else (self.agent.handle,)))

    def turn(self) -> tuple[int, str] | None:
        """Handles all pending events and messages. Returns the result of `run` if the run has ended or the leader is
        lost, else None. Raises OSError if the leader is lost."""
        for event in self.agent.events(0):
            self._relay(event)
        if self.agent.ended:
            self._bury()
        messages, ended = self.link.read()
        for message in messages:
            self._heard = self.outside.clock()
            if message["do"] == "end":
                return int(message["code"]), str(message["line"])
            self._obey(message)
        if ended or self.outside.clock() > self._heard + NODE_TIMEOUT_SECONDS:
            return LEADER_LOST_EXIT
        self._free_retained()
        if self.leaving and not self._is_announced:
            self._is_announced = True
            self._say(event="node_leaving", signal=self.leaving)
        self._show()
        return None

    def _obey(self, message: IpcMessage) -> None:
        if message["do"] == "again":
            self.agent.close()
            self._bury()
        elif message["do"] == "sources":
            self._job = message["job"]
            self._settle(message["key"], message["source"], message["runs"])
        elif message["do"] == "start" and "ranks" in message:
            self._start(message)  # without "ranks", the message starts a device probe and goes to the fork server
        elif message["do"] == "keep":
            if message["key"] in self.holdings:
                self.holdings[message["key"]].keep(message["steps"])
        elif message["do"] == "mirror":
            try:
                self.mirror.order(replication_request(message, self.holdings[message["key"]]))
            except (KeyError, OSError) as error:  # the set of snapshots was closed, or no descriptor is left
                self._was_mirrored(
                    message["number"], False, 0.0, Message("node {node}: {line}", node=self.number, line=error)
                )
        elif message["do"] != "alive":
            self.agent.command(**message)

    def _settle(self, key: str, source: str, runs: LocationRuns) -> None:
        """Records where the next ranks find the snapshots in the set `source`, from which they resume. Closes the
        snapshots that are no longer needed. `key`: the set that these ranks write."""
        here, self.retained = self.lender.address, None
        for old in set(self.holdings) - {key, source}:
            self.holdings.pop(old).close()
        found = self.holdings.get(source)
        self._sources = [*resolve_locations(runs, source, here, found.source if found else lambda rank: LOST_LOCATION)]
        if key == source and found:
            found.release({*ranks_stored_at(runs, here), *self.mirror.ranks})

    def _start(self, message: IpcMessage) -> None:
        """Starts the ranks in `message`. Their heartbeat rows and snapshots are on this machine. They read the
        snapshots of other nodes over the network."""
        key, ranks, here = message.pop("key"), message.pop("ranks"), message.pop("here")
        if key not in self.holdings:
            self.holdings[key] = self.outside.holdings(message["world"])
        holdings, self.every = self.holdings[key], message.pop("every")
        self.generation, self.key = message["generation"], key
        holdings.begin(rank for rank, *_ in ranks)
        self._rows.clear()
        memory = {"sources": holdings.table(self._sources), "single_node": False}
        for rank, device, log in ranks:
            # The rank is registered before its process exists: if the fork server dies before the fork, `_bury` must
            # still report the rank as ended.
            self.processes.setdefault(rank, 0)
            self.agent.command(
                **message, rank=rank, log=log, local=[device, here], memory={**memory, **holdings.places(rank)}
            )

    def _was_mirrored(self, number: int, whole: bool, seconds: float, why: str = "") -> None:
        """Sends the result of a replication request to the leader. The replicator's thread calls it."""
        with contextlib.suppress(OSError):
            self.link.send({"event": "mirrored", "number": number, "whole": whole, "seconds": seconds, "why": why})

    def _degraded(self, line: str) -> None:
        """Reports the failure of a background thread to the leader. The failed thread calls it."""
        with contextlib.suppress(OSError):
            self.link.send({"event": "degraded", "line": Message("node {node}: {line}", node=self.number, line=line)})

    def _relay(self, event: IpcMessage) -> None:
        if event["event"] == "ready":
            event = {"event": "ready"}  # the secret of the local rendezvous store must not leave this node
        elif event["event"] == "started" and event["rank"] >= 0:
            self.processes[event["rank"]] = event["pid"]
        elif event["event"] == "ended":
            self.processes.pop(event["rank"], None)
            before, self._kills = self._kills, oom_kill_count()
            event["kills"] = self._kills - before
            if event["status"] == -signal.SIGKILL and event["kills"]:
                event["oom"] = True
                # The text is made here, since it names the memory limit of this node.
                event["words"] = failure_cause(RankExit(event["rank"], 0.0, event["status"], kills=event["kills"]))
        self._say(**event)

    def _bury(self) -> None:
        """Reports every rank as ended, since the fork server has died, and starts a new fork server."""
        for rank in list(self.processes):
            self._relay({"event": "ended", "rank": rank, "generation": self.generation, "status": -signal.SIGKILL})
        self.agent.again()

    def _show(self) -> None:
        """Sends the heartbeat rows that have changed, and at least one message every NODE_KEEPALIVE_SECONDS."""
        now = self.outside.clock()
        if now < self._said + self.every:
            return
        holdings = self.holdings.get(self.key)
        rows = {rank: holdings.row(rank) for rank in sorted(self.processes)} if holdings else {}
        if rows != self._rows or now > self._said + NODE_KEEPALIVE_SECONDS:
            changed = [(rank, row) for rank, row in rows.items() if row != self._rows.get(rank)]
            self._rows = rows
            signs = [(rank, *self.agent.signs(process).rounded()) for rank, process in self.processes.items()]
            self._say(event="pulse", generation=self.generation, rows=pack_heartbeats(changed), signs=signs)

    def _say(self, **message: Any) -> None:
        self._said = self.outside.clock()
        self.link.send(message)
