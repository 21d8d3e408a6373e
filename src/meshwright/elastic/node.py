"""A node of a run on several machines, on the node's side: ranks and their copies live here, what they do is decided by
the leader's supervisor.

Promises: the ranks of this node end when the leader is gone or silent for SILENCE seconds, so that a part of the
machines that was cut off
never goes on alone; a SIGTERM here tells the leader, which goes on with the other nodes and reads the copies of this
one meanwhile; no process is left.

| the leader says | this node says |
|---|---|
| sources: key, source, runs: where the copies lie that ranks go on from (homes.py) | |
| start: what ranks do, and of each here its number, device and log | started, said, ended: as a zygote |
| tell, signal: as to a zygote (train/forkserver.py) | |
| again: ranks that will not die: all of them end with their zygote | ready: the zygote is there |
| mirror: number, key, step, address, ranks: read their copies (mirror.py) | mirrored: number, whether all of them are whole, and the seconds that copying took |
| keep: key, steps: ranks do not write over their copies of these | |
| alive: now and then | pulse: generation, the rows of signs of life that have changed, what the system says of each rank's process (signs.py) |
| end: code, line | leaving: a signal asks this node to go |
"""

from __future__ import annotations

import contextlib
import selectors
import signal
from pathlib import Path
from typing import Any

from meshwright.core.cgroup_limits import oom_kill_count, raise_open_file_limit
from meshwright.core.ipc import IpcMessage
from meshwright.core.secure_channel import SecureChannel
from meshwright.core.signals import stop_signal_handler
from meshwright.core.snapshots import LOST_LOCATION
from meshwright.elastic.failure import RankExit, failure_cause
from meshwright.elastic.local_agent import LocalAgent, SystemInterface
from meshwright.elastic.shared_files import SharedFileStore, pack_heartbeats
from meshwright.elastic.snapshot_locations import LocationRuns, ranks_stored_at, resolve_locations
from meshwright.elastic.snapshot_replication import replication_request

TICK_SECONDS = 0.05
NODE_TIMEOUT_SECONDS = 15.0
"""Seconds without a word after which the other side counts as gone. A link may be down for a third of it and nothing is
lost."""

NODE_KEEPALIVE_SECONDS = 1.0
"""Seconds after which a word is said in any case."""

LEADER_LOST_EXIT = (75, "")


