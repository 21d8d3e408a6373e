"""Performs the actions of the model of the control plane (protocol_model.py) on the real leader, supervisor and nodes,
one at a time.

Real: `Fleet`, `Supervisor`, `Node`, `ReplicationCoordinator`, `SnapshotLocations`, `DeviceIds`, `Slots`, `Attempt`,
`EventLog`, the wait for nodes of a new leader, and who follows
it by the lease and RUN/leader. Simulated (virtual_cluster.py): clocks, links, ranks, anonymous files, the copying of a
mirror, and the re-planning,
which gives the same work for another number of ranks. Whenever nothing is under way any more the next action is
performed, from the wait of the leader.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from protocol_model import NODES, SAVED, Action, State
from virtual_cluster import START, Cluster
from virtual_machines import Files, LeaderWaits, Mirror, Ranks

from meshwright.cli.leader_file import read_leader
from meshwright.cli.leader_role import await_nodes, continues_run
from meshwright.cli.node_role import (
    NodeRole,
    announce_leader,
    has_other_leader,
    is_next_leader,
)
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.cluster_agent import ClusterAgent
from meshwright.elastic.hang_detector import CPU_LIMITS
from meshwright.elastic.local_agent import SystemInterface
from meshwright.elastic.restart_policy import FaultPolicy
from meshwright.elastic.snapshot_inventory import AdoptionPolicy
from meshwright.elastic.snapshot_replication import ReplicationRequest
from meshwright.elastic.supervisor import Supervisor
from meshwright.train.run_lock import RunLock

NEVER, REJOIN = 1e15, 100.0
"""Seconds: after which nothing happens by itself, and that a leader waits for a node. Two such waits are shorter than
the time for which a node without a leader retains its snapshots."""

BURIAL = 0.3
"""Seconds that a leader waits for the end of ranks that it has killed, instead of KILL_SECONDS."""

CALM = BURIAL + 1.0
"""Seconds without a message after which nothing is under way."""


class Killed(BaseException):
    """The leader was."""


class Over(BaseException):
    """All actions are performed."""


class Held(Mirror):
    """A mirror that copies when it is told to."""

    waits: ReplicationRequest | None = None

    def _look(self, order: ReplicationRequest) -> None:
        if self.waits is not None:
            self._end(self.waits, None)  # it is given up
        self.waits = order

    def finish(self) -> None:
        order, self.waits = self.waits, None
        assert order is not None, "no copies were ordered"
        steps = [self.cluster.steps_at(f"at:{order.address}/{order.key}/{rank}") for rank in order.files]
        self._end(order, order.step if all(order.step in found for found in steps) else None)


class Waits(LeaderWaits):
    calm = 0.0

    def wait(self, timeout: float, linger: float, *also: int) -> list[Any]:
        before = self.cluster.now
        found = super().wait(timeout, linger, *also)
        self.calm = 0.0 if found else self.calm + self.cluster.now - before
        if self.calm > CALM:
            self.calm = 0.0
            self.cluster.perform()
        return found


class Watched(Supervisor):
    waits = False
    """Whether it waits for a node."""

    def _await_places(self) -> None:
        self.waits = True
        super()._await_places()
        self.waits = False


class Protocol(Cluster):
    """One path through the model: `walk` yields what is seen of the real objects before the first of `actions` and
    after each of them."""

    def follow(self, actions: list[Action], check: Callable[[dict[str, Any]], None]) -> None:
        self.actions, self.check, self.step = iter(actions), check, NEVER
        self.copying: dict[int, Held] = {}
        self.supervisor: Watched | None = None
        self.leads, self.term, self.begun, self.orphans, self.graves = 0, 0, -1, set[int](), list[Any]()
        self.after: int | None = None
        self.is_lost = False
        self.lease = RunLock(self.folder, 0).__enter__()
        try:
            while True:
                try:
                    self._reign()
                except Killed:
                    self._bury()
                    self._interregnum()
        except Over:
            pass
        finally:
            if not self.is_lost:
                self._bury()

    # --- what is held back
    # ----------------------------------------------------------------------------------------------------

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        if seconds < START:  # ranks join each other and step when it is their turn
            super().at(seconds, do)

    def outside(self, files: Files) -> SystemInterface:
        number = self.making

        def mirror(token: str, done: Callable[[int, bool, float], None]) -> Held:
            self.copying[number] = Held(self, files, done)
            return self.copying[number]

        waits = lambda: Waits(self)
        return super().outside(files)._replace(waiting=waits, mirror=mirror, repeat=lambda *_: None)  # type: ignore[arg-type]

    def stopwatch(self, works: bool) -> None:
        """No CPU time is measured."""

    def _later(self, host: Any) -> None:
        """Nodes have no ticks of their own: they are woken."""

    def _turn(self, host: Any) -> None:
        host.is_due = False
        if host.is_alive and host.node.turn() is not None:
            self.leave(host)
            self.orphans.add(host.number)

    def _go_on(self) -> None:
        """No faults but those of the path."""

    # --- who leads
    # ------------------------------------------------------------------------------------------------------------

    def _place(self, number: int) -> NodeRole:
        return NodeRole(number, NODES, (1,) * NODES, f"10.0.0.{number}", 1, self.after)

    def _reign(self) -> None:
        place = self._place(self.leads)
        entered = announce_leader(self.folder, place, self.notes.append)
        entered.__enter__()
        self.graves.append(entered)  # a leader that is killed removes nothing
        self.making, self.leader_files = self.leads, Files(self)
        (logs := self.folder / "logs").mkdir(parents=True, exist_ok=True)
        held = lambda key: self.leader._snapshots.shared[key]
        here = type("Here", (Ranks,), self._ranks(self.leader_files, self._wake_leader, held))
        self.leader = type("Leader", (ClusterAgent, here), {})(logs, (), place.host, 1, "secret", 1)
        if not self.term:
            for number in range(1, NODES):
                self._come(number)
        await_nodes(
            self.leader, place, self.notes.append, SimpleNamespace(rejoin_timeout=REJOIN, min_ranks=1, retries=5)
        )  # type: ignore[arg-type]
        work = RankJob("module:function", NODES, {}, self.folder)
        retained = None if place.after is None else self.hosts[place.number].node.retained
        hold = AdoptionPolicy(60.0, "job and run", retained=retained)
        care = FaultPolicy(
            5,
            replan=lambda world: replace(work, world=world),
            min_ranks=1,
            rejoin_timeout=REJOIN,
            full=NODES,
            hold=hold,
            terms=replace(CPU_LIMITS, kill=BURIAL),
        )
        work = replace(work, world=min(NODES, len(self.leader.slots)))
        care = replace(care, follows=continues_run(self.leader, place))
        self.supervisor = Watched(work, lambda *_: None, self.notes.append, agent=self.leader, care=care)
        self.supervisor.run()
        raise AssertionError("the run has ended")

    def _bury(self) -> None:
        """The memory of the leader's process, its connections and its lease are gone."""
        if self.supervisor is not None:
            self.supervisor._journal._lines._drop()
        fleet, self.supervisor, self.generation, self.begun, self.ranks = self.leader, None, -1, -1, {}
        fleet._snapshots.server.close()
        for held in fleet._snapshots.shared.values():
            held.close()
        for node in fleet.nodes:
            node.link.close()
        fleet._inbox.close()
        os.close(self.lease._handle)
        self.is_lost, self.after = True, self.leads

    def _interregnum(self) -> None:
        while self.is_lost:
            for host in self.hosts.values():
                self.wake(host)
            self.run(self.now + 1.0, lambda: False)
            self.perform()

    def perform(self) -> None:
        """From the wait of a leader that nobody says anything to any more, or where nobody leads."""
        self.check(self.seen())
        verb, which = next(self.actions, ("over", -1))
        getattr(self, f"_do_{verb}")(which)
        self._freshen()

    def _freshen(self) -> None:
        """Time that passes without a word, while others are waited for, is nobody's silence."""
        for node in [] if self.is_lost else self.leader.nodes:
            node.heard = self.now
        for host in self.hosts.values():
            host.node._heard = self.now
            self.at(0.1, lambda host=host: self.wake(host))  # type: ignore[misc]

    # --- actions
    # --------------------------------------------------------------------------------------------------------------

    def _do_over(self, _: int) -> None:
        raise Over

    def _do_begin(self, _: int) -> None:
        self._resume(self.generation)
        self.begun = self.generation

    def _do_step(self, _: int) -> None:
        self._step(self.generation)
        if self.done == SAVED:
            self.disk = SAVED

    def _do_mirror(self, node: int) -> None:
        self.copying[node].finish()

    def _do_crash(self, node: int) -> None:
        self.orphans.discard(node)
        if node == self.leads and not self.is_lost:
            raise Killed
        host = self.hosts.get(node)
        if host is not None and host.is_alive:
            host.ours.is_silent = True
        if host is not None:
            self.crash(host)

    def _do_kill(self, node: int) -> None:
        rank = self.members().index(node)
        agent: Any = self.leader if node == self.leads else self.hosts[node].node.agent
        agent.die(rank, -9)

    def _do_hear(self, slot: int) -> None:
        node = next(node for node in self.leader.nodes if node.first == slot)
        node.link.is_silent = False
        node.link.wake()

    def _come(self, number: int) -> None:
        self.making = number
        self.join(number, self.hosts[number].node.retained if number in self.orphans else None)
        self.hosts[number].ours.hello["lost"] = number in self.orphans
        self.orphans.discard(number)

    def _do_come(self, number: int) -> None:
        found = read_leader(self.folder)
        assert found is not None and found.number == self.leads and has_other_leader(self._place(number), self.folder)
        assert not is_next_leader(self._place(number), found, self.folder, 1e3), "never two leaders"
        self._come(number)

    def _do_start(self, _: int) -> None:
        pass

    def _do_lead(self, number: int) -> None:
        lost = read_leader(self.folder)
        assert lost is not None and not has_other_leader(self._place(number), self.folder)
        if number in self.orphans:
            assert is_next_leader(self._place(number), lost, self.folder, 1e3)
            self.orphans.discard(number)
        else:
            self.after = None
        self.lease = RunLock(self.folder, number).__enter__()
        self.leads, self.term, self.is_lost = number, self.term + 1, False

    def _do_expire(self, _: int) -> None:
        self.now += 1.1 * REJOIN

    # --- what is seen
    # ---------------------------------------------------------------------------------------------------------

    def members(self) -> list[int]:
        """The node of each rank."""
        at, world = self.leader._remote.at, self.supervisor.work.world if self.supervisor else 0
        return [at[rank].link.hello["order"] if rank in at else self.leads for rank in range(world)]

    def seen(self) -> dict[str, Any]:
        if self.is_lost:
            return {"phase": "lost", "term": self.term}
        seen: dict[str, Any] = {"phase": "gather", "term": self.term, "lead": self.leads}
        run = self.supervisor
        if run is None:
            return seen
        now, mirrors = getattr(run, "_now", None), self.leader._snapshots.rounds
        seen |= {"phase": "wait", "generation": run.generation}
        if now is not None and not run.waits:
            seen |= {"phase": "run" if self.begun == run.generation else "join", "members": self.members()}
        if seen["phase"] == "run":
            where = self.leader.homes._mirrors.get(run._holdings.key, {})
            mirrored = {
                rank: sorted(self.steps_at(f"at:{at}/{run._holdings.key}/{rank}")) for rank, at in where.items()
            }
            own = {rank: sorted(each.file.steps) for rank, each in self.ranks.items() if not each.agent.ended}
            seen |= {"done": self.done, "whole": mirrors._whole, "own": own}
            seen["mirrors"] = {rank: steps for rank, steps in mirrored.items() if steps}
        return seen


def expected(state: State) -> dict[str, Any]:
    """The same of the model."""
    if state.phase == "lost":
        return {"phase": "lost", "term": state.term}
    seen: dict[str, Any] = {"phase": state.phase, "term": state.term, "lead": state.lead}
    if state.phase == "gather":
        return seen
    seen |= {"generation": state.generation}
    if state.phase != "wait":
        seen["members"] = state.members
    if state.phase == "run":
        here = [each for each in state.held if each.key == state.key]
        own = {
            rank: sorted(each.step for each in here if each.rank == rank and each.node == node)
            for rank, node in enumerate(state.members)
            if state.seats[rank] not in state.unheard
        }
        mirrors: dict[int, list[int]] = {}
        for each in sorted(here):
            if (each.key, each.rank, each.node) in state.mirrors:
                mirrors.setdefault(each.rank, []).append(each.step)
        seen |= {"done": state.done, "whole": state.whole, "own": own, "mirrors": mirrors}
    return seen
