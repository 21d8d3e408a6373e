"""What a rank tells whoever watches it, without a message: a row of words in memory that both have open.

Each rank writes its own row and nobody else's; a watcher only reads. The memory belongs to the watcher (an anonymous
file), so that the last
words of a rank outlive it: where it was when it died, and which step its copy holds. Without a watcher the row is
memory of the rank alone.

>>> pulse = Heartbeat(memoryview(bytearray(2 * HEARTBEAT_FIELDS * 8)), 1)
>>> pulse.at(RankPhase.reduce, 7)
>>> Heartbeat(pulse.memory, 1).read(HeartbeatField.step), RankPhase(pulse.read(HeartbeatField.phase)).name, Heartbeat(pulse.memory, 0).read(HeartbeatField.beat)
(7, 'reduce', 0)
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from enum import IntEnum

HEARTBEAT_FIELDS = 8
"""Words of 8 bytes of a rank."""


WAIT_INCREMENT = 1 << 16
"""What a rank adds to its word `waits` whenever it has looked for the other in vain."""


class HeartbeatField(IntEnum):
    """What stands where in a row. `step` is the one in progress, `beat` grows with every sign of progress, `waits` is 1
    + the rank that
    this one waits for and, above WAITS, how often it has looked for it in vain: whoever waits in truth looks again and
    again, `kept` the newest step of which a whole copy is in memory, `busy` 1 while a checkpoint is written
    beside training, which the supervisor sets to 0 again, `saved` how many microseconds the last one took, `took` those
    of the last whole step."""

    step = 0
    phase = 1
    beat = 2
    waits = 3
    kept = 4
    busy = 5
    saved = 6
    took = 7


class RankPhase(IntEnum):
    """What a rank is doing. Up to `restore` it starts, from `data` to `compare` it trains."""

    start = 0
    join = 1
    build = 2
    restore = 3
    data = 4
    backward = 5
    reduce = 6
    agree = 7
    update = 8
    compare = 9
    evaluate = 10
    save = 11
    sample = 12
    end = 13
    prove = 14


class Heartbeat:
    """The row of `rank` in `memory`."""

    def __init__(self, memory: memoryview, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.memory, self.rank, self.clock = memory, rank, clock
        self.row = memory.cast("B").cast("Q")[rank * HEARTBEAT_FIELDS : (rank + 1) * HEARTBEAT_FIELDS]
        self._began: float | None = None

    def at(self, phase: RankPhase, step: int | None = None) -> None:
        if step is not None:
            self._begin(step)
        self.row[HeartbeatField.phase] = phase
        self.beat()

    def beat(self) -> None:
        """A sign of life of a rank that goes on with what it does."""
        self.row[HeartbeatField.beat] += 1

    def _begin(self, step: int) -> None:
        """A step that begins ends the one before; one that begins again, or after another start, ends none."""
        now = self.clock()
        is_next = self._began is not None and step == self.row[HeartbeatField.step] + 1
        self.row[HeartbeatField.took] = max(1, int(1e6 * (now - (self._began or 0.0)))) if is_next else 0
        self._began = now
        self.row[HeartbeatField.step] = step

    def read(self, word: HeartbeatField) -> int:
        return self.row[word]

    def write(self, word: HeartbeatField, value: int) -> None:
        self.row[word] = value


def open_heartbeats(path: str, world: int) -> memoryview:
    """The rows of `world` ranks in the file at `path`; memory of this process alone where `path` is empty."""
    size = world * HEARTBEAT_FIELDS * 8
    if not path:
        return memoryview(bytearray(size))
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(handle, size))
    finally:
        os.close(handle)
