"""What a run does before its first step, said while it lasts: torch, a model and its data may take a minute, and nobody should wait for them in silence."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshwright.base.pulse import Phase, Word
from meshwright.base.units import show_seconds
from meshwright.elastic.holdings import Holdings

EVERY = 10.0
"""Seconds between two lines."""


class Starting:
    """Called several times a second while no rank has begun; says what the rank does that is furthest behind."""

    def __init__(self, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.note, self.clock = note, clock
        self._began = self._said = self._last = float("-inf")

    def __call__(self, holdings: Holdings) -> None:
        now = self.clock()
        if now > self._last + EVERY:  # another start, later in the run
            self._began = self._said = now
        self._last = now
        if now < self._said + EVERY:
            return
        self._said = now
        phase, rank = min(zip(holdings.column(Word.phase), range(holdings.world), strict=True))
        if phase < Phase.build:
            words = "processes start and load torch"
        else:
            words = (
                f"rank {rank} builds the model and opens its data" if phase == Phase.build else f"rank {rank} reads what it goes on from"
            )
        self.note(f"starting, {show_seconds(now - self._began)}: {words}")
