"""Time that goes from event to event: work that goes on at a rate, signals that others wait for, processes that do one
thing after another.

Promise: events happen in the order of their times, and those of one time in the order in which they were made, so that
a play is the
same on every machine. Nothing here knows of training.

A process is a generator: it yields a `SimEvent`, and goes on when that has been fired.

Links as ports: what a rank sends leaves by its own port and comes in by that of the receiver; what shares a port shares
its bandwidth.

    rate of a transfer = the least over its ports of (share of the bandwidth that is left) / (transfers on the port)

A collective is on the ports of all its members, in and out, from its start to its end. Two tiers of ports for each
rank: to the
devices of its own domain and to those outside, as in `cost.collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from enum import StrEnum
from heapq import heappop, heappush
from math import inf

SimProcess = Generator["SimEvent", None, None]


class SimEvent:
    """Something that happens once."""

    __slots__ = ("fired", "waiting")

    def __init__(self) -> None:
        self.fired = False
        self.waiting: list[Callable[[], None]] = []

    def fire(self) -> None:
        self.fired = True
        for call in self.waiting:
            call()
        self.waiting = []

    def then(self, call: Callable[[], None]) -> None:
        """`call` when it has happened: at once when it has."""
        if self.fired:
            call()
        else:
            self.waiting.append(call)


class SimTask:
    """So many seconds of undisturbed work, done at a rate that may change meanwhile; `done` is called at its end."""

    __slots__ = ("done", "left", "rate", "serial", "since")

    def __init__(self, seconds: float, done: Callable[[], None]) -> None:
        self.left = seconds
        self.done = done
        self.rate = 0.0
        self.since = 0.0
        self.serial = -1


class SimClock:
    """The present, and what is to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._serial = 0
        self._agenda: list[tuple[float, int, SimTask]] = []

    def at(self, work: SimTask, rate: float) -> None:
        """`work` goes on at `rate` from now: seconds of work a second; 0 stops it."""
        if rate == work.rate and work.serial >= 0:
            return
        if work.serial >= 0:
            work.left = max(work.left - (self.now - work.since) * work.rate, 0.0)
        work.since, work.rate = self.now, rate
        self._serial += 1
        work.serial = self._serial
        if rate > 0.0:
            heappush(self._agenda, (self.now + work.left / rate, self._serial, work))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """`call` so many seconds from now."""
        self.at(SimTask(seconds, call), 1.0)

    def start(self, process: SimProcess) -> None:
        """Runs `process` until it waits."""

        def go_on() -> None:
            for signal in process:
                if not signal.fired:
                    signal.waiting.append(go_on)
                    return

        go_on()

    def run(self, until: float = inf) -> None:
        """Lets happen what is to come, up to the moment `until`."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= until:
            time, serial, work = heappop(agenda)
            if serial == work.serial:
                self.now = time
                work.serial = -2
                work.done()


class LinkTier(StrEnum):
    """Which link."""

    near = "near"
    far = "far"


class LinkPort:
    """One direction of one link of one rank."""

    __slots__ = ("share", "users")

    def __init__(self) -> None:
        self.share = 1.0
        self.users: list[LinkTransfer] = []


class LinkTransfer:
    """Bytes on their way, as the seconds that they take alone; `pace` slows it from outside, where it shares a device
    with compute."""

    __slots__ = ("clock", "pace", "ports", "work")

    def __init__(
        self, clock: SimClock, ports: Sequence[LinkPort], seconds: float, done: Callable[[], None], pace: float = 1.0
    ) -> None:
        self.clock = clock
        self.ports = ports
        self.pace = pace
        self.work = SimTask(seconds, self._leave(done))
        for port in ports:
            port.users.append(self)
        retime_transfers(ports)

    def _leave(self, done: Callable[[], None]) -> Callable[[], None]:
        def leave() -> None:
            for port in self.ports:
                port.users.remove(self)
            retime_transfers(self.ports)
            done()

        return leave

    def retime(self) -> None:
        rate = min((port.share / len(port.users) for port in self.ports), default=1.0)
        self.clock.at(self.work, rate * self.pace)


def retime_transfers(ports: Iterable[LinkPort]) -> None:
    """Everything on `ports` goes on at the rate that it gets now."""
    for transfer in dict.fromkeys(transfer for port in ports for transfer in port.users):
        transfer.retime()
