"""What a rank tells whoever watches it, without a message: a row of words in memory that both have open.

Each rank writes its own row and nobody else's; a watcher only reads. The memory belongs to the watcher (an anonymous file), so that the last
words of a rank outlive it: where it was when it died, and which step its copy holds. Without a watcher the row is memory of the rank alone.

>>> pulse = Pulse(memoryview(bytearray(2 * ROW * 8)), 1)
>>> pulse.at(Phase.reduce, 7)
>>> Pulse(pulse.memory, 1).read(Word.step), Phase(pulse.read(Word.phase)).name, Pulse(pulse.memory, 0).read(Word.beat)
(7, 'reduce', 0)
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum

ROW = 8
"""Words of 8 bytes of a rank."""


class Word(IntEnum):
    """What stands where in a row. `step` is the one in progress, `beat` grows with every sign of progress, `waits` is 1 + the rank that
    this one waits for, `kept` the newest step of which a whole copy is in memory, `busy` 1 while a checkpoint is written
    beside training, which the supervisor sets to 0 again, `saved` how many microseconds the last one took."""

    step = 0
    phase = 1
    beat = 2
    waits = 3
    kept = 4
    busy = 5
    saved = 6


class Phase(IntEnum):
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


class Pulse:
    """The row of `rank` in `memory`."""

    def __init__(self, memory: memoryview, rank: int) -> None:
        self.memory, self.rank = memory, rank
        self.row = memory.cast("B").cast("Q")[rank * ROW : (rank + 1) * ROW]

    def at(self, phase: Phase, step: int | None = None) -> None:
        if step is not None:
            self.row[Word.step] = step
        self.row[Word.phase] = phase
        self.row[Word.beat] += 1

    def read(self, word: Word) -> int:
        return self.row[word]

    def write(self, word: Word, value: int) -> None:
        self.row[word] = value


def opened(path: str, world: int) -> memoryview:
    """The rows of `world` ranks in the file at `path`; memory of this process alone where `path` is empty."""
    size = world * ROW * 8
    if not path:
        return memoryview(bytearray(size))
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(handle, size))
    finally:
        os.close(handle)
