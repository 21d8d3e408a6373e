"""Numbers the devices of a run over all machines, and decides which devices ranks use. The supervisor and the agent of
several machines (cluster_agent.py) call it.

`DeviceIds` assigns device ids from 0. The first machine, which leads the run, has the first ids. The other machines
(nodes) follow in the order in which they first joined. Guarantee: a node that is lost and returns with an unchanged
name and device count gets its former device ids.

`DeviceExclusion` excludes the devices of stragglers, and readmits a device when it is healthy again. Ranks report two
durations (train/straggler.py): the current step time, and `without`, the step time if the stragglers were as fast as
their peers. The planner predicts two step times on healthy devices: `now` of the current plan, and `then` of the best
plan without the excluded devices. The expected step time after the exclusion is

    without x then / now

The stragglers are excluded if the exclusion makes steps at least MIN_SPEEDUP times as fast, and if the time saved until
the end of the run is at least `starts` (default 2) times the duration of the last start of the ranks.

A probe regularly measures a matrix product on an excluded device. If the device were healthy, the product would take
the time of the first measurement divided by the slowdown. The device counts as healthy if the product takes at most
MAX_HEALTHY_RATIO times this time. Matrix products do not reveal every defect, so a device is readmitted after `rest`
seconds in any case. Each further exclusion of the device doubles this time.

[Note: ranks and slots] Each generation (start of all ranks) numbers its ranks anew. A rank gets its device id as
LOCAL_RANK, so that a plan of three ranks can exclude any one of four devices. Only the first machine decides which
devices are used, and it always uses at least one of its own devices. The nodes receive the ids of the devices to use,
and measure a device on request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any, Protocol, TypeVar

from meshwright.core.errors import MeshwrightError
from meshwright.core.ipc import IpcMessage
from meshwright.core.messages import Message
from meshwright.elastic.event_log import EventLog
from meshwright.spec.record import device_names


class NodeDevices(Protocol):
    """A machine other than the first one. `first`: its first device id. `devices`: its number of devices. `leaving`:
    whether it is about to leave the run."""

    first: int
    devices: int
    leaving: bool


NodeT = TypeVar("NodeT", bound=NodeDevices)


class DeviceIds:
    """Assigns ids to the devices of all machines. `devices` is the number of devices of the first machine."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._known: dict[int, tuple[str, int]] = {}
        self._nodes: list[tuple[int, int]] = []
        self._ids = tuple(range(devices))

    def first_of(self, name: str, devices: int, taken: Iterable[int]) -> int:
        """Returns the first device id of the node `name`, which has joined with `devices` devices. `taken`: the first
        device ids of the connected nodes."""
        there = set(taken)
        before = (first for first, known in self._known.items() if known == (name, devices) and first not in there)
        first = next(before, self.devices + sum(count for _, count in self._known.values()))
        self._known[first] = (name, devices)
        return first

    def name_of(self, slot: int) -> str:
        """Returns a readable name of the device with the id `slot`: its index on its machine, and the machine.

        >>> seats = DeviceIds(2)
        >>> first_ids = seats.first_of("b", 4, []), seats.first_of("c", 1, [2]), seats.first_of("b", 4, [6])
        >>> (*first_ids, seats.name_of(3), seats.name_of(1))
        (2, 6, 2, '1 of node b', '1 of the first node')
        """
        first = max((first for first in self._known if first <= slot), default=0)
        return (
            Message("{slot} of node {known}", slot=slot - first, known=self._known[first][0])
            if first
            else Message("{slot} of the first node", slot=slot)
        )

    def seated(self, world: int, slots: Sequence[int], nodes: Sequence[NodeT]) -> list[tuple[NodeT | None, int]]:
        """Returns, for each of `world` new ranks, its node (None for the first machine) and the index of its device on
        that machine.

        `slots` has the device id of each rank. If it is empty, ranks take all devices in order, except those of nodes
        that are leaving. Ranks for which there is no device go to the first machine.

        >>> DeviceIds(2).seated(4, (), [])
        [(None, 0), (None, 1), (None, 2), (None, 3)]
        """
        if slots:
            stored = {slot: node for node in nodes for slot in range(node.first, node.first + node.devices)}
            return [(node := stored.get(slot), slot - (node.first if node else 0)) for slot in slots]
        seats: list[tuple[NodeT | None, int]] = [(None, device) for device in range(self.devices)]
        seats += [(node, device) for node in nodes if not node.leaving for device in range(node.devices)]
        return seats[:world] + [(None, rank) for rank in range(len(seats), world)]

    def all_of(self, nodes: Sequence[NodeDevices]) -> tuple[int, ...]:
        """Returns the device ids of the first machine and of `nodes`, in this order."""
        there = [(node.first, node.devices) for node in nodes]
        if there != self._nodes:  # the supervisor asks twenty times a second
            later = chain.from_iterable(range(first, first + devices) for first, devices in there)
            self._nodes, self._ids = there, (*range(self.devices), *later)
        return self._ids


