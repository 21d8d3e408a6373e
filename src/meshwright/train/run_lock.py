"""The lock of a run folder: one launch at a time may write into it. The kernel frees the lock when its holder dies,
however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from meshwright.core.errors import InputError
from meshwright.core.messages import Message

LOCK_TIMEOUT_SECONDS = 0.5
"""Seconds to retry: a probe by another process (`is_locked`) takes the lock for less."""


class RunLocked(InputError):
    """Another process has the lock."""


def is_locked(folder: Path) -> bool:
    """Returns whether a process has the lock of this run folder now. Any number of processes may call it at once."""
    try:
        handle = os.open(folder / "lease", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def locking_node(folder: Path) -> int | None:
    """Returns the index of the node that has the lock; None where nobody has it, or no node."""
    if not is_locked(folder):
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((folder / "lease").read_text().splitlines()[1])
    return None


class RunLock:
    """Locks the folder while the context is open. `number`: the index of this node, where there are several. Raises
    RunLocked when another process has the lock."""

    def __init__(self, folder: Path, number: int | None = None) -> None:
        self.folder, self.number = folder, number

    def __enter__(self) -> Self:
        self._handle = os.open(self.folder / "lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        end = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while not self._take():
            if time.monotonic() > end:
                holder = os.read(self._handle, 200).decode(errors="replace").partition("\n")[0] or Message(
                    "another process"
                )
                os.close(self._handle)
                raise RunLocked(
                    Message(
                        "run {folder!r} is being trained by {holder}: wait for it, or choose another --run",
                        folder=str(self.folder),
                        holder=holder,
                    )
                )
            time.sleep(0.02)
        os.ftruncate(self._handle, 0)
        number = "" if self.number is None else self.number
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n{number}\n".encode())
        return self

    def _take(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)
