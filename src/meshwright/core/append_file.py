"""Appends lines to files while a process runs. The training run writes its records and its event log with it. If the
disk is full, training continues, and lines are buffered in memory until there is space."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from meshwright.core import storage

MAX_BACKLOG_BYTES = 16 * 2**20
"""Maximum number of bytes that are buffered in memory while the disk is full. If there are more, the oldest lines are
dropped."""


class AppendOnlyFile:
    """Appends whole lines to the file at `path`. No other process may write to this file. A line that does not fit on
    the disk is buffered in memory and written, in order, with the next lines.

    A failed write is undone, so that the file contains whole lines only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        """Number of lines that were dropped, because the buffer or (in `close`) the disk was full."""
        self._handle = -1
        self._waiting: deque[bytes] = deque()
        self._size = 0

    def append(self, line: str) -> OSError | None:
        """Writes `line` after the buffered lines. Returns the error if some lines are still buffered."""
        self._waiting.append(line.encode() + b"\n")
        self._size += len(self._waiting[-1])
        while self._size > MAX_BACKLOG_BYTES:
            self._size -= len(self._waiting.popleft())
            self.lost += 1
        return self.flush()

    def flush(self) -> OSError | None:
        """Writes the buffered lines. Returns the error if some lines are still buffered."""
        try:
            if self._handle < 0:
                self._handle = storage.open_for_append(self.path)
            while self._waiting:
                storage.append_line(self._handle, self._waiting[0])
                self._size -= len(self._waiting.popleft())
        except OSError as error:
            self._drop()
            return storage.with_path(error, self.path)
        return None

    def _drop(self) -> None:
        if self._handle >= 0:
            storage.close_quietly(self._handle)
        self._handle = -1

    def close(self) -> OSError | None:
        """Writes the buffered lines and closes the file. Returns the error if lines are lost."""
        error = self.flush() if self._waiting else None
        self.lost += len(self._waiting) if error else 0
        self._drop()
        return error
