"""A simulated cluster in virtual time: the real leader, nodes, generations, hang detector, snapshot locations and
mirrors run on simulated ranks, links and clocks.

The simulated parts replace `SystemInterface` (elastic/local_agent.py) and the fork server. A line takes LATENCY
seconds, all ranks complete a step every STEP seconds and copy it into their files, and a mirror takes COPY seconds
(virtual_machines.py). Every line is encoded and decoded as between machines, so that its size is real. There is one
thread and one queue of future events, so the same seed gives the same run. Nothing sleeps.

Faults occur at the rate of Llama 3 (419 unexpected interruptions in 54 days on 16,384 devices: 1.973e-5 per device
and hour), with its published causes: devices and software that end a rank, lost hosts, silent links and collectives.
A fault may hit any node, also the leader. Source: The Llama 3 Herd of Models, 2024, section 3.3.4 and Table 5,
grouped as in KINDS. Hours without faults are skipped: only heartbeats arrive in them, and their cost is measured
separately.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import mmap
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from virtual_machines import LATENCY, End, Files, LeaderWaits, Lender, Mirror, Rank, Ranks, address, copy

from meshwright.cli.leader_role import await_nodes
from meshwright.cli.node_role import NodeRole
from meshwright.core.ipc import HEARTBEAT_FIELDS, WAIT_INCREMENT, Heartbeat, HeartbeatField, RankPhase
from meshwright.core.snapshots import REMOTE_PREFIX
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.cluster_agent import ClusterAgent
from meshwright.elastic.hang_detector import ACCELERATOR_LIMITS, KILL_SECONDS
from meshwright.elastic.local_agent import SystemInterface
from meshwright.elastic.node import NodeAgent
from meshwright.elastic.restart_policy import FaultPolicy
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_inventory import AdoptionPolicy, RetainedSnapshots
from meshwright.elastic.supervisor import Supervisor

SILENT = 60.0
"""Seconds within which every node has noticed that its leader is silent."""

START, RETURN = 3.0, 5.0
"""Seconds of a rank until it has joined the others, and until a lost node is back."""

STEP = 11.9
"""Seconds of a step: 6 x 405e9 parameters x 16e6 tokens on 8,192 devices of 400 TFLOP/s, as Llama 3 reports them."""

SAVE = 50
"""Steps between two checkpoints on disk."""

RATE = 419 / (54 * 24 * 16_384)
KINDS = {"dies": 0.78, "node": 0.12, "hangs": 0.06, "link": 0.04}
"""Shares of 419: faulty devices, their memory and processors, and software end a rank; maintenance, network cards,
power and chassis take a host;
switches and cables, and collectives that time out, are silent, here as a rank that hangs or a link that carries
nothing."""

OF_LEADER = {"node": "leader", "link": "leader's link"}
"""What a kind is called where it hits the node that leads."""


class LeaderLost(BaseException):
    """The leader process is lost, wherever it was."""


class LeaderSilent(LeaderLost):
    """The leader's links deliver nothing. Each node notices this after its limit of silence."""


@dataclass
class Told:
    """A fault and its outcome."""

    kind: str
    step: int
    at: float
    healed: float = 0.0
    lost: int = 0
    source: str = ""
    alone: bool = True
    """Whether no other one came before it was healed."""


