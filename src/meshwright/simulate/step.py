"""One step of a plan, played action by action: every pass of every virtual stage in the order of the plan's schedule, every message between
stages, every gather and reduction of the data ranks, the sums behind them and the update.

Rules beside those of `schedules.timing`: a rank posts its collectives in order and they run one after the other, each when all of its
members have come; a collective and compute on the same device slow each other by OVERLAP_SLOWDOWN (on a host device, whose cores do both,
compute stands still meanwhile); transfers that share a port share its bandwidth. At ZeRO 2 and 3 at most REDUCTIONS_IN_FLIGHT reductions are
under way while another unit fills. Where gradients are clipped, no rank updates before all have summed theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.cost.constants import OVERLAP_SLOWDOWN, REDUCTIONS_IN_FLIGHT
from meshwright.schedules.action import Action, Kind
from meshwright.schedules.check import Orders, owners
from meshwright.simulate.durations import Durations, Piece, Pieces
from meshwright.simulate.events import Clock, Process, Signal, Work
from meshwright.simulate.lanes import Lane
from meshwright.simulate.network import Port, Tier, Transfer, retime

STAGE_BEFORE, STAGE_BEHIND = "the stage before", "the stage behind"
GATHERS, REDUCTIONS, OTHERS, HOST, END = "weights", "reductions", "other ranks", "its host", "the end"
REASONS = (STAGE_BEFORE, STAGE_BEHIND, GATHERS, REDUCTIONS, OTHERS, HOST, END)
"""What a rank waits for."""


class Span(NamedTuple):
    """Something that a cell did: an action, the update; or that was on its links. `to` is the cell that a message goes to."""

    name: str
    start: float
    end: float
    to: int = -1


class Line(NamedTuple):
    """A link between two tiers of ranks: bytes/s that a rank gets, seconds of latency."""

    bandwidth: float
    latency: float


class Play(NamedTuple):
    """What is played: the order of actions by pipeline rank, what they take, the lanes; the links by tier, and which tier is used."""

    orders: Orders
    durations: Durations
    lanes: Sequence[Lane]
    lines: dict[Tier, Line]
    hops: Sequence[Sequence[Tier]]
    data: Tier
    tensor: Tier
    faulty: Tier
    zero: int
    barrier: bool


@dataclass
class Cell:
    """One pipeline rank of one lane, while it is played."""

    at: int
    pp: int
    lane: Lane
    ports: dict[tuple[Tier, str], Port] = field(default_factory=lambda: {(tier, way): Port() for tier in Tier for way in ("out", "in")})
    computing: Work | None = None
    running: Collective | None = None
    queue: deque[Collective] = field(default_factory=deque)
    posted: dict[tuple[str, int], int] = field(default_factory=dict)
    pending: list[Signal] = field(default_factory=list)
    busy: float = 0.0
    update: float = 0.0
    finish: float = 0.0
    waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REASONS, 0.0))
    actions: list[Span] = field(default_factory=list)
    collectives: list[Span] = field(default_factory=list)
    messages: list[Span] = field(default_factory=list)


@dataclass(eq=False)
class Collective:
    """One that `members` take part in."""

    name: str
    members: list[Cell]
    seconds: float
    done: Signal = field(default_factory=Signal)
    came: int = 0
    started: bool = False
    start: float = 0.0
    transfer: Transfer | None = None


SCOPES: tuple[tuple[str, Callable[[Cell, int], bool]], ...] = (
    ("data", lambda cell, width: True),
    ("replicas", lambda cell, width: True),
    ("tie", lambda cell, width: cell.pp in (0, width - 1)),
    ("all", lambda cell, width: True),
)
"""Kinds of groups, and which cells are in one."""


class Player:
    """Plays one step."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.clock = Clock()
        self.stages = len(play.durations.stages)
        self.owner = owners(play.orders)
        self.width = len(play.orders)
        self.cells = [Cell(at * self.width + pp, pp, lane) for at, lane in enumerate(play.lanes) for pp in range(self.width)]
        self.arrived: dict[tuple[int, Action], Signal] = {}
        self.collectives: dict[tuple[str, int, int], Collective] = {}
        self.members: dict[tuple[str, int], list[Cell]] = {}
        for scope, takes_part in SCOPES:
            for cell in self.cells:
                if takes_part(cell, self.width):
                    self.members.setdefault((scope, self._place(cell, scope)), []).append(cell)
        self.pace = 1.0 / (1.0 + OVERLAP_SLOWDOWN)

    def run(self) -> list[Cell]:
        """The cells as they are at the end of the step."""
        for cell in self.cells:
            self._faults(cell)
        for cell in self.cells:
            self.clock.start(self._process(cell))
        self.clock.run()
        last = max(cell.finish for cell in self.cells)
        for cell in self.cells:
            cell.waits[END] += last - cell.finish
        return self.cells

    def _faults(self, cell: Cell) -> None:
        """Sets the shares of a cell's ports, and the moments at which they change."""
        ports = [cell.ports[self.play.faulty, way] for way in ("out", "in")]
        links = cell.lane.mark(cell.pp).links

        def set_share() -> None:
            now = self.clock.now
            shares = [link.share for link in links if link.seconds is None or link.start <= now < link.start + link.seconds]
            for port in ports:
                port.share = min(shares, default=1.0)
            retime(ports)

        moments = {0.0} | {moment for link in links if link.seconds is not None for moment in (link.start, link.start + link.seconds)}
        for moment in sorted(moments):
            self.clock.after(moment, set_share)

    # --- what a rank does ---------------------------------------------------------------------------------------------------------

    def _process(self, cell: Cell) -> Process:
        play, clock = self.play, self.clock
        mark = cell.lane.mark(cell.pp)
        exchange = 1.0 / mark.share if play.tensor == play.faulty and mark.share else 1.0
        order = play.orders[cell.pp]
        last = {action.stage: action for action in order if action.kind is not Kind.F}
        for action in order:
            stage = play.durations.stages[action.stage]
            for signal, reason in self._inputs(cell, action):
                if not signal.fired:
                    began = clock.now
                    yield signal
                    cell.waits[reason] += clock.now - began
            if action.kind is Kind.F:
                pieces = stage.forward
            elif last[action.stage] is action:
                pieces = stage.last
            else:
                pieces = stage.weights if action.kind is Kind.W else stage.backward
            began = clock.now
            yield from self._pass(cell, action, pieces, (mark.slow, exchange))
            cell.actions.append(Span(str(action), began, clock.now))
            self._send(cell, action)
        yield from self._ending(cell)
        cell.finish = clock.now

    def _inputs(self, cell: Cell, action: Action) -> Iterator[tuple[Signal, str]]:
        kind, stage, micro_batch = action
        if kind is Kind.F and stage and self.owner[stage - 1] != cell.pp:
            yield self._arrival(cell, Action(Kind.F, stage - 1, micro_batch)), STAGE_BEFORE
        if kind is Kind.B and stage < self.stages - 1 and self.owner[stage + 1] != cell.pp:
            yield self._arrival(cell, Action(Kind.B, stage + 1, micro_batch)), STAGE_BEHIND

    def _arrival(self, cell: Cell, action: Action) -> Signal:
        return self.arrived.setdefault((cell.at - cell.pp, action), Signal())

    def _pass(self, cell: Cell, action: Action, pieces: Pieces, factors: tuple[float, float]) -> Process:
        clock, stage = self.clock, self.play.durations.stages[action.stage]
        ending = Kind.W if stage.weights else Kind.B
        gathered: Signal | None = None
        for at, piece in enumerate(pieces):
            if stage.gathers and piece.unit >= 0 and action.kind is not Kind.W:
                signal = gathered if piece.ahead and gathered is not None else self._gather(cell, action, piece)
                yield from self._wait(cell, signal, GATHERS)
                following = pieces[at + 1] if at + 1 < len(pieces) else piece
                gathered = self._gather(cell, action, following) if following.ahead and following is not piece else None
            reduces = bool(stage.reductions) and piece.unit >= 0 and action.kind is ending
            if reduces and self.play.zero >= 2 and len(cell.pending) > REDUCTIONS_IN_FLIGHT:
                yield from self._wait(cell, cell.pending[-1 - REDUCTIONS_IN_FLIGHT], REDUCTIONS)
                del cell.pending[: -1 - REDUCTIONS_IN_FLIGHT]
            seconds = piece.compute * factors[0] + piece.exchange * factors[1]
            if seconds > 0.0:
                began = clock.now
                yield self._compute(cell, seconds)
                cell.busy += clock.now - began
            if reduces:
                cell.pending.append(self._post(cell, f"reduce {action}.{piece.unit}", "data", stage.reductions[piece.unit]))

    def _gather(self, cell: Cell, action: Action, piece: Piece) -> Signal:
        seconds = self.play.durations.stages[action.stage].gathers[piece.unit]
        return self._post(cell, f"gather {action}.{piece.unit}", "data", seconds)

    def _ending(self, cell: Cell) -> Process:
        ending, clock = self.play.durations.endings[cell.pp], self.clock
        for signal in cell.pending:
            yield from self._wait(cell, signal, REDUCTIONS)
        if ending.replicas:
            yield from self._wait(cell, self._post(cell, "sum over replicas", "replicas", ending.replicas), REDUCTIONS)
        if self.play.durations.tie and cell.pp in (0, self.width - 1):
            yield from self._wait(cell, self._post(cell, "sum of the tied weight", "tie", self.play.durations.tie), REDUCTIONS)
        if self.play.barrier:
            yield from self._wait(cell, self._post(cell, "norm", "all", 0.0), OTHERS)
        if ending.update:
            began = clock.now
            yield self._compute(cell, ending.update * cell.lane.mark(cell.pp).slow)
            cell.update = clock.now - began
            cell.actions.append(Span("update", began, clock.now))
        if ending.on_host:
            yield from self._wait(cell, self._compute(cell, ending.on_host), HOST)
        if ending.weights:
            yield from self._wait(cell, self._post(cell, "gather new weights", "data", ending.weights), GATHERS)

    def _wait(self, cell: Cell, signal: Signal, reason: str) -> Process:
        if not signal.fired:
            began = self.clock.now
            yield signal
            cell.waits[reason] += self.clock.now - began

    # --- compute and communication ------------------------------------------------------------------------------------------------

    def _compute(self, cell: Cell, seconds: float) -> Signal:
        done = Signal()

        def end() -> None:
            cell.computing = None
            if cell.running is not None:
                self._set_pace(cell.running)
            done.fire()

        cell.computing = Work(seconds, end)
        self._set_rate(cell)
        if cell.running is not None:
            self._set_pace(cell.running)
        return done

    def _set_rate(self, cell: Cell) -> None:
        """Compute is slower while a collective runs beside it; on a host device it stands still."""
        if cell.computing is not None:
            beside = 0.0 if self.play.durations.on_host else self.pace
            self.clock.at(cell.computing, 1.0 if cell.running is None else beside)

    def _set_pace(self, collective: Collective) -> None:
        assert collective.transfer is not None
        stretched = not self.play.durations.on_host and any(member.computing is not None for member in collective.members)
        collective.transfer.pace = self.pace if stretched else 1.0
        collective.transfer.retime()

    def _send(self, cell: Cell, action: Action) -> None:
        """The result of `action` on its way to the rank that reads it."""
        neighbour = {Kind.F: action.stage + 1, Kind.B: action.stage - 1}.get(action.kind, -1)
        receiver = self.owner.get(neighbour, cell.pp)
        if receiver == cell.pp:
            return
        tier = self.play.hops[cell.pp][receiver]
        line = self.play.lines[tier]
        other = self.cells[cell.at - cell.pp + receiver]
        arrival = self._arrival(cell, action)
        began = self.clock.now

        def arrive() -> None:
            cell.messages.append(Span(str(action), began, self.clock.now, other.at))
            arrival.fire()

        ports = (cell.ports[tier, "out"], other.ports[tier, "in"])
        Transfer(self.clock, ports, self.play.durations.message / line.bandwidth, lambda: self.clock.after(line.latency, arrive))

    def _post(self, cell: Cell, name: str, scope: str, seconds: float) -> Signal:
        """`cell` has come to its next collective of `scope`; what fires when that has ended."""
        place = self._place(cell, scope)
        number = cell.posted.get((scope, place), 0)
        cell.posted[scope, place] = number + 1
        key = (scope, place, number)
        collective = self.collectives.get(key)
        if collective is None:
            collective = self.collectives[key] = Collective(name, self.members[scope, place], seconds)
        collective.came += 1
        cell.queue.append(collective)
        self._try(collective)
        return collective.done

    def _place(self, cell: Cell, scope: str) -> int:
        """Cells with the same place are members of the same collectives of `scope`."""
        if scope == "data":
            return cell.pp if self.play.zero == 0 else cell.lane.group * self.width + cell.pp
        return {"replicas": cell.pp, "tie": cell.at - cell.pp, "all": 0}[scope]

    def _try(self, collective: Collective) -> None:
        """Starts it when all have come and nothing that was posted before is under way."""
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
        collective.transfer = Transfer(self.clock, ports, collective.seconds, lambda: self._end(collective))
        for member in collective.members:
            member.running = collective
            self._set_rate(member)
        self._set_pace(collective)

    def _end(self, collective: Collective) -> None:
        for member in collective.members:
            member.queue.popleft()
            if collective.seconds:
                member.running = None
                member.collectives.append(Span(collective.name, collective.start, self.clock.now))
                self._set_rate(member)
        collective.done.fire()
        for member in collective.members:
            if member.queue:
                self._try(member.queue[0])
