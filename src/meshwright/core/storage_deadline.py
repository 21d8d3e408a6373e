"""Limits how long a process waits for a disk. Processes that must not stop, such as the supervisor, perform operations
of core/storage.py through this module, in a background thread. An operation that exceeds its limit continues there."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshwright.core import storage
from meshwright.core.background_thread import BackgroundCall, CallPending
from meshwright.core.messages import Message

ResultT = TypeVar("ResultT")


def unanswered(path: Path, seconds: float | None = None) -> OSError:
    """Returns the error for an operation on `path` that has not returned for `seconds`, by default
    storage.OVERDUE_SECONDS."""
    seconds = storage.OVERDUE_SECONDS if seconds is None else seconds
    return TimeoutError(errno.ETIMEDOUT, Message("has not answered for {seconds:seconds}", seconds=seconds), str(path))


def answer_in_time(path: Path, work: Callable[[], ResultT]) -> ResultT:
    """Returns `work()`, an operation on `path`. Raises OSError if it has not returned after storage.OVERDUE_SECONDS."""
    try:
        return BackgroundCall[ResultT](f"wait for {path.name}").call(work, time.monotonic() + storage.OVERDUE_SECONDS)
    except CallPending:
        raise unanswered(path) from None


def read_tail(path: Path, most: int) -> bytes:
    """Returns at most `most` bytes from the end of the text file `path`. Raises OSError as storage.read_file and
    `answer_in_time` do."""
    return answer_in_time(path, lambda: storage.read_file(path, -most, links=True))
