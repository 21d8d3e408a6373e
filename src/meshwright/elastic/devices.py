"""Numbers the devices of a run, and decides which of them take part.

`DeviceIds` numbers the devices of all machines. The devices of the first machine come first. Those of the nodes follow
in the order in which the nodes first joined.

Guarantees: A node that is lost and returns with the same name and device count gets the same device ids as before.

`DeviceExclusion` decides which devices take part in a run. Device ids count from 0 over all machines. The device of a
straggler may be excluded, and returns when it is healthy.

Rule: Ranks report the current step time and `without`, the step time if the stragglers were as fast as their peers
(train/straggler.py). The planner predicts two step times on healthy devices: `now` of the current plan, and `then` of
the best plan without the excluded devices. The expected step time after the exclusion is

    without x then / now

The stragglers are excluded under two conditions. Steps become at least MIN_SPEEDUP times as fast. The time saved until
the end of the run is at least `starts` times (default 2) the duration of the last start of the ranks.

From time to time a probe measures a matrix product on an excluded device. Its expected duration is the first
measurement divided by the slowdown. The device is healthy if the product takes at most MAX_HEALTHY_RATIO times as long.
Matrix products do not show every defect, so a device returns after `rest` seconds in any case. Each further exclusion
of the device doubles this time.

[Note: ranks and slots] Each generation (start of all ranks) renumbers its ranks. A rank gets its device id as
LOCAL_RANK, so that a plan of three ranks can exclude any one of four devices. The devices of the first machine get the
first ids, then those of each node (cluster_agent.py). A node that returns gets the same ids as before. The first
machine leads the run and alone decides; at least one of its devices always takes part. The other machines receive the
ids of the devices to use, and measure on request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol, TypeVar

from meshwright.core.errors import MeshwrightError
from meshwright.core.ipc import IpcMessage
from meshwright.core.messages import Message
from meshwright.elastic.event_log import EventLog
from meshwright.spec.record import device_names


class NodeDevices(Protocol):
    """A node: its first device id, its number of devices, and whether it is leaving."""

    first: int
    devices: int
    leaving: bool


NodeT = TypeVar("NodeT", bound=NodeDevices)


class DeviceIds:
    """Assigns ids to the devices of all machines. `devices` is the number of devices of the first machine."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._known: dict[int, tuple[str, int]] = {}

    def first_of(self, name: str, devices: int, taken: Iterable[int]) -> int:
        """Returns the first device id of a node that has joined. `taken`: the first device ids of the connected
        nodes."""
        there = set(taken)
        before = (first for first, known in self._known.items() if known == (name, devices) and first not in there)
        first = next(before, self.devices + sum(count for _, count in self._known.values()))
        self._known[first] = (name, devices)
        return first

    def name_of(self, slot: int) -> str:
        """Returns a readable name of a device: its index on its machine, and the machine.

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
        """Returns the machine (None for the first) and the local device of each of `world` new ranks.

        `slots` contains the device ids of all ranks. If it is empty, ranks take all devices in order, except those of
        nodes that are leaving. Ranks for which there is no device go to the first machine.

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
        """Returns the device ids of the first machine and of `nodes`, machine by machine."""
        there = [range(self.devices), *(range(node.first, node.first + node.devices) for node in nodes)]
        return tuple(slot for devices in there for slot in devices)


def node_of_device(nodes: Sequence[NodeT], slot: int) -> NodeT | None:
    """Returns the node that owns a device id, or None for a device of the first machine."""
    return next((node for node in nodes if node.first <= slot < node.first + node.devices), None)


MIN_SPEEDUP = 1.1
MAX_HEALTHY_RATIO = 1.3
WARMUP_STEPS = 3
"""The number of first steps after a change that are left out when its speedup is measured."""

GAIN_STEPS = 10
READMISSION_PROBES = 2
"""The number of good measurements in a row after which a device returns."""


@dataclass(frozen=True)
class ExclusionPolicy:
    """Allows the exclusion of slow devices. `predict` takes the name of a plan and a number of ranks. It returns two
    step times in seconds: under this plan, and under the best plan for this number of ranks."""

    predict: Callable[[str, int], tuple[float, float]]
    probe: str = ""
    """The `module:function` of the execution packages that measures a device."""
    every: float = 30.0
    """Seconds between measurements."""
    rest: float = 600.0
    """Seconds after which an excluded device returns in any case."""
    starts: float = 2.0
    """An exclusion must save at least this many times the duration of a start of the ranks."""


@dataclass
class _ExcludedDevice:
    """An excluded device. `times` is its slowdown. `first` is the result of its first measurement in seconds."""

    since: float
    times: float
    first: float = 0.0
    good: int = 0


