"""Defines a generation, that is one start of all ranks of a job, for the supervisor. The ranks of a generation share a
key prefix in the rendezvous store, start together and end together. Messages of earlier generations are ignored."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.core.cgroup_limits import oom_kill_count
from meshwright.core.errors import Interrupted
from meshwright.core.ipc import IpcMessage
from meshwright.core.messages import Message
from meshwright.elastic.failure import RankExit
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.writer_supervisor import WRITER_RANK

STOPPED_EXIT_CODE = Interrupted.exit_code
PROBE_RANK = -2
"""The process that measures an excluded device sends messages under this rank number."""


@dataclass(frozen=True)
class RankJob:
    """The job that every rank runs: `target` (`module:function`) is called with the rank's RankControl and `payload`.
    `world`: the number of ranks. `folder`: the run folder. `warm`: the modules that the fork server imports.
    `environment`: additional environment variables of the fork server. `plan`: the name of the plan."""

    target: str
    world: int
    payload: IpcMessage
    folder: Path
    warm: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    plan: str = ""
    scribe: str = ""
    """The `module:function` of the checkpoint writer, a process that saves while training continues; '' if the job has
    none."""
    slots: tuple[int, ...] = ()
    """The device id of each rank (devices.py). If it is empty, ranks take the devices in order."""

    @property
    def logs(self) -> Path:
        """Returns the folder of the ranks' log files."""
        return self.folder / "logs"

    def log(self, rank: int) -> Path:
        """Returns the log file of a rank, of the checkpoint writer or of the device probe."""
        return self.logs / (f"rank-{rank}.log" if rank >= 0 else "probe.log" if rank == PROBE_RANK else "scribe.log")


@dataclass
class Attempt:
    """The state of generation `number`. `living`: by rank, the process id of each living rank, or 0 if its process has
    not started yet. `failures`: by rank, how each failed rank ended. `stopped` contains the ranks that ended after a
    stop request. `hear` receives the messages of ranks. `begun`: whether a rank has begun to train."""

    work: RankJob
    number: int
    hear: Callable[[int, IpcMessage], None]
    living: dict[int, int] = field(default_factory=dict)
    failures: dict[int, RankExit] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    begun: bool = False
    kills: int = field(default_factory=oom_kill_count)
    """The number of OOM kills in the cgroup before the generation began."""
    silent: float = 0.0
    """The seconds from the last heartbeat of a hung rank, or the last message of a silent node, to the detection."""
    clock: Callable[[], float] = time.monotonic
    blames_server: bool = False
    """Whether the fork servers must be replaced before the next generation."""

    def start(self, agent: LocalAgent, holdings: SharedFileStore, source: SharedFileStore) -> None:
        """Starts all ranks. They write their in-memory snapshots to `holdings` and resume from those in `source`."""
        agent.hold(holdings)
        self.living = dict.fromkeys(range(self.work.world), 0)
        what = {
            "target": self.work.target,
            "payload": self.work.payload,
            "world": self.work.world,
            "generation": self.number,
        }
        logs = [str(self.work.log(rank)) for rank in self.living]
        agent.start(what, logs, self.work.slots, holdings, source)

    def write(self, agent: LocalAgent, holdings: SharedFileStore, request: IpcMessage) -> None:
        """Starts the checkpoint writer for `request`, the message `write` of rank 0. It reads the snapshots in
        `holdings`."""
        assert self.work.scribe, "this job has no checkpoint writer"
        payload = {"launch": self.work.payload, "step": request["step"]}
        memory = {"sources": holdings.table(map(holdings.source, range(holdings.world)))}
        here = {
            "world": self.work.world,
            "generation": self.number,
            "log": str(self.work.log(WRITER_RANK)),
            "memory": memory,
        }
        agent.command("start", WRITER_RANK, target=self.work.scribe, payload=payload, **here)

    def probe(self, agent: LocalAgent, target: str, slot: int) -> None:
        """Starts a process that measures the device with the id `slot`. `target`: its `module:function`."""
        payload = {"launch": self.work.payload, "slot": slot}
        here = {
            "world": 1,
            "generation": self.number,
            "log": str(self.work.log(PROBE_RANK)),
            "memory": {},
            "local": (slot, 1),
        }
        agent.command("start", PROBE_RANK, target=target, payload=payload, **here)

    def fail_without_save(self, seconds: float) -> None:
        """Counts as a failure of no rank that the ranks have not saved within `seconds` of a request to stop."""
        words = Message("no save within {seconds:.0f} s of the request to stop", seconds=seconds)
        self.failures[-1] = RankExit(-1, self.clock(), 1, words=words)

    def heed(self, event: IpcMessage) -> None:
        """Updates the state from an event of the fork server. Events of other generations, of the checkpoint writer and
        of the device probe are ignored."""
        if event.get("generation") != self.number or event.get("rank", WRITER_RANK) < 0:
            return
        rank, now = event["rank"], self.clock()
        if event["event"] == "started":
            self.living[rank] = event["pid"]
        elif event["event"] == "refused":
            lives = Message("process {pid} of an earlier generation is still alive", pid=event.get("pid"))
            words = Message("was not started: {why}", why=event.get("why") or lives)
            self.failures.setdefault(rank, RankExit(rank, now, -signal.SIGKILL, words=words))
        elif event["event"] == "said" and event["message"]["kind"] == "failed":
            said = event["message"]
            failure = RankExit(
                rank,
                now,
                said["code"],
                said["error"],
                said["message"],
                said["place"],
                said["known"],
                raised_by=said.get("raised_by"),
            )
            self.failures.setdefault(rank, failure)
        elif event["event"] == "said":
            self.begun = self.begun or event["message"]["kind"] == "begin"
            self.hear(rank, event["message"])
        elif event["event"] == "ended":
            del self.living[rank]
            self.silent = max(self.silent, event.get("silent", 0.0))
            if event["status"] == STOPPED_EXIT_CODE and rank not in self.failures:
                self.stopped.add(rank)
            elif event["status"] != 0:
                # For a rank on another machine, the event has the OOM kill count of that machine.
                kills = event["kills"] if "kills" in event else oom_kill_count() - self.kills
                words, oom = event.get("words", ""), event.get("oom", False)
                peer = event.get("watchdog", False)
                self.failures.setdefault(
                    rank, RankExit(rank, now, event["status"], words=words, kills=kills, oom=oom, watchdog=peer)
                )

    def tell(self, agent: LocalAgent, message: IpcMessage) -> None:
        """Sends `message` to every living rank."""
        for rank in self.living:
            agent.command("tell", rank, message=message)

    def end(self, agent: LocalAgent, other: Callable[[IpcMessage], None], seconds: float) -> None:
        """Kills the remaining ranks and waits at most `seconds` for their end, since no rank may write afterwards.
        Passes the events that arrive in this time to `other`."""
        for rank in self.living:
            agent.command("signal", rank, signal=int(signal.SIGKILL))
        end = self.clock() + seconds
        while self.living and not agent.ended and self.clock() < end:
            for event in agent.events(0.05):
                other(event)
                if event["event"] == "ended" and event["generation"] == self.number:
                    self.living.pop(event["rank"], None)  # not a failure, since the supervisor has killed this rank

    def waited(self, until: float) -> float:
        """Returns the seconds from the first failure to the time `until`, or 0 if no rank has failed."""
        return max((until - failure.at for failure in self.failures.values()), default=0.0)

    @property
    def guilty(self) -> bool:
        """Returns whether a rank failed for a reason of its own, not because it lost another rank
        (`RankExit.innocent`)."""
        return any(not failure.innocent for failure in self.failures.values())