@dataclass
class Cluster:
    """A run on `nodes` nodes with `each` devices. It ends after `hours`, or after `faults` faults. `kinds`: the kinds
    of the faults; if not given, they are drawn."""

    folder: Path
    nodes: int
    each: int = 8
    seed: int = 0
    hours: float = float("inf")
    faults: int = 10**9
    kinds: tuple[str, ...] = ()
    leader_every: int = 0
    """Every so many-th of the faults that are drawn is the loss of the leader: of many nodes chance takes it rarely."""
    step: float = STEP
    """Seconds."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of FaultPolicy other than those of `_reign`."""
    now: float = 0.0
    skipped: float = 0.0
    spent: float = 0.0
    resumed: float = 0.0
    told: list[Told] = field(default_factory=list)
    steady: list[tuple[float, float]] = field(default_factory=list)
    """Virtual seconds in which all was well, and seconds of a processor that the leader took in them."""
    starts: list[int] = field(default_factory=list)
    """Bytes that a node got in each start, the most of all nodes."""
    notes: list[str] = field(default_factory=list)
    hung_opens: int = 0
    killing: float = LATENCY
    """Seconds from the signal to the end of a killed rank."""
    files: dict[int, SimpleNamespace] = field(default_factory=dict)
    owners: dict[int, Files] = field(default_factory=dict)
    lenders: dict[str, Callable[[str, int], int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.numbers, self.random = itertools.count(1000), random.Random(self.seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.waiting: LeaderWaits
        self.ranks: dict[int, Rank] = {}
        self.generation, self.done, self.disk, self.healthy = -1, 0, 0, 0
        self.is_over, self.is_armed, self.has_leader, self.stops = False, False, True, False
        self.next_fault = self.random.expovariate(RATE * self.nodes * self.each) * 3600.0
        self.hosts: dict[int, SimpleNamespace] = {}
        self.counted: Counter[str] = Counter()

    # --- time ---------------------------------------------------------------------------------------------------------

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self.numbers), do))

    def run(self, until: float, done: Callable[[], bool]) -> None:
        while not done() and self._queue and self._queue[0][0] <= until:
            self.now, _, do = heapq.heappop(self._queue)
            do()
        if not done():
            self.now = until

    def stopwatch(self, works: bool) -> None:
        """Notes that the leader starts to run (`works`) or stops, and adds its CPU time to `spent`. Only some healthy
        steps are measured, because reading the clock takes time. The garbage collector does not search the objects of
        the simulation, which a real leader does not have."""
        if 3 <= self.healthy < 5:
            if works:
                gc.freeze()
            now = time.process_time()
            self.spent += 0.0 if works or not self.resumed else now - self.resumed
            self.resumed = now

    @property
    def calendar(self) -> float:
        return self.now + self.skipped

    # --- machines
    # -------------------------------------------------------------------------------------------------------------

    def outside(self, files: Files) -> SystemInterface:
        def opened(holdings: SharedFileStore) -> memoryview:
            return memoryview(
                mmap.mmap(-1, holdings.world * HEARTBEAT_FIELDS * 8)
            )  # pages that nobody touches take no memory

        kept = type("HeldHere", (SharedFileStore,), {"system": files, "_opened": opened})
        return SystemInterface(
            clock=lambda: self.now,
            waiting=lambda: LeaderWaits(self),  # type: ignore[arg-type,return-value]
            repeat=self._repeat,
            door=lambda host, port, *_: SimpleNamespace(host=host, port=1, close=lambda: None),  # type: ignore[arg-type,return-value]
            link=lambda end, hello: end,  # type: ignore[arg-type,return-value]
            lender=lambda host, token, find, *_: Lender(self, host, find),  # type: ignore[arg-type,return-value]
            mirror=lambda token, done: Mirror(self, files, done),  # type: ignore[arg-type,return-value]
            holdings=kept,
        )

    def _repeat(self, do: Callable[[], None], seconds: float, over: Any, failed: Callable[[str], None]) -> None:
        def again() -> None:
            if over.is_set():
                return
            self.stopwatch(True)
            do()
            self.stopwatch(False)
            self.at(seconds, again)

        self.at(seconds, again)

    def _ranks(self, files: Files, wake: Callable[[], None], held: Callable[[str], SharedFileStore]) -> dict[str, Any]:
        parts = {"wake": staticmethod(wake), "held": staticmethod(held)}
        return {"cluster": self, "outside": self.outside(files), "files": files, **parts}

    def lead(self, number: int = 0, retained: RetainedSnapshots | None = None) -> ClusterAgent:
        """Starts the leader on node `number`. The first leader finds all other nodes."""
        self.leader_files, self.leads, self.has_leader = Files(self), number, True
        (logs := self.folder / "logs").mkdir(parents=True, exist_ok=True)
        held = lambda key: self.leader._snapshots.shared[key]
        here = type("Here", (Ranks,), self._ranks(self.leader_files, self._wake_leader, held))
        self.leader = type("Leader", (ClusterAgent, here), {})(logs, (), address(number), 1, "secret", self.each)
        self.retained = retained
        if retained is None:
            for other in range(1, self.nodes):
                self.join(other)
        return self.leader  # type: ignore[no-any-return]

    def _succeed(self, silent: bool) -> ClusterAgent:
        """Lets the next node lead after all nodes have noticed the loss. The lost node returns as a follower. `silent`:
        the leader still runs, but no node receives its lines."""
        lost, self.has_leader = self.leads, False
        if silent:
            self.run(self.now + SILENT, lambda: not any(host.is_alive for host in self.hosts.values()))
        self.leader.dissolve()
        self.generation, self.ranks, self.leads = -1, {}, min(number for number in self.hosts if number != lost)
        self.at(RETURN, lambda: self.join(lost))
        self.run(self.now + 1.0, lambda: False)
        return self.lead(self.leads, self.hosts[self.leads].node.retained)

    def _wake_leader(self) -> None:
        self.waiting.is_awake = True

    def join(self, number: int, retained: RetainedSnapshots | None = None) -> None:
        """Lets node `number` join, or return with the snapshots that it has retained."""
        files, handle = Files(self), next(self.numbers)
        host = SimpleNamespace(is_alive=True, is_due=False, files=files, most=0)
        ours = End(self, lambda: self.waiting.ready.setdefault(handle), handle)
        theirs = End(self, lambda: self.wake(host), handle)
        ours.other, theirs.other = theirs, ours
        ours.hello = {"name": f"{number} (host-{number})", "devices": self.each, "order": number}
        theirs.hello = {"logs": str(self.folder / "logs"), "warm": []}
        made = self._ranks(files, lambda: self.wake(host), lambda key: host.node.holdings[host.node.key])
        kind = type(
            "There",
            (NodeAgent,),
            {"outside": made["outside"], "_local_agent": lambda *_: type("Forks", (Ranks,), made)(Path("none"))},
        )
        host.number, host.end, host.ours = number, theirs, ours
        host.node = kind(theirs, address(number), "secret", number, {})
        self.hosts[number] = host
        host.node.retained = retained
        self.leader._inbox.put(ours.hello, ours)
        self._wake_leader()
        host.node.begin()
        self._later(host)

    def wake(self, host: Any) -> None:
        if not host.is_due:
            host.is_due = True
            self.at(0.0, lambda: self._turn(host))

    def _turn(self, host: Any) -> None:
        host.is_due = False
        if host.is_alive:
            how = host.node.turn()
            host.most = max(host.most, len(host.files.own))
            if how is not None:
                self.leave(host)
                if not self.is_over:
                    self.at(RETURN, lambda: self._return(host))

    def _return(self, host: Any) -> None:
        """Lets the node return once there is a leader."""
        if not self.has_leader:
            self.at(RETURN, lambda: self._return(host))
        elif host.number != self.leads:
            self.join(host.number, host.node.retained)

    def _later(self, host: Any) -> None:
        """Schedules the regular ticks of a node. Arriving lines also wake it."""
        if host.is_alive:
            self.wake(host)
            self.at(host.node.every, lambda: self._later(host))

    def leave(self, host: Any) -> None:
        host.is_alive = False
        host.node.end((75, ""))

    def crash(self, host: Any) -> None:
        """Ends a node with all of its memory."""
        if host.is_alive:
            self.leave(host)
        if host.node.retained is not None:
            host.node.retained.close()

    # --- ranks --------------------------------------------------------------------------------------------------------

    def started(self, rank: Rank) -> None:
        generation = rank.start["generation"]
        if generation != self.generation:
            self.generation, self.ranks, self.healthy, self.stops = generation, {}, 0, False
        memory = rank.start["memory"]
        rows = rank.agent.held(memory["key"])
        rank.pulse, rank.file = (
            Heartbeat(rows.memory, rank.rank, lambda: self.now),
            self.files[int(memory["own"].rpartition("/")[2])],
        )
        rank.pulse.at(RankPhase.build)
        self.ranks[rank.rank] = rank
        if len(self.ranks) == rank.start["world"]:
            self.at(START, lambda: self._resume(generation))

    def _is_whole(self, generation: int) -> bool:
        return generation == self.generation and all(
            rank.agent.children.get(number) is rank for number, rank in self.ranks.items()
        )

    def steps_at(self, place: str) -> list[int]:
        """Returns the steps with a snapshot, as a rank that reads there sees them."""
        return [step for _, step in self.versions_at(place)]

    def versions_at(self, place: str) -> list[tuple[int, int]]:
        """Returns the steps of `steps_at`, each after the generation that computed it."""
        file = None
        if place.startswith("/proc/"):
            file = self.files.get(int(place.rpartition("/")[2]))
        if place.startswith(REMOTE_PREFIX):
            address, key, rank = place.removeprefix(REMOTE_PREFIX).split("/")
            number = self.lenders[address](key, int(rank)) if address in self.lenders else None
            if number is not None:
                file = self.files[number]
                self.owners[number].close(number)
        return [(file.pasts[step], step) for step in file.steps] if file else []

    def _resume(self, generation: int) -> None:
        """All ranks have joined. They resume from the newest step of which all of them have a snapshot, or else from
        disk."""
        if not self._is_whole(generation):
            return
        if self.leader.store_hangs:
            for rank in self.ranks.values():
                rank.pulse.at(RankPhase.join)
            return
        common: set[tuple[int, int]] | None = None
        tables: dict[str, list[str]] = {}
        for number, rank in self.ranks.items():
            table = rank.start["memory"]["sources"]
            if table not in tables:  # one for all ranks of a node
                tables[table] = self.files[int(table.rpartition("/")[2])].text.decode().splitlines()
            places = tables[table]
            if len(places) == len(self.ranks):  # else of another number of ranks: each reads those of all
                places = places[number : number + 1]
            for place in places:
                found = set(self.versions_at(place))
                common = found if common is None else common & found
        _, newest = max(common or {(0, 0)})
        step, source = (newest, "memory") if newest >= max(self.disk, 1) else (self.disk, "disk" if self.disk else "")
        lost, self.done = self.done - step, step
        for fault in self.told:
            if not fault.healed:
                fault.healed, fault.lost, fault.source = self.calendar, lost, source
        for rank in self.ranks.values():
            rank.file.steps[:] = [each for each in rank.file.steps if each <= step]
            rank.pulse.at(RankPhase.data, step + 1)
        self.starts.append(max(host.ours.sent for host in self.hosts.values()))
        self._say(kind="begin", step=step, source=source)
        self.at(self.step, lambda: self._step(generation))

    def _say(self, **message: Any) -> None:
        rank = self.ranks[0]
        rank.agent.say(event="said", rank=0, generation=self.generation, message=message)

    def _step(self, generation: int) -> None:
        if not self._is_whole(generation):
            return
        if frozen := [rank.rank for rank in self.ranks.values() if rank.is_frozen]:
            for rank in self.ranks.values():
                if not rank.is_frozen:
                    rank.pulse.at(RankPhase.reduce)
                    rank.pulse.write(HeartbeatField.waits, WAIT_INCREMENT + frozen[0] + 1)
            return
        self.done, self.healthy = self.done + 1, self.healthy + 1
        for rank in self.ranks.values():
            copy(rank.file, self.done, rank.start["generation"])
            rank.pulse.write(HeartbeatField.snapshot_step, self.done)
            rank.pulse.at(RankPhase.data, self.done + 1)
        self._say(kind="record", record={"step": self.done, "seconds": self.step})
        if self.done % SAVE == 0 or self.stops:
            self.disk = self.done
            self._say(kind="saved", step=self.done, path="", seconds=1.0)
        if self.stops:
            for number, rank in self.ranks.items():
                rank.agent.die(number, 75)
            return
        self._go_on()
        self.at(self.step, lambda: self._step(generation))

    # --- faults
    # ---------------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Measures one healthy step, then skips the time until the next fault."""
        if self.healthy == 3:
            self._mark, self.resumed = (self.now, self.spent), 0.0
        if self.healthy < 5:
            return
        if self.healthy == 5:
            self.steady.append((self.now - self._mark[0], self.spent - self._mark[1]))
        if self.calendar > self.hours * 3600.0 or len(self.told) >= min(self.faults, len(self.kinds) or self.faults):
            self._finish()
        elif not self.is_armed:
            self.is_armed = True
            self.skipped += max(0.0, self.next_fault - self.calendar)
            self.at(self.random.uniform(0.0, self.step), self._fault)

    def _fault(self) -> None:
        """Applies a fault to any node, also the leader. Given `kinds` state whether they concern the leader."""
        drawn = self.random.choices([*KINDS], [*KINDS.values()])[0]
        kind = self.kinds[len(self.told)] if self.kinds else drawn
        if self.leader_every and (len(self.told) + 1) % self.leader_every == 0:
            kind = "leader"
        spared = self.leads if self.kinds else -1
        number = self.random.choice([number for number in range(self.nodes) if number != spared])
        if number == self.leads or kind in OF_LEADER.values():
            number, kind = self.leads, OF_LEADER.get(kind, kind)
        agent = self._agent_of(number)
        if agent is None or not agent.children:
            self.at(self.step, self._fault)
            return
        rank = self.random.choice(sorted(agent.children))
        alone = all(fault.healed for fault in self.told)
        for fault in self.told:
            fault.alone = fault.alone and bool(fault.healed)
        self.told.append(Told(kind, self.done, self.calendar, alone=alone))
        self.healthy, self.is_armed = 0, False
        self.next_fault = self.calendar + self.random.expovariate(RATE * self.nodes * self.each) * 3600.0
        for host in self.hosts.values():
            host.ours.sent = 0
        self._happen(kind, number, agent, rank)

    def _agent_of(self, number: int) -> Any:
        """Returns the supervisor of the ranks of node `number`, or None while the node is lost."""
        if number == self.leads:
            return self.leader
        host = self.hosts[number]
        return host.node.agent if host.is_alive else None

    def _happen(self, kind: str, number: int, agent: Any, rank: int) -> None:
        if kind == "dies":
            agent.die(rank, -9)
        elif kind == "hangs":
            agent.children[rank].is_frozen = True
        elif kind in ("link", "leader's link"):
            for host in self.hosts.values():
                if number in (host.number, self.leads):
                    host.ours.is_silent = host.end.is_silent = True
            for child in agent.children.values():
                child.is_frozen = True  # what ranks say to each other takes the same way
            if number == self.leads:
                raise LeaderSilent
        elif kind == "leader":
            raise LeaderLost
        else:
            victim = self.hosts[number]
            self.crash(victim)
            if kind != "gone":  # for good
                self.at(RETURN, lambda: self.join(victim.number))

    def _finish(self) -> None:
        self.is_over = True
        for number, rank in self.ranks.items():
            rank.agent.die(number, 0)

    # --- a run --------------------------------------------------------------------------------------------------------

    def train(self) -> Cluster:
        """Runs from the start to the end. `notes` has every note of the supervisor."""
        fleet = self.lead()
        while True:
            try:
                self._reign(fleet)
                return self
            except LeaderLost as loss:
                fleet = self._succeed(isinstance(loss, LeaderSilent))

    def _reign(self, fleet: ClusterAgent) -> None:
        place = NodeRole(self.leads, self.nodes, (self.each,) * self.nodes, address(self.leads), 1)
        await_nodes(fleet, place, self.notes.append, SimpleNamespace(retries=5))  # type: ignore[arg-type]
        work = RankJob("module:function", self.nodes * self.each, {"launch": "x" * 2500}, self.folder)
        hold = AdoptionPolicy(60.0, "job and run", retained=self.retained)
        terms = replace(ACCELERATOR_LIMITS, kill=KILL_SECONDS)  # simulated ranks end at once, or never
        care = FaultPolicy(retries=5, hang_timeout=2.0, rejoin_timeout=600.0, terms=terms, hold=hold)
        care = replace(care, follows=bool(self.told), **self.options)
        self.supervisor = Supervisor(work, lambda *_: None, self.notes.append, agent=fleet, care=care)
        self.supervisor.run()
        self.is_over = True
        fleet.end(0, "")
        fleet.dissolve()
