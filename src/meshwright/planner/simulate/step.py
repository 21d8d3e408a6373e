"""Simulates one step of a plan action by action. run.py prepares the input (`StepProgram`) and summarizes the result.

The simulation contains every forward and backward of every virtual stage in the order of the schedule, and every
message between stages. The simulation also contains every gather and reduction of the data ranks, and the update.

The following rules apply in addition to the order of the schedule:

- A rank posts its collectives in order. A collective starts when all members have posted it and the previous collective
  of every member has ended.
- A collective and compute on one device slow each other down by OVERLAP_SLOWDOWN. On a CPU, the cores that compute also
  communicate, so compute stops during a collective.
- Transfers on one port share the bandwidth of the port.
- At ZeRO 2 and 3, at most MAX_INFLIGHT_REDUCE reductions are in flight while backward fills the next parameter group.
- The gather of new weights overlaps with the first forward of the next step, so the step ends with its exposed rest.
- If gradients are clipped, no rank updates before all ranks have reduced their gradients.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost.constants import MAX_INFLIGHT_REDUCE, OVERLAP_SLOWDOWN
from meshwright.planner.cost.overlap import overlapped
from meshwright.planner.simulate.events import (
    LinkPort,
    LinkTransfer,
    SimClock,
    SimEvent,
    SimProcess,
    SimTask,
    retime_transfers,
)
from meshwright.planner.simulate.op_times import OpTimes, PassSegment, PassSegments
from meshwright.planner.simulate.symmetry import ReplicaClass
from meshwright.spec.schedules.action import Action, ActionKind, RankOrders, stage_ranks

WAIT_PREVIOUS_STAGE, WAIT_NEXT_STAGE = "the stage before", "the stage behind"
WAIT_GATHER, WAIT_REDUCTION, WAIT_OTHER_RANKS, WAIT_HOST, WAIT_STEP_END = (
    "weights",
    "reductions",
    "other ranks",
    "its host",
    "the end",
)
WAIT_REASONS = (
    WAIT_PREVIOUS_STAGE,
    WAIT_NEXT_STAGE,
    WAIT_GATHER,
    WAIT_REDUCTION,
    WAIT_OTHER_RANKS,
    WAIT_HOST,
    WAIT_STEP_END,
)
"""The reasons why a rank is idle, in the order in which a report lists them."""


class TraceSpan(NamedTuple):
    """An interval in the trace, in seconds from the start of the step: an action, the update, a collective, or a
    message. `to` is the index of the simulated rank that receives a message, otherwise -1."""

    name: str
    start: float
    end: float
    to: int = -1


class LinkSpeed(NamedTuple):
    """A link of one tier: the bandwidth of one rank in bytes/s, and the latency in seconds."""

    bandwidth: float
    latency: float


class StepProgram(NamedTuple):
    """The input of a simulation.

    `orders` is the order of actions of each pipeline rank, `durations` the times of these actions. `lanes` are the
    classes of identical replicas (symmetry.py). `lines` is the speed of a link by tier, innermost first, and a tier is
    an index of it. `hops` is the tier of the link between each pair of pipeline ranks. `data` and `tensor` are the
    tiers of the data-parallel groups and of the tensor and context groups. Link faults apply to the ports of tier
    `faulty` and of the tiers outside of it. `zero` is the ZeRO stage. `barrier`: whether all ranks synchronise before
    the update, for the norm of clipped gradients.
    """

    orders: RankOrders
    durations: OpTimes
    lanes: Sequence[ReplicaClass]
    lines: Sequence[LinkSpeed]
    hops: Sequence[Sequence[int]]
    data: int
    tensor: int
    faulty: int
    zero: int
    barrier: bool


@dataclass
class SimulatedRank:
    """The state of one simulated rank, which represents pipeline rank `pp` in all replicas of the class `lane`.

    `at` is the index of the simulated rank. `running` is the collective in flight, `queue` the posted collectives that
    have not ended, in order. `pending` are the reductions that a later action or the end of the step waits for.
    Seconds: `busy` is the time of compute, `update` that of the update on the device, `waits` the idle time by reason,
    and `finish` the time at which the rank ends its step.
    """

    at: int
    pp: int
    lane: ReplicaClass
    ports: defaultdict[tuple[int, str], LinkPort] = field(default_factory=lambda: defaultdict(LinkPort))
    computing: SimTask | None = None
    running: SimulatedCollective | None = None
    queue: deque[SimulatedCollective] = field(default_factory=deque)
    posted: dict[tuple[str, int], int] = field(default_factory=dict)
    pending: list[SimEvent] = field(default_factory=list)
    busy: float = 0.0
    update: float = 0.0
    finish: float = 0.0
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WAIT_REASONS, 0.0))
    actions: list[TraceSpan] = field(default_factory=list)
    collectives: list[TraceSpan] = field(default_factory=list)
    messages: list[TraceSpan] = field(default_factory=list)


@dataclass(eq=False)
class SimulatedCollective:
    """A collective of the simulated ranks `members`. The collective takes `seconds` without contention. `came` is the
    number of members that have posted the collective."""

    name: str
    members: list[SimulatedRank]
    seconds: float
    done: SimEvent = field(default_factory=SimEvent)
    came: int = 0
    started: bool = False
    start: float = 0.0
    transfer: LinkTransfer | None = None


COLLECTIVE_SCOPES: tuple[tuple[str, Callable[[SimulatedRank, int], bool]], ...] = (
    ("data", lambda cell, width: True),
    ("replicas", lambda cell, width: True),
    ("tie", lambda cell, width: cell.pp in (0, width - 1)),
    ("all", lambda cell, width: True),
)
"""The types of process groups, each with a function that returns whether a rank is a member: shard group (at ZeRO 0 all
data ranks), replicas, first and last pipeline rank with a tied weight, and all ranks."""


class StepSimulator:
    """Simulates one step of the plan in `play`. An instance is used for one call of `run`."""

    def __init__(self, play: StepProgram) -> None:
        self.play = play
        self.clock = SimClock()
        self.stages = len(play.durations.stages)
        self.owner = stage_ranks(play.orders)
        self.width = len(play.orders)
        self.cells = [
            SimulatedRank(at * self.width + pp, pp, lane)
            for at, lane in enumerate(play.lanes)
            for pp in range(self.width)
        ]
        self.arrived: dict[tuple[int, Action], SimEvent] = {}
        self.collectives: dict[tuple[str, int, int], SimulatedCollective] = {}
        self.members: dict[tuple[str, int], list[SimulatedRank]] = {}
        for scope, takes_part in COLLECTIVE_SCOPES:
            for cell in self.cells:
                if takes_part(cell, self.width):
                    self.members.setdefault((scope, self._place(cell, scope)), []).append(cell)
        self.pace = 1.0 / (1.0 + OVERLAP_SLOWDOWN)

    def run(self) -> list[SimulatedRank]:
        """Runs the simulation and returns the ranks in their final state."""
        for cell in self.cells:
            self._faults(cell)
        for cell in self.cells:
            self.clock.start(self._process(cell))
        self.clock.run()
        last = max(cell.finish for cell in self.cells)
        for cell in self.cells:
            cell.waits[WAIT_STEP_END] += last - cell.finish
        return self.cells

    def _faults(self, cell: SimulatedRank) -> None:
        """Sets the bandwidth fractions of a rank's ports. Schedules the changes at the start and end of temporary link
        faults."""
        tiers = range(self.play.faulty, len(self.play.lines))
        ports = [cell.ports[tier, way] for tier in tiers for way in ("out", "in")]
        links = cell.lane.mark(cell.pp).links

        def set_share() -> None:
            now = self.clock.now
            shares = [
                link.share for link in links if link.seconds is None or link.start <= now < link.start + link.seconds
            ]
            for port in ports:
                port.share = min(shares, default=1.0)
            retime_transfers(ports)

        moments = {0.0} | {
            moment for link in links if link.seconds is not None for moment in (link.start, link.start + link.seconds)
        }
        for moment in sorted(moments):
            self.clock.after(moment, set_share)

    # --- actions of a rank
    # ---------------------------------------------------------------------------------------------------------

    def _process(self, cell: SimulatedRank) -> SimProcess:
        play, clock = self.play, self.clock
        mark = cell.lane.mark(cell.pp)
        exchange = 1.0 / mark.share if play.tensor >= play.faulty and mark.share else 1.0
        order = play.orders[cell.pp]
        last = {action.stage: action for action in order if action.kind is not ActionKind.F}
        for action in order:
            stage = play.durations.stages[action.stage]
            for signal, reason in self._inputs(cell, action):
                if not signal.fired:
                    began = clock.now
                    yield signal
                    cell.waits[reason] += clock.now - began
            if action.kind is ActionKind.F:
                pieces = stage.forward
            elif last[action.stage] is action:
                pieces = stage.last
            else:
                pieces = stage.weights if action.kind is ActionKind.W else stage.backward
            began = clock.now
            yield from self._pass(cell, action, pieces, (mark.slow, exchange))
            cell.actions.append(TraceSpan(str(action), began, clock.now))
            self._send(cell, action)
        yield from self._ending(cell)
        cell.finish = clock.now

    def _inputs(self, cell: SimulatedRank, action: Action) -> Iterator[tuple[SimEvent, str]]:
        kind, stage, micro_batch = action
        if kind is ActionKind.F and stage and self.owner[stage - 1] != cell.pp:
            yield self._arrival(cell, Action(ActionKind.F, stage - 1, micro_batch)), WAIT_PREVIOUS_STAGE
        if kind is ActionKind.B and stage < self.stages - 1 and self.owner[stage + 1] != cell.pp:
            yield self._arrival(cell, Action(ActionKind.B, stage + 1, micro_batch)), WAIT_NEXT_STAGE

    def _arrival(self, cell: SimulatedRank, action: Action) -> SimEvent:
        return self.arrived.setdefault((cell.at - cell.pp, action), SimEvent())

    def _pass(
        self, cell: SimulatedRank, action: Action, pieces: PassSegments, factors: tuple[float, float]
    ) -> SimProcess:
        clock, stage = self.clock, self.play.durations.stages[action.stage]
        ending = ActionKind.W if stage.weights else ActionKind.B
        gathered: SimEvent | None = None
        for at, piece in enumerate(pieces):
            if stage.gathers and piece.unit >= 0 and action.kind is not ActionKind.W:
                signal = gathered if piece.ahead and gathered is not None else self._gather(cell, action, piece)
                yield from self._wait(cell, signal, WAIT_GATHER)
                following = pieces[at + 1] if at + 1 < len(pieces) else piece
                gathered = self._gather(cell, action, following) if following.ahead and following is not piece else None
            reduces = bool(stage.reductions) and piece.unit >= 0 and action.kind is ending
            if reduces and self.play.zero >= 2 and len(cell.pending) > MAX_INFLIGHT_REDUCE:
                yield from self._wait(cell, cell.pending[-1 - MAX_INFLIGHT_REDUCE], WAIT_REDUCTION)
                del cell.pending[: -1 - MAX_INFLIGHT_REDUCE]
            seconds = piece.compute * factors[0] + piece.exchange * factors[1]
            if seconds > 0.0:
                began = clock.now
                yield self._compute(cell, seconds)
                cell.busy += clock.now - began
            if reduces:
                cell.pending.append(
                    self._post(cell, f"reduce {action}.{piece.unit}", "data", stage.reductions[piece.unit])
                )

    def _gather(self, cell: SimulatedRank, action: Action, piece: PassSegment) -> SimEvent:
        seconds = self.play.durations.stages[action.stage].gathers[piece.unit]
        return self._post(cell, f"gather {action}.{piece.unit}", "data", seconds)

    def _ending(self, cell: SimulatedRank) -> SimProcess:
        ending, clock = self.play.durations.endings[cell.pp], self.clock
        for signal in cell.pending:
            yield from self._wait(cell, signal, WAIT_REDUCTION)
        if ending.replicas:
            yield from self._wait(
                cell, self._post(cell, "sum over replicas", "replicas", ending.replicas), WAIT_REDUCTION
            )
        if self.play.durations.tie and cell.pp in (0, self.width - 1):
            what = "sum of the tied weight" if self.width > 1 else "gather for the loss"
            yield from self._wait(cell, self._post(cell, what, "tie", self.play.durations.tie), WAIT_REDUCTION)
        if self.play.barrier:
            yield from self._wait(cell, self._post(cell, "norm", "all", 0.0), WAIT_OTHER_RANKS)
        if ending.update:
            began = clock.now
            yield self._compute(cell, ending.update * cell.lane.mark(cell.pp).slow)
            cell.update = clock.now - began
            cell.actions.append(TraceSpan("update", began, clock.now))
        if ending.on_host:
            yield from self._wait(cell, self._compute(cell, ending.on_host), WAIT_HOST)
        if ending.weights:
            seconds = float(overlapped(np.array(ending.weights), np.array(self._forward_seconds(cell))))
            yield from self._wait(cell, self._post(cell, "gather new weights", "data", seconds), WAIT_GATHER)

    def _forward_seconds(self, cell: SimulatedRank) -> float:
        """Returns the seconds of the first forward of the next step, with which the gather of new weights overlaps: 0
        on a CPU."""
        times = self.play.durations
        own = [stage for at, stage in enumerate(times.stages) if self.owner[at] == cell.pp and not times.on_host]
        return sum(piece.compute + piece.exchange for stage in own for piece in stage.forward)

    def _wait(self, cell: SimulatedRank, signal: SimEvent, reason: str) -> SimProcess:
        if not signal.fired:
            began = self.clock.now
            yield signal
            cell.waits[reason] += self.clock.now - began

    # --- compute and communication
    # ------------------------------------------------------------------------------------------------

    def _compute(self, cell: SimulatedRank, seconds: float) -> SimEvent:
        done = SimEvent()

        def end() -> None:
            cell.computing = None
            if cell.running is not None:
                self._set_pace(cell.running)
            done.fire()

        cell.computing = SimTask(seconds, end)
        self._set_rate(cell)
        if cell.running is not None:
            self._set_pace(cell.running)
        return done

    def _set_rate(self, cell: SimulatedRank) -> None:
        """Sets the rate of compute. While a collective overlaps with compute, the rate is lower, and zero on a CPU."""
        if cell.computing is not None:
            rate = 0.0 if self.play.durations.on_host else self.pace
            self.clock.at(cell.computing, 1.0 if cell.running is None else rate)

    def _set_pace(self, collective: SimulatedCollective) -> None:
        assert collective.transfer is not None
        stretched = not self.play.durations.on_host and any(
            member.computing is not None for member in collective.members
        )
        collective.transfer.pace = self.pace if stretched else 1.0
        collective.transfer.retime()

    def _send(self, cell: SimulatedRank, action: Action) -> None:
        """Sends the output of `action` to the rank of the next stage, or the gradient to the rank of the previous
        stage."""
        neighbour = {ActionKind.F: action.stage + 1, ActionKind.B: action.stage - 1}.get(action.kind, -1)
        receiver = self.owner.get(neighbour, cell.pp)
        if receiver == cell.pp:
            return
        tier = self.play.hops[cell.pp][receiver]
        line = self.play.lines[tier]
        other = self.cells[cell.at - cell.pp + receiver]
        arrival = self._arrival(cell, action)
        began = self.clock.now

        def arrive() -> None:
            cell.messages.append(TraceSpan(str(action), began, self.clock.now, other.at))
            arrival.fire()

        ports = (cell.ports[tier, "out"], other.ports[tier, "in"])
        LinkTransfer(
            self.clock,
            ports,
            self.play.durations.message / line.bandwidth,
            lambda: self.clock.after(line.latency, arrive),
        )

    def _post(self, cell: SimulatedRank, name: str, scope: str, seconds: float) -> SimEvent:
        """Posts the next collective of the rank's process group of type `scope`. Returns the event at the end of this
        collective. `seconds` is the time without contention."""
        place = self._place(cell, scope)
        number = cell.posted.get((scope, place), 0)
        cell.posted[scope, place] = number + 1
        key = (scope, place, number)
        collective = self.collectives.get(key)
        if collective is None:
            collective = self.collectives[key] = SimulatedCollective(name, self.members[scope, place], seconds)
        collective.came += 1
        cell.queue.append(collective)
        self._try(collective)
        return collective.done

    def _place(self, cell: SimulatedRank, scope: str) -> int:
        """Returns the key of the rank's process group of type `scope`. All members of a group have one key."""
        if scope == "data":
            return cell.pp if self.play.zero == 0 else cell.lane.group * self.width + cell.pp
        return {"replicas": cell.pp, "tie": cell.at - cell.pp, "all": 0}[scope]

    def _try(self, collective: SimulatedCollective) -> None:
        """Starts the collective if all members have posted it, and if no member has an older unfinished collective."""
        if (
            collective.started
            or collective.came < len(collective.members)
            or any(member.queue[0] is not collective for member in collective.members)
        ):
            return
        collective.started, collective.start = True, self.clock.now
        if collective.seconds == 0.0:
            self._end(collective)
            return
        tier = self.play.data
        ports = [member.ports[tier, way] for member in collective.members for way in ("out", "in")]
        collective.transfer = LinkTransfer(self.clock, ports, collective.seconds, lambda: self._end(collective))
        for member in collective.members:
            member.running = collective
            self._set_rate(member)
        self._set_pace(collective)

    def _end(self, collective: SimulatedCollective) -> None:
        for member in collective.members:
            member.queue.popleft()
            if collective.seconds:
                member.running = None
                member.collectives.append(TraceSpan(collective.name, collective.start, self.clock.now))
                self._set_rate(member)
        collective.done.fire()
        for member in collective.members:
            if member.queue:
                self._try(member.queue[0])
