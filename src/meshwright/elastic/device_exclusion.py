"""Which devices take part: a slot each, counted from 0, over all machines of the run. One that is slow for long may be
left out, and comes back when it is well.

Rule: ranks say what a step takes, and what it would take if the slow ones computed as their peers do
(train/straggler.py). The planner says what the best plan
of the other devices takes beside the plan of now, both on devices that are well; so a step without the slow ones should
take

    without x (seconds predicted for the others) / (seconds predicted for the plan of now)

and they are left out where a step becomes at least LEAST times as fast and what that saves until the end of the run is
more than it costs: twice the seconds that the ranks
took to start the last time. A device that is left out multiplies matrices for a moment, now and then: it is well when
that takes at most NEAR times what it should, which is what it took
first divided by how many times too slow it was. What no product shows is tried: after `rest` seconds the device comes
back anyway, after twice as many the next time.

[Note: ranks and slots] Ranks are counted anew by each generation; a rank is told its slot as LOCAL_RANK, so that a plan
of three ranks leaves out any one of four devices.
Of several machines the first one's devices are counted first, then those of each node (fleet.py), which a node that
comes back has again. One device of the first, where
the run is led from, always takes part. The first decides alone; the others are told which of their devices have ranks,
and measure when they are asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.core.ipc import IpcMessage
from meshwright.elastic.event_log import EventLog

MIN_SPEEDUP = 1.1
MAX_HEALTHY_RATIO = 1.3
WARMUP_STEPS = 3
"""Steps that warm up, before those that a gain is measured by."""

GAIN_STEPS = 10
READMISSION_PROBES = 2
"""Good measurements in a row before a device comes back."""


@dataclass(frozen=True)
class ExclusionPolicy:
    """That slow devices may be left out. `predict`: of a plan by its name and a number of ranks, the seconds of a step
    under the plan and under the
    best one of so many."""

    predict: Callable[[str, int], tuple[float, float]]
    probe: str = ""
    """What measures a device, `module:function` of the running wing."""
    every: float = 30.0
    """Seconds between measurements."""
    rest: float = 600.0
    starts: float = 2.0
    """What is saved until the end must be so many times the seconds that the ranks took to start."""


@dataclass
class _ExcludedDevice:
    """A slot that is left out. `times`: how many times too slow it was; `first`: seconds of its first measurement."""

    since: float
    times: float
    first: float = 0.0
    good: int = 0


@dataclass
class DeviceExclusion:
    """Of one run that was planned for `full` ranks."""

    full: int
    journal: EventLog
    leaving: ExclusionPolicy | None = None
    clock: Callable[[], float] = time.monotonic
    name: Callable[[int], str] = str
    """Of a device, in words."""
    there: tuple[int, ...] | None = None
    """The devices that are there now, where these are of several machines."""
    first: int = 0
    """How many the first of several machines has."""
    out: dict[int, _ExcludedDevice] = field(default_factory=dict)
    wanted: int | None = None
    """Ranks that a decision asks for, until it is carried out."""
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
        """The slots of so many ranks; where they are too few, of those that were left out as well."""
        there = range(max(self.full, world)) if self.there is None else self.there
        if len(there) < world:
            return ()
        return tuple(sorted(sorted(there, key=lambda slot: (slot in self.out, slot))[:world]))

    def seat(self, world: int) -> tuple[int, ...]:
        """`of`, where ranks are about to start there: those of them that were left out take part again."""
        slots = self.of(world)
        self.out = {slot: out for slot, out in self.out.items() if slot not in slots}
        return slots

    @property
    def room(self) -> int:
        """How many devices are there and not left out, as many at most as the run was planned for."""
        there = range(self.full) if self.there is None else self.there
        return min(self.full, sum(slot not in self.out for slot in there))

    def free(self, there: tuple[int, ...] | None) -> int | None:
        """The room on devices of several machines, `there` being those; None where there is only this one."""
        self.there = there
        return None if there is None else self.room

    @staticmethod
    def are_to_move(slots: Sequence[int], there: Sequence[int] | None) -> bool:
        """Whether one of the ranks at `slots` sits where it is to go from, as its node is leaving, and there is room
        for all of them."""
        return there is not None and len(there) >= len(slots) and not set(slots) <= set(there)

    def leads(self, slots: Sequence[int]) -> bool:
        """Whether without these no device of the first of several machines would take part."""
        return self.there is not None and not set(range(self.first)) - self.out.keys() - set(slots)

    def leave_out(self, slots: Sequence[int], times: float = 0.0) -> None:
        if self.leads(slots):
            return
        for slot in slots:
            self.out[slot] = _ExcludedDevice(self.clock(), times)
            self._spells[slot] = self._spells.get(slot, 0) + 1

    # --- what ranks say
    # -------------------------------------------------------------------------------------------------------

    def started(self, plan: str) -> None:
        """A generation, under `plan`."""
        self.plan, self._began, self._steps, self._said = plan, self.clock(), [], ()

    def take(self) -> int | None:
        """The number of ranks that was decided on, once."""
        wanted, self.wanted = self.wanted, None
        return wanted

    def hear(self, message: IpcMessage, slots: Sequence[int], generation: int) -> bool:
        """What rank 0 says; whether it was meant for this alone."""
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
        """A step that has ended: of what starting costs, what steps take, and what the last change has gained."""
        if not self._steps:
            self._cost = self.clock() - self._began
        self._steps.append(seconds)
        self._usual = self._steps[-GAIN_STEPS:]
        if (
            self._gain is not None and self.wanted is None and len(self._steps) == WARMUP_STEPS + GAIN_STEPS
        ):  # not before it is carried out
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
            self.journal.note(f"step {step}: {words} made steps {found:.2f} times as fast, {predicted:.2f} predicted")

    def _judge(self, message: IpcMessage, slots: Sequence[int], generation: int) -> None:
        """Whether the slow ranks are left out; said and written once for each verdict, and when it changes."""
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
            why = "the first node, which leads the run, needs a device that takes part"
        out = not why
        if not out and ranks == self._said:
            return
        self._said = ranks
        decision = f"goes on without {words}" if out else f"stays: {why}"
        cause = f"computes {message['times']:.1f} times as long as it should"
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
        decision += f", {gain:.2f} times as fast predicted" if out else ""
        self.journal.note(f"step {step}: rank {', '.join(map(str, ranks))} {cause}: {decision}")
        if out:
            self._change(f"leaving out {words}", message["seconds"], gain, world)
            self.leave_out(here, message["times"])

    def _worth(self, before: float, after: float, least: float = 1.0) -> str:
        """Why a change is not worth it; empty when it is."""
        left = self._last - self.journal.last
        if before < least * after:
            return f"a step would take {after / before:.2f} times as long"
        if self.leaving is not None and (before - after) * left < self.leaving.starts * self._cost:
            return f"{left} steps more do not make up for starting again"
        return ""

    def _change(self, words: str, before: float, predicted: float, world: int) -> None:
        self._gain, self.wanted = (words, before, predicted), world

    # --- while devices are out
    # ------------------------------------------------------------------------------------------------

    def due(self) -> int | None:
        """The slot that is to be measured now, one at a time; and those that have been out for long come back. Nothing
        before it is known
        what the last change has gained."""
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
            self.come_back(rested, "it has rested: tried again")
            return None
        asked = [slot for slot, out in there.items() if out.times]
        if not self.leaving.probe or not asked or self._measuring or now < self._measured + self.leaving.every:
            return None
        self._measured, self._measuring = now, True
        return asked[int(now / self.leaving.every) % len(asked)]

    def heed(self, event: IpcMessage) -> None:
        """What the process that measures says, and its end."""
        if event["event"] == "said" and event["message"]["kind"] == "speed":
            self.measured(event["message"]["slot"], event["message"]["seconds"])
        if event["event"] in ("ended", "refused"):
            self.probed()

    def measured(self, slot: int, seconds: float) -> None:
        """What a product of matrices took there."""
        out = self.out.get(slot)
        if out is None or self.wanted is not None:
            return
        out.first = out.first or seconds
        out.good = out.good + 1 if seconds * out.times <= MAX_HEALTHY_RATIO * out.first else 0
        if out.good >= READMISSION_PROBES:
            self.come_back([slot], f"it multiplies {out.first / seconds:.1f} times as fast as when it was left out")

    def probed(self) -> None:
        """What measured has ended, whatever it said."""
        self._measuring = False

    def come_back(self, slots: Sequence[int], why: str) -> None:
        """From the next generation on, where that is worth it."""
        assert self.leaving is not None
        before, world, words = median(self._usual or [0.0]), min(self.full, self.room + len(slots)), self._words(slots)
        for slot in slots:
            self.out[slot].since, self.out[slot].good = self.clock(), 0
        try:
            now, then = self.leaving.predict(self.plan, world)
        except MeshwrightError:  # no plan runs on so many
            return
        if self._worth(before, before * then / now):
            return
        for slot in slots:
            del self.out[slot]
        self.journal.write(
            kind="device_readmitted", step=self.journal.last, slots=tuple(slots), cause=why, predicted=now / then
        )
        self.journal.note(
            f"step {self.journal.last}: {words} comes back: {why}; {now / then:.2f} times as fast predicted"
        )
        self._change(f"taking back {words}", before, now / then, world)

    def _words(self, slots: Sequence[int]) -> str:
        return f"device{'s' if len(slots) > 1 else ''} {', '.join(map(self.name, slots))}"


def _select_entries(message: IpcMessage, *names: str) -> dict[str, Any]:
    return {name: message[name] for name in names}