class NodeAgent:
    """Serves one run as node `number`, reached at `host`. `environment` goes to the ranks; the leader's hello says
    which modules they need and where logs lie."""

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
        """`warm`: that of this node under another leader."""
        raise_open_file_limit(0)
        self.every = TICK_SECONDS
        """Seconds between two messages with signs of life at least."""
        self.link, self.number, self.environment = link, number, environment
        self.logs = Path(link.hello["logs"])
        self.logs.mkdir(parents=True, exist_ok=True)
        self.nursery = self._nursery(warm)
        self.lender = self.outside.lender(host, token, self._file)
        self.mirror = self.outside.mirror(token, self._was_mirrored)
        self.holdings: dict[str, SharedFileStore] = {}
        self.generation, self.key = -1, ""
        self._sources: list[str] = []
        self.processes: dict[int, int] = {}
        self.leaving = ""
        """The signal that asked this node to go, if one has."""
        self._told = False
        self._heard = self._said = self.outside.clock()
        self._rows: dict[int, bytes] = {}
        self._kills = oom_kill_count()

    def _nursery(self, warm: LocalAgent | None = None) -> LocalAgent:
        return LocalAgent(self.logs / f"zygote-{self.number}.log", self.link.hello["warm"], self.environment, warm)

    def _file(self, key: str, rank: int) -> int | None:
        with contextlib.suppress(KeyError, OSError):  # of ranks that are no more
            return self.holdings[key].lend(rank)
        return None

    def run(self) -> tuple[int, str]:
        """The exit code of the run, and the leader's last line. GONE: the leader is gone; then `nursery` may be as new,
        and is open."""
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
        """Says where copies of this node are lent. Raises OSError when the leader is gone, as `turn` does."""
        self._say(event="lends", address=self.lender.address)

    def end(self, how: tuple[int, str]) -> None:
        """Leaves nothing behind but a `nursery` that is as new, where another leader may need it."""
        if how != LEADER_LOST_EXIT or self.leaving or not self.nursery.clear():
            self.nursery.close()
        self.lender.close()
        self.mirror.close()
        for holdings in self.holdings.values():
            holdings.close()
        self.link.close()

    def _on_signal(self, number: int, _: Any) -> None:
        """Nothing is said from here: what this interrupts may be in the middle of a line, and hold the link's lock."""
        self.leaving = self.leaving or signal.Signals(number).name

    def _wait(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.link.handle, selectors.EVENT_READ)
            if not self.nursery.ended:
                waiting.register(self.nursery.handle, selectors.EVENT_READ)
            waiting.select(TICK_SECONDS)

    def turn(self) -> tuple[int, str] | None:
        """Does what there is to do now. Returns how the run ended, once it has."""
        for event in self.nursery.events(0):
            self._relay(event)
        if self.nursery.ended:
            self._bury()
        messages, ended = self.link.read()
        for message in messages:
            self._heard = self.outside.clock()
            if message["do"] == "end":
                return int(message["code"]), str(message["line"])
            self._obey(message)
        if ended or self.outside.clock() > self._heard + NODE_TIMEOUT_SECONDS:
            return LEADER_LOST_EXIT
        if self.leaving and not self._told:
            self._told = True
            self._say(event="node_leaving", signal=self.leaving)
        self._show()
        return None

    def _obey(self, message: IpcMessage) -> None:
        if message["do"] == "again":
            self.nursery.close()
            self._bury()
        elif message["do"] == "sources":
            self._settle(message["key"], message["source"], message["runs"])
        elif message["do"] == "start" and "ranks" in message:
            self._start(message)  # else it is what measures a device, which keeps no copies
        elif message["do"] == "keep":
            if message["key"] in self.holdings:
                self.holdings[message["key"]].keep(message["steps"])
        elif message["do"] == "mirror":
            with contextlib.suppress(KeyError, OSError):  # of ranks that are no more
                self.mirror.order(replication_request(message, self.holdings[message["key"]]))
        elif message["do"] != "alive":
            self.nursery.command(**message)

    def _settle(self, key: str, source: str, runs: LocationRuns) -> None:
        """What the next ranks go on from. Copies that nobody can be told of any more are closed."""
        here = self.lender.address
        for old in set(self.holdings) - {key, source}:
            self.holdings.pop(old).close()
        found = self.holdings.get(source)
        self._sources = [*resolve_locations(runs, source, here, found.source if found else lambda rank: LOST_LOCATION)]
        if key == source and found:
            found.release({*ranks_stored_at(runs, here), *self.mirror.ranks})

    def _start(self, message: IpcMessage) -> None:
        """Ranks with the memory of this node: rows and copies here, copies elsewhere by address."""
        key, ranks, here = message.pop("key"), message.pop("ranks"), message.pop("here")
        if key not in self.holdings:
            self.holdings[key] = self.outside.holdings(message["world"])
        holdings, self.every = self.holdings[key], message.pop("every")
        self.generation, self.key = message["generation"], key
        holdings.begin(rank for rank, *_ in ranks)
        self._rows.clear()
        memory = {"sources": holdings.table(self._sources), "beside": False}
        for rank, device, log in ranks:
            # from here on, so that the end of a zygote that dies before it obeys is the end of this rank too
            self.processes.setdefault(rank, 0)
            self.nursery.command(
                **message, rank=rank, log=log, local=[device, here], memory={**memory, **holdings.places(rank)}
            )

    def _was_mirrored(self, number: int, whole: bool, seconds: float) -> None:
        """From the mirror's thread."""
        with contextlib.suppress(OSError):
            self.link.send({"event": "mirrored", "number": number, "whole": whole, "seconds": seconds})

    def _relay(self, event: IpcMessage) -> None:
        if event["event"] == "ready":
            event = {"event": "ready"}  # the secret of its store stays here
        elif event["event"] == "started" and event["rank"] >= 0:
            self.processes[event["rank"]] = event["pid"]
        elif event["event"] == "ended":
            self.processes.pop(event["rank"], None)
            before, self._kills = self._kills, oom_kill_count()
            event["kills"] = self._kills - before
            if event["status"] == -signal.SIGKILL and event["kills"]:
                event["words"] = failure_cause(
                    RankExit(event["rank"], 0.0, event["status"], kills=event["kills"])
                )  # as it is on this node
        self._say(**event)

    def _bury(self) -> None:
        """The zygote is gone, and every rank with it; another one takes its place."""
        for rank in list(self.processes):
            self._relay({"event": "ended", "rank": rank, "generation": self.generation, "status": -signal.SIGKILL})
        self.nursery.again()

    def _show(self) -> None:
        """Signs of life, when there are new ones; and a word in any case after a while."""
        now = self.outside.clock()
        if now < self._said + self.every:
            return
        holdings = self.holdings.get(self.key)
        rows = {rank: holdings.row(rank) for rank in sorted(self.processes)} if holdings else {}
        if rows != self._rows or now > self._said + NODE_KEEPALIVE_SECONDS:
            changed = [(rank, row) for rank, row in rows.items() if row != self._rows.get(rank)]
            self._rows = rows
            signs = [(rank, *self.nursery.signs(process).rounded()) for rank, process in self.processes.items()]
            self._say(event="pulse", generation=self.generation, rows=pack_heartbeats(changed), signs=signs)

    def _say(self, **message: Any) -> None:
        self._said = self.outside.clock()
        self.link.send(message)