def node_of_device(nodes: Sequence[NodeT], slot: int) -> NodeT | None:
    """Returns the node that has the device id `slot`, or None for a device of the first machine."""
    return next((node for node in nodes if node.first <= slot < node.first + node.devices), None)


MIN_SPEEDUP = 1.1
MAX_HEALTHY_RATIO = 1.3
WARMUP_STEPS = 3
"""After a change, this number of steps does not count towards the measured speedup."""

GAIN_STEPS = 10
"""The speedup of a change is measured over this number of steps, which follow WARMUP_STEPS."""
READMISSION_PROBES = 2
"""An excluded device is readmitted after this number of good measurements in a row."""


@dataclass(frozen=True)
class ExclusionPolicy:
    """The settings for the exclusion of slow devices. `predict` gets the name of a plan and a number of ranks. It
    returns two predicted step times in seconds: under this plan, and under the best plan for this number of ranks."""

    predict: Callable[[str, int], tuple[float, float]]
    probe: str = ""
    """The `module:function` that measures a device; '' for no measurements."""
    every: float = 30.0
    """The seconds between measurements."""
    rest: float = 600.0
    """The seconds after which a device is readmitted in any case, after its first exclusion."""
    starts: float = 2.0
    """An exclusion must save at least the duration of this number of starts of the ranks."""


@dataclass
class _ExcludedDevice:
    """An excluded device. `since`: the time of the exclusion. `times`: its slowdown, or 0 if it was excluded for
    another reason. `first`: the seconds of its first measurement. `good`: the number of good measurements in a row."""

    since: float
    times: float
    first: float = 0.0
    good: int = 0


