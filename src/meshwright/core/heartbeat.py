"""Reports the progress of a rank to its supervisor through shared memory, without messages.

Each rank writes only its own row of 64-bit fields, and the supervisor reads all rows. The supervisor owns the memory
(an anonymous file). After a rank has died, its last phase and the step of its in-memory checkpoint can still be read.
Without a supervisor the row is private memory of the rank.

>>> pulse = Heartbeat(memoryview(bytearray(2 * HEARTBEAT_FIELDS * 8)), 1)
>>> pulse.at(RankPhase.reduce, 7)
>>> (Heartbeat(pulse.memory, 1).read(HeartbeatField.step), RankPhase(pulse.read(HeartbeatField.phase)).name,
...     Heartbeat(pulse.memory, 0).read(HeartbeatField.beat))
(7, 'reduce', 0)
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from enum import IntEnum

HEARTBEAT_FIELDS = 8
"""Number of 64-bit fields of one rank."""


WAIT_INCREMENT = 1 << 16
"""Increment of the field `waits` for each unsuccessful poll of another rank."""


class HeartbeatField(IntEnum):
    """The index of each field in a row.

    - `step` is the step in progress.
    - `phase` is the current `RankPhase`.
    - `beat` increases with every sign of progress.
    - `waits` is 1 + the rank for which this rank waits, plus `WAIT_INCREMENT` for each unsuccessful poll. So the value
      of a waiting rank keeps changing.
    - `snapshot_step` is the newest step with a complete in-memory checkpoint.
    - `busy` is 1 while an asynchronous checkpoint is written. The supervisor resets it to 0.
    - `saved` is the duration of the last checkpoint in microseconds.
    - `took` is the duration of the last complete step in microseconds.
    """

    step = 0
    phase = 1
    beat = 2
    waits = 3
    snapshot_step = 4
    busy = 5
    saved = 6
    took = 7


class RankPhase(IntEnum):
    """The phase of a rank. Phases up to `restore` belong to start-up; `data` to `compare` belong to training."""

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
        """Records that the rank enters `phase`. If `step` is given, it also records that the rank begins this step."""
        if step is not None:
            self._begin(step)
        self.row[HeartbeatField.phase] = phase
        self.beat()

    def beat(self) -> None:
        """Records a sign of progress within the current phase."""
        self.row[HeartbeatField.beat] += 1

    def _begin(self, step: int) -> None:
        """Begins `step`. If it directly follows the previous step, records the duration of the previous step; otherwise
        sets the duration to 0."""
        now = self.clock()
        is_next = self._began is not None and step == self.row[HeartbeatField.step] + 1
        self.row[HeartbeatField.took] = max(1, int(1e6 * (now - (self._began or 0.0)))) if is_next else 0
        self._began = now
        self.row[HeartbeatField.step] = step

    def read(self, word: HeartbeatField) -> int:
        """Returns the value of the field `word`."""
        return self.row[word]

    def write(self, word: HeartbeatField, value: int) -> None:
        """Sets the field `word` to `value`."""
        self.row[word] = value


def open_heartbeats(path: str, world: int) -> memoryview:
    """Returns the rows of `world` ranks in the file at `path`. Without `path` the rows are private memory."""
    size = world * HEARTBEAT_FIELDS * 8
    if not path:
        return memoryview(bytearray(size))
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(handle, size))
    finally:
        os.close(handle)
