"""Memory of the ranks that this process holds open, so that no death of a rank loses it: their copies, and their rows
of signs of life.

An anonymous file lives as long as anyone has it open; ranks open it by the path of this process's handle. When this
process ends it is gone:
then the checkpoint on disk is what is left. Where the system has no anonymous files there are no copies.

Only the ranks of this machine, and those whose copies it mirrors, have a file here: the number of open files does not
grow with the world. Where the
copies of all ranks lie stands in one file more, a line for each rank, so that what a rank is told has the same size in
any world.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from meshwright.core.heartbeat import HEARTBEAT_FIELDS, Heartbeat, HeartbeatField, RankPhase, open_heartbeats
from meshwright.core.snapshots import HEADER_BYTES, LOST_LOCATION, PINNED_STEPS_FIELD


class SharedFileStore:
    """Of the ranks of one plan."""

    system: Any = os
    """What has the files; a simulated cluster has another one."""

    def __init__(self, world: int, adopted: tuple[str, Sequence[int]] | None = None) -> None:
        """`adopted`: the key and the files of a supervisor that was killed, its pulse last, which are closed with this
        (adoption.py)."""
        self.world, self.key = world, secrets.token_hex(8)
        self.is_open = hasattr(self.system, "memfd_create")
        self._files: dict[int, int] = {}
        self._table = self._pulse = -1
        if adopted is not None:
            self.key, (*files, self._pulse) = adopted[0], adopted[1]
            self._files = dict(enumerate(files))
        elif self.is_open:
            self._pulse = self.system.memfd_create(f"meshwright-pulse-{self.key}")
            self.system.ftruncate(self._pulse, world * HEARTBEAT_FIELDS * 8)
        if self.is_open:
            self._table = self.system.memfd_create("meshwright-places")
        self.memory = self._opened()
        self._words = self.memory.cast("B").cast("Q")

    def _opened(self) -> memoryview:
        return open_heartbeats(_fd_path(self._pulse), self.world)

    # --- copies
    # ---------------------------------------------------------------------------------------------------------------

    def source(self, rank: int) -> str:
        """Where the copies of a rank lie here; NOWHERE if they do not."""
        return _fd_path(self._files[rank]) if rank in self._files else LOST_LOCATION

    def table(self, places: Iterable[str]) -> str:
        """The file that says where the copies of every rank lie, for ranks that are about to start; it replaces the one
        before. Empty without files."""
        if self._table >= 0:
            text = "".join(f"{place}\n" for place in places).encode()
            self.system.ftruncate(self._table, 0)
            self.system.pwrite(self._table, text, 0)
        return _fd_path(self._table)

    def file(self, rank: int) -> int:
        """The open file of the copies of a rank; a new one where there is none yet. Raises OSError when these holdings
        are closed."""
        if not self.is_open:
            raise OSError("these copies are closed")
        if rank not in self._files:
            self._files[rank] = self.system.memfd_create(f"meshwright-copies-{self.key}-{rank}")
        return self._files[rank]

    def all_files(self) -> list[str]:
        """Where the copies of all ranks lie, where all of them are of this machine, and then their signs of life."""
        return [_fd_path(file) for file in (*map(self.file, range(self.world)), self._pulse)]

    def lend(self, rank: int) -> int:
        """The open file of the copies of a rank once more, for whoever closes it. Raises OSError when there is none
        here."""
        if rank not in self._files:
            raise OSError("these copies are not here")
        return self.system.dup(self._files[rank])

    def mirrored(self, rank: int) -> int:
        """`lend`, of a rank of another machine, whose copies are to be written here; there is a file from here on."""
        self.file(rank)
        return self.lend(rank)

    def keep(self, steps: Sequence[int]) -> None:
        """Two steps that ranks do not write over (core/snapshots.py)."""
        for file in self._files.values():
            if self.system.fstat(file).st_size >= HEADER_BYTES:
                self.system.pwrite(file, array("Q", steps).tobytes(), PINNED_STEPS_FIELD * 8)

    def release(self, needed: Collection[int]) -> None:
        """Closes the copies of all other ranks: nobody reads them any more."""
        for rank in self._files.keys() - set(needed):
            self.system.close(self._files.pop(rank))

    def places(self, rank: int) -> dict[str, Any]:
        """Where a rank of this machine finds its own memory."""
        own = _fd_path(self.file(rank)) if self.is_open else ""
        return {"pulse": _fd_path(self._pulse), "own": own, "key": self.key}

    # --- signs of life
    # --------------------------------------------------------------------------------------------------------

    def pulse(self, rank: int) -> Heartbeat:
        return Heartbeat(self.memory, rank)

    def column(self, word: HeartbeatField) -> list[int]:
        """One word of all rows, in order of rank."""
        return self._words[word::HEARTBEAT_FIELDS].tolist()

    def place(self, rank: int) -> dict[str, Any]:
        """Where a rank was by its last sign of life, for the event log; nothing for all of them, which are -1."""
        if rank < 0:
            return {}
        pulse = self.pulse(rank)
        return {
            "rank": rank,
            "phase": RankPhase(pulse.read(HeartbeatField.phase)).name,
            "step": pulse.read(HeartbeatField.step),
        }

    @property
    def kept(self) -> int:
        """The newest step that every rank of this generation has said to hold a copy of."""
        return min(self.column(HeartbeatField.kept)) if self.is_open else 0

    def begin(self, ranks: Iterable[int] | None = None) -> None:
        """Before a new generation: `ranks`, or all of them, have given no signs of life and made no copies yet. What
        copies hold stays."""
        for rank in range(self.world) if ranks is None else ranks:
            first = rank * HEARTBEAT_FIELDS
            for word in (HeartbeatField.step, HeartbeatField.phase, HeartbeatField.waits, HeartbeatField.kept):
                self._words[first + word] = 0
            self._words[first + HeartbeatField.beat] += 1

    def row(self, rank: int) -> bytes:
        return bytes(self._words[rank * HEARTBEAT_FIELDS : (rank + 1) * HEARTBEAT_FIELDS])

    def heard(self, rows: Sequence[tuple[int, str]]) -> None:
        """Rows of ranks of other machines that have changed there, as `packed`."""
        for rank, run in rows:
            words = memoryview(base64.b64decode(run)).cast("Q")
            self._words[rank * HEARTBEAT_FIELDS : rank * HEARTBEAT_FIELDS + len(words)] = words

    def written(self, seconds: float) -> None:
        """The checkpoint that was written beside training is done, or has failed."""
        for rank in range(self.world):
            row = self.pulse(rank).row
            row[HeartbeatField.saved] = round(seconds * 1e6) or row[HeartbeatField.saved]
            row[HeartbeatField.busy] = 0

    def close(self) -> None:
        files = [*self._files.values(), *(file for file in (self._table, self._pulse) if file >= 0)]
        self._files, self._table, self._pulse, self.is_open = {}, -1, -1, False  # first, since other threads lend them
        for file in files:
            with contextlib.suppress(OSError):
                self.system.close(file)


def pack_heartbeats(rows: Iterable[tuple[int, bytes]]) -> list[tuple[int, str]]:
    """Rows of ranks in order as they travel: the first rank of each run of neighbours, and their words.

    >>> [(rank, len(words)) for rank, words in pack_heartbeats([(3, bytes(64)), (4, bytes(64)), (6, bytes(64))])]
    [(3, 172), (6, 88)]
    """
    runs: list[tuple[int, bytearray]] = []
    for rank, row in rows:
        if not runs or rank != runs[-1][0] + len(runs[-1][1]) // len(row):
            runs.append((rank, bytearray()))
        runs[-1][1].extend(row)
    return [(rank, base64.b64encode(words).decode()) for rank, words in runs]


def _fd_path(file: int) -> str:
    return f"/proc/{os.getpid()}/fd/{file}" if file >= 0 else ""
