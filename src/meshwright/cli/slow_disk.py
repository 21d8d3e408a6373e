"""Reports a disk that does not answer a command. It watches only the main thread of a command. Ranks, and the threads
of a supervisor, report such a disk themselves (core/storage_deadline.py)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NamedTuple

from meshwright.core import storage
from meshwright.core.background_thread import start_background_thread
from meshwright.core.messages import Message

POLL_SECONDS = 1.0
"""Seconds between two inspections of the main thread."""
PATH_NAMES = ("path", "folder")
"""Names of the local variables of core/storage.py that contain a path."""


class StorageCall(NamedTuple):
    """A call of core/storage.py that runs: its frame, the index of the current instruction, and the path."""

    frame: int
    instruction: int
    path: str


@contextmanager
def report_slow_disk(say: Callable[[str], None]) -> Iterator[None]:
    """Inside the context, `say` gets one line for each call of core/storage.py by the current thread that takes longer
    than storage.OVERDUE_SECONDS."""
    ended, watched = threading.Event(), threading.get_ident()
    with suppress(OSError):  # the system starts no more threads
        start_background_thread("slow disk", lambda: _watch(watched, ended, say), lambda line: None, restarts=False)
    try:
        yield
    finally:
        ended.set()


def _watch(thread: int, ended: threading.Event, say: Callable[[str], None]) -> None:
    before: StorageCall | None = None
    polls = 0
    while not ended.wait(POLL_SECONDS):
        call = _storage_call(sys._current_frames().get(thread))
        polls = polls + 1 if call is not None and call == before else 0
        before = call
        if call is not None and polls == round(storage.OVERDUE_SECONDS / POLL_SECONDS):
            say(Message("still waiting for {path}: its disk is slow, or does not answer", path=call.path))


def _storage_call(frame: FrameType | None) -> StorageCall | None:
    """Returns the innermost call of core/storage.py, or None if neither `frame` nor its callers are in this file."""
    inner: FrameType | None = None
    path = ""
    while frame is not None:
        if frame.f_code.co_filename == storage.__file__:
            inner = inner or frame
            path = path or next((str(frame.f_locals[key]) for key in PATH_NAMES if key in frame.f_locals), "")
        frame = frame.f_back
    return None if inner is None else StorageCall(id(inner), inner.f_lasti, path)
