"""Time that goes from event to event: work that goes on at a rate, signals that others wait for, processes that do one thing after another.

Promise: events happen in the order of their times, and those of one time in the order in which they were made, so that a play is the
same on every machine. Nothing here knows of training.

A process is a generator: it yields a `Signal`, and goes on when that has been fired.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from math import inf

Process = Generator["Signal", None, None]


class Signal:
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


class Work:
    """So many seconds of undisturbed work, done at a rate that may change meanwhile; `done` is called at its end."""

    __slots__ = ("done", "left", "rate", "serial", "since")

    def __init__(self, seconds: float, done: Callable[[], None]) -> None:
        self.left = seconds
        self.done = done
        self.rate = 0.0
        self.since = 0.0
        self.serial = -1


class Clock:
    """The present, and what is to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._serial = 0
        self._agenda: list[tuple[float, int, Work]] = []

    def at(self, work: Work, rate: float) -> None:
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
        self.at(Work(seconds, call), 1.0)

    def start(self, process: Process) -> None:
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