@dataclass
class DeviceExclusion:
    """Tracks the devices of one run that was planned for `full` ranks."""

    full: int
    journal: EventLog
    leaving: ExclusionPolicy | None = None
    clock: Callable[[], float] = time.monotonic
    name: Callable[[int], str] = str
    """Returns the name of a device for messages."""
    there: tuple[int, ...] | None = None
    """The devices that are available now in a run on several machines, else None."""
    first: int = 0
    """The number of devices of the first machine in a run on several machines."""
    out: dict[int, _ExcludedDevice] = field(default_factory=dict)
    wanted: int | None = None
    """The number of ranks that the last decision requests; None once the decision is carried out."""
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
        """Returns the device ids for `world` ranks. Excluded devices are used only if the others are too few."""
        there = range(max(self.full, world)) if self.there is None else self.there
        if len(there) < world:
            return ()
        return tuple(sorted(sorted(there, key=lambda slot: (slot in self.out, slot))[:world]))

    def seat(self, world: int) -> tuple[int, ...]:
        """Returns the devices for `world` ranks that are about to start, and readmits the excluded devices among
        them."""
        slots = self.of(world)
        self.out = {slot: out for slot, out in self.out.items() if slot not in slots}
        return slots

    @property
    def room(self) -> int:
        """The number of available devices that are not excluded, but at most the planned number of ranks."""
        there = range(self.full) if self.there is None else self.there
        return min(self.full, sum(slot not in self.out for slot in there))

    def free(self, there: tuple[int, ...] | None) -> int | None:
        """Sets the available devices of a run on several machines and returns `room`. For a run on one machine, `there`
        is None and the result is None."""
        self.there = there
        return None if there is None else self.room

    @staticmethod
    def are_to_move(slots: Sequence[int], there: Sequence[int] | None) -> bool:
        """Returns whether some rank must move because its node is leaving, and `there` has enough devices for all
        ranks. `slots`: the devices of the ranks."""
        return there is not None and len(there) >= len(slots) and not set(slots) <= set(there)

    def leads(self, slots: Sequence[int]) -> bool:
        """Returns whether the exclusion of `slots` would leave no device of the first machine, in a run on several
        machines."""
        return self.there is not None and not set(range(self.first)) - self.out.keys() - set(slots)

    def leave_out(self, slots: Sequence[int], times: float = 0.0) -> None:
        """Excludes the devices, unless the first machine would have none left."""
        if self.leads(slots):
            return
        for slot in slots:
            self.out[slot] = _ExcludedDevice(self.clock(), times)
            self._spells[slot] = self._spells.get(slot, 0) + 1

    # --- messages of ranks

    def started(self, plan: str) -> None:
        """Records the start of a generation under `plan`."""
        self.plan, self._began, self._steps, self._said = plan, self.clock(), [], ()

    def take(self) -> int | None:
        """Returns the number of ranks that the last decision requests, and clears it. None: there is no decision."""
        wanted, self.wanted = self.wanted, None
        return wanted

    def hear(self, message: IpcMessage, slots: Sequence[int], generation: int) -> bool:
        """Handles a message from rank 0. Returns whether only this class needs the message."""
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
        """Records a completed step. It updates the duration of a start, the usual step time, and the measured speedup
        of the last change."""
        if not self._steps:
            self._cost = self.clock() - self._began
        self._steps.append(seconds)
        self._usual = self._steps[-GAIN_STEPS:]
        # The speedup is measured after the decision is carried out.
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
                    "step {step}: {words} made steps {found:.2f} times as fast, {predicted:.2f} predicted",
                    step=step,
                    words=words,
                    found=found,
                    predicted=predicted,
                )
            )

    def _judge(self, message: IpcMessage, slots: Sequence[int], generation: int) -> None:
        """Decides whether the slow ranks are excluded. The decision is reported and logged once per diagnosis, and
        again when it changes."""
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
            why = Message("the first node, which leads the run, needs a device that takes part")
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
        """Returns the excluded device to measure now, or None. Devices are measured one at a time. It also readmits
        devices whose `rest` is over. Until the speedup of the last change is measured, it does nothing."""
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
        """Handles the messages and the exit of the probe process."""
        if event["event"] == "said" and event["message"]["kind"] == "speed":
            self.measured(event["message"]["slot"], event["message"]["seconds"])
        if event["event"] in ("ended", "refused"):
            self.probed()

    def measured(self, slot: int, seconds: float) -> None:
        """Records the seconds of a matrix product on an excluded device."""
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
        """Records that the probe process has ended, with or without a result."""
        self._measuring = False

    def come_back(self, slots: Sequence[int], why: str) -> None:
        """Readmits devices from the next generation on if that saves time. `why` is the reason for the log."""
        assert self.leaving is not None
        before, world, words = median(self._usual or [0.0]), min(self.full, self.room + len(slots)), self._words(slots)
        for slot in slots:
            self.out[slot].since, self.out[slot].good = self.clock(), 0
        try:
            now, then = self.leaving.predict(self.plan, world)
        except MeshwrightError:  # no plan exists for this number of ranks
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
                "step {last}: {words} comes back: {why}; {now:.2f} times as fast predicted",
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
