"""Appends lines to files while a process runs. The training run writes its records and its event log with it. If the
disk is full or does not answer, training continues, and lines are buffered in memory until the disk accepts them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from functools import partial
from itertools import islice
from pathlib import Path

from meshwright.core import storage
from meshwright.core.background_thread import BackgroundCall, CallPending
from meshwright.core.storage_deadline import unanswered

MAX_BACKLOG_BYTES = 16 * 2**20
"""Maximum number of bytes that are buffered in memory while the disk is full. If there are more, the oldest lines are
dropped."""

CLOSE_SECONDS = 10.0
"""`AppendOnlyFile.close` waits at most this time for the disk."""


class AppendOnlyFile:
    """Appends whole lines to the file at `path`. No other process may write to this file. A line that does not fit on
    the disk is buffered in memory and written, in order, with the next lines.

    A failed write is undone, so that the file contains whole lines only.

    A background thread writes the lines. Usually a line is in the file when `append` returns. If the disk does not
    answer, `append` returns after PATIENCE_SECONDS, and at once during the same write. After storage.OVERDUE_SECONDS
    this counts as an error, which `append` returns. Only one thread may call the methods.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        """Number of lines that were dropped, because the buffer or (in `close`) the disk was full."""
        self._disk = BackgroundCall[tuple[int, OSError | None]](f"append to {path.name}")
        self._handle = -1
        """The open file, for the background thread."""
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._writing = 0
        """The number of lines at the front of `_waiting` that the background thread is writing."""
        self._error: OSError | None = None

    @property
    def is_waiting(self) -> bool:
        """Returns whether lines are buffered."""
        return bool(self._waiting)

    def append(self, line: str) -> OSError | None:
        """Writes `line` after the buffered lines. Returns the error if some lines are still buffered because of one."""
        self._waiting.append(line.encode() + b"\n")
        self._size += len(self._waiting[-1])
        while self._size > MAX_BACKLOG_BYTES and len(self._waiting) > self._writing:
            self._size -= len(self._waiting[self._writing])
            del self._waiting[self._writing]
            self.lost += 1
        return self.flush()

    def flush(self, end: float | None = None) -> OSError | None:
        """Writes the buffered lines. Returns the error if some lines are still buffered because of one. `end`: the time
        until which the caller waits; None: until PATIENCE_SECONDS after the start of the write."""
        while self._waiting:
            if not self._disk.is_pending:
                self._writing = len(self._waiting)
            lines = list(islice(self._waiting, self._writing))
            try:
                written, self._error = self._disk.call(partial(self._write, lines), end)
            except CallPending as pending:
                if pending.seconds >= storage.OVERDUE_SECONDS:
                    self._error = unanswered(self.path)
                return self._error
            self._writing = 0
            for _ in range(written):
                self._size -= len(self._waiting.popleft())
            if self._error is not None:
                return self._error
        self._error = None
        return None

    def _write(self, lines: list[bytes]) -> tuple[int, OSError | None]:
        """Writes `lines`, in the background thread. Returns how many were written, and the error of the next one."""
        written = 0
        try:
            if self._handle < 0:
                self._handle = storage.open_for_append(self.path)
            for line in lines:
                storage.append_line(self._handle, line)
                written += 1
        except OSError as error:
            self._drop()
            return written, storage.with_path(error, self.path)
        return written, None

    def _drop(self) -> tuple[int, None]:
        if self._handle >= 0:
            storage.close_quietly(self._handle)
        self._handle = -1
        return 0, None

    def close(self, seconds: float = CLOSE_SECONDS) -> OSError | None:
        """Writes the buffered lines and closes the file. Waits at most `seconds`. Returns the error if lines are
        lost."""
        end = time.monotonic() + seconds
        error = self.flush(end)
        if self._disk.is_pending:
            error = error or unanswered(self.path, time.monotonic() - self._disk.began)
        elif self._handle >= 0:
            with contextlib.suppress(CallPending):
                self._disk.call(self._drop, end)
        self.lost += len(self._waiting) if error else 0
        return error
