"""Who may write into a run folder: one launch at a time. The kernel frees the lease when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from meshwright.base.errors import InputError


class Held(InputError):
    """Another process has the lease."""


def is_held(folder: Path) -> bool:
    """Whether somebody has the lease of this run folder, at this moment."""
    try:
        handle = os.open(folder / "lease", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


class Lease:
    """Held from entering to leaving. Raises Held when another process has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Self:
        self._handle = os.open(self.folder / "lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._handle, 200).decode(errors="replace").strip() or "another process"
            os.close(self._handle)
            raise Held(f"run {str(self.folder)!r} is being trained by {holder}: wait for it, or choose another --run") from None
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)
