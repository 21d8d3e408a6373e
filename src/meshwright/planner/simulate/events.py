"""Implements a discrete-event simulation: tasks with a variable rate, events with callbacks, and sequential processes.
step.py uses this module to simulate a training step; the module itself has no code about training.

Guarantees: events occur in the order of their times. Simultaneous events occur in the order in which they were
scheduled, so a simulation gives the same result on every machine.

A process is a generator. It yields a `SimEvent` and continues when this event has fired.

A link is modelled by ports. A transfer uses the output port of the sender and the input port of the receiver. Transfers
on one port share its bandwidth.

    rate of a transfer = minimum over its ports of (available fraction of the bandwidth) / (transfers on the port)

A collective uses the input and output ports of all members from its start to its end. Each rank has ports in each tier
of the network (`cost.links.LinkModel`): ports to the devices of its own node, to other nodes of its block, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from heapq import heappop, heappush
from math import inf

SimProcess = Generator["SimEvent", None, None]


class SimEvent:
    """An event that occurs once."""

    __slots__ = ("fired", "waiting")

    def __init__(self) -> None:
        self.fired = False
        self.waiting: list[Callable[[], None]] = []

    def fire(self) -> None:
        """Marks the event as occurred and runs the callbacks that wait for it."""
        self.fired = True
        for call in self.waiting:
            call()
        self.waiting = []

    def then(self, call: Callable[[], None]) -> None:
        """Calls `call` when the event occurs, or at once if the event has already occurred."""
        if self.fired:
            call()
        else:
            self.waiting.append(call)


class SimTask:
    """A task that takes `seconds` at rate 1. `SimClock.at` sets and changes the rate. At the end of the task, `done` is
    called."""

    __slots__ = ("done", "left", "rate", "serial", "since")

    def __init__(self, seconds: float, done: Callable[[], None]) -> None:
        self.left = seconds
        self.done = done
        self.rate = 0.0
        self.since = 0.0
        self.serial = -1


class SimClock:
    """The current simulated time (`now`, in seconds) and the scheduled ends of tasks."""

    def __init__(self) -> None:
        self.now = 0.0
        self._serial = 0
        self._agenda: list[tuple[float, int, SimTask]] = []

    def at(self, work: SimTask, rate: float) -> None:
        """Starts or continues `work` at `rate`, in seconds of work per simulated second. Rate 0 stops the task."""
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
        """Schedules `call` in `seconds` simulated seconds from now."""
        self.at(SimTask(seconds, call), 1.0)

    def start(self, process: SimProcess) -> None:
        """Runs `process` until it yields an event that has not occurred."""

        def go_on() -> None:
            for signal in process:
                if not signal.fired:
                    signal.waiting.append(go_on)
                    return

        go_on()

    def run(self, until: float = inf) -> None:
        """Runs all tasks that end up to time `until`, in the order of their ends."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= until:
            time, serial, work = heappop(agenda)
            if serial == work.serial:
                self.now = time
                work.serial = -2
                work.done()


class LinkPort:
    """One direction of one link of one rank. `share` is the available fraction of the bandwidth, `users` the transfers
    in progress."""

    __slots__ = ("share", "users")

    def __init__(self) -> None:
        self.share = 1.0
        self.users: list[LinkTransfer] = []


class LinkTransfer:
    """A transfer that takes `seconds` without contention on `ports`. `pace` is a factor on its rate, below 1 while
    compute runs on a device of the transfer."""

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
        """Recomputes the rate of this transfer from the number of transfers on its ports."""
        rate = min((port.share / len(port.users) for port in self.ports), default=1.0)
        self.clock.at(self.work, rate * self.pace)


def retime_transfers(ports: Iterable[LinkPort]) -> None:
    """Recomputes the rates of all transfers on `ports`."""
    for transfer in dict.fromkeys(transfer for port in ports for transfer in port.users):
        transfer.retime()
