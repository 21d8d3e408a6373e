"""Memory of the ranks that this process holds open, so that no death of a rank loses it: their copies, and their rows of signs of life.

An anonymous file lives as long as anyone has it open; ranks open it by the path of this process's handle. When this process ends it is gone:
then the checkpoint on disk is what is left. Where the system has no anonymous files there are no copies.
"""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Sequence
from typing import Any

from meshwright.base.pulse import ROW, Phase, Pulse, Word, opened
from meshwright.base.slots import HEAD, KEPT


class Holdings:
    """Of the ranks of one plan."""

    def __init__(self, world: int) -> None:
        self.world, self.key = world, secrets.token_hex(8)
        here = hasattr(os, "memfd_create")
        self._files = [os.memfd_create(f"meshwright-copies-{rank}") for rank in range(world)] if here else []
        self._pulse = os.memfd_create("meshwright-pulse") if here else -1
        if here:
            os.ftruncate(self._pulse, world * ROW * 8)
        self.memory = opened(_path(self._pulse), world)

    @property
    def sources(self) -> list[str]:
        """Where the copies lie, in order of rank."""
        return [_path(file) for file in self._files]

    @property
    def is_open(self) -> bool:
        return bool(self._files)

    def lend(self, rank: int) -> int:
        """The open file of the copies of a rank once more, for whoever closes it. Raises OSError when it is closed here."""
        if rank >= len(self._files):
            raise OSError("these copies are closed")
        return os.dup(self._files[rank])

    def keep(self, steps: Sequence[int]) -> None:
        """Two steps that ranks do not write over (base/slots.py)."""
        for file in self._files:
            if os.fstat(file).st_size >= HEAD:
                os.pwrite(file, array("Q", steps).tobytes(), KEPT * 8)

    def places(self, rank: int, source: Holdings | None = None) -> dict[str, Any]:
        """What a rank is told: where its own memory is, and the copies of `source` that it goes on from. Memory of another machine goes by key."""
        source = source or self
        own = self.sources[rank] if self._files else ""
        return {"pulse": _path(self._pulse), "own": own, "sources": source.sources, "key": self.key, "source": source.key}

    def pulse(self, rank: int) -> Pulse:
        return Pulse(self.memory, rank)

    def place(self, rank: int) -> dict[str, Any]:
        """Where a rank was by its last sign of life, for the event log; nothing for all of them, which are -1."""
        if rank < 0:
            return {}
        pulse = self.pulse(rank)
        return {"rank": rank, "phase": Phase(pulse.read(Word.phase)).name, "step": pulse.read(Word.step)}

    @property
    def kept(self) -> int:
        """The newest step that every rank has said to hold a copy of."""
        return min(self.pulse(rank).read(Word.kept) for rank in range(self.world)) if self._files else 0

    def begin(self) -> None:
        """Before a new generation: no signs of life yet. What copies hold stays."""
        for rank in range(self.world):
            row = self.pulse(rank).row
            for word in (Word.step, Word.phase, Word.waits):
                row[word] = 0
            row[Word.beat] += 1

    def heard(self, rows: dict[str, list[int]]) -> None:
        """Rows of ranks of other machines, as they are there."""
        for rank, row in rows.items():
            self.pulse(int(rank)).row[:] = memoryview(array("Q", row))

    def written(self, seconds: float) -> None:
        """The checkpoint that was written beside training is done, or has failed."""
        for rank in range(self.world):
            row = self.pulse(rank).row
            row[Word.saved] = round(seconds * 1e6) or row[Word.saved]
            row[Word.busy] = 0

    def close(self) -> None:
        files = [*self._files, *([self._pulse] if self._pulse >= 0 else [])]
        self._files, self._pulse = [], -1  # first, since other threads lend them
        for file in files:
            os.close(file)


def _path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}" if file >= 0 else ""
