"""Locks a run folder, so that only one launch of `meshwright train` writes into it. The lock is an `flock`, which the
kernel releases when the process ends, whatever the cause.

Guarantees: the lock counts as free only if the lock file is missing or the kernel reports no lock. If the file system
fails, StorageFailed is raised. An error during release is ignored, since the end of the process releases the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from meshwright.core import storage
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

LOCK_FILE = "lease"
LOCK_TIMEOUT_SECONDS = 0.5
"""`RunLock` retries for this long, since `is_locked` in another process may hold the lock for a much shorter time."""

MAX_HOLDER_BYTES = 200


class RunLocked(InputError):
    """Raised if another process has the lock."""


def is_locked(folder: Path) -> bool:
    """Returns whether a process has the lock of this run folder. Concurrent calls do not disturb each other.

    Raises: StorageFailed if the file system cannot answer.
    """
    path = folder / LOCK_FILE
    with storage.failures_as_one_line(path):
        try:
            handle = storage.open_for_update(path)
        except FileNotFoundError:
            return False
        try:
            return not _take(handle, fcntl.LOCK_SH, path)
        finally:
            storage.close_quietly(handle)


def locking_node(folder: Path) -> int | None:
    """Returns the index of the node that has the lock. Returns None if no process has the lock, or if the launch that
    has it uses only one node.

    Raises: StorageFailed if the file system cannot answer.
    """
    if not is_locked(folder):
        return None
    lines = (storage.read_text(folder / LOCK_FILE) or "").splitlines()
    with contextlib.suppress(ValueError, IndexError):
        return int(lines[1])
    return None


def _take(handle: int, kind: int, path: Path) -> bool:
    """Takes the lock of the open file `handle` and returns True, or returns False if another process has it. `kind`:
    fcntl.LOCK_SH or LOCK_EX. Raises OSError if the file system fails."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise storage.with_path(error, path) from None
    return True


class RunLock:
    """A context manager that locks `folder`. `number`: the index of this node in a job of several nodes.

    Raises on entry: RunLocked if another process has the lock, StorageFailed if the file system has no locks or fails.
    """

    def __init__(self, folder: Path, number: int | None = None) -> None:
        self.folder, self.number = folder, number

    def __enter__(self) -> Self:
        path = self.folder / LOCK_FILE
        with storage.failures_as_one_line(path):
            self._handle = storage.open_for_update(path, create=True)
            try:
                self._acquire(path)
                number = "" if self.number is None else self.number
                holder = f"process {os.getpid()} on {socket.gethostname()}\n{number}\n"
                storage.overwrite(self._handle, holder.encode())
            except BaseException:
                storage.close_quietly(self._handle)
                raise
        return self

    def _acquire(self, path: Path) -> None:
        end = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while not _take(self._handle, fcntl.LOCK_EX, path):
            if time.monotonic() > end:
                text = storage.read_file(path, most=MAX_HOLDER_BYTES).decode(errors="replace")
                holder = text.partition("\n")[0] or Message("another process")
                raise RunLocked(
                    Message(
                        "run {folder!r} is being trained by {holder}: wait for it, or choose another --run",
                        folder=str(self.folder),
                        holder=holder,
                    )
                )
            time.sleep(0.02)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            storage.overwrite(self._handle, b"")
        storage.close_quietly(self._handle)