@dataclass
class DeviceExclusion:
    """Decides which devices one run uses. `full`: the number of ranks for which the run was planned. `leaving`: the
    settings, or None if slow devices are not excluded. `plan`: the name of the current plan."""

    full: int
    journal: EventLog
    leaving: ExclusionPolicy | None = None
    clock: Callable[[], float] = time.monotonic
    name: Callable[[int], str] = str
    """Returns the readable name of a device id."""
    there: tuple[int, ...] | None = None
    """The ids of the devices that are connected now, or None in a run on one machine."""
    first: int = 0
    """The number of devices of the first machine, in a run on several machines."""
    out: dict[int, _ExcludedDevice] = field(default_factory=dict)
    """The excluded devices by id."""
    wanted: int | None = None
    """The number of ranks that the last decision requires, or None if it was carried out."""
    plan: str = ""
    _spells: dict[int, int] = field(default_factory=dict)
    _said: tuple[int, ...] = ()
    _gain: tuple[str, float, float] | None = None
    _steps: list[float] = field(default_factory=list)
    _usual: list[float] = field(default_factory=list)
    _began: float = 0.0
    _cost: float = 0.0
    _measured: float = 0.0
    _measuring: bool = False
    _last: int = 0

    def of(self, world: int) -> tuple[int, ...]:
        """Returns the device ids for `world` ranks, or () if there are too few devices. Excluded devices are used only
        if the other devices are too few."""
        there = range(max(self.full, world)) if self.there is None else self.there
        if len(there) < world:
            return ()
        return tuple(sorted(sorted(there, key=lambda slot: (slot in self.out, slot))[:world]))

    def seat(self, world: int) -> tuple[int, ...]:
        """Returns the device ids for `world` ranks that are about to start. Excluded devices among them are
        readmitted."""
        slots = self.of(world)
        self.out = {slot: out for slot, out in self.out.items() if slot not in slots}
        return slots

    @property
    def room(self) -> int:
        """Returns the number of devices that are connected and not excluded, but at most `full`."""
        there = range(self.full) if self.there is None else self.there
        return min(self.full, sum(slot not in self.out for slot in there))

    def free(self, there: tuple[int, ...] | None) -> int | None:
        """Records `there`, the ids of the connected devices, and returns `room`. In a run on one machine, `there` and
        the result are None."""
        self.there = there
        return None if there is None else self.room

    @staticmethod
    def are_to_move(slots: Sequence[int], there: Sequence[int] | None) -> bool:
        """Returns whether a rank must and can move to another device, since its node is leaving. `slots`: the device
        ids of the ranks. `there`: the ids of the remaining devices, or None on one machine."""
        return there is not None and len(there) >= len(slots) and not set(slots) <= set(there)

    def leads(self, slots: Sequence[int]) -> bool:
        """Returns whether the first machine would have no device left if `slots` were excluded. In a run on
        one machine, returns False."""
        return self.there is not None and not set(range(self.first)) - self.out.keys() - set(slots)

    def leave_out(self, slots: Sequence[int], times: float = 0.0) -> None:
        """Excludes the devices `slots`, unless the first machine would have no device left. `times`: their slowdown, or
        0 if another reason excludes them."""
        if self.leads(slots):
            return
        for slot in slots:
            self.out[slot] = _ExcludedDevice(self.clock(), times)
            self._spells[slot] = self._spells.get(slot, 0) + 1

    # --- messages of ranks

    def started(self, plan: str) -> None:
        """Records that a generation starts under the plan with the name `plan`."""
        self.plan, self._began, self._steps, self._said = plan, self.clock(), [], ()

    def take(self) -> int | None:
        """Returns `wanted` and clears it."""
        wanted, self.wanted = self.wanted, None
        return wanted

    def hear(self, message: IpcMessage, slots: Sequence[int], generation: int) -> bool:
        """Handles a message from rank 0. `slots`: the device ids of the ranks. Returns whether the message concerns
        only this class."""
        kind = message["kind"]
        if kind == "record":
            self._count(float(message["record"]["seconds"]), int(message["record"]["step"]), generation)
        elif kind == "rebalanced":
            self.journal.write(
                kind=kind, generation=generation, **_select_entries(message, "step", "plan", "predicted")
            )
        elif kind == "rebalance_result":
            self.journal.write(
                kind=kind, generation=generation, **_select_entries(message, "step", "plan", "predicted", "measured")
            )
        elif kind == "verdict":
            self.journal.write(
                kind="slow", generation=generation, cause=message["words"], **_select_entries(message, "step", "ranks")
            )
        elif kind == "slow":
            self._judge(message, slots, generation)
        return kind in ("rebalanced", "rebalance_result", "verdict", "slow")

    def _count(self, seconds: float, step: int, generation: int) -> None:
        """Records a completed step and its seconds. The first step of a generation shows the duration of its start.
        After enough steps, the speedup of the last change is reported."""
        if not self._steps:
            self._cost = self.clock() - self._began
        self._steps.append(seconds)
        self._usual = self._steps[-GAIN_STEPS:]
        # While `wanted` is set, steps still run on the old devices.
        if self._gain is not None and self.wanted is None and len(self._steps) == WARMUP_STEPS + GAIN_STEPS:
            words, before, predicted = self._gain
            self._gain, found = None, before / median(self._usual)
            self.journal.write(
                kind="rebalance_result",
                generation=generation,
                step=step,
                cause=words,
                predicted=predicted,
                measured=found,
            )
            self.journal.note(
                Message(
                    "step {step}: {words}: steps are {found:.2f} times as fast as before (predicted: {predicted:.2f} "
                    "times)",
                    step=step,
                    words=words,
                    found=found,
                    predicted=predicted,
                )
            )

    def _judge(self, message: IpcMessage, slots: Sequence[int], generation: int) -> None:
        """Decides whether the devices of slow ranks are excluded. `message`: an ExclusionRequest of rank 0. A decision
        against the exclusion is not reported again while the slow ranks are the same."""
        if self.leaving is None or self.wanted is not None or not slots:
            return
        ranks, step = tuple(message["ranks"]), int(message["step"])
        self._last, here = int(message["last"]), [slots[rank] for rank in ranks]
        words, world = self._words(here), self.room - len(ranks)
        try:
            now, then = self.leaving.predict(message["plan"], world)
        except MeshwrightError as error:
            gain, why = 0.0, str(error)
        else:
            seconds = message["without"] * then / now
            gain, why = message["seconds"] / seconds, self._worth(message["seconds"], seconds, MIN_SPEEDUP)
        if self.leads(here):
            why = Message("the first node, which leads the run, must use at least one of its devices")
        out = not why
        if not out and ranks == self._said:
            return
        self._said = ranks
        decision = Message("goes on without {words}", words=words) if out else Message("stays: {why}", why=why)
        cause = Message("computes {times:.1f} times as long as it should", times=message["times"])
        self.journal.write(
            kind="slow",
            generation=generation,
            step=step,
            ranks=ranks,
            slots=tuple(here) if out else (),
            cause=cause,
            decision=decision,
            predicted=gain,
        )
        if out:
            decision = Message("{decision}, {gain:.2f} times as fast predicted", decision=decision, gain=gain)
        self.journal.note(
            Message(
                "step {step}: rank {ranks} {cause}: {decision}",
                step=step,
                ranks=", ".join(map(str, ranks)),
                cause=cause,
                decision=decision,
            )
        )
        if out:
            self._change(Message("leaving out {words}", words=words), message["seconds"], gain, world)
            self.leave_out(here, message["times"])

    def _worth(self, before: float, after: float, least: float = 1.0) -> str:
        """Returns why a change of the step time from `before` to `after` seconds is not worthwhile, or '' if it is.
        `least`: the minimum speedup."""
        left = self._last - self.journal.last
        if before < least * after:
            return Message("a step would take {after:.2f} times as long", after=after / before)
        if self.leaving is not None and (before - after) * left < self.leaving.starts * self._cost:
            return Message("the remaining {left} steps do not make up for a restart", left=left)
        return ""

    def _change(self, words: str, before: float, predicted: float, world: int) -> None:
        self._gain, self.wanted = (words, before, predicted), world

    # --- excluded devices

    def due(self) -> int | None:
        """Returns the id of the excluded device to measure now, or None. Only one device is measured at a time. Also
        readmits devices that were excluded for long enough. Devices that were not excluded for slowness are neither
        measured nor readmitted here. Does nothing until the speedup of the last change has been measured."""
        now = self.clock()
        if self.leaving is None or self.wanted is not None or self._gain is not None or not self.out:
            return None
        there = {slot: out for slot, out in self.out.items() if self.there is None or slot in self.there}
        rested = [
            slot
            for slot, out in there.items()
            if out.times and now > out.since + self.leaving.rest * 2 ** (self._spells[slot] - 1)
        ]
        if rested:
            self.come_back(rested, Message("it was left out long enough: it is tried again"))
            return None
        requested = [slot for slot, out in there.items() if out.times]
        if not self.leaving.probe or not requested or self._measuring or now < self._measured + self.leaving.every:
            return None
        self._measured, self._measuring = now, True
        return requested[int(now / self.leaving.every) % len(requested)]

    def heed(self, event: IpcMessage) -> None:
        """Handles an event of the process that measures a device: its result or its end."""
        if event["event"] == "said" and event["message"]["kind"] == "speed":
            self.measured(event["message"]["slot"], event["message"]["seconds"])
        if event["event"] in ("ended", "refused"):
            self.probed()

    def measured(self, slot: int, seconds: float) -> None:
        """Records that a matrix product on the excluded device `slot` took `seconds`. Readmits the device after
        READMISSION_PROBES good measurements."""
        out = self.out.get(slot)
        if out is None or self.wanted is not None:
            return
        out.first = out.first or seconds
        out.good = out.good + 1 if seconds * out.times <= MAX_HEALTHY_RATIO * out.first else 0
        if out.good >= READMISSION_PROBES:
            self.come_back(
                [slot],
                Message(
                    "it multiplies matrices {first:.1f} times as fast as when it was left out",
                    first=out.first / seconds,
                ),
            )

    def probed(self) -> None:
        """Records that the measuring process has ended, with or without a result."""
        self._measuring = False

    def come_back(self, slots: Sequence[int], why: str) -> None:
        """Readmits the devices `slots` from the next generation on, if this saves time. `why`: the reason, for the
        log."""
        assert self.leaving is not None
        before, world, words = median(self._usual or [0.0]), min(self.full, self.room + len(slots)), self._words(slots)
        for slot in slots:
            self.out[slot].since, self.out[slot].good = self.clock(), 0
        try:
            now, then = self.leaving.predict(self.plan, world)
        except MeshwrightError:  # raised if there is no plan for this number of ranks
            return
        if self._worth(before, before * then / now):
            return
        for slot in slots:
            del self.out[slot]
        self.journal.write(
            kind="device_readmitted", step=self.journal.last, slots=tuple(slots), cause=why, predicted=now / then
        )
        self.journal.note(
            Message(
                "step {last}: {words} is used again: {why}; steps are predicted to be {now:.2f} times as fast as now",
                last=self.journal.last,
                words=words,
                why=why,
                now=now / then,
            )
        )
        self._change(Message("taking back {words}", words=words), before, now / then, world)

    def _words(self, slots: Sequence[int]) -> str:
        return device_names(slots, self.name)


def _select_entries(message: IpcMessage, *names: str) -> dict[str, Any]:
    return {name: message[name] for name in names}
