"""Collectives under way, oldest first: what each still does, once every other rank has said a word or once something has crossed between hosts.

Whatever need not be waited for is done whenever somebody looks (`progress`); a step is done in its turn within its collective, and of equal
steps that of the older collective first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from meshwright.parallel.exchange.calls import CURRENT

CROSSED = -1
"""Instead of a word: what the step before has begun between hosts."""

POLL = 2e-4
"""Seconds between two looks at it."""


class Crossing(Protocol):
    """Something under way between hosts."""

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


Step = tuple[int, Callable[[], Crossing | None]]
"""What is awaited, a word of the others or CROSSED, and what is done then."""


@dataclass
class _Open:
    """A collective and the steps that it has left."""

    number: int
    steps: deque[Step] = field(default_factory=deque)
    crossing: Crossing | None = None

    def go_on(self) -> None:
        """The next step, whose time has come."""
        word, act = self.steps.popleft()
        if word == CROSSED and self.crossing is not None:
            self.crossing.wait()
        self.crossing = act()


class UnderWay:
    """`is_there(number, word)`: whether all others have said it; `everyone(number, word)` waits until they have. `finished`: the number of the
    last collective that is over, with all before it."""

    def __init__(self, is_there: Callable[[int, int], bool], everyone: Callable[[int, int], None]) -> None:
        self._is_there, self._everyone = is_there, everyone
        self.finished = [0]
        self.open: deque[_Open] = deque()

    def add(self, number: int, *steps: Step, crossing: Crossing | None = None) -> Callable[[], None]:
        """What finishes it."""
        self.open.append(_Open(number, deque(steps), crossing))
        return lambda: self.finish(number)

    def progress(self) -> None:
        """Do what need not be waited for."""
        for each in self.open:
            while each.steps and self._is_time(each):
                each.go_on()
        while self.open and not self.open[0].steps:
            self.finished[0] = self.open.popleft().number

    def _is_time(self, each: _Open) -> bool:
        word = each.steps[0][0]
        if word == CROSSED:
            return each.crossing is None or each.crossing.is_done
        return self._is_there(each.number, word)

    def finish(self, number: int) -> None:
        """Wait until collective `number` and all before it are over."""
        began, calls = time.monotonic(), CURRENT.get()
        while self.open and self.open[0].number <= number:
            self.progress()
            if not self.open or self.open[0].number > number:
                return
            first = self.open[0]
            if first.steps[0][0] == CROSSED:
                time.sleep(POLL)  # later ones may have something to send meanwhile
                if calls is not None:
                    calls.look(time.monotonic() - began)
            else:
                self._everyone(first.number, first.steps[0][0])
