"""Reads steps ahead in a thread.

Promise: the values and their order are those of reading directly; at most `depth` steps are ahead; what reading raises, `next` raises, once,
in its turn; closing, or forgetting the reader, or leaving the interpreter ends the thread and waits for nothing but the step being read.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

Step = TypeVar("Step")

_PATIENCE = 5.0  # seconds that closing waits for a step being read; the thread is a daemon and cannot hold the process up


class _Line(Generic[Step]):
    """What the thread and its reader share. The thread holds this and not the reader, so that a forgotten reader is collected."""

    def __init__(self, depth: int) -> None:
        self.free = threading.Semaphore(depth)
        self.done: queue.SimpleQueue[tuple[bool, Step | BaseException | None]] = queue.SimpleQueue()
        self.stopped = threading.Event()


def _read_ahead(line: _Line[Step], read: Callable[[int], Step], first: int, stop: int) -> None:
    try:
        for step in range(first, stop):
            line.free.acquire()
            if line.stopped.is_set():
                return
            line.done.put((True, read(step)))
        line.done.put((False, None))
    except BaseException as error:  # handed over whole: the reader decides
        line.done.put((False, error))


def _close(line: _Line[Step], thread: threading.Thread) -> None:
    line.stopped.set()
    line.free.release()
    if thread is not threading.current_thread():
        thread.join(_PATIENCE)


class Prefetch(Generic[Step]):
    """Iterates over read(first), ..., read(stop - 1). `waited` is how many seconds the last `next` had to wait."""

    def __init__(self, read: Callable[[int], Step], first: int, stop: int, depth: int = 2) -> None:
        self._line: _Line[Step] = _Line(max(1, depth))
        thread = threading.Thread(target=_read_ahead, args=(self._line, read, first, stop), name="prefetch", daemon=True)
        self.waited = 0.0
        self._over = False
        self.close = weakref.finalize(self, _close, self._line, thread)
        thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        if self._over or not self.close.alive:
            raise StopIteration
        began = time.perf_counter()
        more, value = self._line.done.get()
        self.waited = time.perf_counter() - began
        if more:
            self._line.free.release()
            return value  # type: ignore[return-value]
        self._over = True
        if isinstance(value, BaseException):
            raise value
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
